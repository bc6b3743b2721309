"""A Vision Transformer of 25 million parameters at 224 pixels, batch 16, for machines without a GPU."""

from synthetic import RandomImages

from trainer import Memory, Optim, Recipe, main
from trainer.models import VisionTransformer

recipe = Recipe(
    model=VisionTransformer("custom", patch_size=16, layers=8, heads=8, width=512, mlp_width=2048),
    data=RandomImages(size=256),
    optim=Optim("adamw", lr=1e-4),
    batch_size=16,
    memory=Memory(micro_batch_size=16),
)

if __name__ == "__main__":
    main(recipe)
