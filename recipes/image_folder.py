"""ViT-B/16 on your own images, one folder per class: --data.root photos, which contains train and test."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import ImageFolder
from trainer.models import ImageClassifier

recipe = Recipe(
    model=ImageClassifier("google/vit-base-patch16-224-in21k", weights="google/vit-base-patch16-224-in21k"),
    data=ImageFolder(root="photos"),
    optim=Optim("adamw", lr=5e-5, weight_decay=0.05, schedule="cosine", clip_norm=1.0),
    batch_size=32,
    epochs=5,
    memory=Memory(micro_batch_size=8, precision="auto"),
)

if __name__ == "__main__":
    main(recipe)
