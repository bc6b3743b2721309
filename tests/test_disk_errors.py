"""A disk that fails or is full, wherever a run or a command writes: a line with the file and what stays, or the fix."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import datasets.builder
import huggingface_hub.constants
import pytest
import torch
from helpers.pretrained import text
from safetensors import SafetensorError

from trainer import Recipe, RecipeError, predict
from trainer.after.export import export
from trainer.checkpoint import export as saving
from trainer.checkpoint.export import save_model
from trainer.cli import run
from trainer.data import TextFiles
from trainer.data.cache import cache_folder
from trainer.data.tables import open_hub_dataset, open_table
from trainer.data.tokens import tokenize_table
from trainer.errors import RunError
from trainer.models import hub
from trainer.system.files import errno_of, room_in

SMALL = ["vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--data.test_fraction=0.97"]
SMALL += ["--checkpoint.every=1", "--run.evaluate=false"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(["fit", *SMALL, "--max_steps=1", f"--run.dir={run_dir}"]) == 0
    return run_dir


FSYNCS = ["recipe.yaml", "/run", "curves.png", "model.safetensors", "summary.json", ".run.lock"]
CALLS = [("mkdir", "/checkpoints"), ("open", "/run/metrics.csv"), *(("fsync", ending) for ending in FSYNCS)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("call", "ending"), CALLS)
def test_a_failing_disk_is_named_and_what_stays(finished, tmp_path, monkeypatch, call, ending, capsys):
    """Every fsync (or open, or mkdir) of a path with this ending fails."""
    original, number = getattr(os, call), errno.EIO if call == "fsync" else errno.EDQUOT

    def broken(target, *args, **kwargs):
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if path.endswith(ending) or f"/.{ending}." in path:
            raise OSError(number, os.strerror(number), *([] if call == "fsync" else [path]))
        return original(target, *args, **kwargs)

    run_dir, is_new = tmp_path / "run", ending == "/checkpoints"
    if not is_new:
        shutil.copytree(finished, run_dir)
    more = [] if is_new else ["--run.resume=auto", '--run.allow_change=["max_steps"]']
    monkeypatch.setattr(os, call, broken)
    assert run(["fit", *SMALL, "--max_steps=2", f"--run.dir={run_dir}", *more]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (error,) = [line for line in said.splitlines() if "error" in line]
    assert error.startswith("trainer: error: ")
    assert os.strerror(number) in error
    assert f"{run_dir}" in error
    assert ("no checkpoint was saved before" if is_new else "lder checkpoints stay") in error
    assert is_new or (run_dir / "checkpoints" / "step-00000001" / "manifest.json").is_file()


# Full disks

FULL = os.strerror(errno.ENOSPC)
ROWS = "review,label\na wonderful film,1\na dreadful film,0\n"


@pytest.fixture
def no_room(monkeypatch):
    """What ``datasets`` finds when it is about to write."""
    monkeypatch.setattr(datasets.builder, "has_sufficient_disk_space", lambda *args, **kwargs: False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    run_dir = tmp_path_factory.mktemp("run")
    model = text(class_names=["ant", "bee", "cat", "dog", "elk"])
    save_model(model, model.build().eval(), run_dir / "model")
    data = TextFiles("absent.csv", text_column="review", max_length=32)
    return Recipe(model=model, data=data, batch_size=1), run_dir


def test_it_is_found_behind_any_error_and_never_in_a_text_of_the_data(tmp_path):
    rust = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    copied = shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")])
    found = [OSError(errno.EDQUOT, "x"), OSError(errno.EROFS, "x"), rust, copied, OSError("Not enough disk space. N")]
    for error in found:
        said = rf"^{tmp_path} cannot be written to \(.+\): free some space, or do this$"
        with pytest.raises(RunError, match=said), room_in(tmp_path, "do this"):
            raise RecipeError("a.csv cannot be read: mend the file") from error
    assert [errno_of(error) for error in found[2:]] == [errno.ENOSPC] * 3
    for error in (RecipeError("'[Errno 28] x'"), ValueError("Not enough disk space"), OSError(errno.EIO, "x")):
        with pytest.raises(type(error)), room_in(tmp_path, "do this"):
            raise error


def test_a_full_token_cache_is_named_and_not_the_file(tmp_path, no_room):
    (tmp_path / "a.csv").write_text(ROWS)
    cache = cache_folder(str(tmp_path / "cache"))
    rows = open_table(tmp_path / "a.csv", cache)
    said = rf"^{cache} cannot be written to \({FULL}\): free some space, or set data\.cache_dir"
    with pytest.raises(RunError, match=said):
        tokenize_table(rows, "review", "label", text().tokenizer_or_none(), 32, cache)


def test_a_full_cache_of_data_sets_is_named_and_not_the_data_set(tmp_path, no_room):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.csv").write_text(ROWS)
    with pytest.raises(RunError, match=rf"^{tmp_path / 'cache'} cannot be written to \({FULL}\): .*data\.cache_dir"):
        open_hub_dataset("name", str(tmp_path / "own"), {"train": "train"}, "", str(tmp_path / "cache"))


def test_a_full_cache_of_the_hub_is_named_and_not_the_model(monkeypatch):
    def load(*args, **kwargs):
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(hub, "offline_reason", lambda: "")
    cache = re.escape(huggingface_hub.constants.HF_HUB_CACHE)
    with pytest.raises(RunError, match=rf"^{cache} cannot be written to \({FULL}\): .*set HF_HOME"):
        hub.from_hub("name", "some/model", load)


def test_predict_names_the_folder_of_its_output(trained, tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, FULL, str(path))

    recipe, run_dir = trained
    (tmp_path / "a.csv").write_text(ROWS)
    monkeypatch.setattr("trainer.system.files.sync_to_disk", full)
    said = rf"^{tmp_path / 'out'} cannot be written to \({FULL}\): .*give another file with --output"
    with pytest.raises(RunError, match=said):
        predict(recipe, run_dir, paths=[str(tmp_path / "a.csv")], output=str(tmp_path / "out" / "o.csv"))
    assert [*(tmp_path / "out").iterdir()] == []


def test_export_of_a_folder_names_where_it_was_to_be(trained, tmp_path, monkeypatch):
    recipe, run_dir = trained
    copy = shutil.copyfile

    def full(source, target, **how):
        if Path(source).suffix == ".safetensors":
            raise OSError(errno.ENOSPC, FULL, str(source), None, str(target))
        return copy(source, target, **how)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunError, match=rf"^{tmp_path} cannot be written to \({FULL}\): .*--output"):
        export(recipe, run_dir, "hf", str(tmp_path / "hf"), None, False)
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_names_the_checkpoint_that_stays(tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(saving, "save_file", full)
    small = ["--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--data.test_fraction=0.97"]
    small += ["--checkpoint.every=1", "--run.evaluate=false", "--max_steps=1", f"--run.dir={tmp_path / 'run'}"]
    assert run(["fit", "vit_digits", *small]) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    kept = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert re.search(rf"model\.safetensors: .*{FULL}.*; older checkpoints stay, the newest is {kept}\. ", said)
    assert f"--run.dir {tmp_path / 'run'} --run.resume auto" in said
