"""Patches that make torch's Python code see a simulated CUDA device.

Python sees tensors on ``cuda:0``. C++ sees them on meta, so autograd works on any build of torch without a GPU, driver
or memory. Code that chooses by device gets the answers of the target GPU. Patches apply within :func:`patched_torch`.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch._dynamo.config
import torch.distributed.fsdp
import torch.utils._triton
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.cuda.amp import common as cuda_amp
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainer.errors import RunError
from trainer.fakegpu.kernels import install_kernels
from trainer.fakegpu.mode import GPU_DEVICE, cast_weights, install_autocast, on_meta_if
from trainer.fakegpu.target import NEWEST, OLDEST, Target, installed_version

NOTHING = """set_device init _lazy_init synchronize empty_cache set_rng_state manual_seed manual_seed_all seed seed_all
    set_stream reset_peak_memory_stats reset_accumulated_memory_stats ipc_collect _sleep
    set_per_process_memory_fraction _record_memory_history"""
"""Functions of ``torch.cuda`` that become no-ops."""
# Bytes by compute capability, if all its cards have the same size: A100, H100 and H200, B200.
L2_CACHE = {(8, 0): 40 * 2**20, (9, 0): 50 * 2**20, (10, 0): 126 * 2**20}
MISSING = object()
_paused = 0
_library: torch.library.Library | None = None
_undo_stack = ExitStack()  # undoes all changes, the last one first


def is_paused() -> bool:
    """Return whether DTensor is propagating shapes with whole, unsharded tensors, which must not be traced."""
    return _paused > 0


def is_on_gpu(tensor: Any) -> bool:
    """Return whether a tensor is on the simulated GPU."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cuda"
    return isinstance(tensor, FunctionalTensor) and tensor.device.type == "cuda"


def patch(owner: Any, **attributes: Any) -> None:
    """Set attributes of ``owner`` within :func:`patched_torch`; skip those that this version of torch lacks."""
    for name, answer in attributes.items():
        if hasattr(owner, name):
            before = vars(owner).get(name, MISSING)
            setattr(owner, name, answer)
            _undo_stack.callback(*(delattr, owner, name) if before is MISSING else (setattr, owner, name, before))


@contextmanager
def patched_torch(target: Target, ranks: int = 1) -> Iterator[list[str]]:
    """Simulate ``target`` (a card or the CPU) as this process's device, with ``ranks`` such devices on the machine.

    Yields warnings and undoes all changes at the end. A process that already uses any GPU is a ``RunError``.
    """
    global _library
    if _library is not None:
        raise RunError("a process can simulate one GPU at a time: end the other block first")
    if torch.cuda.is_initialized():
        raise RunError("this process has used its GPU already: simulate before that, or in a separate process")
    _library = torch.library.Library("aten", "IMPL")
    try:
        yield _install(_library, target, ranks)
    finally:
        _undo_stack.close()
        _library._destroy()
        _library = None
        cast_weights.clear()
        FakeStream.current = FakeStream.default


