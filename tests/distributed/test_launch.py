"""The same recipe under every launcher, as a user starts it, and the same result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import free_port
from helpers.resumed import losses
from helpers.warm import python
from safetensors.torch import load_file

RECIPE = """
from trainer import Memory, Optim, Recipe, main
from trainer.data import Digits
from trainer.models import VisionTransformer

recipe = Recipe(
    model=VisionTransformer("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1),
    data=Digits(),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=50,
    max_steps=3,
    memory=Memory(micro_batch_size=5, precision="64-true"),
)

if __name__ == "__main__":
    main(recipe)
"""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN_SH = [str(Path(__file__).parents[2] / "launch" / "torchrun.sh"), "2"]
FABRIC = [sys.executable, "-c", "from lightning.fabric.cli import _main; _main()", "run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]

ON_CPU = ["--run.accelerator", "cpu"]

LINES = {
    "torchrun.sh": "torchrun: 2 ranks on 1 node (2 per node), cpu, gloo, ddp",
    "fabric": "fabric run: 2 ranks on 1 node (2 per node), cpu, gloo, ddp",
    "accelerate": "accelerate launch (torchrun): 2 ranks on 1 node (2 per node), cpu, gloo, ddp",
}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "own.py"
    path.write_text(RECIPE)
    return str(path)


def start(command, **environment):
    foreign = ("LT_", "TORCHELASTIC", "ACCELERATE_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"  # for torchrun
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=clean | {"OMP_NUM_THREADS": "1"} | environment
    )


def lines(text):
    """Those that say what was found: one, of the first rank."""
    return [line for line in text.splitlines() if re.search(r" ranks? on \d+ node", line)]


@pytest.fixture(scope="module")
def alone(recipe_file, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "alone"
    done = python(recipe_file, "--run.dir", run_dir, *ON_CPU)
    assert done.returncode == 0, done.stderr
    assert lines(done.stderr) == ["python: 1 rank on 1 node, cpu, no process group, single"]
    return run_dir


@pytest.mark.slow  # every rank starts cold; the warm ones of other tests are told what torchrun would tell them
@pytest.mark.parametrize("launcher", LINES)
def test_two_ranks_give_the_weights_of_one(launcher, recipe_file, alone, tmp_path):
    run_dir = tmp_path / "two"
    flags = ["--run.dir", str(run_dir), *ON_CPU]
    command = {
        "torchrun.sh": [*TORCHRUN_SH, recipe_file, *flags],
        "accelerate": [*ACCELERATE, "--main_process_port", str(free_port()), recipe_file, *flags],
        "fabric": [*FABRIC, "--accelerator", "cpu", "--devices", "2", recipe_file, *flags],
    }[launcher]
    done = start(command)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["world_size"], summary["accumulate"], summary["batch_size"]) == (2, 5, 50)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-6)  # dropout included
    single = json.loads((alone / "summary.json").read_text())
    assert summary["metrics"]["test"]["loss"] == pytest.approx(single["metrics"]["test"]["loss"], rel=1e-6)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run_dir, alone))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name
    assert lines(done.stderr) == [LINES[launcher]]
    assert (summary["launcher"], summary["nodes"], summary["backend"]) == (LINES[launcher].split(":")[0], 1, "gloo")
    assert done.stderr.count("plan: ") == 1  # one rank speaks


def test_single_on_two_ranks_is_refused(recipe_file, tmp_path):
    flags = ["--run.devices", "2", "--memory.strategy", "single", "--run.dir", str(tmp_path / "r")]
    done = python("-m", "trainer", "fit", recipe_file, *flags)
    assert done.returncode == 2
    assert "memory.strategy=single cannot use 2 ranks" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--run.devices", "3"], ["run.devices=3 contradicts the launcher: torchrun started 2 process(es)"]),
        ([], ["4 of 4 images cannot be read", "first rank of a node"]),
    ],
)
def test_what_only_the_first_rank_or_the_launcher_knows_ends_all(flags, messages, tmp_path):
    path, folder = tmp_path / "own.py", tmp_path / "nowhere"
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder / name).mkdir(parents=True)
        (folder / name / "0.png").write_bytes(b"no image")  # only the first rank opens the images
    path.write_text(RECIPE.replace("Digits()", f"ImageFolder({str(folder)!r})").replace("Digits", "ImageFolder"))
    run_dir = tmp_path / "r"
    done = start([*TORCHRUN, "-m", "trainer", "fit", str(path), *flags, "--run.dir", str(run_dir)])
    assert done.returncode != 0
    assert all(message in done.stderr for message in messages)
    assert not (run_dir / "model").exists()
