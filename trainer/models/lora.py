"""Low-rank adapters (Hu et al. 2021) by peft, also on NF4 weights (QLoRA, Dettmers et al. 2023). Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from trainer.contract import Exportable, Plannable, Streamable
from trainer.errors import RecipeError, require, require_choice, require_package
from trainer.models.base import parameters_after_blocks, widened
from trainer.values import PretrainedWeights
from trainer.weights.blocks import find_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

ADAPTER = "default"
BASE_LAYER_KEY, LORA_KEY, NF4_KEY, DORA_KEY = ".base_layer.", ".lora_", ".codes", f".lora_magnitude_vector.{ADAPTER}"
"""Parts of parameter names: a layer that peft has wrapped, a parameter that it has added, a quantised weight, DoRA."""

ADAPTERS = "adapter_model.safetensors"

Base = Literal["full", "nf4"]


@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters and the head, and freeze the rest; saved models hold the merged weights.

    Args:
        rank: rank of the adapters; 0 trains the weights themselves.
        alpha: an adapter's output is scaled by alpha / rank; null is twice the rank.
        dropout: dropout rate on the adapters' inputs.
        targets: the linear layers of a block that get an adapter, by the ends of their names, such as [q_lin, v_lin];
            null selects those of the attention (of the MLP in VisionTransformer).
        base: full, or nf4: the linear layers of the blocks keep their frozen weights in 4 bits; each is dequantised
            only while it is used (QLoRA).
        dora: also train the norm of each output's weights, at first that of the pretrained ones (Liu et al. 2024).
        rank_stabilized: scale an adapter's output by alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023).
    """

    rank: int = 0
    alpha: float | None = None
    dropout: float = 0.0
    targets: list[str] | None = None
    base: Base = "full"
    dora: bool = False
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        require(whole and self.rank >= 0, f"model.lora.rank={self.rank!r} must be an integer of at least 0 (off)")
        require(self.alpha is None or self.alpha > 0, f"model.lora.alpha={self.alpha} must be greater than 0, or null")
        require(0 <= self.dropout < 1, f"model.lora.dropout={self.dropout} must be in [0, 1)")
        require(self.targets != [], "model.lora.targets=[] adapts no layers: name layers, or leave it at null")
        require_choice("model.lora.base", self.base, Base)
        if self.base != "full" and self.rank <= 0:
            raise RecipeError("model.lora.base=nf4 needs frozen weights, but model.lora.rank=0 trains them: set a rank")
        for key in ("dora", "rank_stabilized"):
            require(self.rank > 0 or not getattr(self, key), f"model.lora.{key} needs adapters: set model.lora.rank")
        cause = "model.lora.dora takes norms of the weights of the file, and model.lora.base=nf4 rounds those"
        require(not self.dora or self.base == "full", f"{cause}: use model.lora.base full, or LoRA without dora")

    def require_alone(self, train_last_blocks: int | None) -> None:
        if self.rank and train_last_blocks is not None:
            cause = f"model.lora.rank={self.rank} adapts all blocks, but model.train_last_blocks={train_last_blocks}"
            raise RecipeError(f"{cause} trains only the last blocks, as a whole: use one of the two")


