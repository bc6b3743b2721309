"""Does this tree train, resume and plan as another commit does? Compared bit for bit: the rule of a refactoring.

``python benchmarks/same_curves.py COMMIT`` trains small models with both trees in separate processes and compares loss
curves and final weights. This tree also resumes a checkpoint that the other commit wrote. Then plans are compared as
JSON, and the time of ``--help``. The results of COMMIT are kept in ``--keep`` for the next comparison. The idea is
torchtitan's (scripts/loss_compare.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Record, child_cpu_seconds, curve, table

HERE = Path(__file__).parents[1]
STEPS, HALF = 8, 4
VARIES = re.compile(r'"(date|seconds)": [^,\n]*')
"""Values of a plan's JSON that differ between any two plans."""

TWO = ["--run.devices", "2", "--memory.strategy"]
WORLDS = {
    "1 rank": [],
    "ddp × 2": [*TWO, "ddp", "--memory.activation_checkpointing", "full"],
    "fsdp × 2": [*TWO, "fsdp", "--memory.activation_checkpointing", "full"],
    "tensor parallel × 2": [*TWO, "fsdp", "--memory.tensor_parallel", "2"],
    "optimizer offload": ["--memory.activation_checkpointing", "full", "--memory.cpu_offload", "optimizer"],
    "deterministic, ddp × 2": [*TWO, "ddp", "--run.deterministic", "true"],
}
PLANS = [
    ["vit_digits", "--gpu", "rtx-3060", "--memory.budget", "60MB"],
    ["vit_digits", "--gpu", "a100-80gb", "--devices", "4", "--memory.strategy", "ddp"],
    ["vit_digits", "--gpu", "a100-80gb", "--devices", "4", "--memory.strategy", "fsdp"],
    ["vit_digits", "--gpu", "h100-sxm", "--memory.cpu_offload", "optimizer"],
    ["vit_digits", "--gpu", "rtx-4090", "--memory.compile", "blocks", "--memory.precision", "bf16-mixed"],
    ["vit_digits", "--gpu", "a100-80gb", "--devices", "16", "--nodes", "2", "--interconnect", "10gbe"],
    ["lm_bytes", "--gpu", "rtx-3060", "--memory.budget", "200MB"],
    ["lm_bytes", "--gpu", "a100-80gb", "--devices", "2", "--memory.tensor_parallel", "2"],
    ["mlp_fashion_mnist", "--gpu", "rtx-3060"],
    ["mlp_fashion_mnist", "--gpu", "rtx-3060", "--memory.optimizer_in_backward", "true"],
]


def models(data: Path, folder: Path) -> dict[str, list[str]]:
    """Recipe and flags by model. The text model is small, with the real vocabulary and real reviews."""
    sizes = "{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}"
    lm = ["lm_bytes", "--data.max_length", "64", "--data.train_files", f"{folder}/*.txt", "--data.val_files", "null"]
    return {
        "vit_digits": ["vit_digits"],
        "DistilBERT, IMDb": [
            *("distilbert_imdb", "--model.name", "distilbert", "--data.root", str(data / "imdb")),
            *("--model.tokenizer", str(data / "tokenizers" / "bert-base-uncased")),
            *("--model.config", "{n_layers: 2, dim: 32, hidden_dim: 64, n_heads: 2}", "--model.weights", "null"),
            *("--memory.precision", "32-true", "--data.max_length", "64", "--batch_size", "12"),
        ],
        "lm_bytes": [*lm, "--model.config", sizes],
        "language model in NF4": [
            *(*lm, "--model.name", f"{folder}/lm", "--model.config", "{}", "--model.weights", f"{folder}/lm"),
            *("--model.lora.rank", "4", "--model.lora.base", "nf4"),
        ],
    }


