"""A CUDA device that is not there.

Python sees tensors on ``cuda:0``; to C++ they are on meta, so that autograd works on any build of torch, without a GPU,
a driver, or memory. Whatever asks which device it has before it chooses (autocast, attention, dropout, the optimizers,
FSDP2) is told what the target GPU would say.

``install`` changes torch for the rest of the process: call it in one that does nothing else, see ``worker``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed.fsdp
import torch.utils._triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import grad_scaler
from torch.cuda.amp import common as cuda_amp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from trainer.memory import sharding
from trainer.planner.attention import attend
from trainer.planner.autocast import install_autocast
from trainer.planner.fake_mode import GPU_DEVICE
from trainer.planner.gpus import GPU
from trainer.planner.streams import FakeEvent, FakeStream, OnStream
from trainer.planner.target import NEWEST, OLDEST, Target, installed_version

aten = torch.ops.aten

_library: torch.library.Library | None = None
_paused = 0


def is_paused() -> bool:
    """Whether what is computed now is only about shapes: DTensor propagates them with whole, unsharded tensors."""
    return _paused > 0


def is_on_gpu(tensor: Any) -> bool:
    """Whether a tensor is on the GPU that is not there."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def install(target: Target, ranks: int = 1) -> list[str]:
    """Give this process ``target`` as its CUDA device, once and for all; return warnings for a person.

    Args:
        target: the card and the version of torch.
        ranks: how many such cards this machine says that it has.
    """
    global _library
    if _library is not None:
        raise RuntimeError("a process can have one fake GPU only: use another process")
    _library = torch.library.Library("aten", "IMPL")
    nn.Module._apply = _apply  # type: ignore[method-assign]
    _patch_data()
    if target.device.type == "cpu":  # there is one: nothing but memory is pretended
        nn.Module.compile = lambda module, *args, **options: None  # type: ignore[method-assign]
        sharding.init_device_mesh = _for_real(sharding.init_device_mesh)
        _patch_propagation()
        return []
    _patch_tensors()
    _patch_cuda(target, ranks)
    _patch_compile()
    _patch_amp()
    _patch_optimizers()
    _patch_fsdp()
    with warnings.catch_warnings():  # that kernels are replaced is the purpose
        warnings.simplefilter("ignore")
        unknown = install_autocast(_library, is_on_gpu)
        _library.impl("scaled_dot_product_attention", attend(target.attention), "AutogradCUDA")
        _library.impl("dropout", _dropout, "AutogradCUDA")
        for key in ("AutogradCUDA", "AutogradCPU"):
            _library.impl("to.dtype_layout", _to_dtype_layout, key)
            _library.impl("to.device", _to_device, key)
    return _version_warnings(unknown)


def _version_warnings(uncast: list[str]) -> list[str]:
    version = installed_version()
    if OLDEST <= version <= NEWEST:
        return []
    what = f"; autocast also casts {', '.join(uncast)}, which are left alone here" if uncast else ""
    return [
        f"torch {torch.__version__} is not among the versions that predictions were tested with "
        f"({OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}): attention kernels, casts and the buffers of FSDP may "
        f"differ, and with them the predicted memory{what}"
    ]


def _patch_data() -> None:
    """A tensor whose data is replaced is on the device of the new data, also for Python."""
    data: Any = torch._C.TensorBase.data

    def set_data(tensor: Any, value: Any) -> None:
        data.__set__(tensor, value)
        tensor.fake_device = value.device

    FakeTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    _patch_addresses()


def _patch_addresses() -> None:
    """Memory that is not there has an address all the same: code asks whether two tensors look at the same one."""
    address: Any = torch.UntypedStorage.data_ptr

    def of_storage(storage: Any) -> int:
        return storage._cdata if storage.device.type == "meta" else address(storage)

    torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign, assignment]
    FakeTensor.data_ptr = lambda tensor: (  # type: ignore[method-assign, assignment]
        tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    )


def _patch_tensors() -> None:
    make = torch._C.TensorBase._make_subclass

    def make_subclass(cls: Any, data: Any, requires_grad: bool = False, **options: Any) -> Any:
        if options.get("device_for_backend_keys") is not None:
            options["dispatch_device"] = False  # C++ sees meta, with the dispatch keys of the device
        return make(cls, data, requires_grad, **options)

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[assignment]
    FakeTensor.is_cuda = property(is_on_gpu)  # type: ignore[assignment]
    FakeTensor.is_cpu = property(lambda tensor: tensor.fake_device.type == "cpu")  # type: ignore[assignment]
    FakeTensor.is_meta = property(lambda tensor: tensor.fake_device.type == "meta")  # type: ignore[assignment]
    DTensor.device = property(lambda tensor: tensor._local_tensor.device)  # type: ignore[assignment]
    DTensor.is_cuda = property(lambda tensor: tensor._local_tensor.is_cuda)  # type: ignore[assignment]
    torch.Tensor.to = _to(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor.to(GPU_DEVICE)  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment, method-assign]
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda tensor, device=None: tensor.device.type == "cpu"  # type: ignore[assignment, method-assign]


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _to(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``Tensor.to``, in which ``"cuda"`` and ``0`` are the GPU, without C++ asking a driver which one is current."""

    def is_gpu(device: Any) -> bool:
        named = isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
        return named or (isinstance(device, int) and not isinstance(device, bool))

    @wraps(move)
    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if args and is_gpu(args[0]):
            args = (GPU_DEVICE, *args[1:])
        if is_gpu(options.get("device")):
            options["device"] = GPU_DEVICE
        return move(tensor, *args, **options)

    return to


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module._apply``, which would exchange the insides of tensors; fake ones do not allow that.

    As there, the children come first, parameters stay the same objects unless they leave meta, and each old tensor is
    freed before the next is moved.
    """
    for child in module.children() if recurse else ():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
        if isinstance(parameter, FakeTensor) and changed is not parameter:
            parameter.data = changed
        elif changed is not parameter:
            module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def _patch_cuda(target: Target, ranks: int) -> None:
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **options: target.gpu.capability >= (8, 0),
        "device_count": lambda: ranks,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: target.gpu.capability,
        "get_device_properties": lambda device=None: _Properties(target.gpu),
        "get_device_name": lambda device=None: target.gpu.title,
        "set_device": lambda device: None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": OnStream,
        "current_stream": lambda device=None: FakeStream.current,
        "default_stream": lambda device=None: FakeStream.default,
        "default_generators": (torch.Generator(),),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)


