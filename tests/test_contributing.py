"""The six changes of CONTRIBUTING.md, each applied to a copy of the package and tried in a training step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPE = """
from dataclasses import dataclass
import torch
from trainer import Data, Memory, Optim, Recipe, Run
from trainer.models import MLP

@dataclass
class Sums(Data):
    tasks = ("regression",)
    num_classes = 1
    image_size = 2
    channels = 1

    def prepare(self, tokenizer=None, model=None):
        images = torch.rand(16, 1, 2, 2, generator=torch.Generator().manual_seed(0))
        self.train = self.val = [{"pixel_values": one, "labels": one.sum()} for one in images]

recipe = Recipe(model=MLP(hidden=[4], task="regression"), data=Sums(), batch_size=8, optim=Optim(lr=0.01))
"""
TRY = {
    "An optimizer": (["--optim.name", "adamax"], "adamax"),
    "A memory technique": (["--memory.release_cache", "true"], "cache released"),
    "A dataset": (["--data", "Stripes", "--model.task", "single_label", "--model.num_classes", "null"], "Stripes"),
    "A loss": (["--model.loss.distance", "log_cosh"], "log_cosh"),
    "A metric": (["--run.metrics", "[kendall]"], "kendall"),
    "A flag": (["--run.greeting", "hello, gradient"], "hello, gradient"),
}
"""Flags that use each change, and a text that the command then prints or writes."""


def change(title: str, tree: Path) -> set[str]:
    """Apply the diff below the heading ``title`` to ``tree``. Return the files that it names."""
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
    (diff,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    parts = re.split(r"^--- (.+)\n", diff, flags=re.MULTILINE)[1:]
    for name, lines in zip(parts[::2], parts[1::2], strict=True):
        old = "\n".join(line[1:] for line in lines.splitlines() if line[0] == "-")
        new = "\n".join(line[1:] for line in lines.splitlines() if line[0] == "+")
        path = tree / name
        if not old:
            assert not path.exists(), name
            path.write_text(new + "\n")
            continue
        source = path.read_text()
        assert source.count(old) == 1, f"{name} has {source.count(old)} times: {old}"
        path.write_text(source.replace(old, new))
    return set(parts[::2])


@pytest.mark.slow
@pytest.mark.parametrize("title", TRY)
def test_a_change_of_contributing_md_trains(title, tmp_path):
    shutil.copytree(ROOT / "trainer", tmp_path / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    assert 1 <= len(change(title, tmp_path)) <= 4
    (tmp_path / "toy.py").write_text(RECIPE)
    flags, expected = TRY[title]
    command = [sys.executable, "-m", "trainer", "fit", "toy.py", "--run.dir", "run", "--max_steps", "1", *flags]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command += ["--run.accelerator", "cpu", "--run.predict", "false"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = done.stdout + done.stderr + (tmp_path / "run" / "recipe.yaml").read_text()
    assert expected in written, written
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_contributing_md_names_six_changes_and_each_is_tried():
    assert re.findall(r"^### (.+)$", PAGE, re.MULTILINE) == list(TRY)
