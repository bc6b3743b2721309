"""A disk that fails, wherever a run writes: one line that names the file and what stays."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from trainer.cli import run

SMALL = ["vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--checkpoint.every=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(["fit", *SMALL, "--max_steps=1", f"--run.dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture
def failing(monkeypatch):
    """A function: let every fsync (or open, or mkdir) of a path with this ending fail."""

    def fail(call, ending, number):
        original = getattr(os, call)

        def broken(target, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            if path.endswith(ending) or f"/.{ending}." in path:
                raise OSError(number, os.strerror(number), *([] if call == "fsync" else [path]))
            return original(target, *args, **kwargs)

        monkeypatch.setattr(os, call, broken)

    return fail


@pytest.mark.parametrize(
    ("call", "ending"),
    [
        ("fsync", "recipe.yaml"), ("fsync", "/run"), ("mkdir", "/checkpoints"), ("open", "/run/metrics.csv"),
        ("fsync", "curves.png"), ("fsync", "model.safetensors"), ("fsync", "summary.json"), ("fsync", ".run.lock"),
    ],
)  # fmt: skip
def test_a_failing_disk_is_named_and_what_stays(finished, tmp_path, failing, call, ending, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    more = ["--run.resume=auto", '--run.allow_change=["max_steps"]']
    if has_none := ending == "/checkpoints":
        shutil.rmtree(run_dir)
        more = []
    number = errno.EIO if call == "fsync" else errno.EDQUOT
    failing(call, ending, number)
    assert run(["fit", *SMALL, "--max_steps=2", f"--run.dir={run_dir}", *more]) == 1
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if "error" in line]
    assert "Traceback" not in said
    assert len(errors) == 1
    assert errors[0].startswith("trainer: error: ")
    assert os.strerror(number) in errors[0]
    assert f"{run_dir}" in errors[0]
    assert ("no checkpoint was saved before" if has_none else "lder checkpoints stay") in errors[0]
    assert has_none or Path(run_dir, "checkpoints", "step-00000001", "manifest.json").is_file()
