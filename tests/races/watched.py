"""The simulated GPU, with a detector that is told of every operation and every wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar

import torch
from races.detector import HOST, THREAD, Block, Clock, Detector, here
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from trainer.fakegpu.torch_patches import FakeEvent, FakeStream, OnStream, is_paused
from trainer.fakegpu.tracer import Storage, Tracer

aten = torch.ops.aten

TOUCH_NOTHING = {aten.record_stream.default, aten.is_pinned.default, aten._pin_memory.default, aten.resize_.default}
ALLOCATE = {"empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided"}
ALLOCATE |= {"detach", "alias"}
"""Operations that neither read nor write what they return."""
COPIES = {"copy_", "_to_copy", "_copy_from", "_foreach_copy_"}
WAIT = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "_unique2", "unique_dim"}
"""Operations whose result the host must know: it waits for them."""


class WatchedStream(FakeStream):
    """A stream with a clock. Signatures are those of torch.cuda: a call that it would refuse fails here, too."""

    detector: ClassVar[Detector]

    def wait_event(self, event: Any) -> None:
        if self.detector.heeds("wait_event"):
            self.detector.join(self.number, event.clock)

    def wait_stream(self, stream: Any) -> None:
        if self.detector.heeds("wait_stream"):
            self.detector.join(self.number, self.detector.recorded(stream.number))

    def synchronize(self) -> None:
        if self.detector.heeds("synchronize"):
            self.detector.host_waits(self.detector.clock(self.number), "stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        event = event or WatchedEvent()
        event.record(self)
        return event


class WatchedEvent(FakeEvent):
    """An event that knows what had been launched when it was recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self.clock = WatchedStream.detector.recorded((stream or FakeStream.current).number)

    def wait(self, stream: Any = None) -> None:
        (stream or FakeStream.current).wait_event(self)

    def synchronize(self) -> None:
        if WatchedStream.detector.heeds("synchronize"):
            WatchedStream.detector.host_waits(self.clock, "event.synchronize")


