"""torchvision's Vision Transformer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.contract import DrawnInputs
from trainer.errors import RecipeError, require, require_choice, require_positive
from trainer.models.base import (
    MAX_FEATURES,
    MAX_LAYERS,
    ImageTask,
    Objective,
    SupervisedModel,
    require_filled,
    train_last_blocks,
)
from trainer.models.lora import LoRA, SupportsLoRA, reset_adapters
from trainer.system.text import format_names
from trainer.values import Loss, PretrainedWeights

if TYPE_CHECKING:
    from torch import Tensor, nn

Name = Literal["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14", "custom"]
SHAPE_FIELDS = ("patch_size", "layers", "heads", "width", "mlp_width")
POSITIONS = "encoder.pos_embedding"


@dataclass
class VisionTransformer(SupervisedModel, SupportsLoRA, DrawnInputs):
    """torchvision's ViT (Dosovitskiy et al. 2021): one of its five sizes, or a custom shape.

    Args:
        name: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14, or custom with the five fields of the shape.
        weights: a name of torchvision's weights for the model (DEFAULT, IMAGENET1K_V1, ...), a local .safetensors or
            .pth file, or null for random weights. The head is kept if its shape fits, and new otherwise; position
            embeddings are interpolated to another image size.
        image_size: height and width of the images in pixels; null takes the dataset's.
        patch_size: patch size in pixels, for custom only.
        layers: number of encoder blocks, for custom only.
        heads: number of attention heads, for custom only.
        width: features per token, for custom only.
        mlp_width: hidden features of a block's MLP, for custom only.
        dropout: dropout rate after embeddings, attention and MLP.
        attention_dropout: dropout rate of the attention weights.
        drop_path: stochastic depth (Huang et al. 2016): rate at which the last block's branches are dropped per
            sample, rising from 0 in the first block; 0.1 to 0.3 are usual. A sample's draws do not depend on the cut.
        train_last_blocks: freeze everything except the last n blocks and the head; null trains everything.
        lora: train adapters in the blocks, and the head, instead of all weights.
    """

    name: Name = "vit_b_16"
    weights: str | None = None
    num_classes: int | None = None
    image_size: int | None = None
    patch_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    mlp_width: int | None = None
    class_names: list[str] | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    train_last_blocks: int | None = None
    lora: LoRA = field(default_factory=LoRA)
    task: ImageTask = "single_label"
    loss: Objective = field(default_factory=Objective)

    mixes = True
    # Not the attention: torchvision keeps it in one packed weight. peft's adapter for that replaces the parameter in
    # every forward, which DDP, FSDP and optimizers do not support.
    adapted = ("mlp.0", "mlp.3")

    def __post_init__(self) -> None:
        require_choice("model.task", self.task, ImageTask)
        self.loss.require_fit(self.task)
        self.lora.require_alone(self.train_last_blocks)
        require_choice("model.name", self.name, Name)
        for key in ("dropout", "attention_dropout", "drop_path"):
            require(0 <= getattr(self, key) < 1, f"model.{key}={getattr(self, key)} must be in [0, 1)")
        given = [key for key in SHAPE_FIELDS if getattr(self, key) is not None]
        if self.name == "custom":
            missing = [f"model.{key}" for key in SHAPE_FIELDS if key not in given]
            require(not missing, f"model.name=custom needs {', '.join(missing)}")
            for key in SHAPE_FIELDS:
                require_positive(f"model.{key}", getattr(self, key), MAX_LAYERS if key == "layers" else MAX_FEATURES)
            if (self.width or 0) % (self.heads or 1):
                raise RecipeError(f"model.width={self.width} must be a multiple of model.heads={self.heads}")
            cause = f"model.drop_path={self.drop_path} has no effect with model.layers=1, because the first block's"
            require(self.layers != 1 or not self.drop_path, f"{cause} rate is 0: set it to 0")
        elif given:
            fixed = f"model.{given[0]} cannot be set for model.name={self.name}, which determines it"
            raise RecipeError(f"{fixed}: use model.name custom")

    @property
    def seeded(self) -> bool:
        return self.drop_path > 0

    @property
    def blocks(self) -> Sequence[type]:  # type: ignore[override]
        from torchvision.models.vision_transformer import EncoderBlock

        return (EncoderBlock,)

    def prepare(self) -> None:
        """Download torchvision's weights, or check the local file."""
        if self.weights is not None:
            self._read_weights()  # checks that the file can be read

    def build(self) -> nn.Module:
        """Build the module; its forward takes pixels (n, 3, height, width) and returns logits (n, classes)."""
        if self.weights is None:
            return self.adapt(self.skeleton())
        import torch

        from trainer.weights.streaming import default_dtype

        coded = self.lora.base == "nf4"  # quantise the values of the file, in any precision
        if coded and self._weights_file().suffix == ".safetensors":
            return super().build()
        with default_dtype(torch.float32 if coded else None):
            module = self.skeleton()
            self._load_pretrained(module, self._read_weights())
            self.draw_new(self.adapt(module), _initialise_head)
        return module.to(torch.get_default_dtype())

    def skeleton(self) -> nn.Module:
        from torchvision import models

        require_filled("VisionTransformer", num_classes=self.num_classes, image_size=self.image_size)
        options = {name: getattr(self, name) for name in ("image_size", "num_classes", "dropout", "attention_dropout")}
        patch_size = self.patch_size or int(self.name.rsplit("_", 1)[1])
        size = self.image_size or 0
        nearest = max(1, round(size / patch_size)) * patch_size
        cause = f"image_size={size} is not a multiple of the patch size {patch_size} of {self.name}"
        require(size % patch_size == 0, f"{cause}: use --data.image_size {nearest}")
        if self.name == "custom":
            shape: Any = {"num_layers": self.layers, "num_heads": self.heads, "hidden_dim": self.width}
            module = models.VisionTransformer(patch_size=patch_size, mlp_dim=self.mlp_width or 0, **shape, **options)
        else:
            module = models.get_model(self.name, weights=None, **options)
        if self.drop_path:
            from trainer.models.drop_path import add_drop_path

            add_drop_path(list(module.encoder.layers), self.drop_path)
        if self.train_last_blocks is not None:
            train_last_blocks(module, self.train_last_blocks, self.blocks)
        return module

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Split attention by heads, MLPs by hidden features, norms by tokens."""
        block = "encoder.layers.*"
        plan = {f"{block}.self_attention": "attention", f"{block}.mlp.0": "colwise", f"{block}.mlp.3": "rowwise"}
        return plan | dict.fromkeys((f"{block}.ln_1", f"{block}.ln_2"), "sequence_parallel")

    def merged(self) -> VisionTransformer:
        return replace(self, lora=LoRA())

    def pretrained(self) -> PretrainedWeights:
        """Return the tensors of ``weights`` by name; position embeddings are interpolated, the head may be new."""
        from trainer.weights.streaming import on_meta, tensors_in

        require(self.weights is not None, "there is nothing to stream: model.weights is null")
        file = self._weights_file()
        if file.suffix != ".safetensors":
            cause = f"model.weights={self.weights} is a pickle, which cannot be read in slices"
            raise RecipeError(f"{cause}: convert it with safetensors.torch.save_file, or use memory.init device")
        skeleton: Any = on_meta(self.skeleton)
        shapes, found = _shapes(skeleton.state_dict()), tensors_in(file)
        stored = {key: place for key, (place, _) in found.items()}
        known = {key: shape for key, (_, shape) in found.items()}
        if POSITIONS in stored and known[POSITIONS] != shapes[POSITIONS]:
            transform = partial(self._interpolate_positions, skeleton.patch_size)
            stored[POSITIONS], known[POSITIONS] = replace(stored[POSITIONS], transform=transform), shapes[POSITIONS]
        new = self._new_parameters(shapes, known)
        places = {key: stored[key] for key in stored if key not in new}
        return self.map_to_adapted(PretrainedWeights(places, new, _initialise_head), skeleton)

    def weight_files(self) -> Sequence[Path]:
        return () if self.weights is None else (self._weights_file(),)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the task's loss for ``pixel_values`` (n, 1 or 3, height, width) and ``labels``."""
        if self.drop_path and module.training:
            from trainer.models.drop_path import sample_drop_paths

            sample_drop_paths(module, batch["seeds"])
        pixels = batch["pixel_values"].expand(-1, 3, -1, -1)  # grey becomes three equal channels
        yield self.loss_of_batch(module(pixels), batch)

    def _read_weights(self) -> dict[str, Tensor]:
        from trainer.weights.files import read_weights

        return read_weights(self._weights_file())

    def _weights_file(self) -> Path:
        """Return the local file of ``weights``, or torchvision's in torch.hub's folder, downloaded if missing."""
        import torch
        from torchvision import models

        weights, sized = str(self.weights).removeprefix("file://"), self.name != "custom"
        if Path(weights).suffix or "/" in weights:
            return Path(weights)
        require(sized, f"model.weights={weights} is a torchvision name: set model.name to a torchvision size")
        known = models.get_model_weights(self.name)
        cause = f"model.weights={weights!r} is neither a file nor a name of torchvision's weights for {self.name}"
        require(weights in known.__members__, f"{cause}: use one of {', '.join(known.__members__)}")
        url = known[weights].url
        file = Path(torch.hub.get_dir(), "checkpoints", url.rsplit("/", 1)[1])  # torchvision looks there as well
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            fix = "download it elsewhere and give the file's path, or use --model.weights null"
            try:
                torch.hub.download_url_to_file(url, str(file), file.stem.rsplit("-", 1)[1], progress=False)
            except (OSError, RuntimeError) as error:
                raise RecipeError(f"model.weights={weights}: cannot download {url} ({error}): {fix}") from error
        return file

    def _interpolate_positions(self, patch_size: int, positions: Tensor) -> Tensor:
        """Return position embeddings for ``image_size``, shape (1, 1 + patches, width)."""
        from torchvision.models.vision_transformer import interpolate_embeddings

        return interpolate_embeddings(self.image_size or 0, patch_size, OrderedDict({POSITIONS: positions}))[POSITIONS]

    def _load_pretrained(self, module: nn.Module, state: dict[str, Tensor]) -> None:
        own = module.state_dict()
        if POSITIONS in state:
            state = state | {POSITIONS: self._interpolate_positions(cast(int, module.patch_size), state[POSITIONS])}
        new = self._new_parameters(_shapes(own), _shapes(state))
        module.load_state_dict(state | {key: own[key] for key in new})  # a new head stays zero

    def _new_parameters(self, own: Mapping[str, tuple], found: Mapping[str, tuple]) -> list[str]:
        """Return the head's parameters that the file lacks or has in another shape. All others must match."""
        differ = [key for key in own if found.get(key) != own[key]]
        new = [key for key in differ if key.startswith("heads.")]
        wrong = [key for key in differ if key not in new] + [key for key in found if key not in own]
        require(not wrong, f"model.weights={self.weights} do not fit this {self.name}: {format_names(wrong)} differ")
        return new


def _initialise_head(skeleton: Any) -> None:
    for parameter in skeleton.heads.parameters():
        parameter.zero_()  # as torchvision does
    reset_adapters(skeleton)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}