def _install(library: torch.library.Library, target: Target, ranks: int) -> list[str]:
    patch_modules()
    patch_ranks()
    if target.device.type == "cpu":  # the CPU is real, so only memory is simulated
        return []
    patch_tensors()
    patch_cuda(target, ranks)
    patch_updates()
    patch_fsdp(target.version)
    with warnings.catch_warnings():  # torch warns about replaced kernels
        warnings.simplefilter("ignore")
        patch(torch, clear_autocast_cache=torch.clear_autocast_cache)  # so that its replacement below is undone
        uncast = install_autocast(library, is_on_gpu)
        install_kernels(library, target.attention)
    if OLDEST <= installed_version() <= NEWEST:
        return []
    what = f"; autocast also casts {', '.join(uncast)}, which is not simulated" if uncast else ""
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    differ = "attention kernels, casts and FSDP's buffers may differ, and with them the predicted memory"
    return [f"predictions were tested with torch {tested}, not {torch.__version__}: {differ}{what}"]


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace ``Module._apply``, which would swap the contents of tensors; fake tensors do not allow that.

    Parameters stay the same objects unless they leave meta. Each old tensor is freed before the next one is moved.
    """
    if recurse:
        for child in module.children():
            child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
        if isinstance(parameter, FakeTensor) and changed is not parameter and parameter.is_meta == changed.is_meta:
            parameter.data = changed
        elif changed is not parameter:
            module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def patch_modules() -> None:
    """Let modules move fake parameters and compile nothing; let tensors have addresses, and the device of new data."""
    data: Any = torch._C.TensorBase.data
    address: Any = torch.UntypedStorage.data_ptr

    def set_data(tensor: Any, value: Any) -> None:
        data.__set__(tensor, value)
        tensor.fake_device = value.device
        tensor.fake_mode.known.pop(id(tensor), None)
        if (known := tensor.fake_mode.value(value)) is not None:
            tensor.fake_mode.set_value(tensor, known)

    def of_storage(storage: Any) -> int:
        return storage._cdata if storage.device.type == "meta" else address(storage)

    def of_tensor(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()

    def written(tensor: Tensor, spec: str) -> str:  # f"{loss:.3f}"; torch rejects subclasses here
        return format(tensor.item(), spec) if spec and not tensor.dim() else str(tensor)

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:  # torch's would copy memory that does not exist
        if not tensor.is_leaf or id(tensor) in memo:
            return memo.get(id(tensor)) if tensor.is_leaf else by_storage(tensor, memo)
        with torch.no_grad():
            memo[id(tensor)] = twin = tensor.clone().requires_grad_(tensor.requires_grad)
        vars(twin).update({name: value for name, value in vars(tensor).items() if name not in vars(twin)})
        twin.grad = None if tensor.grad is None else deepcopy(tensor.grad, memo)
        return twin

    def pickled(tensor: Any, protocol: Any) -> Any:  # without data, so checkpoints cost nothing
        return _unpickled, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def numpy(tensor: Any, *, force: bool = False) -> Any:
        with no_dispatch():
            return tensor.fake_mode.read(tensor).numpy()

    def tensor_of(data: Any, **options: Any) -> Tensor:  # torch's reads the numbers of a list without dispatch
        listed = isinstance(data, list) and any(isinstance(item, FakeTensor) for item in data)
        return make([item.tolist() for item in data] if listed else data, **options)

    by_storage, make = torch.Tensor.__deepcopy__, torch.tensor
    _undo_stack.enter_context(torch.serialization.safe_globals([_unpickled]))
    _device_constructors()  # torch caches the functions that are replaced below
    patch(FakeTensor, __deepcopy__=deepcopy, __reduce_ex__=pickled, numpy=numpy)
    patch(torch.Tensor, share_memory_=lambda tensor: tensor)
    patch(torch, tensor=tensor_of)
    patch(nn.Module, _apply=_apply, compile=lambda module, *args, **options: None)
    patch(nn.RNNBase, flatten_parameters=lambda module: None)  # one block would need the same memory
    patch(FakeTensor, data=property(data.__get__, set_data), data_ptr=of_tensor, __format__=written)
    patch(torch.UntypedStorage, data_ptr=of_storage)


def _unpickled(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, learns: bool) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=learns)


def patch_tensors() -> None:
    """Put fake tensors on Python's device, but on meta for C++, with the dispatch keys of Python's device."""
    make = torch._C.TensorBase._make_subclass

    def make_subclass(cls: Any, data: Any, requires_grad: bool = False, **options: Any) -> Any:
        if options.get("device_for_backend_keys") is not None:
            options["dispatch_device"] = False
        return make(cls, data, requires_grad, **options)

    def is_pinned(tensor: Any, device: Any = None) -> bool:
        pinned = getattr(tensor.fake_mode, "pinned", ()) if isinstance(tensor, FakeTensor) else None
        return tensor.device.type == "cpu" and (pinned is None or tensor.untyped_storage() in pinned)

    def is_on(kind: str) -> property:
        return property(lambda tensor: tensor.fake_device.type == kind)

    by_context = on_meta_if(lambda context, *_: context.device.type == "meta", DeviceContext.__torch_function__)
    patch(DeviceContext, __torch_function__=by_context)
    for function in (torch.empty, torch.empty_like):
        patch(torch, **{function.__name__: on_meta_if(lambda *_, device=None, **__: str(device) == "meta", function)})
    patch(fake_tensor, init_gpu_context=lambda device: None)  # torch 2.11 to 2.14 would open a real one
    patch(FakeTensor, is_cuda=is_on("cuda"), is_cpu=is_on("cpu"), is_meta=is_on("meta"))
    patch(torch._C._nn, _parse_to=_to(torch._C._nn._parse_to, moved=0))
    patch(DTensor, device=property(lambda tensor: tensor._local_tensor.device))
    patch(DTensor, is_cuda=property(lambda tensor: tensor._local_tensor.is_cuda))
    patch(
        torch.Tensor,
        _make_subclass=staticmethod(make_subclass),
        to=_to(torch.Tensor.to),
        type_as=lambda tensor, other: tensor.to(other),
        get_device=lambda tensor: -1 if tensor.device.index is None else tensor.device.index,
        cuda=lambda tensor, *args, **options: tensor.to(GPU_DEVICE),
        record_stream=lambda tensor, stream: None,
        pin_memory=lambda tensor, device=None: torch.empty_like(tensor, device="cpu", pin_memory=True),
        is_pinned=is_pinned,
    )


def _to(move: Callable[..., Any], moved: int = 1) -> Callable[..., Any]:
    """Wrap ``Tensor.to``: ``"cuda"``, ``0`` or a tensor's device at position ``moved`` is the GPU, without a driver."""

    def placed(where: Any) -> tuple[Any, ...]:
        if isinstance(where, Tensor):
            return where.device, where.dtype
        named = isinstance(where, str | torch.device) and torch.device(where).type == "cuda"
        return (GPU_DEVICE if named or type(where) is int else where,)

    @wraps(move)
    def to(*args: Any, **options: Any) -> Any:
        given = (part for where in args[moved : moved + 1] for part in placed(where))
        if "device" in options:
            (options["device"],) = placed(options["device"])
        if moved and isinstance(args[0], FakeTensor) and "meta" in map(str, (*args[1:2], options.get("device"))):
            return torch.empty_like(args[0], device="meta")  # C++ would return it unchanged: it is on meta there
        return move(*args[:moved], *given, *args[moved + 1 :], **options)

    return to


