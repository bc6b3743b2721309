"""ViT-L/16 at 224 pixels, batch 64, with random weights and images.

The head is not zero, as torchvision's is: with such a head no gradient would reach the other weights in the first step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synthetic import RandomImages

from trainer import Memory, Optim, Recipe, main
from trainer.models import VisionTransformer


class Measured(VisionTransformer):
    """A ViT with a random head, of which no weights are written at the end: they are of no interest."""

    own_format = True

    def skeleton(self) -> Any:
        """With values in the head."""
        from torch import nn

        module: Any = super().skeleton()
        nn.init.normal_(module.heads.head.weight, std=0.02)
        return module

    def save(self, module: Any, folder: Path, state: Mapping[str, Any]) -> None:
        """Writes that nothing was."""
        (folder / "README").write_text("The weights of this run were not kept.\n")


recipe = Recipe(
    model=Measured("vit_l_16"),
    data=RandomImages(),
    optim=Optim("adamw", lr=3e-4),
    batch_size=64,
    memory=Memory(micro_batch_size=64),
)

if __name__ == "__main__":
    main(recipe)
