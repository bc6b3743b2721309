"""``trainer checkpoint``: look, check, export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.cli import run
from trainer.data import Digits
from trainer.fit import fit
from trainer.weights import read_weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a packaged recipe, with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    recipe = Recipe(
        model=MODEL,
        data=Digits(),
        optim=Optim("adamw"),
        batch_size=100,
        max_steps=4,
        checkpoint=Checkpoint(every=2),
        memory=Memory(micro_batch_size=50, precision="bf16-mixed", cpu_offload="optimizer"),
        run=Run(dir=str(run_dir), progress=False),
    )
    fit(recipe, "vit_digits")
    return run_dir


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def packaged_model():
    from trainer.locate import load_recipe

    return load_recipe("vit_digits")[0].model


MODEL = packaged_model()


def test_list_shows_the_newest_first(finished, capsys):
    assert run(["checkpoint", "list", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].split(" (")[0] for line in lines] == ["step 4", "step 2"]
    assert "1 rank" in lines[0]


def test_verify_finds_the_file_that_changed(copied, capsys):
    assert run(["checkpoint", "verify", str(copied)]) == 0
    victim = copied / "checkpoints/step-00000002/state.json"
    victim.write_bytes(victim.read_bytes().replace(b"2", b"3", 1))
    assert run(["checkpoint", "verify", str(copied)]) == 1
    output = capsys.readouterr()
    assert f"CORRUPT: {victim} is corrupt" in output.out
    assert "1 of 2 checkpoint(s) are corrupt" in output.err
    assert run(["checkpoint", "verify", str(copied / "checkpoints/step-00000004")]) == 0


def test_export_makes_the_model_that_the_run_made(copied, tmp_path, capsys):
    assert run(["checkpoint", "export", str(copied), "--out", str(tmp_path / "model")]) == 0
    ours, theirs = (read_weights(folder / "model.safetensors") for folder in (tmp_path / "model", copied / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "model/config.json").read_bytes() == (copied / "model/config.json").read_bytes()


def test_a_checkpoint_is_exported_from_the_folder_it_lies_in(copied, monkeypatch):
    shutil.rmtree(copied / "model")
    monkeypatch.chdir(copied / "checkpoints")
    assert run(["checkpoint", "export", "step-00000004"]) == 0
    assert (copied / "model/model.safetensors").is_file()


def test_an_unfinished_run_is_evaluated_after_an_export(copied, capsys):
    shutil.rmtree(copied / "model")
    newest = copied / "checkpoints/step-00000004/rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert run(["checkpoint", "export", str(copied)]) == 0
    output = capsys.readouterr().out
    assert "step-00000004/rank-00000.safetensors has" in output
    assert f"the model of step-00000002 is in {copied / 'model'}" in output
    assert run(["evaluate", str(copied)]) == 0
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verfy", "x"], "checkpoint verfy: no such action (there are list, verify, export)"),
        (["list"], "checkpoint list takes one DIR"),
        (["list", "nowhere"], "nowhere: no such directory"),
        (["verify", ".", "--out", "x"], "checkpoint verify: unknown flag --out"),
        (["verify", "."], "holds no checkpoint"),
    ],
)
def test_what_cannot_be_done_is_refused(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["checkpoint", *argv]) == 2
    assert message in capsys.readouterr().err


def test_export_does_not_write_over_a_model(copied, capsys):
    assert run(["checkpoint", "export", str(copied)]) == 2
    assert f"{copied / 'model'} exists: give another folder by --out, or remove it" in capsys.readouterr().err