def patch_cuda(target: Target, ranks: int) -> None:
    """Make ``torch.cuda`` answer for a machine with ``ranks`` GPUs like the target."""
    gpu, major = target.gpu, target.gpu.capability[0]
    known = {"name": gpu.title, "total_memory": gpu.memory, "major": major, "minor": gpu.capability[1], "warp_size": 32}
    known["L2_cache_size"] = L2_CACHE.get(gpu.capability, 0)  # at 0, timm's lion updates all weights at once: the most
    properties = SimpleNamespace(**known, multi_processor_count=100)  # typical of large cards; no effect on memory
    says: dict[str, Any] = dict.fromkeys(NOTHING.split())
    says |= dict.fromkeys(("is_available", "is_initialized", "can_device_access_peer"), True)
    says |= dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device", "utilization"), 0)
    says |= {"is_bf16_supported": major >= 8, "is_current_stream_capturing": False, "device_count": ranks}
    says |= {"get_device_capability": gpu.capability, "get_device_name": gpu.title, "get_device_properties": properties}
    says |= {"mem_get_info": (gpu.memory, gpu.memory), "memory_stats": defaultdict(int)}
    says |= {"get_rng_state": torch.empty(16, dtype=torch.uint8), "initial_seed": 0}
    answers: dict[str, Any] = {name: lambda *_, said=said, **__: said for name, said in says.items()}
    answers |= {"Stream": FakeStream, "ExternalStream": FakeStream, "Event": FakeEvent, "stream": OnStream}
    answers |= {"current_stream": lambda device=None: FakeStream.current, "default_generators": (torch.Generator(),)}
    answers |= {"default_stream": lambda device=None: FakeStream.default}
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        patch(module, **answers)
    patch(torch, Generator=FakeGenerator)
    restore = torch.set_rng_state
    for module in (torch, torch.random):
        patch(module, set_rng_state=lambda state: None if isinstance(state, FakeTensor) else restore(state))
    says = dict.fromkeys(("setDeviceIndex", "synchronizeDevice", "setStream", "maybeExchangeDevice"))
    says |= {"getDeviceIndex": 0, "exchangeDevice": 0, "getAccelerator": torch.device("cuda")}
    answers = {f"_accelerator_{name}": lambda *_, said=said: said for name, said in says.items()}
    answers |= {"_get_accelerator": answers["_accelerator_getAccelerator"]}
    patch(torch._C, **answers, _accelerator_getStream=lambda *_: FakeStream.current)


def patch_updates() -> None:
    """Let optimizers use their fused CUDA paths, GradScaler never overflow, and compiled updates work in place."""

    def compiled(function: Any = None, **options: Any) -> Any:
        if function is None:  # as a decorator with options
            return compiled
        return (lambda *args: None) if getattr(function, "__module__", "").startswith("torchao.") else function

    def step(scaler: Any, optimizer: Any, found: Any, *args: Any, **options: Any) -> Any:
        return optimizer.step(*args, **options)  # the overflow flag has no value

    by_device = _foreach_utils._group_tensors_by_device_and_dtype

    def group(*args: Any, **options: Any) -> Any:  # C++ groups by its own device, meta
        found = by_device(*args, **options)
        return {(GPU_DEVICE if device.type == "meta" else device, dtype): v for (device, dtype), v in found.items()}

    patch(torch, compile=compiled)
    patch(torch.backends.mha, get_fastpath_enabled=lambda: False)  # its nested tensors cannot be traced
    patch(DataLoader, __iter__=_real_batches)
    batches: Any = _SingleProcessDataLoaderIter
    patch(batches, __next__=_disable_current_modes()(batches.__next__))
    patch(torch.utils._triton, has_triton=lambda *_, **__: True)
    patch(cuda_amp, amp_definitely_not_available=lambda: False)
    patch(torch.amp.GradScaler, _maybe_opt_step=step)
    modules: tuple[Any, ...] = (optimizers, _foreach_utils)
    for module in modules:
        known = [kind for kind in module._foreach_supported_types if kind not in (FakeTensor, DTensor)]
        patch(module, _foreach_supported_types=[*known, FakeTensor, DTensor])
    for module in (*modules, clip_grad):
        patch(module, _group_tensors_by_device_and_dtype=group)
    checks = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    patch(torch.optim.Optimizer, **dict.fromkeys(checks, lambda optimizer: None))


