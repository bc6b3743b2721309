"""Fake tensors without memory: Python sees them on a GPU, C++ sees them on meta."""

from __future__ import annotations

import math
import re
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup, ReduceOp
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from trainer.fakegpu.events import Trace
from trainer.fakegpu.repeats import Repeats
from trainer.system.child_jobs import innermost_user_frame

aten = torch.ops.aten

GPU_DEVICE = torch.device("cuda", 0)
MAX_KNOWN_ELEMENTS = 2**22  # max elements of integer and boolean tensors whose values are computed
MAX_KNOWN_FLOATS = 2**16  # the same for floating-point tensors: rates, scales, additive masks, few weights
UNINITIALISED = {aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default}
UNINITIALISED |= {aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default}
"""Operations whose results are uninitialised and therefore unknown."""
COMPARED = {aten.eq.Tensor: True, aten.ne.Tensor: False, aten.eq.Scalar: False, aten.ne.Scalar: True}
"""Results of comparing finite numbers with themselves (Tensor) or with infinity (Scalar), as isfinite does."""
SIZED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default}  # operations of boolean indexing
ABSORBING = {aten.bitwise_or.Tensor: True, aten.logical_or.default: True}
ABSORBING |= {aten.bitwise_and.Tensor: False, aten.logical_and.default: False}
"""The operand value that determines the result of an operation regardless of the other operand."""
ALL = {aten.all.default, aten._is_all_true.default}  # usually validity checks, which should hold
GATHERED = {torch.ops.c10d.allgather_.default, torch.ops.c10d._allgather_base_.default}
WRITTEN_WHOLE = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
BUILT_IN = {"aten", "prims", "quantized", "torchvision"}  # namespaces whose CPU kernels are safe to run


