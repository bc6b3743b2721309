"""Results of repeated operations on fake tensors.

Blocks of a model are alike, and so are its steps. The first call of an operation runs torch's fake kernel. Later calls
with arguments of the same form create their result from its form, in a fifth of the time of torch's own cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operations whose result depends on more than the form of the arguments, or that change that form."""
ABSOLUTE = {torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype}
"""Views that do not start at a fixed distance from their argument."""


class Form(NamedTuple):
    """How to create one tensor of a result."""

    kind: str  # "new", "view" of an argument, or "same" as an argument
    argument: int  # position of that argument
    offset: int  # of a view, in elements from the start of the argument
    shape: Any
    stride: Any
    dtype: torch.dtype
    device: torch.device


class Repeats:
    """Results by function and form of the arguments: shapes, strides, types and devices of tensors, other values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.forms: dict[Any, Any] = {}

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
        if form.kind == "same":
            return args[form.argument]
        with in_kernel_invocation_manager(self.mode):
            if form.kind == "new":
                meta = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            else:
                meta, viewed = torch.empty((), dtype=form.dtype, device="meta"), args[form.argument]
                meta.set_(viewed.untyped_storage(), viewed.storage_offset() + form.offset, form.shape, form.stride)
        return FakeTensor(self.mode, meta, form.device)


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if func.namespace != "aten":
        raise TypeError
    key = [func, torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    for item in args:
        if type(item) is FakeTensor and item.constant is None:
            key += item.shape, item.stride(), item.dtype, item.fake_device
            key += [item.storage_offset()] if func in ABSOLUTE else []
        else:
            key += type(item), _hashable(item)
    for name, item in kwargs.items():
        key += name, type(item), _hashable(item)
    return tuple(key)


def _hashable(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        raise TypeError
    return tuple(map(_hashable, item)) if isinstance(item, list | tuple) else item


def _forms(func: Any, args: Any, out: Any) -> list[Any] | None:
    """Return the form of each value of ``out``, or ``None`` if ``out`` depends on more than the form of ``args``."""
    outs = out if isinstance(out, tuple) else (out,)
    strided = all(one.layout is torch.strided for one in (*args, *outs) if isinstance(one, torch.Tensor))
    if not strided or VARYING & {*func.tags} or isinstance(out, tuple) != (len(func._schema.returns) > 1):
        return None
    forms = [_form(func, args, one) if isinstance(one, FakeTensor) else one for one in outs]
    kinds = [form.kind if isinstance(form, Form) else type(form) for form in forms]
    new = {one.untyped_storage()._cdata for one, kind in zip(outs, kinds, strict=True) if kind == "new"}
    known = {*kinds} <= ({"same"} if func._schema.is_mutable else {"new", "view", "same", type(None), int})
    return forms if known and len(new) == kinds.count("new") else None


def _form(func: Any, args: Any, out: FakeTensor) -> Form | str:
    unusual = out.requires_grad or out.is_conj() or out.is_neg() or out.constant is not None
    memory, offset = out.untyped_storage(), int(out.storage_offset())
    form = Form("new", 0, 0, out.shape, out.stride(), out.dtype, out.fake_device)
    for at, one in enumerate(args):
        if one is out:
            return form._replace(kind="same", argument=at)
        if isinstance(one, FakeTensor) and one.untyped_storage()._cdata == memory._cdata:
            unusual |= one.dtype != out.dtype and func not in ABSOLUTE
            form = form._replace(kind="view", argument=at, offset=offset - int(one.storage_offset()))
    whole = compute_required_storage_length(form.shape, form.stride, 0) * out.element_size()
    return "unusual" if unusual or (form.kind == "new" and (offset or memory.nbytes() != whole)) else form
