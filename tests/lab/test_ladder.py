"""``trainer ladder``: real runs of a small recipe, some of which refuse, run out of memory or are killed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import matplotlib.image
import psutil
import pytest
from cli.supervised import fork_processes

import trainer
from trainer.cli import run
from trainer.commands.recipes import load_recipe
from trainer.lab import measured_run
from trainer.lab.ladder import FLAGS, ON_HOST, baseline, build_steps, choose, ladder
from trainer.lab.measured_run import CPU, MALLOC_TRIM_ENV, run_trial
from trainer.report.plots import plot_ladder

RECIPE = """
import os, signal, time
from dataclasses import dataclass

import torch
from trainer import Memory, Optim, Recipe
from trainer.data import Digits
from trainer.models import MLP


@dataclass
class Fragile(MLP):
    killed_at: int = 0
    seconds: float = 0.0  # that a training micro-step takes at least

    def losses(self, module, batch):
        time.sleep(self.seconds if module.training else 0.0)
        if len(batch["labels"]) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if module.training and len(batch["labels"]) == self.killed_at:  # not where the first step checks the loss
            os.kill(os.getpid(), signal.SIGKILL)
        return super().losses(module, batch)


recipe = Recipe(
    model=Fragile([16], dropout=0.5), data=Digits(),
    optim=Optim("adamw", schedule="cosine", warmup_steps=50, clip_norm=1.0),
    batch_size=32, memory=Memory(micro_batch_size=4, activation_offload=True),
)
"""
VARIABLES = (*MALLOC_TRIM_ENV, "OMP_NUM_THREADS")
GPU = {"accelerator": "cuda", "devices": 1, "device": "GPU", "device_memory_gb": 80.0}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "fragile.py"
    path.write_text(RECIPE)
    return path


def words_of(recipe_file, out, rungs):
    flags = ["--steps", "3", "--rungs", rungs, "--out", out, "--model.killed_at", "2", "--run.accelerator=cpu"]
    return [str(word) for word in ("ladder", recipe_file, *flags)]


@pytest.fixture(scope="module")
def climbed(recipe_file, tmp_path_factory):
    """A ladder with rungs that work, one that is refused, one that runs out of memory and one that is killed."""
    folder, printed, told = tmp_path_factory.mktemp("out") / "ladder", StringIO(), StringIO()
    rungs = "bf16-mixed,micro-batch-8,micro-batch-2,optimizer-in-backward"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(told):
        fork_processes(patch)
        assert run(words_of(recipe_file, folder, rungs)) == 0
    return folder, printed.getvalue(), told.getvalue()


def rows_of(out):
    return {row["name"]: row for row in json.loads((out / "ladder.json").read_text())["rungs"]}


def test_a_rung_that_cannot_be_taken_is_a_row_in_its_own_words(climbed):
    rows = rows_of(climbed[0])
    assert [*rows] == ["baseline", "micro-batch-8", "micro-batch-2", "bf16-mixed", "optimizer-in-backward"]
    assert [row["status"] for row in rows.values()] == ["finished", "out of memory", "killed", "finished", "refused"]
    assert "out of memory" in rows["micro-batch-8"]["reason"]
    assert "2.00 GiB" in rows["micro-batch-8"]["reason"]
    assert rows["micro-batch-2"]["reason"] == "ended by SIGKILL (possibly because host memory ran out)"
    assert rows["optimizer-in-backward"]["reason"].endswith("leave optim.clip_norm at null")


def test_rungs_that_finish_are_measured_and_compared(climbed):
    base, half = (rows_of(climbed[0])[name] for name in ("baseline", "bf16-mixed"))
    assert base["plan"].startswith("batch 32 = 1 rank × 1 micro-batch of 32, single, 32-true")
    for row in (base, half):
        assert row["steps"] == len(row["losses"]) == 3
        assert row["samples_per_second"] > 0
        assert row["peak_gb"] is not None
        assert row["memory"]["host_peak_gb"] > 0.1
    assert base["losses"][0] != base["losses"][2]  # no warm-up: the weights move from the first step on
    assert base["loss_difference"] is None
    assert 0 < half["loss_difference"] < 0.05


def test_the_files_say_what_was_measured_where_and_how(climbed):
    out, printed, told = climbed
    content = json.loads((out / "ladder.json").read_text())
    assert (content["complete"], content["settings"]["steps"]) == (True, 3)
    assert content["machine"]["accelerator"] == "cpu"
    assert content["versions"]["torch"]
    words = shlex.split(rows_of(out)["bf16-mixed"]["command"])
    assert words[:4] == ["python", "-m", "trainer", "fit"]
    assert str(out) not in (out / "ladder.json").read_text()
    assert content["environment"] == {**MALLOC_TRIM_ENV, **{k: os.environ[k] for k in VARIABLES if k in os.environ}}
    assert {"--memory.precision=bf16-mixed", "--model.killed_at=2", "--memory.micro_batch_size=32"} <= set(words)
    assert "--memory.activation_offload=false" in words  # the baseline takes the recipe's own techniques back
    assert matplotlib.image.imread(out / "ladder.png").shape[1] == 1200
    assert not list(out.glob("*/model"))
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 5
    assert len({len(line.split("|")[1]) for line in table}) == 1
    assert [line.split("|")[3].strip() for line in (table[0], table[2])] == ["of baseline", "100%"]
    assert "refused: memory.optimizer_in_backward" in printed
    assert "rung 3/5: micro-batch-2" in told


@pytest.mark.slow
def test_an_interrupted_ladder_keeps_its_rows_and_leaves_no_process(tmp_path):
    out, recipe_file = tmp_path / "ladder", tmp_path / "slow.py"
    # FSDP needs blocks: without them its rung would be refused, and over before it is interrupted.
    recipe_file.write_text(RECIPE.replace("    seconds: float", "    blocks = (torch.nn.Linear,)\n    seconds: float"))
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words_of(recipe_file, out, "ddp-2-ranks,fsdp-2-ranks"), "--model.seconds=1"],
        env={**os.environ, "PYTHONPATH": str(Path(trainer.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    third = f"--run.dir={out / '03-fsdp-2-ranks'}"

    def begun() -> bool:
        """It works: a signal in the midst of being forked may be lost."""
        found = [one for one in psutil.process_iter(["cmdline"]) if third in (one.info["cmdline"] or ())]
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(one.cpu_times().user > 0.5 for one in found)
        return False

    while process.poll() is None and not begun():
        time.sleep(0.1)
    while process.poll() is None:  # again if the signal came in the midst of a fork, where Python may lose it
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(25)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 130, text
    content = json.loads((out / "ladder.json").read_text())
    assert content["complete"] is False
    _, ddp = content["rungs"]
    assert ddp["plan"].startswith("batch 32 = 2 ranks × 1 micro-batch of 16, ddp, 32-true")
    assert ddp["loss_difference"] < 1e-5  # no dropout: another cut is the same run
    assert (out / "ladder.png").is_file()
    assert "stopped after 2 of 3" in text


def test_a_run_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_run, "GRACE_SECONDS", 0.1)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    trial = run_trial(["vit_digits"], tmp_path / "run", seconds=0.5, entry=[str(tmp_path / "sleeps.py")])
    assert (trial.status, trial.reason) == ("too slow", "not finished after 0.5 s")
    assert trial.losses == []


def test_help_lists_the_ladders_flags(capsys):
    ladder(["vit_digits", "--help"])
    page = capsys.readouterr().out
    assert all(f"--{name} " in page for name in (*FLAGS, "optim.lr", "run.devices"))


def test_rungs_are_those_that_make_sense_here():
    recipe, _ = load_recipe("vit_digits")
    names = [rung.name for rung in build_steps(recipe, baseline(recipe), CPU)]
    assert names[:4] == ["baseline", "micro-batch-16", "micro-batch-4", "micro-batch-1"]
    assert {"ddp-2-ranks", "fsdp-2-ranks", "8-bit-state", "sgd"} <= set(names)
    assert "16-mixed" not in names
    stacked = "+micro-batch-4 +bf16-mixed +full-checkpointing +activation-offload +optimizer-offload +parameter-offload"
    assert names[-6:] == stacked.split()
    on_gpu = [rung.name for rung in build_steps(recipe, baseline(recipe), GPU)]
    assert "16-mixed" in on_gpu
    assert not any("ranks" in name for name in on_gpu)
    sgd, _ = load_recipe("mlp_fashion_mnist")
    assert not {"sgd", "8-bit-state"} & {rung.name for rung in build_steps(sgd, baseline(sgd), CPU)}


def test_without_a_gpu_it_is_said_that_offload_has_nothing_to_gain():
    recipe, _ = load_recipe("vit_digits")
    for machine, note in ((CPU, ON_HOST), (GPU, "")):
        notes = {rung.name: rung.note for rung in build_steps(recipe, baseline(recipe), machine)}
        assert {text for name, text in notes.items() if name.endswith("offload")} == {note}
        assert notes["full-checkpointing"] == ""


FREE_TENSORS = """
import torch
from trainer.system.machine import HostMemory
for _ in range(2):  # glibc raises its threshold when the first ones are freed
    tensors = [torch.ones(400_000) for _ in range(200)]
    kept = tensors.pop()
    del tensors
