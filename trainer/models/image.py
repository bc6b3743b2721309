"""Any image classifier of transformers, and through it of timm."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.contract import DrawnInputs
from trainer.errors import require, require_choice, require_package
from trainer.models.base import ImageTask, Objective
from trainer.models.hub import HubClassifier, is_local
from trainer.system.files import read_json_object
from trainer.values import ImageInput, Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

PROCESSOR_FILE = "preprocessor_config.json"
MAX_CONFIG_BYTES = 1_000_000
TIMM = "timm/"


@dataclass
class ImageClassifier(HubClassifier, DrawnInputs):
    """Any ``AutoModelForImageClassification`` of transformers: ViT, DINOv2, Swin, ConvNeXt, ResNet; or any of timm.

    The loss is computed here from the logits, never by the model itself.

    Args:
        name: the source of the configuration: a hub id, a local folder, or a model type such as vit; timm/NAME is
            a model of timm, with random weights if weights are null.
        config: entries of the configuration to override, such as {num_hidden_layers: 2}; for timm {model_args: {...}}
            are the arguments of timm.create_model.
        image_size: height and width of the images in pixels; null takes the dataset's.
    """

    name: str = "vit"
    num_classes: int | None = None
    image_size: int | None = None
    class_names: list[str] | None = None
    task: ImageTask = "single_label"
    loss: Objective = field(default_factory=Objective)

    auto = "AutoModelForImageClassification"
    mixes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.task", self.task, ImageTask)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the task's loss for ``pixel_values`` (n, 1 or 3, height, width) and ``labels``."""
        pixels = batch["pixel_values"]
        pixels = pixels.expand(-1, max(3, pixels.shape[1]), -1, -1)  # grey becomes three equal channels
        yield self.loss_of_batch(module(pixel_values=pixels).logits, batch)

    def image_input(self) -> ImageInput:
        """Return the input format in the image processor or, for timm, in the configuration."""
        config: Any = self._configuration()
        known = getattr(config, "pretrained_cfg", None) or {}
        if known.get("input_size"):
            return ImageInput(known["input_size"][-1], *(tuple(known.get(key) or ()) for key in ("mean", "std")))
        found = read_json_object(path, MAX_CONFIG_BYTES) if (path := self._processor()) is not None else {}
        cut = found.get("do_center_crop") and found.get("crop_size")
        side = cut or found.get("size") or getattr(config, "image_size", None)
        side = side.get("height") or side.get("shortest_edge") if isinstance(side, Mapping) else side
        side = side if isinstance(side, int) else None
        return ImageInput(side, *(tuple(found.get(key) or ()) for key in ("image_mean", "image_std")))

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``AutoModelForImageClassification.from_pretrained`` loads, with the image processor."""
        super().save(module, folder, state)
        if (path := self._processor()) is not None:
            shutil.copyfile(path, folder / PROCESSOR_FILE)

    def _processor(self) -> Path | None:
        from transformers.utils import cached_file

        if self.weights is None and self._type() is not None:  # a model type has no files
            return None
        key, source = ("weights", self.weights) if self.weights else ("name", self.name)
        missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        found = self._load(key, source, cached_file, filename=PROCESSOR_FILE, **missing)
        return None if found is None else Path(found)

    def _type(self) -> str | None:
        """Return the model type; transformers wraps every timm model as ``timm_wrapper``."""
        timm = self.name.startswith(TIMM) and self.weights is None and not is_local(self.name)
        return "timm_wrapper" if timm else super()._type()

    def _config_from_data(self) -> dict[str, Any]:
        from transformers import AutoConfig

        kind = self._type() or ""
        if kind != "timm_wrapper":
            sized = self.image_size is not None and hasattr(AutoConfig.for_model(kind), "image_size")
            return {"image_size": self.image_size} if sized else {}
        require_package(f"model.name={self.name}", "timm", "timm")
        import timm

        name = self.name.removeprefix(TIMM)
        # Names begin with the architecture, so the longest common beginning says more than the number of equal letters.
        parts = (name[:end] for end in range(len(name), 2, -1))
        similar = next((found for part in parts if (found := timm.list_models(f"{part}*"))), [])
        hint = f"; did you mean {TIMM}{min(similar, key=len)}?" if similar else "; timm.list_models() lists them"
        require(timm.is_model(name), f"model.name={self.name!r}: timm {timm.__version__} has no such model{hint}")
        known = timm.get_pretrained_cfg(name)
        seen = {key: list(getattr(known, key)) for key in ("input_size", "mean", "std")} if known else {}
        size = self.image_size
        resized = known and known.fixed_input_size and size is not None and size != known.input_size[-1]
        return {"architecture": name, "pretrained_cfg": seen, **({"model_args": {"img_size": size}} if resized else {})}

    def _configuration(self) -> Any:
        config = super()._configuration()
        if config.model_type == "timm_wrapper":
            require_package(f"model.name={self.name}", "timm", "timm")
        return config

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        """Interpolate position embeddings if the images have another size than the configuration."""
        module = super()._finalize_module(module)
        for name, parameter in module.named_parameters():
            if name.endswith("mask_token"):  # used in pretraining only: it gets no gradient, and DDP would wait for it
                parameter.requires_grad_(False)
        own: Any = getattr(module.config, "image_size", None)
        differs = self.image_size is not None and own not in (None, self.image_size, [self.image_size] * 2)
        if differs and "interpolate_pos_encoding" in inspect.signature(module.forward).parameters:
            module.forward = partial(module.forward, interpolate_pos_encoding=True)
        return module
