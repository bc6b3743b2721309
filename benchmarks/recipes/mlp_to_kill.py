"""For chaos_peers.py: a network with dropout whose checkpoint, of 53 MB, takes long enough to be killed in."""

from trainer import Checkpoint, Memory, Optim, Recipe, Run, main
from trainer.data import Digits
from trainer.models import MLP

recipe = Recipe(
    model=MLP(hidden=[2048, 2048], dropout=0.1),
    data=Digits(),
    optim=Optim("adamw", lr=1e-3),
    batch_size=20,
    max_steps=18,
    memory=Memory(micro_batch_size=20),
    checkpoint=Checkpoint(every=3),
    run=Run(evaluate=False, predict=False, accelerator="cpu"),
)

if __name__ == "__main__":
    main(recipe)