class SupportsLoRA(Streamable, Exportable, Plannable):
    """A model that can train adapters instead of its weights."""

    lora: LoRA

    adapted: ClassVar[Sequence[str] | None] = None
    """Layers that get an adapter if ``lora.targets`` is not set; ``None`` for those of the attention."""

    head_is_new: ClassVar[bool] = True
    """Whether the weights may lack the head, which then trains together with the adapters."""

    @property
    def lossy(self) -> Sequence[str]:  # type: ignore[override]
        """The lossy techniques of this model: LoRA, with its rank and NF4 weights."""
        on = " on NF4 weights" if self.lora.base == "nf4" else ""
        kind = "DoRA" if self.lora.dora else "LoRA"
        return (f"{kind} of rank {self.lora.rank}{on}",) if self.lora.rank else ()

    def adapt(self, module: nn.Module) -> nn.Module:
        add_adapters(module, self.lora, self.blocks, self.adapted, self.head_is_new)
        return module

    def map_to_adapted(self, found: PretrainedWeights, skeleton: nn.Module) -> PretrainedWeights:
        """Rename ``found`` for the adapted module and add new adapters; ``skeleton``, on meta, gets them in place."""
        import torch

        if not self.lora.rank:
            return found
        with torch.device("meta"):
            names = {base_parameter_name(name): name for name, _ in self.adapt(skeleton).named_parameters()}
        stored = {names.get(name, name): place for name, place in found.stored.items()}
        for name in [name for name in names.values() if DORA_KEY in name]:
            layer = skeleton.get_submodule(name.partition(DORA_KEY)[0])
            place = stored[f"{name.partition(DORA_KEY)[0]}{BASE_LAYER_KEY}weight"]
            stored[name] = replace(place, transform=partial(_norms_of, layer, place.transform))
        return PretrainedWeights(stored, {*found.new, *adapters_of(skeleton)}, found.initialise)

    def weight_files(self) -> Sequence[Path]:
        """Return the files of ``weights``; empty for random weights."""
        return ()

    def base_files(self) -> Sequence[Path]:
        """Return the files of the frozen base weights; empty without adapters or files, as a checkpoint holds all."""
        return self.weight_files() if self.lora.rank else ()

    def in_base(self, module: nn.Module) -> Collection[str]:
        """Return the names of the frozen parameters, except adapters and a head that may be new."""
        if not self.base_files():
            return ()
        head = self.new_head(module)
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad and LORA_KEY not in name}
        return {name for name, parameter in frozen.items() if parameter not in head}

    def new_head(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters of a head that the weights may lack."""
        return set(parameters_after_blocks(module, find_blocks(module, self.blocks)) if self.head_is_new else ())

    def draw_new(self, module: nn.Module, initialise: Callable[[nn.Module], object], new: Collection[str] = ()) -> None:
        """Draw the adapters and ``new`` parameters of ``module`` again, exactly as when weights are streamed."""
        import torch

        from trainer.weights.streaming import init_new_parameters, skeleton_on_meta

        if names := {*new, *adapters_of(module)}:
            with torch.no_grad():
                drawn = init_new_parameters(skeleton_on_meta(self), names, initialise, torch.initial_seed())
                for name, value in drawn.items():
                    module.get_parameter(name).copy_(value)

    def merged_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return merged_state(module, state) if self.lora.rank else dict(state)


def add_adapters(
    module: nn.Module, lora: LoRA, blocks: Sequence[type] = (), defaults: Sequence[str] | None = None, head: bool = True
) -> None:
    """Add adapters to linear layers of the blocks of ``module``, in place, and freeze the rest except the head.

    The class of ``module`` stays. An adapter starts at zero, so the outputs do not change. Rank 0 does nothing.
    ``defaults`` is used if ``lora.targets`` is ``None``; if both are, attention is adapted. With ``head`` false the
    head is frozen too, but ``lora.targets`` may name it. With ``lora.base`` nf4 all linear layers of the blocks are
    quantised one by one.
    """
    if not lora.rank:
        return
    require_package(f"model.lora.rank={lora.rank}", "peft", "lora")
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    found = find_blocks(module, blocks)
    layers = _linear_layers(found)
    inside = {id(layer) for _, layer in layers}
    outside = [] if head else [(name, one) for name, one in _linear_layers([module]) if id(one) not in inside]
    chosen = _choose([*layers, *outside] if lora.targets else layers, lora.targets or defaults)
    adapted = {id(layer): layer for layer in chosen}
    for name, layer in [(name, layer) for name, layer in outside if id(layer) in adapted]:
        tied = any(getattr(part, "weight", None) is layer.weight and part is not layer for part in module.modules())
        cause = f"model.lora.targets: {name} shares its weight with the embedding, and a merged weight would differ"
        require(not tied, f"{cause}: leave it out")
        require(not lora.dora, f"model.lora.dora cannot adapt {name}, a layer outside of the blocks: leave it out")
    names = [name for name, layer in module.named_modules() if id(layer) in adapted]
    transposed = all(isinstance(layer, Conv1D) for layer in adapted.values())
    trained = [parameter for parameter in parameters_after_blocks(module, found) if parameter.requires_grad and head]
    settings: Any = {"r": lora.rank, "lora_alpha": lora.alpha or 2 * lora.rank, "lora_dropout": lora.dropout}
    settings |= {"use_dora": lora.dora, "use_rslora": lora.rank_stabilized, "fan_in_fan_out": transposed}
    inject_adapter_in_model(LoraConfig(target_modules=names, **settings), module, ADAPTER)
    for parameter in trained:  # peft froze everything except adapters
        parameter.requires_grad_(True)
    if lora.base == "nf4":
        _quantise(module, [layer for _, layer in layers])


def _quantise(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    from trainer.weights.nf4 import NF4Linear

    coded = {layer: NF4Linear(layer) for layer in _unmodified_linears(layers)}
    for name, layer in [*module.named_modules(remove_duplicate=False)]:
        if layer in coded:
            module.set_submodule(name, coded[layer])


def _unmodified_linears(layers: Sequence[nn.Module]) -> list[Any]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [layer for layer in layers if type(layer).forward in (nn.Linear.forward, Conv1D.forward)]


def dequantised_in_place(module: nn.Module, blocks: Sequence[type] = ()) -> None:
    """Round the weights that ``lora.base`` nf4 quantises to their NF4 values, in full precision."""
    from trainer.weights.nf4 import NF4Linear

    layers = _linear_layers(find_blocks(module, blocks))
    for layer in _unmodified_linears([layer for name, layer in layers if LORA_KEY not in name]):
        layer.weight.data = NF4Linear(layer).weight


def base_parameter_name(name: str) -> str:
    """Return the name of a parameter in the same module without adapters."""
    plain = name.replace(BASE_LAYER_KEY, ".")
    return f"{plain.removesuffix(NF4_KEY)}.weight" if plain.endswith(NF4_KEY) else plain


def adapters_of(module: nn.Module) -> list[str]:
    """Return the names of the low-rank matrices, which are drawn. DoRA's norms are computed from the weights."""
    return [name for name, _ in module.named_parameters() if LORA_KEY in name and DORA_KEY not in name]


def reset_adapters(module: nn.Module) -> None:
    """Draw the adapters of ``module`` in order; those on meta stay there."""
    for part in module.modules():
        if ADAPTER in getattr(part, "lora_A", ()):
            part.reset_lora_parameters(ADAPTER, True)  # type: ignore[operator]


def merged_state(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge every adapter into its weight, under the names of a module without adapters.

    NF4 weights get the dtype of the others. ``module`` may be sharded. Its full tensors, ``state``, are not modified.
    """
    import torch

    from trainer.weights.nf4 import NF4Linear, dequantise

    merged = {}
    usual = next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)
    for name, tensor in state.items():
        if LORA_KEY in name:
            continue
        path, _, leaf = name.rpartition(".")
        layer, dtype, whole = module.get_submodule(path), tensor.dtype, tensor
        if leaf == "codes" and isinstance(layer, NF4Linear):
            whole, dtype = dequantise(tensor, layer.shape, torch.float32), usual
        if path.endswith(BASE_LAYER_KEY[:-1]) and leaf != "bias":
            owner = path.removesuffix(BASE_LAYER_KEY[:-1])
            whole = whole + _update(module, owner, state)
            if (norms := state.get(f"{owner}{DORA_KEY}.weight")) is not None:
                adapted, found = module.get_submodule(owner), norms.detach().to(whole.dtype)
                found = found / _norms_of(adapted, None, whole)
                whole = whole * (found if cast(Any, adapted).fan_in_fan_out else found[:, None])
        merged[base_parameter_name(name)] = whole.to(dtype)  # rounded once
    return merged


def save_adapters(module: nn.Module, state: Mapping[str, Tensor], folder: Path, **facts: Any) -> None:
    """Write the trained adapters and head layers as peft's ``adapter_config.json`` and ``adapter_model.safetensors``.

    Nothing is written if other parameters of adapted layers trained, which peft cannot store. ``state`` is as for
    :func:`merged_state`; ``facts`` are further settings of peft's configuration.
    """
    from safetensors.torch import save_file

    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if any(BASE_LAYER_KEY in name for name in trained):
        return
    layers = {name.rpartition(".")[0]: None for name in trained if LORA_KEY not in name}
    configured: Any = module.peft_config
    config = replace(configured[ADAPTER], modules_to_save=list(layers) or None, inference_mode=True, **facts)
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    named = {name_in_peft(name): state[name].detach().cpu() for name in trained}
    save_file({name: value.contiguous() for name, value in named.items()}, folder / ADAPTERS, {"format": "pt"})


def name_in_peft(name: str) -> str:
    """Return the name of an adapted module's parameter in peft's files."""
    name = name.removesuffix(".weight") if DORA_KEY in name else name
    return f"base_model.model.{name}.".replace(f".{ADAPTER}.", ".").removesuffix(".")


def _update(module: nn.Module, path: str, state: Mapping[str, Tensor]) -> Tensor:
    """Return the adapter's update of the weight of layer ``path``, in fp32 or wider."""
    layer: Any = module.get_submodule(path)
    down, up = (widened(state[f"{path}.lora_{side}.{ADAPTER}.weight"].detach()) for side in "AB")
    update = layer.scaling[ADAPTER] * (up @ down)
    return update.T if layer.fan_in_fan_out else update  # transformers' Conv1D keeps its weights transposed


def _norms_of(layer: Any, transform: Callable[[Tensor], Tensor] | None, weight: Tensor) -> Tensor:
    """Return the norm of the weights of each output of ``layer``, in fp32 or wider."""
    weight = weight if transform is None else transform(weight)
    return widened(weight).norm(dim=0 if layer.fan_in_fan_out else 1)


def _linear_layers(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the linear layers of all blocks that are called as modules, with their names within a block."""
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
        require(bool(chosen), f"model.lora finds no attention layers in a block: set model.lora.targets, from {names}")
        return chosen
    ends = {target: [layer for name, layer in layers if f".{name}".endswith(f".{target}")] for target in targets}
    for target, chosen in ends.items():
        missing = f"model.lora.targets: no linear layer's name in a block ends in {target!r}"
        require(bool(chosen), f"{missing}: choose from {names}")
    return [layer for chosen in ends.values() for layer in chosen]
