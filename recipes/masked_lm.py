"""A small byte-level ModernBERT trained on the sources of Python's standard library with masked bytes: no download."""

from sysconfig import get_path

from trainer import Memory, Optim, Recipe, main
from trainer.data import Documents
from trainer.models import MaskedLM

SOURCES = get_path("stdlib")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 512}

recipe = Recipe(
    model=MaskedLM("modernbert", tokenizer="bytes", config=SIZES),
    data=Documents(train_files=f"{SOURCES}/*.py", val_files=f"{SOURCES}/unittest/*.py", max_length=256),
    optim=Optim("adamw", lr=3e-3, weight_decay=0.1, schedule="cosine", warmup_steps=100, clip_norm=1.0),
    batch_size=8,
    max_steps=2000,
    memory=Memory(micro_batch_size=8),
)

if __name__ == "__main__":
    main(recipe)