class FakeGPUMode(FakeTensorMode):
    """A fake tensor mode that knows the values of masks, positions and lengths.

    A model with ``if mask.all()`` must take the same branch as on a GPU. So integer, boolean and small floating-point
    tensors carry values that follow from real tensors, constants and random numbers. Guesses of others are counted.

    Args:
        ranks: number of ranks, which are assumed to hold the same, finite values. Reading an unknown floating-point
            value (a loss, a norm) returns this number, the sum of ones over the ranks.
    """

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)  # torch.compile may compile in it

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.ranks = ranks
        self.trace = Trace()  # shared with the tracer; counts guesses
        self.known: dict[int, tuple[Any, Tensor]] = {}
        self.repeats = Repeats(self)
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.overwritten: weakref.WeakSet[Any] = weakref.WeakSet()  # storages of values that are no longer valid

    @property
    def avoid_device_init(self) -> bool:
        """``True``: a real tensor that is moved to the GPU becomes a fake tensor."""
        return True

    def fake(self, real: Tensor) -> Tensor:
        """Return a fake of a real tensor, with its value if it is small enough. A fake tensor is returned unchanged."""
        if isinstance(real, FakeTensor):  # computed while the batch was packed
            return real
        fake = self.from_tensor(real)
        if _can_be_known(real):
            self.set_value(fake, real)
        return fake

    def value(self, tensor: Any) -> Tensor | None:
        """Return the value of a fake tensor, or ``None`` if unknown; return a real tensor unchanged."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        _, value = self.known.get(id(tensor), (None, None))
        return None if value is None or value.untyped_storage() in self.overwritten else value

    def read(self, fake: Any) -> Tensor:
        """Return the value of a tensor that the program reads; guess it if unknown."""
        with no_dispatch():
            if (value := self.value(fake)) is not None:
                return value.detach().clone()
            if fake.is_floating_point():
                return torch.full(fake.shape, self.ranks, dtype=fake.dtype)
            self._guess()
            return torch.full(fake.shape, hasattr(fake, "should_hold"), dtype=fake.dtype)

    def _guess(self) -> None:
        """Record a guess and the line of code that needs the value."""
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
        if not any(file == nn.init.__file__ for file, _ in frames):  # nn.init only asks whether to redraw weights
            self.trace.guesses += 1
            self.trace.add_note(f"an unknown value is read at {innermost_user_frame(frames)}")

    def set_value(self, fake: Any, value: Tensor) -> None:
        """Set the value of a fake tensor, valid until it is written to."""
        key = id(fake)
        self.known[key] = (weakref.ref(fake, lambda _: self.known.pop(key, None)), value)

    def _forget(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Invalidate the values of tensors written by ``func`` and of tensors that share their memory."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            for tensor in tree_leaves(named.get(argument.name)) if argument.is_write else ():
                self.forget(tensor)

    def forget(self, tensor: Any) -> None:
        """Invalidate the value of a tensor that is written to."""
        if (value := self.value(tensor)) is not None:
            self.overwritten.add(value.untyped_storage())

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any
        if not isinstance(func, torch._ops.OpOverload):  # such as flex attention
            return super().dispatch(func, types, args, kwargs)
        pinned = bool(kwargs) and _is_pinned(func, args, kwargs)
        kwargs = on_a_device(func, args, kwargs) if kwargs else {}
        if func is aten._local_scalar_dense.default:
            return self.read(args[0]).item()
        if func.namespace == "aten" and func.__name__.startswith("_fused_") and not func._schema.returns:
            self._forget(func, args, kwargs)
            return None  # a fused optimizer works in place; some have no kernel for fake tensors
        if func is torch.ops.c10d.allreduce_.default:
            op = ReduceOp.unbox(args[2]) if hasattr(ReduceOp, "unbox") else args[2].op()  # before torch 2.15
            for tensor in args[0] if op == ReduceOp.SUM else ():
                if (value := self.value(tensor)) is not None:
                    self.set_value(tensor, value * ProcessGroup.unbox(args[1]).size())
        if func is torch.ops.c10d.allreduce_coalesced_.default:  # torch has no meta kernel for it
            out = super().dispatch(torch.ops.c10d.allreduce_.default, types, (*args[:3], None, *args[3:]), kwargs)
            return out[1]
        if func in SIZED_BY_VALUES and self.value(args[-1]) is None:
            return self._sized(func, args[0], args[-1])
        try:
            out = self.repeats.result(func, args, kwargs, partial(super().dispatch, func, types, args, kwargs))
        except fake_tensor.DataDependentOutputException:
            if func not in (aten.equal.default, aten.allclose.default):
                raise
            self._guess()
            return True  # tensors of unknown values are assumed to be equal
        except (fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedOperatorException):
            return self._infer_on_cpu(func, args, kwargs)
        finally:
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor needs it, and leaving a nested mode resets it
        if pinned:
            self.pinned.add(out.untyped_storage())
        self._learn(func, args, kwargs, out)
        if func in GATHERED:
            self._gather(*args[:2])
        return out

    def _gather(self, outs: Any, inputs: Any) -> None:
        """Set the values that a rank receives: all ranks have the same."""
        for out, given in [(outs, inputs)] if isinstance(outs, Tensor) else zip(outs, inputs, strict=True):
            value: Any = self.value(given)
            for part in tree_leaves(out) if value is not None else ():
                with no_dispatch():
                    self.set_value(part, value.reshape(-1).repeat(part.numel() // given.numel()).view(part.shape))

    def _sized(self, func: Any, tensor: Any, mask: Any) -> Any:
        """Return the result of an operation whose shape depends on an unknown mask, as if all elements are selected."""
        self._guess()
        if func is aten.nonzero.default:
            return tensor.new_empty((mask.numel(), tensor.dim()), dtype=torch.int64)
        return tensor.new_empty(math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)))

    def _learn(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if func._schema.is_mutable:
            self._write(func, args, kwargs)
            return
        leaves = [out] if isinstance(out, FakeTensor) else tree_leaves(out)  # tree_leaves is slow
        outs = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        for tensor in outs:
            if tensor.constant is not None:  # torch's constant, which it would compute with on a real GPU
                self.set_value(tensor, tensor.constant)
                tensor.constant = None
        first = next((tensor for tensor in outs if _can_be_known(tensor)), None)
        if first is None or id(first) in self.known or func in UNINITIALISED:
            return
        results = self._computed(func, args, kwargs)
        if results is None and (certain := self._value_independent(func, args)) is not None:
            with no_dispatch():
                results = [torch.tensor(certain).expand(first.shape)]  # takes the memory of one element
        for tensor, value in zip(outs, results or [], strict=False):
            if isinstance(value, Tensor):
                self.set_value(tensor, value)
        if results is None and func in ALL:
            outs[0].should_hold = True  # type: ignore[attr-defined]

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Apply the in-place operation ``func`` to the known values, which share memory like their tensors."""
        target: Any = args[0] if args else None
        new = func in WRITTEN_WHOLE and isinstance(target, FakeTensor) and self.value(target) is None
        if new and not target._is_view() and _can_be_known(target):
            with no_dispatch():
                self.set_value(target, torch.empty_strided(target.shape, target.stride(), dtype=target.dtype))
        # Randomly initialised weights stay unknown, because their values are never needed.
        drawn = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("out", target).is_floating_point()
        if drawn or self._computed(func, args, kwargs) is None:
            self._forget(func, args, kwargs)

    def _value_independent(self, func: Any, args: Any) -> bool | None:
        """Return a result that unknown values cannot change: all are finite, one operand decides ``and``, ``or``."""
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
        """Return the results of ``func`` for the values of its inputs; unknown inputs become ``stand_in(input)``."""
        if stand_in is None and any(isinstance(item, FakeTensor) and self.value(item) is None for item in args):
            return None  # the usual case, without the slow tree_map
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
                return None  # cannot be computed on a CPU, so unknown

    def _infer_on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the results of ``func`` on the host; unknown inputs are distinct values or, if that fails, ones."""
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, FakeTensor)]
        results = None
        if func.namespace in BUILT_IN and all(tensor.numel() <= MAX_KNOWN_ELEMENTS for tensor in tensors):
            if func is not aten.bincount.default:  # distinct values would create too many bins
                results = self._computed(
                    func, args, kwargs, lambda t: torch.arange(t.numel()).view(t.shape).to(t.dtype)
                )
            results = results or self._computed(func, args, kwargs, lambda t: torch.ones(t.shape, dtype=t.dtype))
        usual = (isinstance(one, Tensor) and one.layout is torch.strided and not one.is_nested for one in results or ())
        if not results or not all(usual):
            advice = "register one with torch.library.register_fake, or plan without this operation"
            raise NotImplementedError(f"{func} has no fake kernel, so it cannot be traced: {advice}")
        decisive = [tensor for tensor in tensors if not tensor.is_floating_point()] or tensors
        if any(self.value(tensor) is None for tensor in decisive):
            self._guess()
        device = tensors[0].fake_device if tensors else GPU_DEVICE
        with self:
            outs: list[Any] = [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=device) for r in results]
        for out, result in zip(outs, results, strict=True):
            if not result.is_floating_point():
                self.set_value(out, result)
        if func is aten._pack_padded_sequence.default:
            outs[1] = results[1]  # C++ reads these sizes, so they must be a real host tensor
        return outs[0] if len(outs) == 1 else tuple(outs)


def _can_be_known(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.layout is torch.strided and tensor.numel() <= (MAX_KNOWN_ELEMENTS if whole else MAX_KNOWN_FLOATS)


def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the result is in pinned memory: if requested, or for a non-blocking copy from the GPU."""
    if func is aten._to_copy.default and kwargs.get("non_blocking"):
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type == "cuda"
    return bool(kwargs.get("pin_memory"))


