"""Streams and events of a GPU that is not there: they keep the order in which memory is asked for, and no time."""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar

import torch


class FakeStream:
    """Stands in for ``torch.cuda.Stream``. The allocator keeps free memory apart for each stream; 0 computes."""

    made: ClassVar[int] = 0
    current: ClassVar[FakeStream]
    default: ClassVar[FakeStream]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.number = FakeStream.made
        FakeStream.made += 1
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type = 0, 1
        self.stream_id = self.cuda_stream = self.number

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def __enter__(self) -> FakeStream:
        self._before = FakeStream.current
        FakeStream.current = self
        return self

    def __exit__(self, *error: object) -> None:
        FakeStream.current = self._before

    @classmethod
    def restart(cls) -> None:
        """Forget all streams but the default one."""
        cls.made = 0
        cls.default = cls.current = cls()


FakeStream.restart()


class FakeEvent:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


class OnStream:
    """Stands in for ``torch.cuda.stream(stream)``."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = FakeStream.current
        FakeStream.current = self.stream or self._before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        FakeStream.current = self._before
