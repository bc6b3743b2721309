"""A command says at once what it does, and imports no more than it needs; without torch it refuses what it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG

from trainer.system import status_line

HEAVY = ("torchmetrics", "sklearn", "matplotlib", "transformers", "scipy", "pytorch_lightning")
FABRIC = "lightning_fabric"


@pytest.mark.slow
def test_what_predicts_imports_torch_alone_and_what_trains_fabric_too():
    names = (*HEAVY, "lightning", FABRIC)
    code = "import sys"
    for imported in ("predict, load_recipe", "fit, evaluate"):
        code += f"; from trainer import {imported}; print(sorted(set({names!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", f"[{FABRIC!r}]"]


WRONG = {
    "a folder of shards": ["fit", "distilbert_streaming", "--data.train_files", "nope"],
    "a folder of reviews": ["evaluate", "RUN", "--data.root", "./nope"],
    "a column of chats": ["fit", "lm_chat", "--data.train_files", "RUN/chats.jsonl"],
    "a model": ["fit", "distilbert_imdb", "--model.name", "nobody/absent"],
    "weights": ["fit", "distilbert_imdb", "--model.weights", "./nope"],
    "a rung": ["ladder", "vit_digits", "--rungs", "baselin"],
    "a GPU": ["plan", "vit_digits"],
}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(), reason="there may be a GPU")
def test_what_is_not_there_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.yaml").write_text("recipe: distilbert_imdb\n")
    (tmp_path / "chats.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    commands = [[word.replace("RUN", str(tmp_path)) for word in words] for words in WRONG.values()]
    code = "import sys; sys.modules['torch'] = None; from trainer.cli import run\n"
    code += f"print([run(words) for words in {commands}])"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str([2] * len(commands)), done.stderr
    said = [line.removeprefix("trainer: error: ") for line in done.stderr.splitlines()]
    starts = ["data.train_files='nope': ", "data.root='./nope': ", f"{tmp_path / 'chats.jsonl'} has no column messages"]
    starts += ["model.name='nobody/absent' cannot be loaded: ", "model.weights=./nope is not a folder"]
    starts += ["--rungs: no rung 'baselin'", "no GPU found: "]
    assert [line for line, start in zip(said, starts, strict=True) if not line.startswith(start)] == []


def test_the_first_line_comes_before_torch_and_once_for_all_ranks(tmp_path):
    """In a Python that has no torch: it is looked for after the line was written."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    command = [sys.executable, "-m", "trainer", "fit", "vit_digits"]
    missing = "[rank 1] trainer: error: cannot import torch: no torch here"
    for rank, first in (("0", "trainer 0.1.0 · vit_digits · loading torch …"), ("1", missing)):
        places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
        environment = {**os.environ, "PYTHONPATH": places, "LOCAL_RANK": rank}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG, check=False)
        assert done.stderr.startswith(first), done.stderr
        assert "no torch here" in done.stderr


def test_a_status_line_follows_another_only_after_a_while_and_none_after_the_end(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr(status_line.time, "monotonic", lambda: now)
    status_line.show_status("nothing has begun")
    status_line.start_status("a command\x1b[2J", {"RANK": "0"})
    for seconds, what in ((0.0, "one"), (1.0, "two"), (2.0, "three"), (3.0, "four")):
        now = seconds
        status_line.show_status(what)
    status_line.clear_status()
    now = 9.0
    status_line.show_status("five")
    status_line.start_status("another rank", {"LOCAL_RANK": "1"})
    status_line.show_status("six")
    first, second = (rf"a command\x1b[2J · {what} …" for what in ("one", "three"))
    assert capsys.readouterr().err.splitlines() == [first, second]
