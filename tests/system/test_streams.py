"""What becomes of a command whose standard streams are closed, full, or left by their reader."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import LONG
from helpers.warm import forks

from trainer import cli
from trainer.system.streams import install_safe_streams, opened, stdout_error

if not sys.platform.startswith("linux"):
    pytest.skip("needs /dev/full", allow_module_level=True)

WAYS = ("closed", "full", "no reader")


def lead(number: int, way: str) -> None:
    """Make descriptor ``number`` of this process such a one, or lead it to a file."""
    if way == "closed":
        os.close(number)
        return
    if way == "no reader":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full" if way == "full" else way, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(writer, number)
    os.close(writer)


# ------------------------------------------------------------------------------------- commands, in a whole interpreter

COMPLETE = "trainer: error: stdout: No space left on device: the output is not complete\n"


ENDS = [
    ("--help", {1: "closed"}, 0, ""),
    ("--help", {1: "no reader"}, 0, ""),
    ("--help", {1: "full"}, 1, COMPLETE),
    ("--help", {1: "full", 2: "full"}, 1, ""),
    ("--help", {2: "closed"}, 0, ""),
    ("--help", {2: "full"}, 0, ""),
    ("--help", dict.fromkeys(range(3), "closed"), 0, ""),
    *(("fit", {2: way}, 2, "") for way in WAYS),  # an error that cannot be said keeps its exit code
]
UNBUFFERED = [end for end in ENDS if "full" in end[1].values()]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("command", "ways", "code", "error", "unbuffered"),
    [*((*end, "") for end in ENDS), *((*end, "1") for end in UNBUFFERED)],
)
def test_a_command_that_prints_ends_as_it_should(command, ways, code, error, unbuffered):
    done = subprocess.run(
        [sys.executable, "-m", "trainer", command],
        capture_output=True,
        preexec_fn=lambda: [lead(number, way) for number, way in ways.items()],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stderr.decode()) == (code, error)
    assert done.stdout[:14] == (b"usage: trainer" if command == "--help" and 1 not in ways else b"")


# ----------------------------------------------------------------------------------------------------------- training

RECIPE = """
import logging, sys, warnings
from dataclasses import dataclass

import torch
from tqdm import tqdm
from trainer import Checkpoint, Data, Memory, Recipe, Run, main
from trainer.models import MLP


class Loud(list):
    "Says something in every way there is, in the process that loads."
    def __getitem__(self, index):
        print("to stdout \\udcff", index)
        print("to stderr \\udcff", index, file=sys.stderr)
        sys.stdout.flush()
        warnings.warn(f"of sample {index}")
        logging.getLogger("loud").warning("sample %d", index)
        tqdm.write(f"sample {index}")
        return super().__getitem__(index)


@dataclass
class Own(Data):
    workers: int = 0
    num_classes = 2
    channels = 1
    image_size = 4

    def prepare(self, tokenizer=None):
        samples = [{"pixel_values": torch.ones(1, 4, 4), "labels": i % 2} for i in range(16)]
        self.train, self.test = Loud(samples), Loud(samples[:4])


recipe = Recipe(model=MLP([4]), data=Own(), batch_size=4, max_steps=4, memory=Memory(micro_batch_size=2),
                checkpoint=Checkpoint(every=1), run=Run(predict=False))

if __name__ == "__main__":
    main(recipe)
