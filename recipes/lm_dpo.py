"""DPO of a small byte-level Llama that learns to prefer code to its shuffled lines: no download."""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path, get_python_version

from trainer import Memory, Optim, Recipe, main
from trainer.data import Preferences
from trainer.models import CausalLM

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "tie_word_embeddings": True, "initializer_range": 0.05}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer" / "lm_dpo"
FOLDERS = {str(CACHE / f"python{get_python_version()}-{name or 'lib'}.jsonl"): name for name in ("", "unittest")}
LINES = 4  # of a prompt and of an answer


@dataclass
class CodePairs(Preferences):
    """Lines of Python's standard library, then the next lines, or those shuffled. The files are written if missing."""

    def require_files(self) -> None:
        for path in {self.train_files, self.val_files} & FOLDERS.keys():
            if not Path(path).exists():
                write_pairs(Path(path), FOLDERS[path])
        super().require_files()


def write_pairs(path: Path, folder: str) -> None:
    """Write pairs from the files of a ``folder`` of Python's standard library."""
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


train_files, val_files = FOLDERS
recipe = Recipe(
    model=CausalLM("llama", tokenizer="bytes", config=SIZES, loss="dpo"),
    data=CodePairs(train_files=train_files, val_files=val_files, max_length=512, chat_template="plain"),
    optim=Optim("adamw", lr=3e-4, schedule="cosine", warmup_steps=20, clip_norm=1.0),
    batch_size=16,
    max_steps=200,
    memory=Memory(micro_batch_size=16, micro_batch_tokens=4096),
)

if __name__ == "__main__":
    main(recipe)
