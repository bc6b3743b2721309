"""A small byte-level Llama trained on the sources of Python's standard library: no download."""

from sysconfig import get_path

from trainer import Memory, Optim, Recipe, Run, main
from trainer.data import Documents
from trainer.models import CausalLM

SOURCES = get_path("stdlib")
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "tie_word_embeddings": True, "initializer_range": 0.05}

recipe = Recipe(
    model=CausalLM("llama", tokenizer="bytes", config=SIZES),
    data=Documents(train_files=f"{SOURCES}/*.py", val_files=f"{SOURCES}/unittest/*.py", max_length=256),
    optim=Optim(
        "adamw", lr=3e-3, betas=[0.9, 0.99], weight_decay=0.1, schedule="cosine", warmup_steps=100, clip_norm=1.0
    ),
    batch_size=4,
    max_steps=2000,
    memory=Memory(micro_batch_size=4),
    run=Run(metrics=["bits_per_byte"]),
)

if __name__ == "__main__":
    main(recipe)
