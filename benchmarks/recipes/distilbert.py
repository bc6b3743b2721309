"""DistilBERT at 512 tokens, batch 12, with random weights and texts; needs --model.tokenizer FOLDER."""

from synthetic import RandomTexts

from trainer import Memory, Optim, Recipe, main
from trainer.models import TextClassifier

recipe = Recipe(
    model=TextClassifier("distilbert", dropout=0.0),
    data=RandomTexts(tokens=512),
    optim=Optim("adamw", lr=5e-5),
    batch_size=12,
    memory=Memory(micro_batch_size=12),
)

if __name__ == "__main__":
    main(recipe)
