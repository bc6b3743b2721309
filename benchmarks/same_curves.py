"""Does this tree train as another commit does? Loss curves and final weights, bit for bit: the rule of a refactoring.

Each case is trained by both, in processes of their own; where it says "killed", in the second save of a checkpoint,
and resumed. The idea is torchtitan's (scripts/loss_compare.py).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Record, table

HERE = Path(__file__).parents[1]
FAILPOINTS = Path(__file__).parent / "chaos" / "failpoints.py"
STEPS = 8
TIMES = ("samples_per_second", "tokens_per_second", "data_share", "mfu")
"""Columns of metrics.csv that no two runs have in common."""

TEXT = ["--model.weights", "null", "--memory.precision", "32-true", "--data.max_length", "64", "--batch_size", "12"]
LESS = ["--memory.activation_checkpointing", "full"]
LEAST = [*LESS, "--memory.cpu_offload", "optimizer"]
WORLDS = {
    "single, checkpointing, optimizer offload, killed": [*LEAST],
    "ddp × 2, checkpointing": ["--run.devices", "2", "--memory.strategy", "ddp", *LESS],
    "fsdp × 2, checkpointing, optimizer offload, killed": ["--run.devices", "2", "--memory.strategy", "fsdp", *LEAST],
}


def models(data: Path) -> dict[str, list[str]]:
    """Recipe and flags by model; the text models are small ones with the real vocabularies, on real reviews."""
    imdb = ["--data.root", str(data / "imdb"), *TEXT]
    return {
        "ViT, digits": ["vit_digits"],
        "DistilBERT, IMDb": [
            *("distilbert_imdb", "--model.name", "distilbert", *imdb),
            *("--model.tokenizer", str(data / "tokenizers" / "bert-base-uncased")),
            *("--model.config", "{n_layers: 2, dim: 32, hidden_dim: 64, n_heads: 2}"),
        ],
        "BigBird, IMDb": [
            *("bigbird_imdb", "--model.name", "big_bird", *imdb),
            *("--model.tokenizer", str(data / "tokenizers" / "bigbird-roberta-base")),
            *("--model.config.num_hidden_layers", "2", "--model.config.hidden_size", "32"),
            *("--model.config.intermediate_size", "64", "--model.config.num_attention_heads", "2"),
        ],
    }


def train(tree: Path, run_dir: Path, flags: list[str], cache: Path, killed: bool) -> dict[str, Any]:
    """One run with the code of ``tree``: its curve, as it was written, and the hash of its weights."""
    own = [*flags, "--run.dir", str(run_dir), "--max_steps", str(STEPS), "--checkpoint.every", "2"]
    own += ["--run.accelerator", "cpu", "--run.predict", "false", "--run.resume", "auto"]
    own += ["--data.cache_dir", str(cache)] if flags[0] != "vit_digits" else []
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", "fit", *own]
    if killed:
        failing = [sys.executable, str(FAILPOINTS), "fit", *own]
        done = _run(failing, run_dir.parent, environment | {"TRAINER_FAILPOINT": "after rotation@2@0"})
        if done.returncode in (0, 2):
            raise SystemExit(
                f"{tree}: the run that should have been killed ended with {done.returncode}:\n{done.stderr}"
            )
    done = _run(command, run_dir.parent, environment)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(own)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    with (run_dir / "metrics.csv").open() as file:
        curve = [{name: text for name, text in row.items() if name not in TIMES} for row in csv.DictReader(file)]
    weights = hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()
    return {"curve": curve, "weights": weights}


def _run(command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # A session of its own: what a killed rank takes along must not reach this process.
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("--data", type=Path, default=HERE.parent / "shared" / "data", help="folder of the samples")
    settings = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    record = Record("same_curves", {"before": settings.before, "steps": STEPS})
    rows = []
    with tempfile.TemporaryDirectory(prefix="same-curves-") as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(before), settings.before], cwd=HERE, check=True)
        try:
            for model, flags in models(settings.data.resolve()).items():
                for world, more in WORLDS.items():
                    found = []
                    for name, tree in (("before", before), ("now", HERE)):
                        place = Path(folder) / f"{len(rows)}-{name}"
                        place.mkdir()
                        found.append(
                            train(tree, place / "run", [*flags, *more], Path(folder) / name, "killed" in world)
                        )
                    same = [found[0][part] == found[1][part] for part in ("curve", "weights")]
                    losses = [row["loss"] for row in found[1]["curve"] if row["loss"]]
                    rows.append(
                        {"model": model, "world": world, "curve": same[0], "weights": same[1], "losses": losses}
                    )
                    print(f"{model}, {world}: curve {same[0]}, weights {same[1]}, {len(losses)} losses", flush=True)
                    record.write(rows=rows)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=HERE, check=True)
    record.write(complete=True, rows=rows)
    cells = [(row["model"], row["world"], str(row["curve"]), str(row["weights"])) for row in rows]
    print(table(("model", "run", "same curve", "same weights"), cells))
    if not all(row["curve"] and row["weights"] for row in rows):
        raise SystemExit("not the same")


if __name__ == "__main__":
    main()