class WatchedOnStream(OnStream):
    """``torch.cuda.stream(stream)``."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream if WatchedStream.detector.heeds("with stream") else None)


class WatchedTracer(Tracer):
    """Tells ``detector``, set before, who touches what."""

    detector: ClassVar[Detector]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks: dict[Storage, Block] = {}

    def __enter__(self) -> Tracer:
        WatchedStream.detector = self.detector
        FakeStream.numbers = count()
        FakeStream.default = FakeStream.current = WatchedStream()
        names: Any = torch.cuda, torch.Tensor
        names[0].Stream, names[0].Event, names[0].stream = WatchedStream, WatchedEvent, WatchedOnStream
        names[0].synchronize = lambda device=None: self._synchronize()
        names[1].record_stream = lambda tensor, stream: self._record_stream(tensor, stream)
        return super().__enter__()

    def enter(self, phase: str) -> None:
        if self.detector.phase == "init" != phase:
            self._fill_weights()
        self.detector.enter(phase)
        super().enter(phase)

    def _fill_weights(self) -> None:
        """The planner leaves out what a run reads from files, on the stream that computes."""
        for storage, block in self.blocks.items():
            if block.is_new and storage.on_device:
                self.detector.touch(block, (0, storage.bytes), True, 0, self.detector.launch(0), "reading weights")

    @contextmanager
    def on_host_thread(self) -> Iterator[None]:
        detector = self.detector
        detector.join(THREAD, detector.clock(HOST))  # what is handed to it comes after all that was done before
        with super().on_host_thread():
            detector.host = THREAD
            yield
        detector.host = HOST

    def join(self) -> None:
        if self.detector.heeds("join"):
            self.detector.join(HOST, self.detector.clock(THREAD))

    def _synchronize(self) -> None:
        detector = self.detector
        if detector.heeds("synchronize"):
            for stream in [stream for stream in detector.clocks if stream >= 0]:
                detector.join(HOST, detector.clock(stream))
            detector.host_waits({}, "cuda.synchronize")

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        block = self._block(tensor)
        if block is not None and self.detector.heeds("record_stream"):
            block.recorded.add(stream.number)

    # ------------------------------------------------------------------------------------------------------- blocks

    def _block(self, tensor: Any) -> Block | None:
        return self.blocks.get(self.storages.get(id(tensor.untyped_storage())))  # type: ignore[arg-type]

    def _new(self, untyped: Any, key: int, size: int, on_device: bool, op: str) -> None:
        super()._new(untyped, key, size, on_device, op)
        self._make_block(self.storages[key], op)

    def _resize(self, storage: Storage, size: int, op: str) -> None:
        block = self.blocks.pop(storage, None)
        if block is not None:
            self.detector.free(block)
        super()._resize(storage, size, op)
        if size:
            self._make_block(storage, op)

    def _make_block(self, storage: Storage, op: str) -> None:
        pool = FakeStream.current.number if storage.on_device else HOST
        self.blocks[storage] = Block(pool, f"{op} at {here()}")

    # --------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        for leaf in leaves:
            self.watch(leaf, "from outside")
        known = {id(leaf.untyped_storage()) for leaf in leaves}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = self.detector.heeds("pin_memory")
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not is_paused() and out is not NotImplemented:
            self._see(func, args, kwargs, out, known)
        return out

    def _see(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, known: set[int]) -> None:
        name = func._overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else str(func)
        if func in TOUCH_NOTHING or name in ALLOCATE or getattr(func, "is_view", False):
            return
        reads, writes = _operands(func, args, kwargs)
        writes += [t for t in _fakes(out) if id(t.untyped_storage()) not in known]
        on_device = [tensor for tensor in (*reads, *writes) if self.is_on_device(tensor)]
        on_host = [t for t in (*reads, *writes) if t.fake_device.type == "cpu" and (t.dim() or _among(t, writes))]
        if on_device and on_host and name in COPIES:
            asked = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
            self._copy(name, reads, writes, on_host, bool(asked))
        elif reads or writes:
            host = self.detector.host
            stream = FakeStream.current.number if on_device else host
            number = self.detector.launch(stream)
            for tensor in reads:  # a number on the host is an argument of the kernel: it is read at the launch
                self._touch(tensor, False, stream if self.is_on_device(tensor) else host, number, name)
            for tensor in writes:
                self._touch(tensor, True, stream, number, name)
            if on_device and name in WAIT:
                self.detector.host_waits(self.detector.clock(stream), name)

    def _copy(self, name: str, reads: list[Any], writes: list[Any], on_host: list[Any], asked: bool) -> None:
        """A copy over the bus: with pageable memory the host waits, or the driver takes a copy before it returns."""
        detector, stream = self.detector, FakeStream.current.number
        to_host = any(_among(tensor, writes) for tensor in on_host)
        is_pinned = all(tensor.untyped_storage() in self.mode.pinned for tensor in on_host)
        if asked and not (is_pinned and _is_direct(reads, writes)):
            way = "by way of a temporary copy" if is_pinned else "with host memory that is not pinned"
            detector.report("pageable copy", f"{name} {way} at {here()}")
        number = detector.launch(stream)
        waits = not (asked and is_pinned)
        for tensors, are_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                read_by_host = waits and not are_written and _among(tensor, on_host)
                self._touch(tensor, are_written, detector.host if read_by_host else stream, number, name)
        if waits and (to_host or not asked):
            detector.host_waits(detector.clock(stream), f"{name} {'to' if to_host else 'from'} the host")

    def _touch(self, tensor: Any, writes: bool, stream: int, number: int, name: str) -> None:
        block = self._block(tensor)
        if block is not None and tensor.numel():
            number = self.detector.launch(stream) if stream < 0 else number
            self.detector.touch(block, _extent(tensor), writes, stream, number, name)


def _operands(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The tensors that an operation reads, and those that its schema says it writes."""
    arguments = {argument.name: argument for argument in func._schema.arguments}
    given: Iterator[Any] = zip(arguments.values(), args, strict=False)
    reads: list[Any] = []
    writes: list[Any] = []
    for argument, value in [*given, *((arguments.get(key), value) for key, value in kwargs.items())]:
        (writes if argument is not None and argument.is_write else reads).extend(_fakes(value))
    return (reads, reads + writes) if func.namespace == "c10d" else (reads, writes)  # whose schemas do not say


def _fakes(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)]


def _among(tensor: Any, tensors: list[Any]) -> bool:
    return any(tensor is other for other in tensors)


def _is_direct(reads: list[Any], writes: list[Any]) -> bool:
    """Whether no temporary copy on the host is needed, which would not be pinned."""
    for source, target in zip(reads, writes, strict=False):
        from_host = source.fake_device.type == "cpu"
        same_type = source.dtype == target.dtype
        is_contiguous = (source if from_host else target).is_contiguous() and (same_type or not from_host)
        if not is_contiguous and not (same_type and source.stride() == target.stride() and _is_dense(source)):
            return False
    return True


def _is_dense(tensor: Any) -> bool:
    low, high = _extent(tensor)
    return high - low == tensor.numel() * tensor.element_size()


def _extent(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage between the first and the last element."""
    size, low = tensor.element_size(), tensor.storage_offset()
    high = low + sum((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return low * size, high * size