"""


def as_started(argv: list[str], ways: dict[int, str], workers: str, as_script: bool) -> None:
    """Be ``trainer`` with the arguments ``argv``: from what Python does at its start to what it does at its end."""
    multiprocessing.set_start_method(workers, force=True)
    for number, way in ways.items():
        lead(number, way)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        with contextlib.suppress(OSError):
            os.fstat(number)
            stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["trainer", *argv]
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        code = 0
        if as_script:
            from trainer.commands.recipes import import_recipe

            sys.argv = ["own.py", *argv[2:]]
            sys.modules["__main__"].__file__ = argv[1]
            cli.main(import_recipe(Path(argv[1])))
        else:
            cli.entry()
    except SystemExit as end:
        code = end.code
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


def started(folder, ways, *flags, workers="fork", as_script=False):
    """A training that has begun; wait for its end by ``join``."""
    (folder / "own.py").write_text(RECIPE)
    argv = ["fit", str(folder / "own.py"), "--run.dir", str(folder / "run"), *flags]
    process = forks.Process(target=as_started, args=(argv, ways, workers, as_script))
    process.start()
    return process


def assert_finished(process, folder):
    process.join(LONG)
    process.kill()
    assert process.exitcode == 0
    assert json.loads((folder / "run" / "summary.json").read_bytes())["status"] == "finished"
    for path in (folder / "run").rglob("*"):  # nothing was printed into a file that got the number of a stream
        assert path.is_dir() or b"to std" not in path.read_bytes(), path


TRAINED = [({1: "full", 2: "full"}, False), (dict.fromkeys(range(3), "closed"), False), ({2: "no reader"}, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "as_script"), TRAINED)
def test_training_goes_on_whatever_becomes_of_its_streams(tmp_path, ways, as_script):
    flags = [] if as_script else ["--data.workers", "1"]
    assert_finished(started(tmp_path, ways, *flags, as_script=as_script), tmp_path)


@pytest.mark.slow
def test_a_reader_that_leaves_in_the_middle_is_not_missed(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    process = started(tmp_path, {1: pipe, 2: pipe})
    with open(pipe, "rb") as reader:
        for _ in range(30):
            assert reader.readline()
    assert_finished(process, tmp_path)


@pytest.mark.slow
def test_a_supervised_run_whose_reader_leaves_is_finished_and_not_started_again(tmp_path):
    reader, writer = os.pipe()
    (tmp_path / "own.py").write_text(RECIPE)
    command = ["run", "--", str(tmp_path / "own.py"), "--run.dir", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-m", "trainer", *command], stdout=writer, stderr=writer)
    os.close(writer)
    assert os.read(reader, 1) == b"t"
    os.close(reader)
    try:
        assert process.wait(LONG) == 0
    finally:
        process.kill()
    journal = json.loads((tmp_path / "run" / "supervisor.json").read_bytes())
    assert journal["status"] == "finished"
    assert [attempt["exit_code"] for attempt in journal["attempts"]] == [0]


# ------------------------------------------------------------------------------------------------------- the streams


@pytest.fixture
def pipe():
    """A stream and the descriptor from which what it writes is read."""
    reader, writer = os.pipe()
    stream = opened(writer, None)
    yield stream, reader
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_a_reader_that_is_slow_gets_everything_also_where_writing_does_not_wait(pipe):
    stream, reader = pipe
    os.set_blocking(stream.fileno(), False)
    found = bytearray()

    def read():
        while len(found) < 1_000_000:
            time.sleep(0.001)
            found.extend(os.read(reader, 20_000))

    thread = threading.Thread(target=read)
    thread.start()
    stream.write("x" * 1_000_000)
    stream.flush()
    thread.join(LONG)
    assert bytes(found) == b"x" * 1_000_000


def test_when_the_reader_has_gone_also_c_code_writes_to_nobody(pipe):
    stream, reader = pipe
    os.close(reader)
    print("anything", file=stream, flush=True)
    assert os.write(stream.fileno(), b"C code") == 6
    print("anything", file=stream, flush=True)
    assert stream.buffer.raw.lost is None


def test_what_a_full_disk_did_not_take_is_known(monkeypatch):
    with open("/dev/full", "wb") as full:
        stream = opened(full.fileno(), None)
        monkeypatch.setattr(sys, "stdout", stream)
        print("anything")
        assert "No space left" in str(stdout_error())
        print("anything", flush=True)  # the disk may have space again


def test_what_the_encoding_has_no_bytes_for_is_written_out():
    reader, writer = os.pipe()
    stream = opened(writer, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print("1 · 2", file=stream, flush=True)
    assert os.read(reader, 100) == rb"1 \xb7 2" + b"\n"
    os.close(reader)
    os.close(writer)


def test_streams_that_somebody_else_has_put_in_place_are_left_alone(monkeypatch):
    theirs = [io.StringIO(), io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "w"))]
    for stream, name in zip(theirs, ("stdout", "stderr"), strict=True):
        monkeypatch.setattr(sys, name, stream)
    install_safe_streams()
    assert [sys.stdout, sys.stderr] == theirs
    assert stdout_error() is None
