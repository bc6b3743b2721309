"""The repeated modules of a network: the unit of sharding, checkpointing, offload, streaming and compiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn


MIN_STACK_SHARE = 0.1  # a stack of other modules also holds blocks from this share of the largest stack's parameters


def find_blocks(module: nn.Module, classes: Sequence[type] = ()) -> list[nn.Module]:
    """Return the repeated modules in order of registration: instances of ``classes``, or the modules of stacks.

    A stack is a ``ModuleList`` or ``Sequential`` of modules of one class. Blocks are the modules of the stack with the
    most parameters, of stacks of the same class (stages of a ResNet, T5's encoder and decoder), and of stacks whose
    modules have several layers and together at least a tenth of its parameters (BART's encoder). No block contains
    another.
    """
    if classes:
        return [m for m in module.modules() if isinstance(m, tuple(classes))]
    stacks = _module_lists(module)
    largest = max(stacks, key=_size_of_all, default=[])
    taken = {part for block in largest for part in block.modules()}
    blocks: dict[nn.Module, None] = {}
    for stack in stacks:  # outer ones before inner ones
        if stack is largest or (_is_comparable_stack(stack, largest) and taken.isdisjoint(stack)):
            blocks |= dict.fromkeys(stack)
            taken.update(part for block in stack for part in block.modules())
    return list(blocks)


def describe_blocks(blocks: Sequence[nn.Module]) -> str:
    """Return the number of blocks per class: ``2 BartEncoderLayer + 2 BartDecoderLayer``; empty if there are none."""
    return " + ".join(f"{count} {name}" for name, count in Counter(type(block).__name__ for block in blocks).items())


def require_blocks(module: nn.Module, classes: Sequence[type], setting: str) -> list[nn.Module]:
    """Return the repeated modules; if there are none, raise ``RecipeError`` with ``setting`` and the fix."""
    if blocks := find_blocks(module, classes):
        return blocks
    by_class: dict[str, list[nn.Module]] = {}
    for child in module.modules():
        if child is not module and next(child.parameters(), None) is not None:
            by_class.setdefault(type(child).__name__, []).append(child)
    largest = sorted(by_class.items(), key=lambda item: -_size_of_all(item[1]))[:5]
    shown = ", ".join(f"{len(found)} × {name} ({_size_of_all(found):,} parameters)" for name, found in largest)
    named = f" (it contains no {', '.join(kind.__name__ for kind in classes)} from blocks)" if classes else ""
    found = "Candidates: " if shown else "It has no submodule with parameters"
    cause = f"{setting} works on repeated modules, but none were found in {type(module).__name__}{named}"
    raise RecipeError(f"{cause}: name their classes in `blocks` of the model's class. {found}{shown}")


def disable_kv_cache(module: nn.Module) -> None:
    """Disable the KV cache, to which a checkpointed block would append twice; :func:`kv_cache_restored` undoes this."""
    configs: dict[int, Any] = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in on:
        config.use_cache = False
    module._caching = [*getattr(module, "_caching", ()), *on]  # type: ignore[assignment]


@contextmanager
def kv_cache_restored(module: nn.Module) -> Iterator[None]:
    """Undo :func:`disable_kv_cache` within the context, to save ``module``."""
    switched: Sequence[Any] = getattr(module, "_caching", ())
    for config in switched:
        config.use_cache = True
    try:
        yield
    finally:
        for config in switched:
            config.use_cache = False


def _module_lists(module: nn.Module) -> list[list[nn.Module]]:
    from torch import nn

    lists = [list(dict.fromkeys(m)) for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return [children for children in lists if children and len({type(child) for child in children}) == 1]


def _is_comparable_stack(stack: Sequence[nn.Module], largest: Sequence[nn.Module]) -> bool:
    if type(stack[0]) is type(largest[0]):
        return True
    is_large = _size_of_all(stack) >= MIN_STACK_SHARE * _size_of_all(largest)
    return is_large and next(stack[0].children(), None) is not None


def _size_of_all(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
