"""``trainer runs``: every run below a folder is a line, sound or broken, and no torch is imported to say it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import run


def made(
    folder: Path, name: str, when: int, status: str = "finished", lr: str = "1e-3", accuracy: float | None = 0.5
) -> Path:
    """A run directory, changed ``when``, as a run leaves it behind."""
    path = folder / name
    (path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (path / "checkpoints" / "step-00000001" / "recipe.yaml").write_text("recipe: within\n")
    (path / "recipe.yaml").write_text(f"recipe: vit_digits\nbatch_size: 64\noptim:\n  lr: {lr}\n  name: adamw\n")
    memory = {"reserved_gb": None, "host_peak_gb": 0.92}
    figures = {"test": {"accuracy": accuracy, "loss": 0.25}}
    summary = {"status": status, "steps": 1200, "metrics": figures, "memory": memory, "seconds": 3661.5}
    (path / "metrics.csv").write_text("step,loss,val_loss,val_accuracy\n1,0.5,,\n2,0.4,0.75,0.1\n3,0.3,,\n")
    (path / "status.json").write_text(json.dumps({"status": status}))
    if status == "finished":
        (path / "summary.json").write_text(json.dumps(summary))
    for file in ("status.json", "recipe.yaml"):
        os.utime(path / file, (when, when))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three finished runs, one whose process is gone, one that is broken; and what is no run."""
    made(tmp_path, "late", 2_000_000_000, lr="1e-3")
    made(tmp_path, "deep/early", 1_000_000_000, lr="0.01", accuracy=0.875)
    made(tmp_path, "number", 1_500_000_000, accuracy=None)
    made(tmp_path, "dead", 1_600_000_000, status="running")
    broken = made(tmp_path, "broken", 1_700_000_000)
    (broken / "summary.json").write_text("{")
    (broken / "recipe.yaml").write_text("optim: [\n")
    os.utime(broken / "recipe.yaml", (1_700_000_000, 1_700_000_000))
    (tmp_path / ".hidden" / "x").mkdir(parents=True)
    (tmp_path / "mine.yaml").write_text("recipe: vit_digits\n")
    return tmp_path


def lines(capsys: pytest.CaptureFixture, *words: object) -> list[str]:
    assert run(["runs", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def names(found: list[str]) -> list[str]:
    return [line.split()[0] for line in found[2:] if ": " not in line]


def test_every_run_is_a_line_the_latest_last(folder, capsys):
    found = lines(capsys, folder)
    assert found[0].split() == ["run", "status", "step", "figure", "val", "loss", "memory", "time", "date"]
    assert names(found) == ["deep/early", "number", "dead", "broken", "late"]
    assert found[2].split()[1:] == [
        "finished",
        "1,200",
        "test",
        "accuracy",
        "87.50",
        "%",
        "0.7500",
        "0.92",
        "GB",
        "1:01:01",
        *found[2].split()[-2:],
    ]
    assert found[3].split()[2:6] == ["1,200", "test", "loss", "0.2500"]
    assert found[4].split()[1:3] == ["died", "3"]
    assert found[5].split()[1] == "broken"
    assert found[-1].startswith("broken: summary.json is no JSON object; recipe.yaml line 2: not valid YAML")


def test_a_run_that_lives_is_running(folder, capsys):
    from trainer.system.processes import ProcessId

    lock = folder / "dead" / ".run.lock"
    lock.write_text(json.dumps(ProcessId.own().to_dict() | {"started": "now"}))
    assert json.loads("\n".join(lines(capsys, folder / "dead", "--json")))[0]["status"] == "running"
    lock.write_text(json.dumps(ProcessId.own().to_dict() | {"began": 1}))
    assert json.loads("\n".join(lines(capsys, folder / "dead", "--json")))[0]["status"] == "died"
    lock.write_text(json.dumps({"host": socket.gethostname()}))
    assert json.loads("\n".join(lines(capsys, folder / "dead", "--json")))[0]["status"] == "running"


def test_runs_are_chosen_and_sorted_by_columns_and_settings(folder, capsys):
    assert names(lines(capsys, folder, "--where", "optim.lr=0.001")) == ["number", "dead", "late"]
    assert names(lines(capsys, folder, "--where=status=finished", "--where=optim.lr=1e-2")) == ["deep/early"]
    assert names(lines(capsys, folder, "--sort", "-test_accuracy"))[:2] == ["deep/early", "late"]
    assert names(lines(capsys, folder, "--sort", "optim.lr"))[-2:] == ["deep/early", "broken"]
    assert lines(capsys, folder, "--where=status=stopped") == ["none of 5 runs fits --where"]
    content = json.loads("\n".join(lines(capsys, folder, "--json", "--sort=seconds")))
    assert {"run", "status", "step", "val_loss", "memory_gb", "test_accuracy", "settings"} <= content[0].keys()
    assert content[0]["settings"]["batch_size"] == 64


def test_two_runs_are_compared_by_what_they_differ_in(folder, capsys):
    found = lines(capsys, "--compare", folder / "late", folder / "deep" / "early")
    assert [line.split()[0] for line in found[2:]] == ["optim.lr", "date", "test_accuracy"]
    assert found[2].split()[1:] == ["0.001", "0.01"]
    assert found[4].split()[1:] == ["0.5000", "0.8750"]
    same = lines(capsys, "--compare", folder / "late", folder / "late")
    assert same == ["the two runs have the same settings and figures"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no folder 'nowhere'"),
        (
            ["--sort", "accuracy"],
            "--sort='accuracy' is no column and no setting of these runs; did you mean test_accuracy?",
        ),
        (
            ["--where", "optim.nane=1"],
            "--where='optim.nane' is no column and no setting of these runs; did you mean optim.name?",
        ),
        (["--where", "status"], "--where='status' must be KEY=VALUE"),
        (["--wheer", "a=b"], "unknown flag --wheer; did you mean --where?"),
        (["--compare", "late"], "--compare takes two run directories, and was given 1"),
        (["--compare", "late", "deep"], "--compare: deep is no run directory"),
    ],
)
def test_a_slip_is_named(folder, capsys, monkeypatch, words, said):
    monkeypatch.chdir(folder)
    assert run(["runs", *([] if words[0][:2] != "--" else ["."]), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_runs_and_the_help_page(tmp_path, capsys):
    assert lines(capsys, tmp_path) == [f"no runs in {tmp_path}"]
    assert lines(capsys, "--help")[0].startswith("usage: trainer runs [DIR ...]")


def test_no_torch_is_imported(folder):
    code = f"import sys; from trainer.cli import run; run(['runs', {str(folder)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
