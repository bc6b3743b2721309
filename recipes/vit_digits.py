"""A small Vision Transformer on scikit-learn's handwritten digits: real images, no download, a minute on a laptop."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import Digits
from trainer.models import VisionTransformer

recipe = Recipe(
    model=VisionTransformer("custom", patch_size=4, layers=4, heads=4, width=64, mlp_width=256, dropout=0.2),
    data=Digits(),
    optim=Optim("adamw", lr=1.5e-3, weight_decay=0.05, schedule="cosine", warmup_steps=50, clip_norm=1.0),
    batch_size=64,
    epochs=60,
    memory=Memory(micro_batch_size=16),
)

if __name__ == "__main__":
    main(recipe)
