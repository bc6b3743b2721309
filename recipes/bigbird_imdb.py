"""BigBird on whole IMDb reviews of up to 4,096 tokens, 12 reviews per step."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import IMDb
from trainer.models import BigBird

recipe = Recipe(
    model=BigBird("google/bigbird-roberta-base", weights="google/bigbird-roberta-base"),
    data=IMDb(max_length=4096),
    optim=Optim("adamw", lr=3e-5, schedule="linear", clip_norm=1.0),
    batch_size=12,
    epochs=1,
    memory=Memory(micro_batch_size=1, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
