"""Checkpoints of somebody else, with manifests that fit: no code is executed, and each fault names its file."""

import hashlib
import json
import pickle
import shutil

import pytest
from helpers.payloads import DEEP_JSON, LYING, Trap

from trainer.checkpoint.manifest import Manifest
from trainer.cli import run

FIT = ["fit", "vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--max_steps=2"]
FIT += ["--run.evaluate=false", "--checkpoint.every=1", "--checkpoint.asynchronous=false", "--run.predict=false"]
TENSORS = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run([*FIT, f"--run.dir={run_dir}"]) == 0
    return run_dir / "checkpoints" / "step-00000001"


@pytest.fixture
def resumed(original, tmp_path, capsys):
    """A function: resume from the checkpoint with one file replaced, and its manifest made to fit; the last line."""

    def attempt(file, content):
        folder = shutil.copytree(original, tmp_path / original.name, dirs_exist_ok=True)
        (folder / file).write_bytes(content)
        # What anybody can do who can write the file: the hashes find accidents, not intentions.
        stated = json.loads((folder / "manifest.json").read_text())
        stated["files"][file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        del stated["digest"]
        (folder / "manifest.json").write_text(Manifest(**stated).to_json())
        capsys.readouterr()
        code = run([*FIT, f"--run.resume={folder}", f"--run.dir={tmp_path / 'again'}"])
        errors = capsys.readouterr().err.strip().splitlines()
        assert not (tmp_path / "executed").exists()
        assert "Traceback" not in "".join(errors)
        return code, errors[-1] if errors else ""

    return attempt


def test_an_unchanged_file_is_resumed_from(original, resumed):
    assert resumed("state.json", (original / "state.json").read_bytes())[0] == 0


def test_files_that_nothing_needs_are_not_executed(original, resumed, tmp_path):
    (tmp_path / original.name).mkdir()
    for extra in (".metadata", "optimizer.pt", "__init__.py", "manifest.json.pkl", "state.json.pkl"):
        (tmp_path / original.name / extra).write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    resumed("state.json", (original / "state.json").read_bytes())


@pytest.mark.parametrize("file", ["state.json", "rank-00000.json", TENSORS])
@pytest.mark.parametrize("content", ["pickle", "deep", "[1]", "{}", '{"tensors": 1, "values": 2}'])
def test_what_is_no_state_is_refused(resumed, tmp_path, file, content):
    known = {"pickle": pickle.dumps(Trap(tmp_path / "executed")), "deep": DEEP_JSON.encode()}
    code, error = resumed(file, known.get(content, content.encode()))
    assert code in (1, 2)
    assert error.startswith("trainer: error: ")
    assert file in error


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("counters", [1]), ("counters.step", "1"), ("counters.step", 7), ("counters.epoch", None),
        ("skipped_steps", 1.5), ("scheduler.steps", "1"), ("scheduler.rates", 0.1), ("scheduler.rates", ["x"]),
        ("scheduler.rates", []), ("overlapped", "no"), ("halvings", 10**12), ("quarantine", []),
        ("quarantine.samples", [{"position": "x"}]), ("stopwatch.seconds", None), ("stopwatch", {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_state_of_other_kinds_is_refused_naming_it(original, resumed, way, value):
    state = inner = json.loads((original / "state.json").read_text())
    *sections, last = way.split(".")
    for section in sections:
        inner = inner[section]
    inner[last] = value
    code, error = resumed("state.json", json.dumps(state).encode())
    assert code == 1
    assert error.startswith("trainer: error: ")
    assert "state.json holds content that no run wrote" in error


@pytest.mark.parametrize("name", LYING)
def test_tensors_that_lie_are_refused(resumed, name):
    code, error = resumed(TENSORS, LYING[name])
    assert code in (1, 2)
    assert TENSORS in error


def test_a_history_that_is_no_text_is_refused_before_training(resumed):
    code, error = resumed("metrics.csv", b"step,loss\n1,\xff\n")
    assert code == 1
    assert "metrics.csv holds content that no run wrote" in error
