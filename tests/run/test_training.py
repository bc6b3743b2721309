"""The way from the command line to the backward pass is short."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

import trainer
from trainer.cli import run

MAX_FRAMES = 12  # from the command line to precision.backward

RECIPE = """
import sys
from dataclasses import dataclass, replace

import torch

from trainer import Recipe
from trainer.data import Digits
from trainer.models import MLP

FRAMES = []


class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        frame, found = sys._getframe(), []
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        FRAMES.append(found)
        return gradient


@dataclass
class Deep(MLP):
    def losses(self, module, batch):
        for loss in super().losses(module, batch):
            yield replace(loss, total=Recorded.apply(loss.total))


recipe = Recipe(model=Deep(), data=Digits(), batch_size=64, max_steps=2)
"""


@pytest.mark.parametrize("flags", [[], ["--memory.precision=bf16-mixed"]])
def test_the_command_line_reaches_backward_in_few_frames(tmp_path, flags):
    path = tmp_path / "deep.py"
    path.write_text(RECIPE)
    common = [f"--run.dir={tmp_path}/run", "--run.accelerator=cpu", "--run.evaluate=false", "--run.predict=false"]
    assert run(["fit", str(path), *common, *flags]) == 0
    recorded = [vars(module)["FRAMES"] for module in [*sys.modules.values()] if "FRAMES" in vars(module)][-1]
    assert len(recorded) == 3  # a rehearsal and two steps
    package = str(Path(inspect.getfile(trainer)).parent)
    for frames in recorded:
        own = [name for file, name in frames if file.startswith(package)]
        assert own[0] == "accumulate"
        assert own[-1] == "run"
        assert len(own) + 1 <= MAX_FRAMES  # the entry point calls run()
