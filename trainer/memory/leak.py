"""Does memory at the end of a step keep growing?"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainer.memory.units import GB, MB


@dataclass
class LeakCheck:
    """Looks at memory at the ends of steps, and tells once when it keeps growing.

    Args:
        kind: which memory, for the message.
        least_bytes: growth since the first looks that is not yet a leak.
        least_share: the same, as a share of the first level.
        warm_up: looks before growth counts: optimizer state, caches and buffers come to be in the first steps.
        looks: how many of the last looks are judged; all but one of them must have grown.
    """

    kind: str
    least_bytes: float
    least_share: float = 0.0
    warm_up: int = 3
    looks: int = 10
    told: bool = False
    _seen: int = 0
    _first: tuple[int, int] = (0, 0)
    _last: int = 0
    _grew: deque[bool] = field(default_factory=deque)

    def look(self, step: int, level: int) -> str | None:
        """Take in the ``level`` in bytes after ``step``; a warning the first time that it must be a leak."""
        self._seen += 1
        if self._seen <= self.warm_up:
            self._first, self._last = (step, level), level
            return None
        self._grew.append(level > self._last)
        self._last = level
        if len(self._grew) > self.looks:
            self._grew.popleft()
        if self.told or len(self._grew) < self.looks or sum(self._grew) < self.looks - 1:
            return None
        _, first = self._first
        if level - first <= max(self.least_bytes, self.least_share * first):
            return None
        self.told = True
        return self._message(step, level)

    def _message(self, step: int, level: int) -> str:
        first_step, first = self._first
        each = (level - first) / (step - first_step) / MB
        return (
            f"{self.kind} memory grows by {each:.2f} MB a step: {first / GB:.2f} GB after step {first_step}, "
            f"{level / GB:.2f} GB after step {step}. Usually something keeps tensors with their graph, such as a list "
            "of losses: keep loss.detach() instead"
        )
