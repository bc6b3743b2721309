"""``trainer checkpoint``: look, check, export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.ranks import PICTURES

from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.api import fit
from trainer.checkpoint.manifest import Manifest, read_manifest, verify_files
from trainer.cli import run
from trainer.commands.checkpoint import find, list_checkpoints, verify_checkpoints
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.weights.files import read_weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a packaged recipe, with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    recipe = Recipe(
        model=dataclasses.replace(load_recipe("vit_digits")[0].model, layers=1),
        data=Digits(),
        optim=Optim("adamw"),
        batch_size=100,
        max_steps=4,
        checkpoint=Checkpoint(every=2),
        memory=Memory(micro_batch_size=50, precision="bf16-mixed", cpu_offload="optimizer"),
        run=Run(dir=str(run_dir), progress=False, predict=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in PICTURES:
            patch.setattr(name, lambda *_: None)
        fit(recipe, "vit_digits")
    return run_dir


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_list_shows_the_newest_first_and_verify_finds_the_file_that_changed(copied, capsys):
    assert run(["checkpoint", "list", str(copied)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].split(" (")[0] for line in lines] == ["step 4", "step 2"]
    assert "1 rank" in lines[0]
    assert run(["checkpoint", "verify", str(copied)]) == 0
    victim = copied / "checkpoints/step-00000002/state.json"
    victim.write_bytes(victim.read_bytes().replace(b"2", b"3", 1))
    assert run(["checkpoint", "verify", str(copied)]) == 1
    output = capsys.readouterr()
    assert f"CORRUPT: {victim} is corrupt" in output.out
    assert "1 of 2 checkpoint(s) are corrupt" in output.err
    assert run(["checkpoint", "verify", str(copied / "checkpoints/step-00000004")]) == 0


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/files.json", "recipe.yaml"])
def test_a_flipped_bit_in_the_results_is_found_by_all_who_read_them(copied, capsys, name, tmp_path):
    victim = copied / name
    (tmp_path / "image.png").touch()
    content = bytearray(victim.read_bytes())
    if name == "recipe.yaml":  # one that is still a recipe
        content = content.replace(b"seed: 0", b"seed: 1")
    else:
        content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert run(["checkpoint", "verify", str(copied)]) == 1
    said = capsys.readouterr()
    assert f"CORRUPT: {victim} was changed after the run" in said.out
    assert "1 of 2 results of the run have changed since they were written" in said.err
    for words in (["evaluate", str(copied)], ["predict", str(copied), "--image", str(tmp_path / "image.png")]):
        assert run(words) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert line.startswith(f"trainer: error: {victim} was changed after the run: ")
        assert "if it was changed on purpose" in line


def test_what_was_changed_on_purpose_and_what_is_older_is_used_with_a_warning(copied, capsys):
    with open(copied / "model" / "config.json", "a") as file:
        file.write("\n")
    (copied / "model" / "files.json").unlink()  # as the message says
    recipe = copied / "recipe.yaml"
    *lines, seal = recipe.read_text().splitlines()
    assert seal.startswith("# sha256 of the lines above: ")
    recipe.write_text("\n".join(lines) + "\n")
    assert run(["checkpoint", "verify", str(copied)]) == 0
    assert "model has no files.json: it is not checked" in capsys.readouterr().out
    assert run(["evaluate", str(copied)]) == 0
    said = capsys.readouterr().err
    assert "trainer: warning: " in said
    assert "recipe.yaml has no hash: it is not checked" in said


def test_a_run_without_checkpoints_is_verified_by_its_results(copied, capsys):
    shutil.rmtree(copied / "checkpoints")
    (copied / "model" / "README.md").write_text("what a person adds is left alone")
    assert run(["checkpoint", "verify", str(copied)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{copied / 'recipe.yaml'}  ok", f"{copied / 'model'}  ok"]


def test_a_checkpoint_that_its_run_removes_meanwhile_is_no_fault(copied, capsys, monkeypatch):
    newest, oldest = find(copied)

    def read_late(path):
        if path == oldest:  # rotation comes between the listing and the look
            os.rename(path, path.with_name(f".{path.name}.0123.gone"))
        return read_manifest(path)

    for reader in ("trainer.commands.checkpoint", "trainer.checkpoint.manifest"):
        monkeypatch.setattr(f"{reader}.read_manifest", read_late)
    list_checkpoints([newest, oldest])
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [str(newest)]
    os.rename(oldest.with_name(f".{oldest.name}.0123.gone"), oldest)
    verify_checkpoints([newest, oldest], {})
    assert capsys.readouterr().out == f"{newest}  ok\n{oldest}  removed by its run in the meantime\n"

    def verify_late(folder, manifest, names):  # it goes while its files are read
        os.rename(folder, folder.with_name(f".{folder.name}.0123.gone"))
        verify_files(folder, manifest, names)

    monkeypatch.setattr("trainer.checkpoint.manifest.verify_files", verify_late)
    verify_checkpoints([newest], {})
    assert "removed by its run in the meantime" in capsys.readouterr().out


def test_a_forged_figure_hides_no_other_checkpoint(copied, capsys):
    path, other = find(copied)
    content = dataclasses.asdict(read_manifest(path)) | {"figures": {"acc": "x"}}
    (path / "manifest.json").write_text(Manifest(**content).to_json())
    assert run(["checkpoint", "list", str(copied)]) == 0
    forged, fine = capsys.readouterr().out.splitlines()
    assert "CORRUPT" in forged
    assert "figures={'acc': 'x'}" in forged
    assert fine.startswith(f"{other}  step 2 ")


def test_a_shape_that_no_file_holds_is_refused_by_an_export(copied, capsys):
    shutil.rmtree(copied / "model")
    for path in find(copied):
        sign = path / "rank-00000.json"
        text = re.sub(r'"shape": \[\d+, \d+\]', '"shape": [10000000, 10000000]', sign.read_text())
        sign.write_text(text)
        content = json.loads((path / "manifest.json").read_text())
        del content["digest"]
        content["files"][sign.name] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        (path / "manifest.json").write_text(Manifest(**content).to_json())
    assert run(["checkpoint", "export", str(copied)]) == 2
    assert "does not fit the model: weights/" in capsys.readouterr().err


def test_export_makes_the_model_that_the_run_made(copied, tmp_path, capsys):
    assert run(["checkpoint", "export", str(copied)]) == 2
    assert f"{copied / 'model'} exists: remove it or give another folder with --out" in capsys.readouterr().err
    assert run(["checkpoint", "export", str(copied), "--out", str(tmp_path / "model")]) == 0
    ours, theirs = (read_weights(folder / "model.safetensors") for folder in (tmp_path / "model", copied / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "model/config.json").read_bytes() == (copied / "model/config.json").read_bytes()
    ours, theirs = ((folder / "README.md").read_text() for folder in (tmp_path / "model", copied / "model"))
    assert "| status | checkpoint of step 4 |" in ours
    assert ours.partition("## Recipe")[2] == theirs.partition("## Recipe")[2]  # and versions


def test_an_unfinished_run_is_evaluated_after_an_export_from_the_folder_it_lies_in(copied, capsys, monkeypatch):
    shutil.rmtree(copied / "model")
    newest = copied / "checkpoints/step-00000004/rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    monkeypatch.chdir(copied / "checkpoints")
    assert run(["checkpoint", "export", "."]) == 0
    output = capsys.readouterr().out
    assert "step-00000004/rank-00000.safetensors has" in output
    assert f"exported the model of step-00000002 to {copied / 'model'}" in output
    assert run(["evaluate", str(copied)]) == 0
    assert "accuracy" in capsys.readouterr().out
