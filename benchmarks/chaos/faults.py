"""The faults that are tried, and how often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import damage, kills, stuck
from .run import Shape
from .trial import Trial

SINGLE, DDP, FSDP = Shape("single", 1), Shape("ddp", 2), Shape("fsdp", 2)
USUAL = (SINGLE, DDP, FSDP)
MANY = (*USUAL, *USUAL, *USUAL, Shape("ddp", 4), *USUAL, *USUAL, Shape("fsdp", 4))
"""Of many trials, some are on four ranks."""
ENOUGH_FOR_MANY = 50


@dataclass(frozen=True)
class Fault:
    """A row of the matrix.

    Args:
        disturb: one trial of it.
        share: of the trials asked for.
        shapes: in turn.
        poisoned: whether the undisturbed run has the bad sample, too.
    """

    disturb: Callable[[Trial], None]
    share: float = 0.05
    shapes: Sequence[Shape] = USUAL
    poisoned: bool = False

    def trials(self, asked: int) -> int:
        """How many there are when ``asked`` kills are wanted in all."""
        return max(1, round(self.share * asked))

    def shape(self, number: int, trials: int) -> Shape:
        """Of one of so many trials."""
        shapes = MANY if trials >= ENOUGH_FOR_MANY and self.shapes == USUAL else self.shapes
        return shapes[number % len(shapes)]


FAULTS = {
    "kill": Fault(kills.kill, 0.5),
    "kill-in-save": Fault(kills.kill_in_save, 0.5),
    "stop": Fault(kills.stop, 0.5),
    "stop-twice": Fault(kills.stop_twice),
    "raise": Fault(stuck.rank_raises),
    "hang": Fault(stuck.rank_hangs),
    "freeze": Fault(stuck.rank_stopped, shapes=(DDP, FSDP)),
    "worker": Fault(stuck.worker),
    "nan": Fault(damage.not_a_number, poisoned=True),
    "full-disk": Fault(damage.full_disk),
    "two-runs": Fault(damage.two_runs),
    "corrupt": Fault(damage.corrupt),
}
