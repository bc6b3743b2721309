"""Autocast as CUDA does it, for tensors that C++ does not believe to be on CUDA.

The casts themselves are C++ kernels that look at the device of a tensor, which is ``meta`` to them here. These stand in
for them: the same lists of operations, and the same cache of cast weights, which lives as long as the autocast context.

Source of the lists: aten/src/ATen/autocast_mode.h; the dispatcher is asked whether they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

LOWER = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot scaled_dot_product_attention _scaled_dot_product_flash_attention""".split()  # noqa: SIM905
FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
linalg_matrix_sqrth upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""".split()  # noqa: SIM905
FLOAT32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()  # noqa: SIM905
WIDEST = """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""".split()  # noqa: SIM905
LEFT_ALONE = """norm.Scalar norm.ScalarOpt_dim binary_cross_entropy _cudnn_rnn rnn_relu_cell rnn_tanh_cell lstm_cell
gru_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell cudnn_convolution cudnn_convolution_transpose""".split()  # noqa: SIM905
"""Refused by autocast, recurrent, or reached only through another of the lists."""

_cast_weights: dict[int, tuple[Tensor, Tensor]] = {}


def install_autocast(library: torch.library.Library, is_on_gpu: Callable[[Any], bool]) -> list[str]:
    """Replace the kernels; return what this version of torch casts, too, and is in none of the lists.

    Args:
        library: where they are registered: for aten.
        is_on_gpu: says of a tensor whether it is to be taken for one on the GPU.
    """
    kernels = {"lower": LOWER, "float32": FLOAT32, "result": FLOAT32_RESULT, "widest": WIDEST}
    for policy, names in kernels.items():
        for name in filter(_exists, names):
            library.impl(name, _kernel(name, policy, is_on_gpu), "AutocastCUDA", allow_override=True)
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        _cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_all
    known = {f"aten::{name}" for name in (*LOWER, *FLOAT32, *FLOAT32_RESULT, *WIDEST, *LEFT_ALONE)}
    cast = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return sorted(name for name in cast if name.startswith("aten::") and name not in known)


def _exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    return hasattr(getattr(aten, packet, None), overload or "default")


def _kernel(name: str, policy: str, is_on_gpu: Callable[[Any], bool]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    arguments = [argument.name for argument in op._schema.arguments]

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(cast(item, dtype) for item in value)
        if not isinstance(value, Tensor) or not is_on_gpu(value):
            return value
        if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        return _cast(value, dtype)

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
    given = kwargs.get("dtype")
    if "dtype" in names and len(args) > names.index("dtype"):
        given = args[names.index("dtype")]
    if given is not None or "dtype" not in names or not args[0].is_floating_point():
        return kwargs
    if len(args) > names.index("dtype"):  # given as None, by position
        return kwargs
    return {**kwargs, "dtype": torch.float32}


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
