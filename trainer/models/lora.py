"""Low-rank adapters (Hu et al. 2021), by peft. Importing this loads neither torch nor peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.contract import Model
from trainer.errors import require, require_package
from trainer.models.common import head_parameters
from trainer.weights.blocks import find_blocks

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER = "default"


@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters and the head, and freeze the rest; saved models hold the merged weights.

    Args:
        rank: of the adapters; 0 trains the weights themselves.
        alpha: an adapter's output is scaled by alpha / rank; null is twice the rank.
        dropout: on the adapters' inputs.
        targets: the linear layers of a block that get an adapter, by the ends of their names, such as [q_lin, v_lin];
            null takes those of the attention (of the MLP in VisionTransformer).
    """

    rank: int = 0
    alpha: float | None = None
    dropout: float = 0.0
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        require(whole and self.rank >= 0, f"model.lora.rank={self.rank!r} must be an integer of at least 0 (off)")
        require(self.alpha is None or self.alpha > 0, f"model.lora.alpha={self.alpha} must be greater than 0, or null")
        require(0 <= self.dropout < 1, f"model.lora.dropout={self.dropout} must be in [0, 1)")
        require(self.targets != [], "model.lora.targets=[] leaves nothing to adapt: name layers, or leave it at null")

    def require_alone(self, train_last_blocks: int | None) -> None:
        """Refuse two answers to the question of what trains."""
        both = f"model.lora.rank={self.rank} adapts all blocks, and model.train_last_blocks={train_last_blocks}"
        alone = not self.rank or train_last_blocks is None
        require(alone, f"{both} trains whole ones and nothing before them: use one of the two")


class Adaptable(Model):
    """A model of which adapters may train instead of its weights."""

    lora: LoRA

    @property
    def lossy(self) -> Sequence[str]:  # type: ignore[override]
        """That adapters train, if they do."""
        return (f"LoRA of rank {self.lora.rank}",) if self.lora.rank else ()

    def merged_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``state`` with the adapters merged into the weights."""
        return merged_state(module, state) if self.lora.rank else dict(state)


def add_adapters(
    module: nn.Module,
    lora: LoRA,
    blocks: Sequence[type] = (),
    defaults: Sequence[str] | None = None,
    head: bool = True,
) -> None:
    """Give linear layers of the blocks of ``module`` adapters, in place, and freeze all but these and the head.

    The class of ``module`` stays. An adapter starts at zero, so the outputs are those of before. At rank 0 nothing is
    done. ``defaults`` take the place of ``lora.targets`` where those are ``None``; otherwise attention is adapted. A
    ``head`` that is not new is frozen as well.
    """
    if not lora.rank:
        return
    require_package(f"model.lora.rank={lora.rank}", "peft", "lora")
    from peft import LoraConfig, inject_adapter_in_model

    found = find_blocks(module, blocks)
    adapted = set(map(id, _choose(_linear_layers(found), lora.targets or defaults)))
    names = [name for name, layer in module.named_modules() if id(layer) in adapted]
    trained = [parameter for parameter in head_parameters(module, found) if parameter.requires_grad and head]
    alpha: Any = lora.alpha or 2 * lora.rank
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=names)
    inject_adapter_in_model(config, module, ADAPTER)
    for parameter in trained:  # peft froze whatever is not an adapter
        parameter.requires_grad_(True)


def merged_state(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with every adapter added to the weight that it adapts, under the names of a module without adapters.

    ``module`` is what ``add_adapters`` made, possibly sharded since; ``state`` its whole tensors, unchanged by this.
    """
    import torch

    base, down = ".base_layer.", f".lora_A.{ADAPTER}.weight"
    merged = {name.replace(base, "."): tensor for name, tensor in state.items() if ".lora_" not in name}
    for name in state:
        if name.endswith(down):
            path = name.removesuffix(down)
            layer: Any = module.get_submodule(path)
            weight, up = state[f"{path}{base}weight"], state[f"{path}.lora_B.{ADAPTER}.weight"].detach()
            wide = torch.promote_types(up.dtype, torch.float32)
            update = layer.scaling[ADAPTER] * (up.to(wide) @ state[name].detach().to(wide))
            if layer.fan_in_fan_out:  # transformers' Conv1D keeps its weights transposed
                update = update.T
            merged[f"{path}.weight"] = (weight + update).to(weight.dtype)  # rounded once
    return merged


def _linear_layers(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The linear layers of all blocks that are called as such, by their names within a block."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    # nn.MultiheadAttention reads the weights of its linear layer without calling it; an adapter would have no effect.
    unused = {id(m.out_proj) for block in blocks for m in block.modules() if isinstance(m, nn.MultiheadAttention)}
    return [
        (name, layer)
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and id(layer) not in unused
    ]


def _choose(layers: Sequence[tuple[str, nn.Module]], targets: Sequence[str] | None) -> list[nn.Module]:
    names = ", ".join(dict.fromkeys(name for name, _ in layers)) or "none"
    if targets is None:
        chosen = [layer for name, layer in layers if "attn" in name.lower() or "attention" in name.lower()]
        found_none = "model.lora finds no attention among the linear layers of a block: give model.lora.targets, of"
        require(len(chosen) > 0, f"{found_none} {names}")
        return chosen
    ends = {target: [layer for name, layer in layers if f".{name}".endswith(f".{target}")] for target in targets}
    for target, chosen in ends.items():
        unknown = f"model.lora.targets: {target!r} is the end of no linear layer's name in a block: choose from"
        require(len(chosen) > 0, f"{unknown} {names}")
    return [layer for chosen in ends.values() for layer in chosen]
