"""Tracer of all operations of a run on fake tensors: records allocations, frees and costs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.fakegpu.events import HOST_STREAM, HOST_THREAD, INNER_BYTES, Category, Event, Kind, Operation
from trainer.fakegpu.kernels import counted_args, embedding_bytes
from trainer.fakegpu.mode import FakeGPUMode
from trainer.fakegpu.target import Target
from trainer.fakegpu.torch_patches import FakeStream, is_paused, patch, patched_torch

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation")
CONVOLUTIONS = {"convolution": 1, "convolution_backward": 2}  # index of the weight; the groups are 7 after it
MIN_TENSOR_CORE_CHANNELS = 8  # min channels per group for tensor cores: one row of a half precision tile
LT_WORKSPACE = 1 << 20  # bytes for a product with a bias, by cuBLASLt (CUBLASLT_WORKSPACE_SIZE's default)
MIN_HOST_WORK_BYTES = 2**16  # host operations on fewer bytes are ignored
_ALL_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor")
_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor", "alltoall_base_")  # as many bytes
COLLECTIVES = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce"), "all_reduce"),
    **dict.fromkeys(_ALL_GATHERS, "all_gather"),
    **dict.fromkeys(_SCATTERS, "reduce_scatter"),
    "broadcast_": "broadcast",
}
"""The kind of collective of each operation of c10d and of functional collectives."""


class Storage:
    """A block of memory that tensors share: its number among the events, its size, and whether it is on the device."""

    __slots__ = ("bytes", "id", "is_pinned", "on_device", "phase", "reference")

    def __init__(self, number: int, size: int, on_device: bool, phase: str) -> None:
        self.id, self.bytes, self.on_device, self.phase = number, size, on_device, phase
        self.is_pinned = False
        self.reference: Any = None

    def host_bytes(self, size: int) -> int:
        """Return the host memory for ``size`` bytes: torch rounds pinned memory up (CachingHostAllocator.h)."""
        return 1 << (size - 1).bit_length() if self.is_pinned and size else size


class Tracer(TorchDispatchMode):
    """Records events and work of everything that runs within it, on tensors of ``mode`` on the simulated ``target``."""

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)  # torch.compile may compile in it

    def __init__(self, target: Target, mode: FakeGPUMode) -> None:
        super().__init__()
        self.target, self.mode, self.trace, self.phase = target, mode, mode.trace, "init"
        self.storages: dict[int, Storage] = {}
        self.records_work = False
        self.repeat = 1  # number of times that an operation traced once is executed
        self.host = HOST_STREAM
        self._ids = self._host_bytes = 0
        self._workspaces: set[tuple[bool, int]] = set()

    def enter(self, phase: str) -> None:
        """Start ``phase``."""
        if phase != self.phase or not self.trace.marks:
            self.trace.marks.append((len(self.trace.events), phase))
        self.phase = phase
        if phase == "backward":  # memory of forward that is still in use is kept for backward
            for storage in self.storages.values():
                if storage.on_device and storage.bytes and storage.phase == "forward":
                    self.trace.categories.setdefault(storage.id, "activations")

    @contextmanager
    def on_host_thread(self) -> Iterator[None]:
        """Record operations in the block as work of a host thread."""
        self.host = HOST_THREAD
        try:
            yield
        finally:
            self.host = HOST_STREAM

    def join(self) -> None:
        """No-op: called when the host has waited for its thread."""

    def categorise(self, tensors: Iterable[Any], category: Category) -> None:
        """Set the category of the memory of ``tensors``, unless it has one."""
        for tensor in tensors:
            for part in constituent_tensors(tensor):
                if id(part.untyped_storage()) not in self.storages:
                    self.watch(part, category)
                storage = self.storages.get(id(part.untyped_storage()))
                if storage is not None and storage.on_device and storage.bytes:
                    self.trace.categories.setdefault(storage.id, category)

    def watch(self, tensor: Any, op: str) -> None:
        """Record the storage of ``tensor`` if it is new or its size has changed."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
            return
        if tensor.layout is torch.sparse_coo:
            for part in constituent_tensors(tensor):
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
                if op == "resize_":  # FSDP repeatedly frees and allocates gathered weights
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

    def allocate_workspace(self, sizes: Iterable[int], op: str) -> None:
        """Record the temporary allocations of a kernel."""
        for number in [self._allocate(size, f"{op} (inside)") for size in sizes if size > 0]:
            self.trace.events.append(Event(number, 0, "", self.phase))

    def _inside_attention(self, func: Any, name: str, args: Any) -> tuple[int, ...]:
        if (registered := INNER_BYTES.get(func)) is None:
            return self.target.attention.workspace_bytes(name, args)
        on_gpu = self.target.device.type == "cuda"
        return registered(func, args, self.target.gpu.capability if on_gpu else None)

    def _workspace(self, op: str) -> None:
        """Record cuBLAS's workspace for a matrix product: at each call, or once for each thread and stream."""
        if self.target.device.type == "cpu":
            return
        size = self.target.gpu.cublas_workspace
        if self.target.workspaces == "one a call":
            self.allocate_workspace((LT_WORKSPACE if op == "addmm" else size,), op)
            return
        in_backward = torch._C._current_graph_task_id() != -1  # autograd runs in a separate thread
        key = (in_backward, FakeStream.current.number)
        if key not in self._workspaces:
            self._workspaces.add(key)
            self._allocate(size, "cuBLAS workspace")
        if op == "addmm" and self.target.workspaces == "kept, and one a call":
            self.allocate_workspace((LT_WORKSPACE,), op)

    def is_on_device(self, tensor: Any) -> bool:
        """Return whether a tensor is on the target device."""
        return isinstance(tensor, FakeTensor) and tensor.fake_device.type == self.target.device.type

    def __enter__(self) -> Tracer:
        set_size = torch.UntypedStorage.resize_

        def resize(untyped: Any, size: int) -> None:  # how FSDP2 frees gathered weights, below any dispatch
            set_size(untyped, size)
            storage = self.storages.get(id(untyped))
            if storage is not None and storage.bytes != untyped.nbytes():
                self._resize(storage, untyped.nbytes(), "resize_")

        patch(torch.UntypedStorage, resize_=resize)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_paused():
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor become operations on its shards first
        name = func._overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else str(func)
        out = func(*args, **kwargs)
        # Nearly all operations return one tensor, and tree_leaves is slow.
        results = [out] if isinstance(out, Tensor) else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.watch(tensor, name)
        if "attention" in name:
            if name == "_flash_attention_forward":
                self.trace.note_attention("flash over packed texts", args[0], masked=False)
            self.allocate_workspace(self._inside_attention(func, name, args), name)
        elif name == "embedding_dense_backward" and self.target.device.type == "cuda":
            self.allocate_workspace(embedding_bytes(*args), name)
        if name in MATRIX_PRODUCTS:
            self._workspace(name)
        if self.records_work:
            self._note_work(func, name, args, kwargs, out, results)
        return out

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Record a Triton kernel that a library launches; its outputs are allocated already."""
        self.trace.add_note(f"Triton kernels of {kernel.__module__.partition('.')[0]} compute parts of the model")
        self.launch_compiled(kernel.__name__, (*args, *options.values()))

    def launch_compiled(self, name: str, args: tuple[Any, ...], names: Sequence[str] = ()) -> None:
        """Record a kernel that Inductor generates; ``names`` of its arguments say which of ``args`` it writes."""
        tensors = [one for one in args if isinstance(one, FakeTensor)]
        for label, tensor in zip(names, tensors, strict=False):
            if "out_ptr" in label:
                self.mode.forget(tensor)
        if self.records_work:
            self.record_operation(name, "compute", 0, _bytes(tensors), dtype_of(tensors))

    def _note_work(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            blocking = func.namespace == "_c10d_functional"  # DTensor's, within the layers of tensor parallelism
            self._note_collective(name, tensors, (*group_among(tree_leaves((args, kwargs))), blocking))
            return
        if getattr(func, "is_view", False) or name == "_unsafe_view":  # a view except for autograd
            if any(map(self.is_on_device, tensors)):
                self.record_operation("view", "compute", 0, 0, "")
            return
        if not any(self.is_on_device(tensor) for tensor in (*tensors, *results)):
            if (moved := _bytes(tensors)) >= MIN_HOST_WORK_BYTES:  # such as an offloaded optimizer
                dtype = str(tensors[0].dtype).removeprefix("torch.")
                self.trace.work.append(Operation(name, "compute", self.phase, self.host, 0, moved, dtype))
            return
        kind = _kind(tensors, results)
        if kind != "compute":
            moved = min(_bytes(results), _bytes(tensors)) if results else 0
            self.record_operation(name, kind, 0, moved, dtype_of(results))
            return
        flops = flops_of(func, name, args, kwargs, out)
        seen = {id(tensor) for tensor in tensors}  # the result of an in-place operation is one of them
        moved = _bytes(tensors) + _bytes([tensor for tensor in results if id(tensor) not in seen])
        dtype = dtype_of(results or tensors)
        units = compute_unit(name, args, dtype) if flops else dtype
        self.record_operation(name, "compute", flops, moved + extra_traffic_bytes(name, args, units, moved), units)

    def _note_collective(self, name: str, tensors: list[Tensor], group: tuple[int, int, bool]) -> None:
        """Record a collective on the device or, for tensors in host memory, on the host."""
        here = [tensor for tensor in tensors if self.is_on_device(tensor)]
        sizes = [_bytes([tensor]) for tensor in here or tensors]
        if not sizes or name not in COLLECTIVES:
            return
        op = COLLECTIVES[name]
        whole = sum(sizes) if op == "all_reduce" else max(sizes)
        if here or whole >= MIN_HOST_WORK_BYTES:
            stream = FakeStream.current.number if here else HOST_STREAM
            self.record_operation(op, "collective", 0, whole, dtype_of(here or tensors), stream, *group)

    def record_operation(
        self, op: str, kind: Kind, flops: int, moved: int, dtype: str, stream: Any = None, *group: Any
    ) -> None:
        """Record one operation for the time of the step, by default on the current stream."""
        number = FakeStream.current.number if stream is None else stream
        again = self.phase == "backward" and torch.is_grad_enabled()  # gradient formulas run without it
        work = Operation(op, kind, self.phase, number, flops, moved, dtype, *group)._replace(is_recompute=again)
        self.trace.work.extend([work] * self.repeat)


def dtype_of(tensors: Iterable[Tensor]) -> str:
    """Return the dtype of the computation, as torch names it."""
    return str(next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)).removeprefix("torch.")


def flops_of(func: Any, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of a call by torch's formulas with two corrections; 0 without a formula.

    Torch counts the weight gradient of a grouped convolution as ungrouped, and causal attention as full attention,
    although kernels skip everything above the diagonal.
    """
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    if count is None:
        return 0
    if name.startswith("_flash_attention"):  # packed texts: lengths are unknown, so all count as the longest
        is_backward = name.endswith("backward")
        query, longest = args[is_backward], args[(9 if is_backward else 6)]
        products, is_causal = (5, args[11]) if is_backward else (2, args[8])
        return int(2 * products * query.numel() * longest) // (1 + is_causal)
    if name == "convolution_backward":
        groups, (of_input, of_weight, _) = args[9:11]
        masks = ([of_input, False, False], [False, of_weight, False])
        inputs, weights = (count(*args[:10], mask, out_val=out) for mask in masks)
        return int(inputs + weights // groups)
    flops = int(count(*counted_args(name, args), **kwargs, out_val=out))
    if not name.startswith("_scaled_dot_product"):
        return flops
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return flops // 2 if given.get("is_causal") else flops


def compute_unit(name: str, args: tuple, dtype: str) -> str:
    """Return the units for a product of ``dtype``: tf32 instead of fp32 if torch may use them."""
    backends: Any = torch.backends
    setting = backends.cuda.matmul if name in MATRIX_PRODUCTS else None
    if name in CONVOLUTIONS:
        first = CONVOLUTIONS[name]
        if args[first + 7] > 1 and args[first].shape[1] < MIN_TENSOR_CORE_CHANNELS:
            return "float32"  # ATen's DepthwiseConv2d.cu
        setting = backends.cudnn.conv
    return "tfloat32" if setting and dtype == "float32" and setting.fp32_precision == "tf32" else dtype


def extra_traffic_bytes(name: str, args: tuple, units: str, moved: int) -> int:
    """Return the bytes that a kernel moves in addition to ``moved``, which counts each tensor of the call once.

    cuDNN transposes what is not channels_last for its tensor cores (NVIDIA, Convolutional Layers User's Guide).
    Normalisations over many rows take their sums first and read everything again for the result, as all backwards do
    (ATen's Normalization.cuh, group_norm_kernel.cu and layer_norm_kernel.cu).
    """
    if name in CONVOLUTIONS and units in ("float16", "bfloat16"):
        entered = args[CONVOLUTIONS[name] - 1]
        return 0 if entered.is_contiguous(memory_format=torch.channels_last) else 2 * moved
    if name.endswith("norm_backward"):
        return _bytes(args[:2])  # the gradient and the input
    return _bytes(args[:1]) if name.endswith(("batch_norm", "group_norm")) else 0


@contextmanager
def tracing(target: Target, ranks: int = 1, nodes: int = 1, kind: type[Tracer] | None = None) -> Iterator[Tracer]:
    """Simulate ``target`` as the CUDA device of this process and trace the block with a tracer of class ``kind``.

    Tensors created in the block are fake and cannot be used after it; move real tensors to it with ``.to("cuda")``.
    Call ``tracer.enter`` at the start of a phase. The result is ``tracer.trace``. Torch is restored at the end.
    """
    with patched_torch(target, ranks // nodes) as notes:
        mode = FakeGPUMode(ranks)
        tracer = (kind or Tracer)(target, mode)
        tracer.trace.notes += notes
        with mode, tracer:
            yield tracer


def constituent_tensors(tensor: Any) -> list[Tensor]:
    """Return the tensors with memory that a tensor consists of: a shard, or the parts of a quantised tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, FakeTensor) and tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if isinstance(tensor, FakeTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor] if isinstance(tensor, Tensor) else []
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in constituent_tensors(getattr(tensor, name))]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kind(tensors: list[Tensor], results: list[Tensor]) -> Kind:
    sources = {t.device.type for t in tensors if t.dim() or t.numel() > 1}
    targets = {t.device.type for t in results}
    if targets == {"cuda"} and "cpu" in sources:
        return "to_device"
    return "to_host" if targets == {"cpu"} and "cuda" in sources else "compute"


def group_among(values: list[Any]) -> tuple[int, int]:
    """Return (number of ranks, distance between them) of the group in a collective's arguments; default ``(0, 1)``."""
    for value in values:
        kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
        group = torch.distributed.ProcessGroup.unbox(value) if kind and kind.name() == "ProcessGroup" else value
        if isinstance(value, str):  # a functional collective names its group
            group = next((one for one, name in distributed_c10d._world.pg_names.items() if name == value), None)
        if isinstance(group, torch.distributed.ProcessGroup):
            ranks = torch.distributed.get_process_group_ranks(group)
            return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return 0, 1
