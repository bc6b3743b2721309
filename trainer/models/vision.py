"""torchvision's Vision Transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.contract import Loss, Model
from trainer.errors import RecipeError, require, require_choice, require_positive
from trainer.models.common import classification_loss, require_filled, train_last_blocks
from trainer.models.lora import LoRA, add_adapters, merged_state

if TYPE_CHECKING:
    from torch import Tensor, nn

Name = Literal["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14", "custom"]
SHAPE_FIELDS = ("patch_size", "layers", "heads", "width", "mlp_width")
PRETRAINED_SIZE = 224
# Not the attention: torchvision keeps it in one packed weight, and peft's adapter for that replaces the parameter in
# every forward, which neither DDP, FSDP nor an optimizer would follow.
ADAPTED = ("mlp.0", "mlp.3")


@dataclass
class VisionTransformer(Model):
    """torchvision's ViT (Dosovitskiy et al. 2021): one of its five sizes, or a shape of your own.

    Args:
        name: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14, or custom with the five fields of the shape.
        weights: a name among torchvision's weights for the model (DEFAULT, IMAGENET1K_V1, ...), a local .safetensors or
            .pth file, or null for random ones. The head is kept if its shape fits, and new otherwise; position
            embeddings are interpolated to another image size.
        num_classes: null takes the dataset's.
        image_size: height and width of the images in pixels; null takes the dataset's.
        class_names: null takes the dataset's; saved with the model.
        patch_size: of a custom shape, pixels.
        layers: of a custom shape, encoder blocks.
        heads: of a custom shape, attention heads.
        width: of a custom shape, features of a token.
        mlp_width: of a custom shape, hidden features of a block's MLP.
        dropout: after embeddings, attention and MLP.
        attention_dropout: on the attention weights.
        train_last_blocks: freeze all but the last n blocks and the head; null trains everything.
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
    train_last_blocks: int | None = None
    lora: LoRA = field(default_factory=LoRA)

    def __post_init__(self) -> None:
        self.lora.require_alone(self.train_last_blocks)
        require_choice("model.name", self.name, Name)
        for key in ("dropout", "attention_dropout"):
            require(0 <= getattr(self, key) < 1, f"model.{key}={getattr(self, key)} must be in [0, 1)")
        given = [key for key in SHAPE_FIELDS if getattr(self, key) is not None]
        if self.name == "custom":
            missing = [f"model.{key}" for key in SHAPE_FIELDS if key not in given]
            require(not missing, f"model.name=custom needs {', '.join(missing)}")
            for key in SHAPE_FIELDS:
                require_positive(f"model.{key}", getattr(self, key))
            require(
                self._shape()["width"] % self._shape()["heads"] == 0,
                f"model.width={self.width} must be a multiple of model.heads={self.heads}",
            )
        else:
            require(
                not given,
                f"model.{given[0] if given else ''} is fixed by model.name={self.name}: use model.name custom",
            )

    @property
    def blocks(self) -> Sequence[type]:  # type: ignore[override]
        """torchvision's encoder blocks."""
        from torchvision.models.vision_transformer import EncoderBlock

        return (EncoderBlock,)

    @property
    def lossy(self) -> Sequence[str]:  # type: ignore[override]
        """That adapters train, if they do."""
        return self.lora.describe()

    def prepare(self) -> None:
        """Download torchvision's weights, or check that the local file is there."""
        if self.weights is not None:
            self._read_weights()

    def build(self) -> nn.Module:
        """The module; its forward takes pixels (n, 3, height, width) and returns logits (n, classes)."""
        require_filled("VisionTransformer", num_classes=self.num_classes, image_size=self.image_size)
        module = self._random()
        if self.weights is not None:
            self._load_pretrained(module, self._read_weights())
        if self.train_last_blocks is not None:
            train_last_blocks(module, self.train_last_blocks, self.blocks)
        add_adapters(module, self.lora, self.blocks, ADAPTED)
        return module

    def merged(self) -> VisionTransformer:
        """This model without adapters, as it is saved."""
        return replace(self, lora=LoRA())

    def merged_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``state`` with the adapters merged into the weights."""
        return merged_state(module, state) if self.lora.rank else dict(state)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Cross entropy; the batch has ``pixel_values`` (n, 1 or 3, height, width) and ``labels`` (n,)."""
        pixels = batch["pixel_values"].expand(-1, 3, -1, -1)  # grey becomes three equal channels
        yield classification_loss(module(pixels), batch["labels"])

    def _shape(self) -> dict[str, int]:
        return {key: getattr(self, key) or 0 for key in SHAPE_FIELDS}

    def _random(self) -> nn.Module:
        from torchvision import models

        options: dict[str, Any] = {
            "image_size": self.image_size,
            "num_classes": self.num_classes,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
        }
        if self.name == "custom":
            shape = self._shape()
            self._require_whole_patches(shape["patch_size"])
            return models.VisionTransformer(
                patch_size=shape["patch_size"],
                num_layers=shape["layers"],
                num_heads=shape["heads"],
                hidden_dim=shape["width"],
                mlp_dim=shape["mlp_width"],
                **options,
            )
        self._require_whole_patches(int(self.name.rsplit("_", 1)[1]))
        return models.get_model(self.name, weights=None, **options)

    def _require_whole_patches(self, patch_size: int) -> None:
        size = self.image_size or 0
        nearest = max(1, round(size / patch_size)) * patch_size
        require(
            size % patch_size == 0,
            f"image_size={size} is not a multiple of the patch size {patch_size} of {self.name}: "
            f"use --data.image_size {nearest}",
        )

    def _read_weights(self) -> dict[str, Tensor]:
        from torchvision import models

        from trainer.weights import read_weights

        weights = str(self.weights).removeprefix("file://")
        if Path(weights).suffix or "/" in weights:
            return read_weights(Path(weights))
        if self.name == "custom":
            raise RecipeError(
                f"model.weights={weights} is a torchvision name, which needs model.name of a torchvision size"
            )
        known = models.get_model_weights(self.name)
        if weights not in known.__members__:
            names = ", ".join(known.__members__)
            raise RecipeError(
                f"model.weights={weights!r} is neither a file nor one of torchvision's for {self.name}: {names}"
            )
        try:
            return dict(known[weights].get_state_dict(progress=False, check_hash=True))
        except OSError as error:
            raise RecipeError(
                f"model.weights={weights}: cannot download {known[weights].url} ({error}): "
                "download it elsewhere and give the file's path, or use --model.weights null"
            ) from error

    def _load_pretrained(self, module: nn.Module, state: dict[str, Tensor]) -> None:
        from torchvision.models.vision_transformer import interpolate_embeddings

        state = dict(state)
        own = module.state_dict()
        patch_size = module.patch_size
        assert isinstance(patch_size, int)
        assert self.image_size is not None
        if "encoder.pos_embedding" in state:
            state = dict(interpolate_embeddings(self.image_size, patch_size, state))
        for key in [key for key in own if key.startswith("heads.")]:
            if key not in state or state[key].shape != own[key].shape:
                state[key] = own[key]
        wrong = [key for key in own if key not in state or state[key].shape != own[key].shape]
        wrong += [key for key in state if key not in own]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise RecipeError(
                f"model.weights={self.weights} are not those of this {self.name}: {', '.join(wrong[:3])}{more} differ"
            )
        module.load_state_dict(state)
