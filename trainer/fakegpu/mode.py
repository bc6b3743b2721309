"""Tensors without memory that Python sees on a GPU, and C++ on meta."""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from trainer.fakegpu.events import Trace
from trainer.system.children import users_line

aten = torch.ops.aten

GPU_DEVICE = torch.device("cuda", 0)
LARGEST_KNOWN = 2**22  # elements up to which the values of whole numbers and truth values are computed for real
LARGEST_KNOWN_FLOATS = 2**16  # of floating-point numbers: rates, scales, masks that are added; few weights are as small
UNINITIALISED = {aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default}
UNINITIALISED |= {aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default}
"""Operations that return whatever was in memory before: nobody knows it."""
COMPARED = {aten.eq.Tensor: True, aten.ne.Tensor: False, aten.eq.Scalar: False, aten.ne.Scalar: True}
"""What comparisons of finite numbers come to, with themselves or with infinity: what isfinite is made of."""
SIZED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default}  # what a boolean index becomes
ABSORBING = {aten.bitwise_or.Tensor: True, aten.logical_or.default: True}
ABSORBING |= {aten.bitwise_and.Tensor: False, aten.logical_and.default: False}
"""The truth value that decides what such an operation returns, whatever the other one is."""
ALL = {aten.all.default, aten._is_all_true.default}  # code asks whether everything is as it must be
WRITTEN_WHOLE = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
BUILT_IN = {"aten", "prims", "quantized", "torchvision"}  # namespaces whose kernels for a CPU are harmless