print(HostMemory().read().resident)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_freed_memory_is_given_back_in_a_trial():
    without = {key: text for key, text in os.environ.items() if key not in MALLOC_TRIM_ENV}
    resident = [
        int(subprocess.run([sys.executable, "-c", FREE_TENSORS], env=env, capture_output=True, check=True).stdout)
        for env in (without, without | MALLOC_TRIM_ENV)
    ]
    assert resident[1] < resident[0] - 0.2e9  # of 0.32


def test_stacked_rungs_hold_all_techniques_before_them():
    recipe, _ = load_recipe("vit_digits")
    rungs = build_steps(recipe, baseline(recipe), CPU)
    stacked = [rung.changes for rung in rungs if rung.name.startswith("+")]
    for before, after in zip(stacked, stacked[1:], strict=False):
        assert set(before) <= set(after)
    assert stacked[-1]["memory.cpu_offload"] == "parameters"
    chosen = [rung.name for rung in choose(rungs, "bf16-mixed, micro-batch-4")]
    assert chosen == ["baseline", "micro-batch-4", "bf16-mixed"]  # which is always in


def test_bars_are_drawn_also_of_rungs_without_figures(tmp_path):
    rungs = [("baseline", [1.0, 2.0], "finished"), ("sgd (another optimizer)", [None, None], "refused")]
    plot_ladder(
        [*rungs, ("+bf16-mixed", [0.5, None], "out of memory")], ["allocated", "reserved"], "t", tmp_path / "l.png"
    )
    assert matplotlib.image.imread(tmp_path / "l.png").shape[1] == 1200
    assert not list(tmp_path.glob(".*"))
