"""Triton kernels without a GPU: run by Triton's interpreter, and compiled ahead of time for several architectures."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ARCHITECTURES = (75, 90, 120, *(pytest.param(one, marks=pytest.mark.slow) for one in (80, 86, 89)))
SHARED = 99 * 1024  # bytes of shared memory that a block can have on every card from compute capability 8.6 on
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")  # of opcheck; the other traces a real launch
T = TypeVar("T")


def interpreted(function: Callable[[], T]) -> T:
    """What ``function`` of a test module returns in a new process, in which kernels run in Triton's interpreter.

    It has to be a new one: Triton reads the variable when its own functions are defined.
    """
    with patch.dict(os.environ, TRITON_INTERPRET="1"), get_context("spawn").Pool(1) as pool:
        return pool.apply(function)


def unwrap(*modules: Any) -> None:
    """Let operators of ``modules`` launch kernels of the interpreter, which torch 2.11 does not wrap."""
    for module in modules:
        module.wrap_triton = lambda kernel: kernel


def compiled(kernel: Any, architecture: int, types: dict[str, str], constants: dict[str, Any], fuses: bool) -> Any:
    """``kernel`` for an architecture (ten times the compute capability), compiled ahead of time.

    Tensors are aligned, and sizes divisible by 16, as models have them. ``types`` are those of the arguments, such as
    ``*bf16`` or ``i32``; the others are ``constants``. ``fuses`` allows one instruction for a product and a sum.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [name for name, kind in types.items() if kind.startswith("*") or kind == "i32"]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": fuses})


class Dispatches(TorchDispatchMode):
    """Within it, ``names`` are those of the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class AdaptedHead(nn.Module):
    """What peft makes of a linear head: its own weight frozen, and a low-rank one beside it."""

    active_adapters = ("default",)

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.base_layer, self.scaling = nn.Linear(width, words, bias=False).requires_grad_(False), {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, words, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + 2.0 * self.lora_B["default"](self.lora_A["default"](hidden))
