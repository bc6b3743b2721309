"""Whether a run that has ended is started again, when, and how: decided from how it ended and what it has saved."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Restart:
    """Start again, after ``wait`` seconds."""

    wait: float
    why: str


@dataclass(frozen=True)
class Stop:
    """Do not start again: ``why`` says so to the person."""

    why: str


@dataclass
class Policy:
    """Counts restarts; both counts begin anew when a newer checkpoint is there.

    Args:
        allowed: restarts, at most.
        patience: crashes in a row with the same newest checkpoint after which it is no use.
        first_wait: seconds before the first restart; twice as long before each further one, up to a minute.
        newest: step of the newest checkpoint; -1 for none.
    """

    allowed: int
    patience: int
    first_wait: float
    newest: int = -1
    used: int = field(default=0, init=False)
    crashes: int = field(default=0, init=False)

    def after_crash(self, step: int, cause: str) -> Restart | Stop:
        """What to do after a crash, with the newest checkpoint at ``step``."""
        self._progress(step)
        self.crashes += 1
        if self.crashes >= self.patience and self.allowed:
            since = f"step {self.newest}" if self.newest >= 0 else "the start"
            return Stop(
                f"{self.crashes} crashes in a row without a checkpoint after {since}: it would crash again ({cause})"
            )
        return self._restart()

    def after_out_of_memory(self, step: int, smaller: int | None) -> Restart | Stop:
        """As :meth:`after_crash`, where the next attempt has micro-batches of ``smaller`` samples.

        Crashes before it say nothing of that one. ``None`` where they cannot be made smaller; 0 after micro-batches of
        one sample.
        """
        if smaller == 0:
            return Stop("out of memory with micro-batches of one sample: docs/faults.md says what else may help")
        if smaller is None:
            return self.after_crash(step, "out of memory, and it is not known how to cut its batches smaller")
        self._progress(step)
        self.crashes = 0
        return self._restart(f" with micro-batches of {smaller}")

    def after_preemption(self, step: int) -> Restart | Stop:
        """As :meth:`after_crash`, for a run that was asked to stop while this process was not."""
        self._progress(step)
        return self._restart()

    def _progress(self, step: int) -> None:
        if step > self.newest:
            self.newest, self.used, self.crashes = step, 0, 0

    def _restart(self, how: str = "") -> Restart | Stop:
        if self.used >= self.allowed:
            return Stop(f"all {self.allowed} restarts are used up" if self.allowed else "no restart is allowed")
        wait = min(LONGEST_WAIT, self.first_wait * 2**self.used)
        self.used += 1
        return Restart(wait, f"restart {self.used} of {self.allowed}{how} in {wait:g} s")
