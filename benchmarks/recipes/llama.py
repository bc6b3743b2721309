"""A decoder like Llama as a classifier, with random weights and texts; needs --model.name and --model.tokenizer FOLDER.

``--model.name`` is a folder with the configuration, as ``make_llama`` of ``synthetic`` writes it.
"""

from synthetic import RandomTexts

from trainer import Memory, Optim, Recipe, main
from trainer.models import TextClassifier

recipe = Recipe(
    model=TextClassifier("llama"),
    data=RandomTexts(tokens=512),
    optim=Optim("adamw", lr=5e-5),
    batch_size=8,
    memory=Memory(micro_batch_size=8),
)

if __name__ == "__main__":
    main(recipe)
