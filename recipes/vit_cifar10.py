"""ViT-L/16 on CIFAR-10 at 224 pixels, batch 64, as in the published memory figures."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import CIFAR10
from trainer.models import VisionTransformer

recipe = Recipe(
    model=VisionTransformer("vit_l_16", weights="DEFAULT"),
    data=CIFAR10(root="data", image_size=224),
    optim=Optim("adamw", lr=5e-5, schedule="cosine"),
    batch_size=64,
    epochs=1,
    memory=Memory(micro_batch_size=4, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
