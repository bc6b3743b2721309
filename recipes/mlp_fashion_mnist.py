"""The 784-512-512-10 network on Fashion-MNIST with plain SGD: 64 samples per step, in micro-batches of any size."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import FashionMNIST
from trainer.models import MLP

recipe = Recipe(
    model=MLP(),
    data=FashionMNIST(root="data"),
    optim=Optim("sgd", lr=1e-3),
    batch_size=64,
    epochs=20,
    memory=Memory(micro_batch_size=64),
)

if __name__ == "__main__":
    main(recipe)
