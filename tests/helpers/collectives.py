"""What a run sends between ranks, and when."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Noted(TorchDispatchMode):
    """Notes every all-reduce, but for those of one or two numbers (the check of losses), beside what others note."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith("allreduce"):
            size = sum(tensor.numel() for tensor in args[0])
            self.events += [f"reduces {size}"] if size > 2 else []
        return func(*args, **(kwargs or {}))


BACKWARD_ENDS = "backward ends"


def watched(stepper: Any, noted: Noted) -> Any:
    """The ``backward`` of a stepper's precision, whose ends are noted."""
    backward = stepper.precision.backward

    def marked(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        noted.events.append(BACKWARD_ENDS)

    return marked


def reductions(events: list[str]) -> tuple[list[str], list[str]]:
    """Of a step, those before the end of the last backward, and those after it."""
    end = len(events) - events[::-1].index(BACKWARD_ENDS)
    begun, left = events[:end], events[end:]
    return [e for e in begun if e.startswith("reduces")], [e for e in left if e.startswith("reduces")]
