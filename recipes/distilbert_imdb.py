"""DistilBERT on IMDb reviews of up to 512 tokens, 12 reviews per step."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import IMDb
from trainer.models import TextClassifier

recipe = Recipe(
    model=TextClassifier("distilbert/distilbert-base-uncased", weights="distilbert/distilbert-base-uncased"),
    data=IMDb(max_length=512),
    optim=Optim("adamw", lr=5e-5, schedule="linear", clip_norm=1.0),
    batch_size=12,
    epochs=3,
    memory=Memory(micro_batch_size=4, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
