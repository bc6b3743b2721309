"""BigBird at 4,096 tokens, batch 12, with random weights and texts; needs --model.tokenizer FOLDER."""

from synthetic import RandomTexts

from trainer import Memory, Optim, Recipe, main
from trainer.models import BigBird

recipe = Recipe(
    model=BigBird("big_bird", dropout=0.0),
    data=RandomTexts(tokens=4096),
    optim=Optim("adamw", lr=3e-5),
    batch_size=12,
    memory=Memory(micro_batch_size=12),
)

if __name__ == "__main__":
    main(recipe)
