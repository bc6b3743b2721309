"""What is the best step worth, and what does patience save? Digits and real reviews, trained until they overfit.

The same training, once keeping the last weights and once each figure's best on a tenth held out; all are judged by the
test set, which chose nothing. With patience a run ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Record, sample_data, table

SMALL = "{n_layers: 2, dim: 128, hidden_dim: 512, n_heads: 4}"
DIGITS = {"epochs": 60, "eval_every": 60, "data.val_fraction": 0.1}
REVIEWS = {
    "epochs": 6,
    "eval_every": 25,
    "data.val_fraction": 0.1,
    "data.max_length": 128,
    "model.name": "distilbert",
    "model.weights": "null",
    "model.config": SMALL,
    "batch_size": 32,
    "memory.micro_batch_size": 8,
    "memory.precision": "32-true",
    "optim.lr": 1e-3,
    "optim.warmup_steps": 50,
}
WAYS: dict[str, dict[str, Any]] = {
    "last": {"run.best": "last"},
    "best accuracy": {"run.best": "val_accuracy"},
    "least loss": {"run.best": "val_loss"},
    "best accuracy, patience 5": {"run.best": "val_accuracy", "run.patience": 5},
}


def train(recipe: str, flags: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """``trainer fit``, and its summary."""
    words = [f"--{name}={value}" for name, value in (flags | {"run.dir": run_dir, "run.predict": "false"}).items()]
    command = [sys.executable, "-m", "trainer", "fit", recipe, *words]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads((run_dir / "summary.json").read_text())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["digits", "reviews"])
    arguments = parser.parse_args()
    data = sample_data()
    reviews = {"data.root": data / "imdb", "model.tokenizer": data / "tokenizers" / "bert-base-uncased"}
    cases = {"digits": ("vit_digits", DIGITS), "reviews": ("distilbert_imdb", REVIEWS | reviews)}
    settings = {"digits": DIGITS, "reviews": REVIEWS, "ways": WAYS}
    record, found = Record("best_model", settings), dict[str, dict[str, Any]]()
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, flags) in cases.items():
            if arguments.only not in (None, name):
                continue
            found[name] = {}
            for way, chosen in WAYS.items():
                summary = train(recipe, flags | chosen, Path(folder, f"{name} {way}"))
                kept = {key: summary[key] for key in ("steps", "best", "metrics", "seconds")}
                found[name][way] = kept
                test, step = kept["metrics"]["test"], (kept["best"] or {"step": kept["steps"]})["step"]
                accuracy, loss = f"{100 * test['accuracy']:.2f} %", f"{test['loss']:.4f}"
                rows.append((name, way, f"{step} of {kept['steps']}", accuracy, loss, f"{kept['seconds']:.0f} s"))
                record.write(runs=found)
    record.write(complete=True)
    print(table(("data", "model/ holds", "of step", "test accuracy", "test loss", "training"), rows))


if __name__ == "__main__":
    main()