L2_CACHE = {(8, 0): 40 * 2**20, (9, 0): 50 * 2**20, (10, 0): 126 * 2**20}
"""Bytes by compute capability, where all cards of one have as much: A100, H100 and H200, B200."""


class _Properties:
    """The few of a card's properties that libraries ask for before they choose."""

    def __init__(self, gpu: GPU) -> None:
        self.L2_cache_size = L2_CACHE.get(gpu.capability, 0)  # at 0 timm's lion takes all weights at once: the most
        self.name, self.total_memory = gpu.title, gpu.memory
        self.major, self.minor = gpu.capability


def _patch_compile() -> None:
    """Compiled updates of optimizers work in place, without intermediate tensors; models are traced as they are."""
    torch.compile = lambda function, **options: lambda *args: None  # type: ignore[assignment]
    nn.Module.compile = lambda module, *args, **options: None  # type: ignore[method-assign]
    torch.utils._triton.has_triton = lambda: True  # type: ignore[assignment]


def _patch_amp() -> None:
    cuda_amp.amp_definitely_not_available = lambda: False
    if hasattr(grad_scaler, "amp_definitely_not_available"):
        grad_scaler.amp_definitely_not_available = cuda_amp.amp_definitely_not_available

    def step(scaler: Any, optimizer: Any, found: Any, *args: Any, **options: Any) -> Any:
        return optimizer.step(*args, **options)  # nothing overflows: the flag that it would read has no value

    torch.amp.GradScaler._maybe_opt_step = step  # type: ignore[method-assign, assignment]


def _patch_optimizers() -> None:
    """Optimizers take their ``foreach`` and fused paths on CUDA tensors only, grouped by a device that C++ names."""
    modules: tuple[Any, ...] = (optimizers, _foreach_utils)
    for module in modules:
        module._foreach_supported_types += [
            kind for kind in (FakeTensor, DTensor) if kind not in module._foreach_supported_types
        ]
    by_device = _foreach_utils._group_tensors_by_device_and_dtype

    def group(*args: Any, **options: Any) -> Any:
        found = by_device(*args, **options)
        return {(GPU_DEVICE if device.type == "meta" else device, dtype): v for (device, dtype), v in found.items()}

    for module in (*modules, clip_grad):
        module._group_tensors_by_device_and_dtype = group
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, lambda optimizer: None)


def _patch_fsdp() -> None:
    FSDPParamGroup._validate_no_meta_params = lambda group: None  # type: ignore[method-assign]
    if hasattr(_fsdp_collectives, "record_grad_output_stream"):
        _fsdp_collectives.record_grad_output_stream = lambda *args: None
    sharding.init_device_mesh = _for_real(sharding.init_device_mesh)
    _patch_propagation()


def _patch_propagation() -> None:
    for name in (
        "_propagate_tensor_meta_non_cached",
        "propagate_op_sharding_non_cached",
        "_propagate_tensor_meta",
        "propagate_tensor_meta",
        "propagate",
    ):
        if hasattr(ShardingPropagator, name):
            setattr(ShardingPropagator, name, _about_shapes(getattr(ShardingPropagator, name)))


def _for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on real tensors: it computes which ranks belong together."""

    @wraps(function)
    def real(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return real


def _about_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def paused(*args: Any, **options: Any) -> Any:
        global _paused
        _paused += 1
        try:
            return function(*args, **options)
        finally:
            _paused -= 1

    return paused


def _dropout(tensor: Tensor, rate: float, train: bool) -> Tensor:
    """The fused kernel of CUDA, which keeps a mask of one byte an element."""
    if not train or rate == 0 or tensor.numel() == 0:
        return tensor
    if rate == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return aten.native_dropout(tensor, rate, train)[0]


def _to_dtype_layout(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """As in C++, but for the device of ``tensor``, of which C++ has another idea."""
    dtype = dtype or tensor.dtype
    device = torch.device(device) if device is not None else tensor.device
    if device.type == "meta" and isinstance(tensor, FakeTensor):
        device = tensor.device  # C++ asks for "where it is"
    if device.type == "cuda":
        device = GPU_DEVICE
    unchanged = dtype == tensor.dtype and device == tensor.device
    if unchanged and not copy and memory_format in (None, torch.preserve_format):
        return tensor
    return aten._to_copy(tensor, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format)


def _to_device(
    tensor: Tensor,
    device: Any,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return _to_dtype_layout(
        tensor, dtype=dtype, device=device, non_blocking=non_blocking, copy=copy, memory_format=memory_format
    )
