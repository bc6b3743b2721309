"""A disk that fails, wherever a run writes: one line that names the file and what stays."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from trainer.cli import run

SMALL = ["vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--data.test_fraction=0.97"]
SMALL += ["--checkpoint.every=1", "--run.evaluate=false"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(["fit", *SMALL, "--max_steps=1", f"--run.dir={run_dir}"]) == 0
    return run_dir


FSYNCS = ["recipe.yaml", "/run", "curves.png", "model.safetensors", "summary.json", ".run.lock"]
CALLS = [("mkdir", "/checkpoints"), ("open", "/run/metrics.csv"), *(("fsync", ending) for ending in FSYNCS)]


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
