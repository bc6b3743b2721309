"""Parameter groups: which parameters train, and their learning rate and decay, by layer and name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn, uint8
from torch.optim import Optimizer

from trainer.contract import Model
from trainer.errors import RecipeError, closest_names
from trainer.models.base import parameters_after_blocks
from trainer.recipe import Optim
from trainer.weights.blocks import find_blocks, require_blocks


@dataclass(frozen=True)
class UpdateRule:
    """The update settings of one parameter."""

    weight_decay: float
    lr_scale: float = 1.0  # factor on the learning rate
    # For a matrix of a block: its parameter, which may be sharded, and is not the tensor to update if offloaded.
    matrix: Tensor | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)


def set_requires_grad(module: nn.Module, model: Model, optim: Optim) -> None:
    """Freeze or unfreeze the parameters of ``module``, as built by ``model``, that ``optim.groups`` names."""
    if optim.layer_decay is not None:
        require_blocks(module, model.blocks, f"optim.layer_decay={optim.layer_decay}")
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        trains = not dict(_settings(name, optim)).get("frozen", not parameter.requires_grad)
        if trains and parameter.dtype == uint8:
            raise RecipeError(f"optim.groups cannot train {name}, stored in NF4: use model.lora.base full")
        parameter.requires_grad_(trains)
    for pattern, settings in optim.groups.items():
        found = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if not found:
            raise RecipeError(f"optim.groups: no parameter is called {pattern!r}{_nearest(pattern, list(named))}")
        if "frozen" not in settings and not any(parameter.requires_grad for parameter in found):
            fix = "remove it, or add frozen: false"
            raise RecipeError(f"optim.groups: all parameters that match {pattern!r} are frozen: {fix}")


def layer_depths(module: nn.Module, classes: Sequence[type] = ()) -> dict[str, int]:
    """Return the layer number of each parameter by name, for layer decay.

    It is 0 before the first block, then that of the parameter's block or of the block before it, from 1 on. Head and
    norms after the last block have one more than the number of blocks.
    """
    blocks = find_blocks(module, classes)
    number = {p: at for at, block in reversed([*enumerate(blocks, 1)]) for p in block.parameters()}
    number |= dict.fromkeys(parameters_after_blocks(module, blocks), len(blocks) + 1)
    found, before = dict[str, int](), 0
    for name, parameter in module.named_parameters():
        before = found[name] = number.get(parameter, before)
    return found


def block_matrices(module: nn.Module, classes: Sequence[type] = ()) -> frozenset[str]:
    """Return the names of the real matrices of blocks, without embeddings."""
    embeddings = {part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    inside = {p for block in find_blocks(module, classes) for p in block.parameters()} - embeddings
    named = module.named_parameters()
    return frozenset(name for name, p in named if p in inside and p.ndim == 2 and p.is_floating_point())


def update_rule_for(
    parameter: Tensor,
    optim: Optim,
    name: str = "",
    layers: Mapping[str, int] | None = None,
    matrix: Tensor | None = None,
) -> UpdateRule:
    """Return the update rule of a parameter.

    Matrices decay; biases and norm weights do not (as in transformers and nanoGPT). The learning rate of a layer is
    that of the layer above it times ``optim.layer_decay`` (Clark et al. 2020, ELECTRA; as in BEiT), times its
    ``optim.groups`` scale.
    """
    settings = dict(_settings(name, optim))
    depth = max(layers.values(), default=0) if layers else 0
    scale = 1.0 if optim.layer_decay is None or not layers else optim.layer_decay ** (depth - layers[name])
    scale *= settings.get("lr_scale", 1.0)
    decay = settings.get("weight_decay", optim.weight_decay if parameter.ndim >= 2 else 0.0)
    if scale <= 0:
        layer = f"layer {layers and layers[name]} of {depth}"
        fix = "raise it, or freeze the layer with optim.groups"
        raise RecipeError(f"optim.layer_decay={optim.layer_decay} sets the learning rate of {layer} to 0: {fix}")
    return UpdateRule(float(decay), scale, matrix, name)


def to_param_groups(rules: Mapping[Tensor, UpdateRule], lr: float) -> list[dict[str, object]]:
    """Return the parameter groups of an optimizer: matrices, which may be large, come first."""
    groups: dict[tuple[bool, UpdateRule], list[Tensor]] = {}
    for parameter in sorted(rules, key=lambda p: p.ndim < 2):
        groups.setdefault((parameter.ndim < 2, rules[parameter]), []).append(parameter)
    return [
        {"params": members, "weight_decay": rule.weight_decay, "lr": lr * rule.lr_scale, "lr_scale": rule.lr_scale}
        for (_, rule), members in groups.items()
    ]


def describe_groups(optimizer: Optimizer) -> list[str]:
    """Return one line about the groups if parameters differ in learning rate, or matrices in decay."""
    kinds: Counter[tuple[float, float]] = Counter()
    for group in optimizer.param_groups:
        kinds[group["lr_scale"], float(group["weight_decay"])] += sum(p.numel() for p in group["params"])
    if len({scale for scale, _ in kinds}) == 1 and len(kinds) <= 2:
        return []
    parts = [f"{size:,} with lr × {scale:.3g}, decay {decay:g}" for (scale, decay), size in sorted(kinds.items())]
    return [f"parameter groups: {'; '.join(parts)}"]


def _settings(name: str, optim: Optim) -> Iterator[tuple[str, float]]:
    for pattern, settings in optim.groups.items():
        if fnmatchcase(name, pattern):
            yield from settings.items()


def _nearest(pattern: str, names: Sequence[str]) -> str:
    bare = pattern.strip("*.")
    if any(bare in name for name in names):
        return f": a pattern must match the whole name, write '*{bare}*'"
    close = closest_names(bare, names, 0.3, 3) or [names[0], names[-1]]
    return f"; the nearest names are {', '.join(close)} (* stands for any part of a name)"
