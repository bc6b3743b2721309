"""``sys.exit()`` within a run, by a library or by user code, is a failure with a named cause."""

from __future__ import annotations

import json
import re
import sys

import pytest

from trainer.cli import _exit_code, run

RECIPE = """
import sys
from dataclasses import dataclass

import torch
from trainer import Data, Memory, Recipe, Run
from trainer.models import MLP


@dataclass
class Model(MLP):
    at: str = ""
    code: int | None = 0

    def build(self):
        self.leave("build")
        return super().build()

    def losses(self, module, batch):
        self.leave("losses")
        yield from super().losses(module, batch)

    def leave(self, here):
        if self.at == here:
            sys.exit(self.code)


class Split(list):
    def __init__(self, at, size):
        super().__init__({"pixel_values": torch.ones(1, 4, 4), "labels": i % 2} for i in range(size))
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            sys.exit(0)
        return super().__getitem__(index)


@dataclass
class Own(Data):
    at: str = ""
    workers: int = 0
    num_classes = 2
    channels = 1
    image_size = 4

    def prepare(self, tokenizer=None):
        if self.at == "prepare":
            sys.exit(0)
        self.train, self.test = Split(11 if self.at == "train" else -1, 16), Split(1 if self.at == "test" else -1, 4)


recipe = Recipe(model=Model([4]), data=Own(), batch_size=8, epochs=1, memory=Memory(micro_batch_size=4),
                run=Run(progress=False, predict=False))
"""

CALLED = r"SystemExit: sys\.exit\(0\) was called before the run was finished"


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.parametrize("code", [None, 0, 1, 75, "enough"])
def test_it_is_a_failure_of_any_command(code, capsys):
    with pytest.raises(SystemExit) as caught:
        sys.exit(code)
    assert _exit_code(caught.value) == 1
    shown = "" if code is None else code
    line = f"trainer: error: SystemExit: sys.exit({shown}) was called before the run was finished"
    assert capsys.readouterr().err.splitlines()[0] == line


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--data.at", "train"], rf"rank 0, step \d, loading, samples [\d, ]+: {CALLED}"),
        (["--data.at", "train", "--data.workers", "1"], r"data worker 0 of 1 \(pid \d+\) exited with code 0 .*11.*"),
        (["--data.at", "test"], rf"rank 0, .*evaluation.*: {CALLED}"),
        (["--data.at", "prepare"], rf"preparing model and data: {CALLED}"),
        (["--model.at", "build"], rf"rank 0, .*: {CALLED}"),
        (["--model.at", "losses"], rf"rank 0, step 1, forward, samples [\d, ]+: {CALLED}"),
        (["--model.at", "losses", "--model.code", "null"], r"rank 0, step 1, forward, .*sys\.exit\(\) was.*"),
    ],
)
def test_it_ends_a_run_as_any_error_does(own, flags, line, tmp_path, capsys):
    assert run(["fit", own, "--run.dir", str(tmp_path / "run"), *flags]) == 1
    errors = [text for text in capsys.readouterr().err.splitlines() if "trainer: error: " in text]
    assert len(errors) == 1
    assert re.fullmatch(f"trainer: error: {line}", errors[0]), errors[0]
    summary = tmp_path / "run" / "summary.json"
    assert not summary.exists() or json.loads(summary.read_bytes())["status"] == "failed"


def test_it_is_refused_in_a_recipe(tmp_path, capsys):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit()\n")
    for command in ("fit", "plan", "doctor", "ladder"):
        assert run([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"trainer: error: recipe {path} line 2: SystemExit")
        assert error.count("\n") == 1


def test_a_plan_that_it_ends_is_none_and_the_doctor_finds_it(own, capsys, tmp_path):
    assert run(["plan", own, "--gpu", "cpu", "--data.at", "prepare"]) == 1
    assert "trainer: error: SystemExit" in capsys.readouterr().err
    assert run(["doctor", own, "--data.at", "train", "--run.dir", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("FAIL") and "train sample 11" in line], out
