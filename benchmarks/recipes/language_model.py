"""A language model with random weights and texts; needs --model.name, of whose weights nothing is read.

Drawing eight billion weights takes a CPU minutes, and memory and speed do not depend on them: a few are drawn, and
repeated.
"""

from dataclasses import dataclass
from typing import Any

from synthetic import RandomTokens

from trainer import Memory, Optim, Recipe, main
from trainer.models import CausalLM

DRAWN = 2**20


@dataclass
class Repeated(CausalLM):
    """A language model whose matrices are the same numbers over and over."""

    def skeleton(self) -> Any:
        """The module: norms of ones, no biases, matrices of a few numbers."""
        import torch
        from transformers.initialization import no_init_weights

        with no_init_weights():
            module = super().skeleton()
            module.tie_weights()  # which else comes with drawing
        drawn = 0.02 * torch.randn(DRAWN, dtype=torch.float32, device="cpu")
        for name, weight in module.named_parameters():
            if weight.is_meta:
                continue
            if weight.ndim < 2:
                weight.detach().fill_(float(not name.endswith("bias")))
            else:
                for piece in weight.detach().view(-1).split(DRAWN):
                    piece.copy_(drawn[: len(piece)])
        return module


recipe = Recipe(
    model=Repeated("llama", tokenizer="none"),
    data=RandomTokens(tokens=4096),
    optim=Optim("adamw", lr=1e-5),
    batch_size=1,
    memory=Memory(micro_batch_size=1, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
