"""Tensors without memory that Python sees on a GPU, and C++ on meta."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

GPU_DEVICE = torch.device("cuda", 0)
LARGEST_KNOWN = 2**22  # elements up to which the values of whole numbers and truth values are computed for real
UNINITIALISED = {aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default}
UNINITIALISED |= {aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default}
"""Operations that return whatever was in memory before: nobody knows it."""
COMPARED = {aten.eq.Tensor: True, aten.ne.Tensor: False, aten.eq.Scalar: False, aten.ne.Scalar: True}
"""What comparisons of finite numbers come to, with themselves or with infinity: what isfinite is made of."""
SIZED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default}  # what a boolean index becomes


class FakeGPUMode(FakeTensorMode):
    """A fake tensor mode that knows the values of masks, positions and lengths.

    A model that asks ``if mask.all()`` must take the branch that it takes on a GPU, so tensors of integers and booleans
    that come from real ones carry their values along. Where a value is not known, it is guessed, and counted.

    Args:
        ranks: how many there are. Each is taken to hold the same values as this one when they are summed, and every
            floating-point number that is read (a loss, a norm) is this one: finite, and what a sum of ones comes to.
            Whether numbers are finite is not guessed: they are.
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ranks = ranks
        self.guesses = 0
        self.known: dict[int, tuple[Any, Tensor]] = {}
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def avoid_device_init(self) -> bool:
        """That a real tensor which is moved to the GPU becomes a fake one."""
        return True

    def fake(self, real: Tensor) -> Tensor:
        """A fake of a real tensor, which is kept as its value if it is of integers or booleans."""
        fake = self.from_tensor(real)
        if not real.is_floating_point() and real.numel() <= LARGEST_KNOWN:
            self._know(fake, real)
        return fake

    def value(self, fake: Any) -> Tensor | None:
        """The value of a fake tensor, where it is known."""
        entry = self.known.get(id(fake))
        return None if entry is None else entry[1]

    def _know(self, fake: Any, value: Tensor) -> None:
        def forget(_: Any, key: int = id(fake)) -> None:
            self.known.pop(key, None)

        self.known[id(fake)] = (weakref.ref(fake, forget), value)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any
        pinned = bool(kwargs) and _is_pinned(func, args, kwargs)
        kwargs = _on_a_device(kwargs) if kwargs else {}
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func.namespace == "aten" and func.__name__.startswith("_fused_") and not func._schema.returns:
            return None  # a fused optimizer: works in place, and not all have a kernel for fake tensors
        if func is torch.ops.c10d.allreduce_.default:
            for tensor in args[0]:
                if (value := self.value(tensor)) is not None:
                    self._know(tensor, value * self.ranks)
        if func in SIZED_BY_VALUES:
            return self._sized(func, args[0], args[-1])
        if func._schema.is_mutable:
            for argument, written in zip(func._schema.arguments, args, strict=False):
                if argument.is_write:
                    for tensor in tree_leaves(written):
                        self.known.pop(id(tensor), None)
        try:
            out = super().dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            if func not in (aten.equal.default, aten.allclose.default):
                raise
            self.guesses += 1
            return True  # a question whether two tensors are equal: they are
        finally:
            torch._C._set_only_lift_cpu_tensors(True)  # a nested mode's exit drops it, and torch.tensor needs it
        if pinned:
            self.pinned.add(out.untyped_storage())
        self._learn(func, args, kwargs, out)
        return out

    def _scalar(self, tensor: Any) -> Any:
        value = self.value(tensor)
        if value is not None:
            return value.item()
        if tensor.dtype.is_floating_point:
            return float(self.ranks)
        self.guesses += 1
        return False if tensor.dtype == torch.bool else 0

    def _sized(self, func: Any, tensor: Any, mask: Any) -> Any:
        """The result of an operation whose shape depends on a mask; of one that is not known all elements are taken."""
        value = self.value(mask)
        self.guesses += value is None
        taken = mask.numel() if value is None else int(value.count_nonzero())
        if func is aten.nonzero.default:
            return tensor.new_empty((taken, tensor.dim()), dtype=torch.int64)
        whole = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape))
        return tensor.new_empty(taken * whole // max(mask.numel(), 1))

    def _learn(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Keep the values of what an operation returned, if they can be known."""
        leaves = [out] if isinstance(out, FakeTensor) else tree_leaves(out)  # which costs as much as all the rest
        outs = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        for tensor in outs:
            if tensor.constant is not None:  # torch's own knowledge, which it would compute with on a real GPU
                self._know(tensor, tensor.constant)
                tensor.constant = None
        finite = _about_finite(func, args)
        if finite is not None and outs[0].numel() <= LARGEST_KNOWN:
            with no_dispatch():
                self._know(outs[0], torch.tensor(finite).expand(outs[0].shape))  # in the memory of one element
        unknown = [t for t in outs if not t.is_floating_point() and t.numel() <= LARGEST_KNOWN]
        if unknown and id(unknown[0]) not in self.known and func not in UNINITIALISED:
            self._compute(func, args, kwargs, outs)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], outs: list[Any]) -> None:
        """Compute the values of ``outs`` for real, if those of all inputs are known."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return
        is_known = True

        def real(item: Any) -> Any:
            nonlocal is_known
            if isinstance(item, FakeTensor):
                value = self.value(item)
                is_known = is_known and value is not None
                return value
            return torch.device("cpu") if isinstance(item, torch.device) else item

        real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
        if not is_known:
            return
        with no_dispatch():
            try:
                results = tree_leaves(func(*real_args, **real_kwargs))
            except (RuntimeError, TypeError, NotImplementedError):  # not computable on a CPU: simply not known
                return
        for tensor, value in zip(outs, results, strict=False):
            if isinstance(value, Tensor):
                self._know(tensor, value)


def _about_finite(func: Any, args: Any) -> bool | None:
    """What an operation says of every floating-point number that is finite; ``None`` if that depends on the number."""
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    if func not in COMPARED or not args[0].is_floating_point():
        return None
    alike = args[1] is args[0] if isinstance(args[1], Tensor) else args[1] == math.inf
    return COMPARED[func] if alike else None


def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result is in page-locked memory: if asked for, or copied from the GPU without waiting."""
    if func is aten._to_copy.default and kwargs.get("non_blocking"):
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type == "cuda"
    return bool(kwargs.get("pin_memory"))


def _on_a_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """C++ that asks for "where the input is" says meta, and means the GPU; pinned memory needs one that is there."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        kwargs = {**kwargs, "device": GPU_DEVICE}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


# Autocast as CUDA does it, for tensors that C++ does not believe to be on CUDA: its own casts look at the device of a
# tensor, which is ``meta`` to them here. These stand in for them: the same lists of operations, and the same cache of
# cast weights, which lives as long as the autocast context.
#
# Source of the lists: aten/src/ATen/autocast_mode.h; the dispatcher is asked whether they are complete.

CASTS = {
    "lower": """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
        linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot scaled_dot_product_attention
        _scaled_dot_product_flash_attention""",
    "float32": """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp linalg_matrix_sqrth upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    "result": """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
"""What is cast to the lower type, to fp32, what gives a result in fp32, what takes the widest type of its inputs."""
LEFT_ALONE = """norm.Scalar norm.ScalarOpt_dim binary_cross_entropy _cudnn_rnn rnn_relu_cell rnn_tanh_cell lstm_cell
    gru_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell cudnn_convolution cudnn_convolution_transpose"""
"""Refused by autocast, recurrent, or reached only through another of the lists."""

_cast_weights: dict[int, tuple[Tensor, Tensor]] = {}


def install_autocast(library: torch.library.Library, is_on_gpu: Callable[[Any], bool]) -> list[str]:
    """Register the kernels in ``library``; return what this torch casts, too, and is in none of the lists."""
    for policy, names in CASTS.items():
        for name in names.split():
            if (op := _overload(name)) is not None:
                library.impl(name, _kernel(op, policy, is_on_gpu), "AutocastCUDA", allow_override=True)
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        _cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_all
    known = {f"aten::{name}" for names in (*CASTS.values(), LEFT_ALONE) for name in names.split()}
    cast = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return sorted(name for name in cast if name.startswith("aten::") and name not in known)


def _overload(name: str) -> Any:
    """The operation of that name; ``None`` if this version of torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def _kernel(op: Any, policy: str, is_on_gpu: Callable[[Any], bool]) -> Callable[..., Any]:
    arguments = [argument.name for argument in op._schema.arguments]

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(cast(item, dtype) for item in value)
        wanted = isinstance(value, Tensor) and is_on_gpu(value) and value.is_floating_point()
        return _cast(value, dtype) if wanted and value.dtype not in (dtype, torch.float64) else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cuda")
        with torch._C._DisableAutocast():
            if policy == "result":
                return op(*args, **_with_float32_result(args, kwargs, arguments))
            dtype = low if policy == "lower" else torch.float32
            if policy == "widest":
                floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
                dtype = torch.float32 if any(t.dtype == torch.float32 for t in floats) else low
            return op(*cast(args, dtype), **{key: cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def _with_float32_result(args: tuple, kwargs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """``kwargs`` with ``dtype=float32``, unless the caller has said which, or the input is no float."""
    if "dtype" not in names or len(args) > names.index("dtype") or not args[0].is_floating_point():
        return kwargs
    return kwargs if kwargs.get("dtype") is not None else {**kwargs, "dtype": torch.float32}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``; of a weight in fp32, the copy that is kept until the context ends."""
    kept = (
        value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and value._base is None
        and dtype == torch.get_autocast_dtype("cuda")
        and torch.is_autocast_cache_enabled()
    )
    if not kept:
        return value.to(dtype)
    if id(value) not in _cast_weights:
        _cast_weights[id(value)] = (value, value.to(dtype))
    return _cast_weights[id(value)][1]