@_disable_current_modes()
def _real_batches(loader: DataLoader) -> Any:
    alone: Any = copy(loader)
    alone.num_workers, alone.timeout, alone.pin_memory = 0, 0, False
    return _SingleProcessDataLoaderIter(alone)


def patch_libraries(launch: Callable[..., None]) -> None:
    """Let transformers omit empty masks, as in a real run, and ``launch`` replace Triton's launches, if imported."""
    utils, jit = (sys.modules.get(name) for name in ("transformers.utils.import_utils", "triton.runtime.jit"))
    patch(utils, is_fake_tensor=lambda tensor: False)
    patch(getattr(jit, "JITFunction", None), run=lambda *args, **options: launch(*args, **options))


def patch_fsdp(version: tuple[int, int]) -> None:
    """Let FSDP2 accept parameters on meta, and cut off only the shard that is used: 512 fake ones would be slow."""
    init = FSDPState.init

    def kept(state: Any, modules: Any, device: Any, policy: Any, is_automatic: bool) -> None:
        # Torch before 2.8 always kept the weights of the outermost module (pytorch/pytorch pull 154704).
        init(state, modules, device, policy, is_automatic or version < (2, 8))

    patch(FSDPState, init=kept)
    patch(_fsdp_param, _chunk_with_empty=Shards)
    patch(FSDPParamGroup, _validate_no_meta_params=lambda group: None)
    patch(_fsdp_collectives, record_grad_output_stream=lambda *args: None)


class Shards:
    """The shards of a tensor by rank, each cut off when it is asked for."""

    def __init__(self, tensor: Tensor, ranks: int, dim: int) -> None:
        self.rows = partial(tensor.narrow, dim)
        self.all, self.size = tensor.size(dim), -(-tensor.size(dim) // ranks)

    def __getitem__(self, rank: int) -> Tensor:
        start = min(rank * self.size, self.all)
        return self.rows(start, min(self.size, self.all - start))


@contextmanager
def _only_shapes() -> Iterator[None]:
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


def patch_ranks() -> None:
    """Compute device meshes with real tensors; the tensors of DTensor's shape propagation are not traced."""
    patch(device_mesh, init_device_mesh=_disable_current_modes()(device_mesh.init_device_mesh))
    names = ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached", "_propagate_tensor_meta")
    for name in (*names, "propagate_tensor_meta", "propagate"):
        before: Any = getattr(ShardingPropagator, name, None)
        patch(ShardingPropagator, **{name: _only_shapes()(before)})


# Streams and events of the simulated GPU record the order of allocations, but no time.


def _nothing(*args: Any, **options: Any) -> None: ...


class OnStream:
    """Stands in for ``torch.cuda.stream(stream)``."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> FakeStream | None:
        self._before = FakeStream.current
        FakeStream.current = self.stream or self._before
        return self.stream

    def __exit__(self, *error: object) -> None:
        FakeStream.current = self._before


class FakeStream(OnStream):
    """Stands in for ``torch.cuda.Stream``. Number 0 is the compute stream; free memory is separate per stream."""

    numbers: ClassVar[Iterator[int]] = count()
    current: ClassVar[FakeStream]
    default: ClassVar[FakeStream]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(self)
        self.number = next(FakeStream.numbers)
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type = 0, 1
        self.stream_id = self.cuda_stream = self.number

    wait_event = wait_stream = synchronize = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()


FakeStream.default = FakeStream.current = FakeStream()


class FakeGenerator(torch.Generator):
    """Stands in for ``torch.Generator``; on the simulated GPU, too, it draws the host's numbers."""

    device: Any = None

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.device = torch.device(device)
        return made

    def set_state(self, state: Tensor) -> Any:  # another rank's state, whose numbers are not known
        return self if isinstance(state, FakeTensor) else super().set_state(state)


class FakeEvent:
    """Stands in for ``torch.cuda.Event``."""

    __init__ = record = wait = synchronize = _nothing
    query = FakeStream.query

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0
