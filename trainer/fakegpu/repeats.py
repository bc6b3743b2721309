"""Results of repeated operations on fake tensors.

The blocks of a model repeat the same operations, and so do the steps of a loop. Torch's fake kernel runs for the first
call. Later calls with arguments of the same form create their result from the form of the first one, in a fifth of the
time of torch's own cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operations whose result depends on more than the form of the arguments, or that change that form."""


class Form(NamedTuple):
    """Form of a tensor of a result. Without a shape it is one of the arguments."""

    argument: int | None  # position of the argument that has the same memory; ``None``: new memory
    offset: int = 0  # elements from the start of that argument
    shape: Any = None
    stride: Any = None
    dtype: torch.dtype | None = None
    device: Any = None


class Repeats:
    """Results by function and form of the arguments: shapes, strides, types and devices of tensors, other values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.forms: dict[Any, list[Any] | None] = {}

    def result(self, func: Any, args: Any, kwargs: dict[str, Any], usual: Callable[[], Any]) -> Any:
        """Return the result of ``func``, from the form of an earlier result if possible, otherwise from ``usual``."""
        try:
            key = _key(func, args, kwargs)
        except (TypeError, RuntimeError):  # an unhashable argument, or a tensor without strides
            return usual()
        if key not in self.forms:
            out = usual()
            self.forms[key] = _forms(func, args, out)
            return out
        if (forms := self.forms[key]) is None:
            return usual()
        found = [self._create(form, args) if isinstance(form, Form) else form for form in forms]
        return tuple(found) if len(func._schema.returns) > 1 else found[0]

    def _create(self, form: Form, args: Any) -> Any:
        owner = None if form.argument is None else args[form.argument]
        if form.shape is None:
            return owner
        with in_kernel_invocation_manager(self.mode):
            if owner is None:
                meta = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            else:
                meta, start = torch.empty((), dtype=form.dtype, device="meta"), owner.storage_offset() + form.offset
                meta.set_(owner.untyped_storage(), start, form.shape, form.stride)
        return FakeTensor(self.mode, meta, form.device)


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if func.namespace != "aten" or func is torch.ops.aten.as_strided.default:  # its offset is absolute
        raise TypeError
    key = [func, torch.is_inference_mode_enabled(), torch.get_default_dtype(), _hashable([*kwargs.items()])]
    for item in args:
        if type(item) is FakeTensor and item.constant is None:
            key += item.shape, item.stride(), item.dtype, item.fake_device
        else:
            key.append(_hashable(item))
    return tuple(key)


def _hashable(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        raise TypeError
    return type(item), tuple(map(_hashable, item)) if isinstance(item, list | tuple) else item


def _forms(func: Any, args: Any, out: Any) -> list[Any] | None:
    """Return the form of each value of ``out``, or ``None`` if a later result could differ from it."""
    outs = out if isinstance(out, tuple) else (out,)
    strided = all(one.layout is torch.strided for one in (*args, *outs) if isinstance(one, torch.Tensor))
    if not strided or VARYING & {*func.tags} or isinstance(out, tuple) != (len(func._schema.returns) > 1):
        return None
    forms = [_form(func, args, outs[:at], one) for at, one in enumerate(outs)]
    return None if "unusual" in forms else forms


def _form(func: Any, args: Any, earlier: tuple[Any, ...], out: Any) -> Any:
    if out is None or type(out) is int:
        return out
    if type(out) is not FakeTensor or out.requires_grad or out.is_conj() or out.is_neg() or out.constant is not None:
        return "unusual"
    memory, start, form = out.untyped_storage(), int(out.storage_offset()), (out.shape, out.stride(), out.dtype)
    for at, one in enumerate((*args, *earlier)):
        if one is out and at < len(args):
            return Form(at)
        if isinstance(one, FakeTensor) and one.untyped_storage()._cdata == memory._cdata:
            usual = at < len(args) and one.dtype == out.dtype and not func._schema.is_mutable
            return Form(at, start - int(one.storage_offset()), *form, out.fake_device) if usual else "unusual"
    whole = compute_required_storage_length(out.shape, out.stride(), 0) * out.element_size()
    return "unusual" if start or memory.nbytes() != whole else Form(None, 0, *form, out.fake_device)
