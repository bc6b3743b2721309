"""Where a rank is in its work, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import MOST_LISTED, listed
from trainer.system.text import escaped

if TYPE_CHECKING:
    from trainer.memory.monitor import Monitor

AFTER_A_STEP = (None, "evaluation", "checkpoint")
"""What lies between two steps."""

LONGEST_ACTIVITY = 64


@dataclass(frozen=True)
class Place:
    """Of a rank, at one moment.

    Args:
        rank: over all machines.
        steps: taken so far.
        activity: a phase, loading or anything that was announced to the monitor; ``None`` between them.
        samples: what it works on, by their place in the dataset; no more than are shown, and one.
        moves: how often the activity changed since the last step ended.
    """

    rank: int
    steps: int
    activity: str | None
    samples: tuple[int, ...] = ()
    moves: int = 0

    @classmethod
    def of(cls, rank: int, monitor: Monitor) -> Place:
        """Where ``rank`` is by its monitor."""
        samples = tuple(map(int, monitor.samples[: MOST_LISTED + 1]))
        return cls(rank, monitor.step, monitor.activity, samples, monitor.moves)

    @classmethod
    def from_dict(cls, values: Any) -> Place:
        """What :meth:`to_dict` gave, as far as can be told from what came from elsewhere.

        Raises:
            ValueError: for what it cannot have given.
        """
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("no place")
        activity, samples = values["activity"], values["samples"]
        if not isinstance(samples, list | tuple) or len(samples) > MOST_LISTED + 1:
            raise ValueError("no list of samples")
        numbers = [values["rank"], values["steps"], values["moves"], *samples]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("no number of a step or a sample")
        if activity is not None and not (isinstance(activity, str) and len(activity) <= LONGEST_ACTIVITY):
            raise ValueError("no activity")
        known = None if activity is None else escaped(activity)
        return cls(**values | {"samples": tuple(samples), "activity": known})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def position(self) -> tuple[int, int]:
        """Rises as a rank moves on, alike on all ranks."""
        return self.steps, self.moves

    def when(self) -> str:
        """The step: that which is being taken, from 1, or the one taken last."""
        if self.activity == "init":
            return "before step 1" if not self.steps else f"after step {self.steps}"
        return f"after step {self.steps}" if self.activity in AFTER_A_STEP else f"step {self.steps + 1}"

    def what(self) -> str:
        """The activity."""
        return {"init": "building the model", None: "between steps"}.get(self.activity, self.activity or "")

    def __str__(self) -> str:
        samples = [f"samples {listed(self.samples)}"] if self.samples else []
        return ", ".join([f"rank {self.rank}", self.when(), self.what(), *samples])

    def at(self) -> str:
        """The same without the rank, as the end of a sentence."""
        when = self.when() if self.when()[0] != "s" else f"at {self.when()}"
        samples = f" (samples {listed(self.samples)})" if self.samples else ""
        return f"{when} in {self.what()}{samples}" if self.activity else f"{when}, between steps"