def prepare(folder: Path) -> None:
    """Write the texts and the pretrained language model that both trees read."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for name in ("recipe.py", "values.py", "errors.py"):
        (folder / f"{name}.txt").write_text((HERE / "trainer" / name).read_text())
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes)).save_pretrained(folder / "lm")


def trainer(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one command with the code of ``tree``."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(command, cwd=tempfile.gettempdir(), env=environment, capture_output=True, text=True)


def train(tree: Path, run_dir: Path, flags: list[str], *more: str) -> dict[str, Any]:
    """Train one model. Return its curve and the hash of its weights, or the last line of its error."""
    flags = [*flags, "--run.dir", str(run_dir), "--max_steps", str(STEPS), "--checkpoint.every", str(HALF), *more]
    flags += ["--checkpoint.keep_last", "9", "--run.accelerator", "cpu", "--run.predict", "false"]
    flags += ["--data.cache_dir", str(run_dir.parent / "cache")] if "distilbert_imdb" in flags else []
    done = trainer(tree, "fit", *flags)
    if done.returncode:
        return {"error": re.sub(r"/\S+", "PATH", done.stderr.strip().splitlines()[-1])}
    weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in run_dir.glob("model/*.safetensors")}
    return {"curve": curve(run_dir), "weights": weights}


def compare(
    before: Path, now: Path, kept: dict[str, Any], folder: Path, data: Path, chosen: str
) -> list[dict[str, Any]]:
    """Train every model in every world with both trees, and resume the checkpoint of ``before`` with ``now``."""
    rows = []
    for model, flags in models(data, folder).items():
        for world, more in WORLDS.items():
            name = f"{model}, {world}"
            if chosen not in name:
                continue
            first = folder / "before" / name
            if name not in kept:
                kept[name] = train(before, first, [*flags, *more])
            wanted = kept[name]
            found = train(now, folder / "now" / name, [*flags, *more])
            same = found == wanted and "error" not in found
            row = {"case": name, "same": same, "losses": len(wanted.get("curve", ())), "resumed": None}
            row |= {"error": found["error"]} if "error" in found else {}
            checkpoints = sorted(first.glob(f"checkpoints/*{HALF}"))
            if checkpoints:
                resume = ["--run.resume", str(checkpoints[0])]
                again = train(now, folder / "resumed" / name, [*flags, *more], *resume)
                after = [line for line in wanted["curve"] if int(line["step"]) > HALF]
                row["resumed"] = again.get("weights") == wanted["weights"] and again["curve"][-len(after) :] == after
                row |= {"error": again["error"]} if "error" in again else {}
            rows.append(row)
            print(row, flush=True)
    return rows


def plans(before: Path, now: Path, kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the planner's JSON, without the time that a plan took."""
    rows = []
    for number, flags in enumerate(PLANS):
        found = []
        for tree in (before, now):
            if tree is before and f"plan {number}" in kept:
                found.append(kept[f"plan {number}"])
                continue
            with tempfile.TemporaryDirectory() as out:
                done = trainer(tree, "plan", *flags, "--json", "--out", f"{out}/plan")
            found.append(VARIES.sub("", done.stdout) or done.stderr[-300:])
        kept[f"plan {number}"] = found[0]
        rows.append({"plan": " ".join(flags), "same": found[0] == found[1], "characters": len(found[0])})
        print(rows[-1], flush=True)
    return rows


def help_times(before: Path, now: Path) -> dict[str, float]:
    """Processor seconds of ``trainer --help`` of both trees, run in turn; medians of 7."""
    taken: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(7):
        for name, tree in (("before", before), ("now", now)):
            start = child_cpu_seconds()
            trainer(tree, "--help").check_returncode()
            taken[name].append(child_cpu_seconds() - start)
    return {name: round(statistics.median(seconds), 3) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("--data", type=Path, default=HERE.parent / "shared" / "data", help="folder of the samples")
    parser.add_argument("--keep", type=Path, help="folder that keeps the results of the commit")
    parser.add_argument("--only", default="", help="train only the cases with this text in their names")
    settings = parser.parse_args()
    record = Record("same_curves", {"before": settings.before, "steps": STEPS})
    with tempfile.TemporaryDirectory(prefix="same-curves-") as temporary:
        folder = (settings.keep or Path(temporary)).resolve()
        before, results = folder / "tree", folder / "before.json"
        if not before.exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["git", "worktree", "add", "-q", "--detach", str(before), settings.before], cwd=HERE, check=True
            )
            prepare(folder)
        kept = json.loads(results.read_text()) if results.exists() else {}
        subprocess.run(["rm", "-rf", str(folder / "now"), str(folder / "resumed")], check=True)
        try:
            rows = compare(before, HERE, kept, folder, settings.data.resolve(), settings.only)
            planned = plans(before, HERE, kept)
        finally:
            results.write_text(json.dumps(kept))
        times = help_times(before, HERE)
        if settings.keep is None:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=HERE, check=True)
    record.write(complete=not settings.only, rows=rows, plans=planned, help_seconds=times)
    cells = [(row["case"], str(row["same"]), str(row["resumed"])) for row in rows]
    print(table(("run", "same curve and weights", "resumed to the same"), cells))
    print(table(("plan", "same"), [(row["plan"], str(row["same"])) for row in planned]), times, sep="\n")
    if not all(row["same"] and row["resumed"] is not False for row in rows) or not all(row["same"] for row in planned):
        raise SystemExit("not the same")


if __name__ == "__main__":
    main()
