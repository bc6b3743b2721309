"""Liger's Triton kernels (Hsu et al. 2024) in language models of transformers; results differ by rounding."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import require, require_package

NORMS = {"llama": (0.0, "llama"), "gemma": (1.0, "gemma"), "olmo2": (0.0, "gemma")}
"""The offset added to the weight, and the casting mode."""
ACTIVATIONS = {"SiLU": "SiLUMul", "SiLUActivation": "SiLUMul", "GELUTanh": "GELUMul"}
ROTATE = "apply_rotary_pos_emb"  # transformers' function
# fmt: off
PARTS = {
    "llama rotary mlp": "bamba falcon_h1 granite llama ministral mistral phi3 qwen2 qwen2_moe qwen3 smollm3",
    "llama rotary": "granitemoe lfm2 mixtral olmoe qwen3_moe seed_oss", "llama": "granitemoehybrid mamba mamba2",
    "rotary": "falcon gpt_neox modernbert-decoder nemotron phi starcoder2", "rotary mlp": "olmo stablelm",
    "llama mlp": "deepseek_v3 glm glm4 jamba llama4_text", "mlp": "cohere cohere2", "gemma mlp": "recurrent_gemma",
    "gemma rotary mlp": "gemma gemma2 gemma3_text qwen3_next",
    "olmo2 rotary mlp": "olmo2 olmo3", "olmo2 mlp": "helium", "olmo2": "gpt_oss",
}
# fmt: on
ARCHITECTURES = {kind: tuple(parts.split()) for parts, kinds in PARTS.items() for kind in kinds.split()}
"""Parts with the right gradient by model type, as measured by benchmarks/liger.py; a norm comes first."""


def use_kernels(module: Any, wish: str) -> None:
    """Install the kernels of ``model.kernels`` by swapping ``__class__``; reject liger if it is not supported."""
    parts, has_gpu = ARCHITECTURES.get(module.config.model_type, ()), torch.cuda.is_available()  # or a simulated GPU
    if wish == "liger":
        require_package("model.kernels=liger", "liger_kernel", "kernels")
        require(bool(parts), f"model.kernels=liger is not certified for {module.config.model_type}: use auto or none")
        require(has_gpu, "model.kernels=liger needs a CUDA GPU: use auto or none")
    for part in module.modules() if parts and wish != "none" and has_gpu and find_spec("liger_kernel") else ():
        kind, layers = cast(Any, type(part)), {name: type(layer).__name__ for name, layer in part.named_children()}
        gated = ACTIVATIONS.get(layers.get("act_fn") or layers.get("activation_fn") or "")
        if parts[0] in NORMS and kind.__name__.endswith("RMSNorm"):
            part.__class__ = _fused(kind, "RMSNorm", *NORMS[parts[0]])
        elif "mlp" in parts and gated and "down_proj" in layers and layers.keys() & {"up_proj", "gate_up_proj"}:
            part.__class__ = _fused(kind, gated)
        elif "rotary" in parts and ROTATE in unwrap(kind.forward).__code__.co_names:
            part.__class__ = _fused(kind, "Rope")


def _takes(*tensors: Tensor) -> bool:
    return all(one.is_cuda and one.itemsize <= 4 and not isinstance(one, DTensor) for one in tensors)


@cache
def _fused(kind: Any, name: str, *norm: Any) -> type:
    """Create a subclass with the same name, which transformers reads. No effect on a CPU, if sharded, or in fp64."""
    from liger_kernel import ops

    # Without decorators: those of transformers rename deprecated arguments, which its own modules never pass.
    function, plain = getattr(ops, f"Liger{name}Function"), unwrap(kind.forward)

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if not _takes(query, key, cos):
            return plain.__globals__[ROTATE](query, key, cos, sin)
        # Clone, because the kernel works in place and selective checkpointing keeps the original products.
        return function.apply(query.clone(), key.clone(), cos, sin)

    def forward(self: Any, hidden: Tensor, *args: Any) -> Any:
        if args or not _takes(hidden, *self.parameters(recurse=False)):
            return plain(self, hidden, *args)
        if norm:  # not in place, because a residual may share the gradient
            eps = vars(self).get("variance_epsilon") or self.eps
            return function.apply(hidden, self.weight, eps, *norm, False, None)
        one = hasattr(self, "gate_up_proj")
        parts = self.gate_up_proj(hidden).chunk(2, -1) if one else (self.gate_proj(hidden), self.up_proj(hidden))
        return self.down_proj(function.apply(*parts))

    if name == "Rope":  # copy forward with ``rotate`` in its globals; compilers would resolve a patched name again
        found = {key: value for key, value in plain.__globals__.items() if key != "__name__"} | {ROTATE: rotate}
        forward = type(plain)(plain.__code__, found, plain.__name__, plain.__defaults__, plain.__closure__)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