class FakeGPUMode(FakeTensorMode):
    """A fake tensor mode that knows the values of masks, positions and lengths.

    A model that asks ``if mask.all()`` must take the branch that it takes on a GPU, so tensors of integers and
    booleans, and small ones of floating-point numbers, carry along what follows from real tensors, constants and random
    numbers. Where a value is not known, it is guessed, and counted.

    Args:
        ranks: how many there are. Each is taken to hold the same values as this one when they are summed, and every
            floating-point number that is read (a loss, a norm) is this one: finite, and what a sum of ones comes to.
            Whether numbers are finite is not guessed: they are.
    """

    supports_higher_order_operators = True

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.ranks = ranks
        self.trace = Trace()  # of its tracer, which is told of guesses
        self.known: dict[int, tuple[Any, Tensor]] = {}
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.overwritten: weakref.WeakSet[Any] = weakref.WeakSet()  # memory of values that are known no more

    @property
    def avoid_device_init(self) -> bool:
        """That a real tensor which is moved to the GPU becomes a fake one."""
        return True

    def fake(self, real: Tensor) -> Tensor:
        """A fake of a real tensor, which is kept as its value if it is small enough; one that is fake stays."""
        if isinstance(real, FakeTensor):  # computed of a batch while it was packed
            return real
        fake = self.from_tensor(real)
        if _can_be_known(real):
            self.know(fake, real)
        return fake

    def value(self, tensor: Any) -> Tensor | None:
        """The value of a tensor, where it is known; a real one is its own."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        _, value = self.known.get(id(tensor), (None, None))
        return None if value is None or value.untyped_storage() in self.overwritten else value

    def read(self, fake: Any) -> Tensor:
        """The value of a tensor that somebody has asked for: guessed where it is not known."""
        with no_dispatch():
            if (value := self.value(fake)) is not None:
                return value.detach().clone()
            if fake.is_floating_point():
                return torch.full(fake.shape, self.ranks, dtype=fake.dtype)
            self._guess()
            return torch.full(fake.shape, hasattr(fake, "should_hold"), dtype=fake.dtype)

    def _guess(self) -> None:
        """The caller guesses a value that decides something: remember where it was asked for."""
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
        if not any(file == nn.init.__file__ for file, _ in frames):  # first weights: whether to draw some of them again
            self.trace.guesses += 1
            self.trace.say(f"a value that is not known is asked for at {users_line(frames)}")

    def know(self, fake: Any, value: Tensor) -> None:
        """``value`` is that of a fake tensor until it is written to."""

        def forget(_: Any, key: int = id(fake)) -> None:
            self.known.pop(key, None)

        self.known[id(fake)] = (weakref.ref(fake, forget), value)

    def _forget(self, func: Any, args: Any) -> None:
        """What ``func`` has written is not known any more, nor is any tensor that shares its memory."""
        for argument, written in zip(func._schema.arguments, args, strict=False):
            for tensor in tree_leaves(written) if argument.is_write else ():
                if (value := self.value(tensor)) is not None:
                    self.overwritten.add(value.untyped_storage())

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any
        if not isinstance(func, torch._ops.OpOverload):  # such as flex attention
            return super().dispatch(func, types, args, kwargs)
        pinned = bool(kwargs) and _is_pinned(func, args, kwargs)
        kwargs = _on_a_device(func, kwargs) if kwargs else {}
        if func is aten._local_scalar_dense.default:
            return self.read(args[0]).item()
        if func.namespace == "aten" and func.__name__.startswith("_fused_") and not func._schema.returns:
            self._forget(func, args)
            return None  # a fused optimizer: works in place, and not all have a kernel for fake tensors
        if func is torch.ops.c10d.allreduce_.default:
            for tensor in args[0]:
                if (value := self.value(tensor)) is not None:
                    self.know(tensor, value * self.ranks)
        if func is torch.ops.c10d.allreduce_coalesced_.default:  # torch has no meta kernel for it
            out = super().dispatch(torch.ops.c10d.allreduce_.default, types, (*args[:3], None, *args[3:]), kwargs)
            return out[1]
        if func in SIZED_BY_VALUES and self.value(args[-1]) is None:
            return self._sized(func, args[0], args[-1])
        try:
            out = super().dispatch(func, types, args, kwargs)
        except fake_tensor.DataDependentOutputException:
            if func not in (aten.equal.default, aten.allclose.default):
                raise
            self._guess()
            return True  # a question whether two tensors are equal: they are
        except (fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedOperatorException):
            return self._tried(func, args, kwargs)
        finally:
            torch._C._set_only_lift_cpu_tensors(True)  # a nested mode's exit drops it, and torch.tensor needs it
        if pinned:
            self.pinned.add(out.untyped_storage())
        self._learn(func, args, kwargs, out)
        return out

    def _sized(self, func: Any, tensor: Any, mask: Any) -> Any:
        """The result of an operation whose shape depends on a mask that is not known: all elements are taken."""
        self._guess()
        if func is aten.nonzero.default:
            return tensor.new_empty((mask.numel(), tensor.dim()), dtype=torch.int64)
        return tensor.new_empty(math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)))

    def _learn(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if func._schema.is_mutable:
            self._write(func, args, kwargs)
            return
        leaves = [out] if isinstance(out, FakeTensor) else tree_leaves(out)  # which costs as much as all the rest
        outs = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        for tensor in outs:
            if tensor.constant is not None:  # torch's own knowledge, which it would compute with on a real GPU
                self.know(tensor, tensor.constant)
                tensor.constant = None
        first = next((tensor for tensor in outs if _can_be_known(tensor)), None)
        if first is None or id(first) in self.known or func in UNINITIALISED:
            return
        results = self._computed(func, args, kwargs)
        if results is None and (certain := self._certain(func, args)) is not None:
            with no_dispatch():
                results = [torch.tensor(certain).expand(first.shape)]  # in the memory of one element
        for tensor, value in zip(outs, results or [], strict=False):
            if isinstance(value, Tensor):
                self.know(tensor, value)
        if results is None and func in ALL:
            outs[0].should_hold = True  # type: ignore[attr-defined]

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Write into the values as ``func`` has written into the tensors, also for all that share their memory."""
        target: Any = args[0] if args else None
        new = func in WRITTEN_WHOLE and isinstance(target, FakeTensor) and self.value(target) is None
        if new and not target._is_view() and _can_be_known(target):
            with no_dispatch():
                self.know(target, torch.empty_strided(target.shape, target.stride(), dtype=target.dtype))
        # Nobody asks for the value of a weight, which would make those of small models known.
        drawn = torch.Tag.nondeterministic_seeded in func.tags and target.is_floating_point()
        if drawn or self._computed(func, args, kwargs) is None:
            self._forget(func, args)

    def _certain(self, func: Any, args: Any) -> bool | None:
        """What an operation comes to whatever is not known: numbers are finite, one side decides ``and`` and ``or``."""
        if func in (aten.isnan.default, aten.isinf.default):
            return False
        if func in COMPARED and args[0].is_floating_point():
            alike = args[1] is args[0] if isinstance(args[1], Tensor) else args[1] == math.inf
            return COMPARED[func] if alike else None
        sides = [value for value in map(self.value, args) if value is not None] if func in ABSORBING else []
        with no_dispatch():
            decided = any(side.dtype == torch.bool and bool((side == ABSORBING[func]).all()) for side in sides)
        return ABSORBING[func] if decided else None

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], stand_in: Any = None) -> list[Any] | None:
        """What ``func`` returns for the values of its inputs; of those that are not known, for ``stand_in(input)``."""
        if stand_in is None and any(isinstance(item, FakeTensor) and self.value(item) is None for item in args):
            return None  # as nearly always: seen without taking a tree apart
        unknown = False

        def real(item: Any) -> Any:
            nonlocal unknown
            if isinstance(item, Tensor):
                value = self.value(item)
                item = stand_in(item) if value is None and stand_in else value
                unknown = unknown or item is None or not _can_be_known(item)
            return torch.device("cpu") if isinstance(item, torch.device) else item

        with no_dispatch(), torch.no_grad():
            real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
            try:
                return None if unknown else tree_leaves(func(*real_args, **real_kwargs))
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None  # not computable on a CPU: simply not known

    def _tried(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns on the host; unknown inputs are distinct values, so that none is dropped, or ones."""
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, FakeTensor)]
        results = None
        if func.namespace in BUILT_IN and all(tensor.numel() <= LARGEST_KNOWN for tensor in tensors):
            if func is not aten.bincount.default:  # there are seldom as many bins
                results = self._computed(
                    func, args, kwargs, lambda t: torch.arange(t.numel()).view(t.shape).to(t.dtype)
                )
            results = results or self._computed(func, args, kwargs, lambda t: torch.ones(t.shape, dtype=t.dtype))
        usual = (isinstance(one, Tensor) and one.layout is torch.strided and not one.is_nested for one in results or ())
        if not results or not all(usual):
            advice = "give it one with torch.library.register_fake, or plan without it"
            raise NotImplementedError(f"{func} has no kernel for tensors without data and cannot be traced: {advice}")
        decisive = [tensor for tensor in tensors if not tensor.is_floating_point()] or tensors
        if any(self.value(tensor) is None for tensor in decisive):
            self._guess()
        device = tensors[0].fake_device if tensors else GPU_DEVICE
        with self:
            outs: list[Any] = [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=device) for r in results]
        for out, result in zip(outs, results, strict=True):
            if not result.is_floating_point():
                self.know(out, result)
        if func is aten._pack_padded_sequence.default:
            outs[1] = results[1]  # sizes that C++ reads: a real tensor on the host, as it always is
        return outs[0] if len(outs) == 1 else tuple(outs)


def _can_be_known(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.layout is torch.strided and tensor.numel() <= (LARGEST_KNOWN if whole else LARGEST_KNOWN_FLOATS)


def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result is in page-locked memory: if asked for, or copied from the GPU without waiting."""
    if func is aten._to_copy.default and kwargs.get("non_blocking"):
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type == "cuda"
    return bool(kwargs.get("pin_memory"))


def _on_a_device(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """C++ that asks for "where the input is" says meta, and means the GPU; pinned memory needs one that is there.

    A single number, which C++ makes for ``torch.where``, goes with tensors of both if it is on the host.
    """
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        kwargs = {**kwargs, "device": "cpu" if func is aten.scalar_tensor.default else GPU_DEVICE}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


# Autocast as CUDA does it, for tensors that C++ does not believe to be on CUDA: its own casts look at the device of a
# tensor, which is ``meta`` to them here. These stand in for them: the same lists of operations, and the same cache of
# cast weights, which lives as long as the autocast context.
#
# Source of the lists: aten/src/ATen/autocast_mode.h; the dispatcher is asked whether they are complete.

CASTS = {  # operations cast to the lower type, to fp32, with a result in fp32, and to the widest type of the inputs
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
LEFT_ALONE = """norm.Scalar norm.ScalarOpt_dim binary_cross_entropy _cudnn_rnn rnn_relu_cell rnn_tanh_cell lstm_cell
    gru_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell cudnn_convolution cudnn_convolution_transpose"""
"""Refused by autocast, recurrent, or reached only through another of the lists."""

cast_weights: dict[int, tuple[Tensor, Tensor]] = {}


def install_autocast(library: torch.library.Library, is_on_gpu: Callable[[Any], bool]) -> list[str]:
    """Register the kernels in ``library``; return what this torch casts, too, and is in none of the lists."""
    for policy, names in CASTS.items():
        for name in names.split():
            if (op := _overload(name)) is not None:
                library.impl(name, _kernel(op, policy, is_on_gpu), "AutocastCUDA", allow_override=True)
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_all
    known = {f"aten::{name}" for names in (*CASTS.values(), LEFT_ALONE) for name in names.split()}
    cast = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return sorted(name for name in cast if name.startswith("aten::") and name not in known)


def _overload(name: str) -> Any:
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
    if id(value) not in cast_weights:
        cast_weights[id(value)] = (value, value.to(dtype))
    return cast_weights[id(value)][1]
