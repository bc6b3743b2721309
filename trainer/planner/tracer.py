"""Watches every operation of a run on fake tensors: what memory it asks for and gives back, and what it costs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.planner.events import Category, Event, Kind, Trace, Work
from trainer.planner.fake_kernels import counted_args, inner_bytes
from trainer.planner.fake_mode import FakeGPUMode
from trainer.planner.fake_patches import FakeStream, install, is_paused, uninstall
from trainer.planner.target import Target

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation")
LT_WORKSPACE = 1 << 20  # bytes for a product with a bias, by cuBLASLt (CUBLASLT_WORKSPACE_SIZE's default)
HOST_STREAM = -1  # the stream of what the CPU computes, for the cost of a step
LEAST_HOST_BYTES = 2**16  # of work on the host that takes time worth counting
_ALL_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor")
_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor", "alltoall_base_")  # as many bytes
PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}
"""Methods of a sparse tensor that return what it consists of."""
COLLECTIVES = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce"), "all_reduce"),
    **dict.fromkeys(_ALL_GATHERS, "all_gather"),
    **dict.fromkeys(_SCATTERS, "reduce_scatter"),
    "broadcast_": "broadcast",
}
"""Operations of c10d and its functional twin, by what they are."""


class Storage:
    """A block of memory that tensors share: its number among the events, its size, and whether it is on the device."""

    __slots__ = ("bytes", "id", "is_pinned", "on_device", "phase", "reference")

    def __init__(self, number: int, size: int, on_device: bool, phase: str) -> None:
        self.id, self.bytes, self.on_device, self.phase = number, size, on_device, phase
        self.is_pinned = False
        self.reference: Any = None

    def host_bytes(self, size: int) -> int:
        """What ``size`` bytes take in host memory: torch rounds page-locked memory up (CachingHostAllocator.h)."""
        return 1 << (size - 1).bit_length() if self.is_pinned and size else size


class Tracer(TorchDispatchMode):
    """Records the events of everything that runs inside of it, on tensors of ``mode`` that seem to be on ``target``."""

    supports_higher_order_operators = True

    def __init__(self, target: Target, mode: FakeGPUMode) -> None:
        super().__init__()
        self.target, self.mode, self.trace, self.phase = target, mode, Trace(), "init"
        self.storages: dict[int, Storage] = {}
        self.records_work = False
        self.repeat = 1  # what is done now is done so often, though it is traced once
        self._ids = self._host_bytes = 0
        self._workspaces: set[tuple[bool, int]] = set()

    def enter(self, phase: str) -> None:
        """What follows is of ``phase``."""
        if phase != self.phase or not self.trace.marks:
            self.trace.marks.append((len(self.trace.events), phase))
        self.phase = phase
        if phase == "backward":  # what forward has left behind is kept for it
            for storage in self.storages.values():
                if storage.on_device and storage.bytes and storage.phase == "forward":
                    self.trace.categories.setdefault(storage.id, "activations")

    def categorise(self, tensors: Iterable[Any], category: Category) -> None:
        """Say what the memory of ``tensors`` is for; what has a category keeps it."""
        for tensor in tensors:
            for part in plain_tensors(tensor):
                if id(part.untyped_storage()) not in self.storages:
                    self.watch(part, category)
                storage = self.storages.get(id(part.untyped_storage()))
                if storage is not None and storage.on_device and storage.bytes:
                    self.trace.categories.setdefault(storage.id, category)

    def watch(self, tensor: Any, op: str) -> None:
        """Notice the storage of ``tensor`` if it is new, or has another size than before."""
        if not isinstance(tensor, FakeTensor):
            return
        if tensor.layout is not torch.strided:
            for part in plain_tensors(tensor):
                self.watch(part, op)
            return
        untyped = tensor.untyped_storage()
        size, key = untyped.nbytes(), id(untyped)
        storage = self.storages.get(key)
        if storage is None and size:
            self._new(untyped, key, size, self.is_on_device(tensor), op)
        elif storage is not None and storage.bytes != size:
            self._resize(storage, size, op)

    def _new(self, untyped: Any, key: int, size: int, on_device: bool, op: str) -> None:
        storage = Storage(self._allocate(size, op) if on_device else 0, size, on_device, self.phase)
        if not on_device:
            storage.is_pinned = untyped in self.mode.pinned
            self._on_host(storage.host_bytes(size))

        def gone(_: Any) -> None:
            lost = self.storages.pop(key, None)
            if lost is not None:
                self._resize(lost, 0, "")

        storage.reference = weakref.ref(untyped, gone)
        self.storages[key] = storage

    def _resize(self, storage: Storage, size: int, op: str) -> None:
        if not storage.on_device:
            self._on_host(storage.host_bytes(size) - storage.host_bytes(storage.bytes))
        else:
            category = self.trace.categories.get(storage.id)
            if storage.bytes:
                self.trace.events.append(Event(storage.id, 0, "", self.phase))
            if size:
                storage.id, storage.phase = self._allocate(size, op), self.phase
                if op == "resize_":  # FSDP gives gathered weights their memory again and again
                    category = category or "params"
                if category is not None:
                    self.trace.categories[storage.id] = category
        storage.bytes = size

    def _allocate(self, size: int, op: str) -> int:
        self._ids += 1
        self.trace.events.append(Event(self._ids, size, op, self.phase, FakeStream.current.number))
        return self._ids

    def _on_host(self, change: int) -> None:
        self._host_bytes += change
        self.trace.host_bytes = max(self.trace.host_bytes, self._host_bytes)

    def inside(self, sizes: Iterable[int], op: str) -> None:
        """What a kernel allocates for itself, and frees before it returns."""
        for number in [self._allocate(size, f"{op} (inside)") for size in sizes if size > 0]:
            self.trace.events.append(Event(number, 0, "", self.phase))

    def _workspace(self, op: str) -> None:
        """cuBLAS takes memory for a matrix product: at each call, or once for each thread and stream."""
        if self.target.device.type == "cpu":
            return
        size = self.target.gpu.cublas_workspace
        if self.target.workspaces == "one a call":
            self.inside((LT_WORKSPACE if op == "addmm" else size,), op)
            return
        in_backward = torch._C._current_graph_task_id() != -1  # where autograd runs in a thread of its own
        key = (in_backward, FakeStream.current.number)
        if key not in self._workspaces:
            self._workspaces.add(key)
            self._allocate(size, "cuBLAS workspace")
        if op == "addmm" and self.target.workspaces == "kept, and one a call":
            self.inside((LT_WORKSPACE,), op)

    def is_on_device(self, tensor: Any) -> bool:
        """Whether a tensor takes memory of the device that is planned for."""
        return isinstance(tensor, FakeTensor) and tensor.fake_device.type == self.target.device.type

    def __enter__(self) -> Tracer:
        self._set_size = set_size = torch.UntypedStorage.resize_

        def resize(untyped: Any, size: int) -> None:  # how FSDP2 frees gathered weights, below any dispatch
            set_size(untyped, size)
            storage = self.storages.get(id(untyped))
            if storage is not None and storage.bytes != untyped.nbytes():
                self._resize(storage, untyped.nbytes(), "resize_")

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._set_size  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_paused():
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor become operations on its shards first
        name = func._overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else str(func)
        out = func(*args, **kwargs)
        # Nearly all return one tensor, and taking a tree apart costs as much as all the rest.
        results = [out] if isinstance(out, Tensor) else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.watch(tensor, name)
        if "attention" in name:
            self.inside(inner_bytes(self.target.attention, name, args), name)
        if name in MATRIX_PRODUCTS:
            self._workspace(name)
        if self.records_work:
            self._note_work(func, name, args, kwargs, out, results)
        return out

    def _note_work(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(name, tensors, group_among(tree_leaves((args, kwargs))))
            return
        if getattr(func, "is_view", False):
            return
        if not any(self.is_on_device(tensor) for tensor in (*tensors, *results)):
            if (moved := _bytes(tensors)) >= LEAST_HOST_BYTES:  # what an offloaded optimizer does
                dtype = str(tensors[0].dtype).removeprefix("torch.")
                self.trace.work.append(Work(name, "compute", self.phase, HOST_STREAM, 0, moved, dtype))
            return
        kind = _kind(tensors, results)
        if kind != "compute":
            moved = min(_bytes(results), _bytes(tensors)) if results else 0
            self.note(name, kind, 0, moved, results)
            return
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        flops = int(count(*counted_args(name, args), **kwargs, out_val=out)) if count else 0
        seen = {id(tensor) for tensor in tensors}  # the result of an in-place operation is one of them
        moved = _bytes(tensors) + _bytes([tensor for tensor in results if id(tensor) not in seen])
        self.note(name, "compute", flops, moved, results or tensors)

    def _note_collective(self, name: str, tensors: list[Tensor], group: tuple[int, int]) -> None:
        """What the device's network does or, with gradients in host memory, the host's."""
        here = [tensor for tensor in tensors if self.is_on_device(tensor)]
        sizes = [_bytes([tensor]) for tensor in here or tensors]
        if not sizes or name not in COLLECTIVES:
            return
        op = COLLECTIVES[name]
        whole = sum(sizes) if op == "all_reduce" else max(sizes)
        if here or whole >= LEAST_HOST_BYTES:
            stream = FakeStream.current.number if here else HOST_STREAM
            self.note(op, "collective", 0, whole, here or tensors, stream, *group)

    def note(
        self, op: str, kind: Kind, flops: int, moved: int, tensors: list[Tensor], stream: int | None = None, *group: int
    ) -> None:
        """Remember one operation for the time of the step: on the current stream if none is given."""
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        number = FakeStream.current.number if stream is None else stream
        work = Work(op, kind, self.phase, number, flops, moved, str(dtype).removeprefix("torch."), *group)
        self.trace.work.extend([work] * self.repeat)


@contextmanager
def tracing(target: Target, ranks: int = 1, nodes: int = 1, kind: type[Tracer] | None = None) -> Iterator[Tracer]:
    """Make ``target`` the CUDA device of this process, and trace what is done inside of the context, by ``kind``.

    Tensors that are made inside are fake; real ones that come from outside are moved with ``.to("cuda")``. What is
    traced is ``tracer.trace``; call ``tracer.enter`` where a phase begins. Torch is itself again afterwards; tensors
    that were made inside are of no use there.
    """
    notes = install(target, ranks // nodes)
    mode = FakeGPUMode(ranks)
    tracer = (kind or Tracer)(target, mode)
    tracer.trace.notes += notes
    try:
        with mode, tracer:
            yield tracer
    finally:
        tracer.trace.guesses = mode.guesses
        tracer.trace.notes += [f"a value that is not known is asked for at {line}" for line in mode.guessed]
        uninstall()


def plain_tensors(tensor: Any) -> list[Tensor]:
    """The tensors with memory that a tensor consists of: a shard, or the parts of a quantised one."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, FakeTensor) and tensor.layout in PARTS:
        return [getattr(tensor, name)() for name in PARTS[tensor.layout]]
    if isinstance(tensor, FakeTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor] if isinstance(tensor, Tensor) else []
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_tensors(getattr(tensor, name))]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kind(tensors: list[Tensor], results: list[Tensor]) -> Kind:
    """Whether an operation crosses the bus, such as ``copy_`` into memory of the device."""
    sources = {t.device.type for t in tensors if t.dim() or t.numel() > 1}
    targets = {t.device.type for t in results}
    if targets == {"cuda"} and "cpu" in sources:
        return "to_device"
    return "to_host" if targets == {"cpu"} and "cuda" in sources else "compute"


def group_among(values: list[Any]) -> tuple[int, int]:
    """How many ranks the process group among the arguments of a collective has, and how far apart they are.

    ``(0, 1)``, which stands for all ranks, where there is no group among them.
    """
    for value in values:
        kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
        if kind is not None and kind.name() == "ProcessGroup":
            ranks = torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(value))
            return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return 0, 1
