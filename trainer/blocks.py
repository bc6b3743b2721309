"""The repeated modules of a network: the one unit of sharding, checkpointing, offload, streaming and compiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn


def find_blocks(module: nn.Module, classes: Sequence[type] = ()) -> list[nn.Module]:
    """The repeated modules: instances of ``classes``, or the children of the ``ModuleList`` or ``Sequential`` of
    equal modules that holds the most parameters."""
    if classes:
        return [m for m in module.modules() if isinstance(m, tuple(classes))]
    return max(_repeated(module), key=_size_of_all, default=[])


def require_blocks(module: nn.Module, classes: Sequence[type], wish: str) -> list[nn.Module]:
    """The repeated modules, for a technique that does nothing without them.

    Args:
        module: the network.
        classes: what its ``Model`` says they are; may be empty.
        wish: the setting that asks for them, for the message.

    Raises:
        RecipeError: when there are none, with the classes that could be named.
    """
    blocks = find_blocks(module, classes)
    if not blocks:
        named = f" (blocks = {', '.join(kind.__name__ for kind in classes)} are not in it)" if classes else ""
        raise RecipeError(
            f"{wish} works on repeated modules, and {type(module).__name__} has none that are found{named}: name their "
            f"classes in `blocks` of the model's class. {_candidates(module)}"
        )
    return blocks


def _repeated(module: nn.Module) -> list[list[nn.Module]]:
    from torch import nn

    lists = [list(m) for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return [children for children in lists if children and len({type(child) for child in children}) == 1]


def _size_of_all(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _candidates(module: nn.Module) -> str:
    """The classes below ``module`` that hold the most parameters, largest first."""
    by_class: dict[str, list[nn.Module]] = {}
    for child in module.modules():
        if child is not module and next(child.parameters(), None) is not None:
            by_class.setdefault(type(child).__name__, []).append(child)
    largest = sorted(by_class.items(), key=lambda item: -_size_of_all(item[1]))[:5]
    shown = ", ".join(f"{len(found)} × {name} ({_size_of_all(found):,} parameters)" for name, found in largest)
    return f"Candidates: {shown}" if shown else "It holds no module with parameters"
