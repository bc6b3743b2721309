"""For kills.py: a tiny Llama on packed documents, with a moving average, the best weights and patience.

With ``UPDATE_AHEAD`` in the environment, offloaded weights are updated beside the last backward, as with a GPU.
"""

import os
import time
from dataclasses import dataclass

from trainer import Checkpoint, Memory, Optim, Recipe, Run, main
from trainer.data import Documents
from trainer.memory import eager_update
from trainer.models import CausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

if "UPDATE_AHEAD" in os.environ:
    eager_update.CHUNK_ELEMENTS = 1

    def open_on_cpu(ahead: eager_update.EagerOptimizerUpdate) -> None:
        """Update ahead although the host computes, where no core is idle for it."""
        ahead.is_open = ahead.has_stepped and ahead.was_right

    eager_update.EagerOptimizerUpdate.begin_last_backward = open_on_cpu  # type: ignore[method-assign]


@dataclass
class Slow(CausalLM):
    """A model that trains slowly, so that many kills come during training."""

    def losses(self, module, batch):
        time.sleep(0.04 if module.training else 0)
        yield from super().losses(module, batch)


recipe = Recipe(
    model=Slow("llama", tokenizer="bytes", config={**SIZES, "num_key_value_heads": 2}, padding_free=True, dropout=0.1),
    data=Documents("texts/train/*.txt", "texts/val/*.txt", max_length=32, cache_dir="cache"),
    optim=Optim("adamw", lr=0.05, clip_norm=1.0, schedule="cosine", ema=0.8),
    batch_size=8,
    max_steps=24,
    epochs=100,
    eval_every=2,
    memory=Memory(micro_batch_size=4),
    checkpoint=Checkpoint(every=3),
    run=Run(predict=False, accelerator="cpu", best="val_loss", patience=4),
)

if __name__ == "__main__":
    main(recipe)
