"""A run on streamed texts, killed once an epoch: every sample once, and the losses of an undisturbed run.

As a program, which forks: test_streamed_resume.py FOLDER TOKENIZER RANKS WORKERS, where RANKS is how many each start
has, such as 1,2,1; the first start is of the undisturbed run, too. It prints JSON of both runs, and what is said when
one is resumed with a shard that has changed.
"""

import csv
import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("forks, and reads /proc", allow_module_level=True)

from helpers.shards import text_of, write_shards
from helpers.warm import python

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
KILLED_BEFORE = (9, 16)
"""Steps, from 1, in whose middle a run is killed: one in each epoch."""


def kill_and_resume(tmp_path, sample_data, ranks, workers):
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    tokenizer = sample_data / "tokenizers" / "bert-base-uncased"
    done = python(__file__, tmp_path, tokenizer, ranks, workers, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    calm, killed = found["calm"], found["killed"]
    assert "was saved with a different recipe: data: " in found["refused"]
    assert "(changed: train/part-02.parquet)" in found["refused"]
    assert len(calm["losses"]) == len(killed["losses"]) == 2 * STEPS
    # A checkpoint is written beside the training: the last one before the kill, or the one before that.
    assert all(0 < kill - 1 - begun <= 4 for kill, begun in zip(KILLED_BEFORE, killed["begun"][1:], strict=True))
    for run in (calm, killed):
        for epoch in range(2):
            steps = run["steps"][epoch * STEPS : (epoch + 1) * STEPS]
            assert Counter(index for step in steps for index in step) == Counter(range(SAMPLES))
    return calm, killed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [("1,2,1", 0), pytest.param("2,4,1", 2, marks=pytest.mark.slow)])
def test_killed_on_changing_ranks(tmp_path, sample_data, ranks, workers):
    calm, killed = kill_and_resume(tmp_path, sample_data, ranks, workers)
    assert list(map(sorted, killed["steps"])) == list(map(sorted, calm["steps"]))
    assert killed["losses"] == pytest.approx(calm["losses"], rel=1e-5)
    if ranks == "1,2,1":
        for name, sums in calm["weights"].items():
            assert killed["weights"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [("1,1,1", 2), ("2,2,2", 0)])
def test_on_the_same_ranks_bit_for_bit(tmp_path, sample_data, ranks, workers):
    calm, killed = kill_and_resume(tmp_path, sample_data, ranks, workers)
    for what in ("steps", "losses", "weights"):
        assert killed[what] == calm[what]


def start(folder, ranks, workers, recipe):
    from benchmarks.chaos.run import ForkedRun, Shape

    flags = ["--run.resume", "auto", "--run.allow_change", '["memory"]', "--data.workers", str(workers)]
    return ForkedRun(folder, Shape("single" if ranks == 1 else "ddp", ranks), *flags, recipe=recipe)


def steps_before(run):
    found = re.search(r"resuming from \S+, after step ([\d,]+)", run.text(0))
    return int(found[1].replace(",", "")) if found else 0


def train(folder, ranks, workers, recipe, kills):
    from safetensors.torch import load_file

    steps, begun = {}, []
    for size, kill in zip(ranks, (*kills, None), strict=True):
        run = start(folder, size, workers, recipe)
        if kill is not None:
            if not run.wait_for_step(1) or not run.wait_for_step(kill - steps_before(run)):
                raise SystemExit(f"did not come to step {kill}:\n{run.text(0)}")
            run.send(range(size), signal.SIGKILL)
        if not run.wait() or (kill is None and any(run.codes.values())):
            raise SystemExit(f"no end:\n{run.text(0)}")
        begun.append(steps_before(run))
        windows = zip(*(run.windows(rank) for rank in range(size)), strict=False)
        for number, lines in enumerate(windows, start=begun[-1]):  # in place of what an earlier start had done of them
            parts = [part for line in lines for part in line.split() if part != "-"]
            steps[number] = [int(i) for part in parts for i in part.split(",")]
    state = load_file(folder / "run" / "model" / "model.safetensors")
    with open(folder / "run" / "metrics.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    weights = {name: [x.double().sum().item(), x.double().abs().sum().item()] for name, x in state.items()}
    return {"losses": losses, "steps": [steps[n] for n in sorted(steps)], "begun": begun, "weights": weights}


def main():
    folder, tokenizer = Path(sys.argv[1]), sys.argv[2]
    ranks, workers = [int(size) for size in sys.argv[3].split(",")], int(sys.argv[4])
    shards = write_shards(folder / "shards", shards=5, rows=SAMPLES // 5, group=10)
    recipe = folder / "own.py"
    recipe.write_text(RECIPE.format(tokenizer=tokenizer, shards=str(shards), cache=str(folder / "cache")))
    import transformers.models.distilbert.modeling_distilbert  # noqa: F401 - before the first fork: it takes seconds

    import trainer.api  # noqa: F401

    calm = train(folder / "calm", ranks[:1], workers, recipe, ())
    killed = train(folder / "killed", ranks, workers, recipe, KILLED_BEFORE)
    write_shards(shards, 5, SAMPLES // 5, 10, text=lambda i: "other" if i == SAMPLES // 2 else text_of(i))
    last = start(folder / "killed", 1, 0, recipe)
    last.wait()
    print(json.dumps({"calm": calm, "killed": killed, "refused": " ".join(last.errors())}))


if __name__ == "__main__":
    main()
