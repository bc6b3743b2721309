"""Embeddings of texts from pairs that belong together: --data.train_file pairs.csv, columns anchor and positive."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import TextFiles
from trainer.models import SentenceEmbedder

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}

recipe = Recipe(
    model=SentenceEmbedder("bert", tokenizer="bytes", config=SIZES),
    data=TextFiles(
        train_file="pairs.csv", text_column="anchor", pair_column="positive", max_length=128, val_fraction=0.1
    ),
    optim=Optim("adamw", lr=5e-4, schedule="linear", warmup_ratio=0.1, clip_norm=1.0),
    batch_size=128,
    epochs=3,
    memory=Memory(micro_batch_size=16),
)

if __name__ == "__main__":
    main(recipe)
