"""A command says at once what it does, and imports no more than it needs; without torch it refuses what it can."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG

HEAVY = ("torchmetrics", "sklearn", "matplotlib", "transformers", "scipy", "lightning.pytorch")


def loaded(code: str, names: tuple[str, ...]) -> str:
    """Which of ``names`` are imported after ``code`` in a Python of its own."""
    code += f"\nimport sys; print(sorted(set({names!r}) & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_what_trains_imports_torch_and_fabric_alone_and_what_predicts_no_fabric():
    assert loaded("from trainer import fit, evaluate", (*HEAVY, "lightning.fabric")) == "['lightning.fabric']"
    assert loaded("from trainer import predict, load_recipe", (*HEAVY, "lightning", "lightning.fabric")) == "[]"


WRONG = {
    "a folder of shards": ["fit", "distilbert_streaming", "--data.train_files", "nope"],
    "a folder of reviews": ["evaluate", "RUN", "--data.root", "./nope"],
    "a rung": ["ladder", "vit_digits", "--rungs", "baselin"],
    "a GPU": ["plan", "vit_digits"],
}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(), reason="there may be a GPU")
def test_what_is_not_there_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.yaml").write_text("recipe: distilbert_imdb\n")
    commands = [[word.replace("RUN", str(tmp_path)) for word in words] for words in WRONG.values()]
    code = "import sys; sys.modules['torch'] = None; from trainer.cli import run\n"
    code += f"print([run(words) for words in {commands}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([2] * len(commands)), done.stderr
    said = [line.removeprefix("trainer: error: ") for line in done.stderr.splitlines()]
    starts = ("data.train_files='nope': ", "data.root='./nope': ", "--rungs: no rung 'baselin'", "no GPU is there: ")
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


SLOW = """
import os, sys, time
from trainer.system import streams, waiting
streams.keep_streams()
waiting.begin("a command")
waiting.doing("one")
time.sleep(2.5)
waiting.doing("two")
if os.fork() == 0:
    time.sleep(2.5)
    os._exit(0)
os.wait()
print("shown", file=sys.stderr)
waiting.end()
assert not [finder for finder in sys.meta_path if isinstance(finder, waiting.Waiting)]
"""


@pytest.mark.slow
def test_in_a_pipe_it_is_repeated_until_there_is_something_to_show():
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("a command · one …", "shown")
    repeated = [re.fullmatch(r"a command · (one|two) … (\d+) s", line) for line in lines[1:-1]]
    assert all(repeated)
    assert [found[1] for found in repeated if found] == sorted(found[1] for found in repeated if found)
    seconds = [int(found[2]) for found in repeated if found]
    assert seconds == sorted(set(seconds)), "one process says it, not the one that it has forked"
    assert {"one", "two"} == {found[1] for found in repeated if found}


@pytest.mark.slow
def test_on_a_terminal_the_line_changes_and_is_gone_when_something_is_printed():
    reader, writer = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SLOW], stderr=writer)
    os.close(writer)
    seen = b""
    while chunk := read(reader):
        seen += chunk
    assert process.wait(LONG) == 0
    first, *changes, last = seen.decode().replace("\r\n", "\n").split("\x1b[K")
    assert first == "\ra command · one …"
    assert all(re.fullmatch(r"\ra command · (one|two) … \d+ s", line) for line in changes[:-1])
    assert {line.split(" · ")[1][:3] for line in changes[:-1]} == {"one", "two"}
    assert (changes[-1], last) == ("\r", "shown\n")


def read(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except OSError:  # the other end is closed
        return b""
