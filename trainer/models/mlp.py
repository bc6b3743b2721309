"""A multi-layer perceptron for images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.contract import DrawnInputs, Plannable
from trainer.errors import require, require_choice
from trainer.models.base import ImageTask, Objective, SupervisedModel, require_filled
from trainer.values import Loss

if TYPE_CHECKING:
    from torch import nn


@dataclass
class MLP(SupervisedModel, DrawnInputs, Plannable):
    """Linear layers with ReLU on the pixels: 784-512-512-10 on Fashion-MNIST.

    Args:
        hidden: widths of the hidden layers.
        image_size: height and width of the images in pixels; null takes the dataset's.
        channels: channels of the images; null takes the dataset's.
        dropout: dropout rate after every hidden layer.
    """

    hidden: list[int] = field(default_factory=lambda: [512, 512])
    image_size: int | None = None
    channels: int | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    dropout: float = 0.0
    task: ImageTask = "single_label"
    loss: Objective = field(default_factory=Objective)

    mixes = True

    def __post_init__(self) -> None:
        require_choice("model.task", self.task, ImageTask)
        self.loss.require_fit(self.task)
        require(all(width > 0 for width in self.hidden), f"model.hidden={self.hidden} must be positive widths")
        require(0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")

    def build(self) -> nn.Module:
        """Build linear layers from ``channels × image_size²`` inputs to ``num_classes`` logits."""
        from torch import nn

        sizes: dict[str, Any] = {key: getattr(self, key) for key in ("image_size", "channels", "num_classes")}
        require_filled("MLP", **sizes)
        widths = [sizes["channels"] * sizes["image_size"] ** 2, *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()] + [nn.Dropout(self.dropout)] * (self.dropout > 0)
        return nn.Sequential(*layers, nn.Linear(widths[-1], sizes["num_classes"]))

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Split every first layer of a pair and sum in the second; a last layer without a partner is replicated."""
        from torch import nn

        layers = [name for name, part in module.named_children() if isinstance(part, nn.Linear)]
        pairs = zip(layers[::2], layers[1::2], strict=False)
        return {name: style for pair in pairs for name, style in zip(pair, ("colwise", "rowwise"), strict=True)}

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the task's loss for ``pixel_values`` (n, channels, height, width) and ``labels``."""
        yield self.loss_of_batch(module(batch["pixel_values"]), batch)