_meta_calls = 0  # number of active calls that ask for the device meta


def on_meta_if(asks: Callable[..., bool], call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``call``: if ``asks`` of its arguments is true, Python asks for meta, where tensors have no memory."""

    def wrapped(*args: Any, **options: Any) -> Any:
        global _meta_calls
        asked = asks(*args, **options)
        _meta_calls += asked
        try:
            return call(*args, **options)
        finally:
            _meta_calls -= asked

    return wrapped


def on_a_device(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace the device meta, which C++ sees for simulated tensors, by the GPU, and other GPUs by the simulated one.

    A scalar that C++ creates for ``torch.where`` stays on the host: it can be combined with tensors of both devices.
    ``pin_memory``, which needs a GPU, is dropped.
    """
    kind = "" if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    like_meta = _meta_calls or (args and isinstance(args[0], FakeTensor) and args[0].fake_device.type == "meta")
    if kind == "cuda" or (kind == "meta" and not like_meta):
        kwargs = {**kwargs, "device": "cpu" if func is aten.scalar_tensor.default else GPU_DEVICE}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


# CUDA's autocast for simulated tensors. Torch's casts check a tensor's device, which is ``meta`` in C++. So they are
# replaced, with the same operations and the same cache of cast weights, which ends with the autocast context. The
# dispatcher's registrations show whether the operations of autocast.txt are complete.

cast_weights: dict[int, tuple[Tensor, Tensor]] = {}


def install_autocast(library: torch.library.Library, is_on_gpu: Callable[[Any], bool]) -> list[str]:
    """Register the kernels in ``library``; return the operations that torch casts but that are in none of the lists."""
    policies = _cast_policies()
    for name, policy in policies.items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None and policy != "uncast":
            library.impl(name, _kernel(op, policy, is_on_gpu), "AutocastCUDA", allow_override=True)
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_all
    cast = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return sorted(name for name in cast if name.startswith("aten::") and name[6:] not in policies)


def _cast_policies() -> dict[str, str]:
    """Return the policy of each operation in autocast.txt."""
    text = re.sub(r"#.*|\n ", "", Path(__file__).with_name("autocast.txt").read_text(encoding="utf-8"))
    lines = (line.partition(":") for line in text.split("\n"))
    return {name: policy for policy, _, names in lines for name in names.split()}


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
    """Add ``dtype=float32`` to ``kwargs`` unless a dtype is given or the input is not floating-point."""
    if "dtype" not in names or len(args) > names.index("dtype") or not args[0].is_floating_point():
        return kwargs
    return kwargs if kwargs.get("dtype") is not None else {**kwargs, "dtype": torch.float32}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``value`` to ``dtype``; an fp32 weight's copy is cached until the autocast context ends."""
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and value._base is None
    if not (is_weight and dtype == torch.get_autocast_dtype("cuda") and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if id(value) not in cast_weights:
        cast_weights[id(value)] = (value, value.to(dtype))
    return cast_weights[id(value)][1]
