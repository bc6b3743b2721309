"""ViT-L/16 at 224 pixels, batch 64, with random weights and images."""

from synthetic import RandomImages

from trainer import Memory, Optim, Recipe, main
from trainer.models import VisionTransformer

recipe = Recipe(
    model=VisionTransformer("vit_l_16"),
    data=RandomImages(),
    optim=Optim("adamw", lr=3e-4),
    batch_size=64,
    memory=Memory(micro_batch_size=64),
)

if __name__ == "__main__":
    main(recipe)
