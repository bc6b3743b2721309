"""A run on streamed texts that is killed twice an epoch, beside one that is not; a program of its own, for it forks.

    python streamed_kills.py FOLDER TOKENIZER RANKS WORKERS

RANKS is how many each start has, such as 2,1,2,1,1; the first start is of the undisturbed run, too. It prints, as
JSON, of both runs the losses of all steps, the samples of every step over all ranks, and what was resumed; and what is
said when it is resumed with a shard that has changed.
"""

from __future__ import annotations

import csv
import json
import re
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.chaos.run import ForkedRun, Shape
from helpers.shards import text_of, write_shards

RECIPE = """
from trainer import Checkpoint, Memory, Optim, Recipe, Run, main
from trainer.data import StreamedText
from trainer.models import TextClassifier

recipe = Recipe(
    model=TextClassifier(
        "distilbert", tokenizer={tokenizer!r}, weights=None,
        config={{"n_layers": 1, "dim": 16, "hidden_dim": 16, "n_heads": 2, "vocab_size": 30522}},
    ),
    data=StreamedText({shards!r}, shuffle_buffer=50, cache_dir={cache!r}, max_length=32),
    optim=Optim("adamw", lr=1e-2, schedule="cosine", clip_norm=1.0),
    batch_size=16,
    epochs=2,
    memory=Memory(micro_batch_size=4),
    checkpoint=Checkpoint(every=2),
    run=Run(predict=False, accelerator="cpu", evaluate=False, progress=True),
)
"""
SAMPLES, STEPS = 190, 12
KILLED_BEFORE = (4, 9, 16, 21)
"""Steps, from 1, in whose middle a run is killed: two in each epoch."""


def losses(run_dir: Path) -> list[float]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def first_step(run: ForkedRun) -> int:
    """The steps that were taken before this start."""
    found = re.search(r"resuming from \S+, after step ([\d,]+)", run.text(0))
    return int(found[1].replace(",", "")) if found else 0


def note(run: ForkedRun, ranks: int, steps: dict[int, list[int]]) -> int:
    """Keep the samples of the steps of this start, in place of what an earlier one had done of them."""
    first = first_step(run)
    windows = [run.windows(rank) for rank in range(ranks)]
    for number in range(min(map(len, windows))):
        lines = [own[number] for own in windows]
        steps[first + number] = [
            int(i) for line in lines for part in line.split() if part != "-" for i in part.split(",")
        ]
    return first


def weights(run_dir: Path) -> dict:
    """The sum of every tensor of the trained model, and of its absolute values."""
    state = load_file(run_dir / "model" / "model.safetensors")
    return {name: [tensor.double().sum().item(), tensor.double().abs().sum().item()] for name, tensor in state.items()}


def start(folder: Path, ranks: int, workers: int, recipe: Path) -> ForkedRun:
    shape = Shape("single" if ranks == 1 else "ddp", ranks)
    allowed = '["memory"]'
    flags = ["--run.resume", "auto", "--run.allow_change", allowed, "--data.workers", str(workers)]
    return ForkedRun(folder, shape, *flags, recipe=recipe)


def train(folder: Path, ranks: list[int], workers: int, recipe: Path, kills: tuple[int, ...]) -> dict:
    steps: dict[int, list[int]] = {}
    begun = []
    for size, kill in zip(ranks, (*kills, None), strict=True):
        run = start(folder, size, workers, recipe)
        if kill is not None:
            first = None
            while first is None or not run.wait_for_step(kill - first):
                if run.codes:
                    raise SystemExit(f"ended before step {kill}:\n{run.text(0)}")
                if first is None and run.wait_for_step(1):
                    first = first_step(run)
            run.send(range(size), signal.SIGKILL)
        if not run.wait():
            raise SystemExit(f"no end:\n{run.text(0)}")
        if kill is None and any(run.codes.values()):
            raise SystemExit(run.text(0))
        begun.append(note(run, size, steps))
    return {
        "losses": losses(folder / "run"),
        "steps": [steps[number] for number in sorted(steps)],
        "begun": begun,
        "weights": weights(folder / "run"),
    }


def refused(folder: Path, recipe: Path) -> str:
    """What a resume says when one word of one shard has changed."""
    write_shards(folder / "shards", 5, SAMPLES // 5, 10, text=lambda i: "other" if i == SAMPLES // 2 else text_of(i))
    run = start(folder / "killed", 1, 0, recipe)
    run.wait()
    return " ".join(run.errors())


def main() -> None:
    folder, tokenizer = Path(sys.argv[1]), sys.argv[2]
    ranks, workers = [int(size) for size in sys.argv[3].split(",")], int(sys.argv[4])
    shards = write_shards(folder / "shards", shards=5, rows=SAMPLES // 5, group=10)
    recipe = folder / "own.py"
    recipe.write_text(RECIPE.format(tokenizer=tokenizer, shards=str(shards), cache=str(folder / "cache")))
    import transformers.models.distilbert.modeling_distilbert  # noqa: F401 - before the first fork: it takes seconds

    import trainer.fit  # noqa: F401

    calm = train(folder / "calm", ranks[:1], workers, recipe, ())
    killed = train(folder / "killed", ranks, workers, recipe, KILLED_BEFORE)
    print(json.dumps({"calm": calm, "killed": killed, "refused": refused(folder, recipe)}))


if __name__ == "__main__":
    main()
