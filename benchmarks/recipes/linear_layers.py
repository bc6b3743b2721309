"""Linear layers on noise: every kernel of a step gives the same bits each time, so that a race of streams shows."""

from typing import Any

from synthetic import RandomImages

from trainer import Memory, Optim, Recipe, main
from trainer.models import MLP


class Layers(MLP):
    """Layers whose weights can be streamed: each is a block."""

    @property
    def blocks(self) -> Any:
        """The class of a layer."""
        from torch import nn

        return (nn.Linear,)


recipe = Recipe(
    model=Layers(hidden=[2048] * 8, channels=3),
    data=RandomImages(image_size=32, size=16_384),
    optim=Optim("adamw", lr=1e-4),
    batch_size=1024,
    memory=Memory(micro_batch_size=256, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
