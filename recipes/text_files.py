"""DistilBERT on your own texts with one label each: --data.train_file a.csv --data.test_file b.csv (or .jsonl)."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import TextFiles
from trainer.models import TextClassifier

recipe = Recipe(
    model=TextClassifier("distilbert/distilbert-base-uncased", weights="distilbert/distilbert-base-uncased"),
    data=TextFiles(train_file="train.csv", max_length=256),
    optim=Optim("adamw", lr=5e-5, schedule="linear", clip_norm=1.0),
    batch_size=16,
    epochs=3,
    memory=Memory(micro_batch_size=8, precision="auto"),
)

if __name__ == "__main__":
    main(recipe)
