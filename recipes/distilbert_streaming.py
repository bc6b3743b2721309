"""DistilBERT on labelled texts in Parquet files of any number and size, which are streamed and tokenised on the fly."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import StreamedText
from trainer.models import TextClassifier

recipe = Recipe(
    model=TextClassifier("distilbert/distilbert-base-uncased", weights="distilbert/distilbert-base-uncased"),
    data=StreamedText(train_files="data/train", test_files="data/test", shuffle_buffer=10_000, workers=2),
    optim=Optim("adamw", lr=5e-5, schedule="linear", clip_norm=1.0),
    batch_size=32,
    epochs=1,
    memory=Memory(micro_batch_size=8, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
