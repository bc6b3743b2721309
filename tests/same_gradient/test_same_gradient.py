"""``trainer same-gradient``: scripts as people write them, which are right or wrong in a known way."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.started import StartedRun

import trainer
from trainer.cli import run

SCRIPTS = Path(__file__).with_name("scripts")
PAGE = Path(__file__).parents[2] / "docs" / "same-gradient.md"
TORCHRUN = "python -m torch.distributed.run --standalone --nproc_per_node"


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch):
    monkeypatch.chdir(SCRIPTS)


def compared(capfd: pytest.CaptureFixture[str], first: str, second: str, *flags: str) -> tuple[int, str]:
    """Exit code and output of the command; ``python`` is this one."""
    commands = [shlex.split(text.replace("python", sys.executable, 1)) for text in (first, second)]
    code = run(["same-gradient", *flags, "--", *commands[0], "--", *commands[1]])
    captured = capfd.readouterr()
    return code, captured.out + captured.err


def test_a_loop_that_divides_sums_is_exact(capfd):
    code, output = compared(capfd, "python plain.py", "python plain.py --batch 2 --accumulate 4")
    assert code == 0, output
    assert "the same gradient in 3 optimizer steps" in output


def test_a_loss_that_is_not_divided_is_a_factor(capfd):
    mean = "python plain.py --batch 2 --accumulate 4 --loss"
    code, output = compared(capfd, f"{mean} mean", f"{mean} undivided")
    assert code == 1
    assert "step 1: B's gradient is 4 times A's" in output


MISTAKES = {
    "one command": (["--", "python"], "same-gradient takes -- COMMAND A -- COMMAND B"),
    "no mark": (["python", "a.py", "--", "python", "b.py"], "same-gradient takes -- COMMAND A"),
    "an empty command": (["--", "--", "python"], "same-gradient takes -- COMMAND A"),
    "a third command": (["--", "a", "--", "b", "--", "c"], "same-gradient takes -- COMMAND A"),
    "an unknown flag": (["--step", "1", "--", "a", "--", "b"], "has no flag --step; did you mean --steps?"),
    "steps": (["--steps", "0", "--", "a", "--", "b"], "--steps='0' must be an integer"),
    "no number": (["--tolerance", "e-5", "--", "a", "--", "b"], "--tolerance='e-5' must be a number"),
    "tolerance": (["--tolerance", "low", "--", "a", "--", "b"], "--tolerance='low' must be a number"),
    "no such command": (["--", sys.executable, "--", "pyton"], "pyton: command not found"),
    "a failure": (["--", "sh", "-c", "exit 3", "--", "true"], "A failed with exit code 3: its last lines are above"),
    "no step": (["--", "true", "--", "true"], "A took no optimizer step"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_a_message_of_one_line(mistake, capfd):
    words, output = MISTAKES[mistake]
    assert run(["same-gradient", *words]) == 2
    error = capfd.readouterr().err.strip()
    assert output in error
    assert "\n" not in error


def test_another_sitecustomize_is_executed_and_the_path_is_as_before(tmp_path):
    (tmp_path / "ours").mkdir()
    hook = (Path(trainer.__file__).parent / "commands" / "gradient_hook.py").read_text()
    start = f"\nsys.meta_path.insert(0, Recorder({str(tmp_path / 'ours')!r}, 3))\n"
    (tmp_path / "ours" / "sitecustomize.py").write_text(hook + start)
    (tmp_path / "sitecustomize.py").write_text("NAME = 'theirs'\n")
    code = "import sys, sitecustomize; print(sitecustomize.NAME, 'torch' in sys.modules, *sys.path)"
    paths = os.pathsep.join([str(tmp_path / "ours"), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    words = [sys.executable, "-c", code]
    printed = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert printed[:2] == ["theirs", "False"]
    assert str(tmp_path) in printed
    assert str(tmp_path / "ours") not in printed


DIFFERENT = {
    "seed": ("--seed 0", "--seed 1", 2, "A and B start from different weights"),
    "rate": ("--lr 0.001", "--lr 0.002", 1, "step 1: the learning rate is 0.001 in A, 0.002 in B"),
    "optimizer": ("--optimizer Adam", "--optimizer SGD", 1, "step 2, not before: the weights differ"),
    "mean of means": ("", "--batch 2 --accumulate 4 --loss mean", 1, "step 1: the gradients have different directions"),
    "batch": ("--batch 16", "--batch 32", 1, "A takes 2 optimizer steps, B takes 1"),
    "bf16": ("--bf16", "--bf16 --batch 1 --accumulate 8", 0, "up to 3.1e-02 is rounding"),
    "SGD": ("--optimizer SGD", "--optimizer SGD --batch 4 --accumulate 2", 0, "the same gradient"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENT)
def test_each_kind_of_difference_is_named(kind, capfd):
    first, second, wanted, text = DIFFERENT[kind]
    code, output = compared(capfd, f"python plain.py {first}", f"python plain.py {second}")
    assert code == wanted, output
    assert text in output


FRAMEWORKS = {
    "a causal model of transformers": (
        *("python transformers_trainer.py", "python transformers_trainer.py --batch 2 --accumulate 4"),
        *((), "the same gradient in 3"),
    ),
    "DDP": ("python distributed.py", f"{TORCHRUN} 2 distributed.py", (), "the same gradient in 3"),
    "FSDP2 on 3 ranks": ("python distributed.py", f"{TORCHRUN} 3 distributed.py --fsdp", (), "the same gradient in 3"),
    "a classifier of transformers": (
        "python transformers_trainer.py --task classify",
        "python transformers_trainer.py --task classify --batch 2 --accumulate 4",
        *((), "step 1: B's gradient is 4 times A's"),
    ),
    "a ragged window of Accelerate": (
        "python accelerate_loop.py --samples 13 --batch 13",
        "python accelerate_loop.py --samples 13 --accumulate 4",
        *((), "step 1: the gradients have different directions"),
    ),
    "a short window of Lightning": (
        "python lightning_trainer.py --samples 20",
        "python lightning_trainer.py --samples 20 --batch 4 --accumulate 2",
        *((), "step 3, not before: B's gradient is 0.5 times A's"),
    ),
    "FSDP2 with sums": (
        *("python distributed.py", f"{TORCHRUN} 2 distributed.py --fsdp --loss sum"),
        *(("--steps", "1"), "step 1: B's gradient is 0.5 times A's"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", FRAMEWORKS)
def test_scripts_of_other_frameworks(script, capfd):
    first, second, flags, text = FRAMEWORKS[script]
    code, output = compared(capfd, first, second, *flags)
    assert text in output
    assert code == (0 if "the same" in text else 1)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import torch, time, pathlib\npathlib.Path(__file__).with_suffix('.on').touch()\ntime.sleep(600)\n"
    )
    ranks = [sys.executable, *shlex.split(TORCHRUN)[1:], "2", str(script)]
    started = StartedRun(tmp_path, [sys.executable, "-m", "trainer", "same-gradient", "--", *ranks, "--", "true"])
    try:
        assert started.until(script.with_suffix(".on").exists, 120)
        time.sleep(1)
        os.kill(started.process.pid, signal.SIGINT)
        assert started.wait() == 130
        started.assert_nothing_left()
    finally:
        started.end()


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("trainer same-gradient")]
    for line, script in zip(lines, ("plain.py", "distributed.py"), strict=True):
        Path("train.py").write_text((SCRIPTS / script).read_text())
        assert run(shlex.split(line)[1:]) == 0
