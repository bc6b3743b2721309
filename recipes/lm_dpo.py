"""DPO of a small byte-level Llama that learns to prefer code to its shuffled lines: no download."""

import json
import os
import random
from pathlib import Path
from sysconfig import get_path, get_python_version

from trainer import Memory, Optim, Recipe, main
from trainer.data import Preferences
from trainer.models import CausalLM

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "tie_word_embeddings": True, "initializer_range": 0.05}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer" / "lm_dpo"
LINES = 4  # of a prompt and of an answer


def pairs_from(folder: str) -> str:
    """Write pairs from a folder of Python's standard library, unless they exist: lines of code, or those shuffled."""
    path = CACHE / f"python{get_python_version()}-{folder or 'lib'}.jsonl"
    if not path.exists():
        draw, rows = random.Random(0), []
        for file in sorted(Path(get_path("stdlib"), folder).glob("*.py")):
            text = [line for line in file.read_text("utf-8", errors="replace").splitlines(True) if line.strip()]
            for start in range(0, len(text) - 2 * LINES, 24 * LINES):
                prompt, chosen = text[start : start + LINES], text[start + LINES : start + 2 * LINES]
                texts = ("".join(lines) for lines in (prompt, chosen, draw.sample(chosen, LINES)))
                row = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
                rows += [json.dumps(row) + "\n"] if row["chosen"] != row["rejected"] else []
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text("".join(rows))
        part.replace(path)  # complete, even if several processes write it
    return str(path)


recipe = Recipe(
    model=CausalLM("llama", tokenizer="bytes", config=SIZES, loss="dpo"),
    data=Preferences(
        train_files=pairs_from(""), val_files=pairs_from("unittest"), max_length=512, chat_template="plain"
    ),
    optim=Optim("adamw", lr=3e-4, schedule="cosine", warmup_steps=20, clip_norm=1.0),
    batch_size=16,
    max_steps=200,
    memory=Memory(micro_batch_size=16, micro_batch_tokens=4096),
)

if __name__ == "__main__":
    main(recipe)
