"""``trainer runs``: every run below a folder is a line, sound or broken, and no torch is imported to say it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trainer.checkpoint.manifest import append_hash
from trainer.cli import run
from trainer.lab import list_runs

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d"


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


def test_every_run_is_a_line_the_latest_last(folder, capsys, golden):
    found = lines(capsys, folder)
    assert names(found) == ["deep/early", "number", "dead", "broken", "late"]
    golden("\n".join(found), hide=[DATE])


def test_a_run_that_lives_is_running(folder, capsys):
    from trainer.system.processes import ProcessId

    lock = folder / "dead" / ".run.lock"
    lock.write_text(json.dumps(ProcessId.current().to_dict() | {"started": "now"}))
    assert json.loads("\n".join(lines(capsys, folder / "dead", "--json")))[0]["status"] == "running"
    lock.write_text(json.dumps(ProcessId.current().to_dict() | {"began": 1}))
    assert json.loads("\n".join(lines(capsys, folder / "dead", "--json")))[0]["status"] == "died"
    lock.write_text(json.dumps({"host": socket.gethostname()}))
    assert json.loads("\n".join(lines(capsys, folder / "dead", "--json")))[0]["status"] == "running"


def test_runs_are_chosen_and_sorted_by_columns_and_settings(folder, capsys):
    assert names(lines(capsys, folder, "--where", "optim.lr=0.001")) == ["number", "dead", "late"]
    assert names(lines(capsys, folder, "--where=status=finished", "--where=optim.lr=1e-2")) == ["deep/early"]
    assert names(lines(capsys, folder, "--sort", "-test_accuracy"))[:2] == ["deep/early", "late"]
    assert names(lines(capsys, folder, "--sort", "optim.lr"))[-2:] == ["deep/early", "broken"]
    assert lines(capsys, folder, "--where=status=stopped") == ["none of the 5 runs matches --where"]
    content = json.loads("\n".join(lines(capsys, folder, "--json", "--sort=seconds")))
    assert {"run", "status", "step", "val_loss", "memory_gb", "test_accuracy", "settings"} <= content[0].keys()
    assert content[0]["settings"]["batch_size"] == 64


def test_two_runs_are_compared_by_what_they_differ_in(folder, golden, capsys, monkeypatch):
    monkeypatch.chdir(folder)  # the width of a column is that of the path
    found = lines(capsys, "--compare", "late", "deep/early")
    golden("\n".join(found), hide=[DATE])
    same = lines(capsys, "--compare", folder / "late", folder / "late")
    assert same == ["the two runs have the same settings and metrics"]


@pytest.mark.parametrize(
    "words",
    [
        "nowhere",
        ". --sort accuracy",
        ". --where optim.nane=1",
        ". --where status",
        ". --wheer a=b",
        "--compare late",
        "--compare late deep",
    ],
)
def test_a_slip_is_named(folder, capsys, golden, monkeypatch, words):
    monkeypatch.chdir(folder)
    assert run(["runs", *words.split()]) == 2
    golden(capsys.readouterr().err)


def test_a_folder_without_runs_and_the_help_page(tmp_path, capsys):
    assert lines(capsys, tmp_path) == [f"no runs in {tmp_path}"]
    assert lines(capsys, "--help")[0].startswith("usage: trainer runs [DIR ...]")


HUGE = "9" * 400
LINES = "step,loss,val_loss\n1,0.5,0.25\n"
BROKEN_METRICS: dict[str, str | bytes] = {
    "a field that is too long": LINES + "2," + "x" * 200_000 + ",0.1\n",
    "an open quote": LINES + '2,"0.5,0.1\n' + "3,0.5,0.1\n" * 20_000,
    "a short open quote": LINES + '2,"0.5,0.1\n',
    "binary data": bytes(range(256)) * 2_000,
    "binary data after the header": LINES.encode() + b"\x00\xff" * 100_000,
    "an infinite step": LINES + "inf,0.5,0.1\n",
    "a step that is NaN": LINES + "nan,0.5,0.1\n",
    "a step of 400 digits": LINES + HUGE + ",0.5,0.1\n",
}
BROKEN_SUMMARIES = {
    "an integer of 400 digits as a step": f'{{"steps": {HUGE}}}',
    "an integer of 400 digits as a metric": f'{{"metrics": {{"test": {{"accuracy": {HUGE}}}}}}}',
    "an integer of 400 digits as memory": f'{{"memory": {{"reserved_gb": {HUGE}}}}}',
    "seconds that are NaN": '{"seconds": NaN}',
    "seconds that are infinite": '{"seconds": -Infinity}',
    "seconds that are a text": '{"seconds": "long"}',
    "a metric in many lists": f'{{"metrics": {{"test": {{"x": {"[" * 900}{"]" * 900}}}}}}}',
}


@pytest.mark.parametrize("fault", [*BROKEN_METRICS, *BROKEN_SUMMARIES])
def test_a_broken_run_does_not_hide_the_others(folder, capsys, golden, fault):
    if fault in BROKEN_METRICS:
        content = BROKEN_METRICS[fault]
        (folder / "late" / "metrics.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
        (folder / "late" / "summary.json").unlink()  # which has the last step, too
    else:
        (folder / "late" / "summary.json").write_text(BROKEN_SUMMARIES[fault])
    found = lines(capsys, folder)
    assert names(found) == ["deep/early", "number", "dead", "broken", "late"]
    assert found[6].split()[1] == "broken"
    golden(found[-1], hide=[r"(?<=metrics.csv: ).*"] if "binary" in fault else ())  # depends on the version of Python
    rows = json.loads("\n".join(lines(capsys, folder, "--json")), parse_constant=pytest.fail)
    assert [row["status"] for row in rows] == ["finished", "finished", "died", "broken", "broken"]
    assert len(lines(capsys, folder, "--where", "optim.name=adamw", "--sort=step")) == 7  # all but "broken", and why
    lines(capsys, "--compare", folder / "late", folder / "dead")


UNUSUAL = """\
recipe: x
picture: !!binary aGk=
optim:
  lr: 1.0e-2
  names: !!set {a, b}
  nested:
    ? !!binary aGk=
    : [.nan, !!timestamp 2001-02-03]
hang_after: .inf
huge: 0xHUGE
""".replace("HUGE", "f" * 5000)


def test_settings_that_json_cannot_hold_are_shown(folder, capsys):
    (folder / "late" / "recipe.yaml").write_text(UNUSUAL)
    assert names(lines(capsys, folder, "--where=optim.lr=0.01")) == ["deep/early", "late"]
    assert names(lines(capsys, folder, "--where=hang_after=inf")) == ["late"]
    assert names(lines(capsys, folder, "--sort=huge"))[0] == "late"
    (row,) = json.loads("\n".join(lines(capsys, folder / "late", "--json")), parse_constant=pytest.fail)
    assert row["status"] == "finished"
    assert row["settings"]["picture"] == "b'hi'"
    assert row["settings"]["optim.nested"] == {"b'hi'": ["nan", "2001-02-03"]}
    assert "optim.names" in "\n".join(lines(capsys, "--compare", folder / "late", folder / "dead"))


def test_a_recipe_that_is_nested_deeply_is_broken(folder, capsys):
    (folder / "late" / "recipe.yaml").write_text("a: " + "[" * 200_000)
    assert "late: recipe.yaml is nested too deeply" in lines(capsys, folder)[-1]


def test_a_recipe_with_its_hash_is_read_only_for_its_settings(folder, capsys, monkeypatch):
    (folder / "late" / "recipe.yaml").write_text(append_hash("optim:\n  lr: 0.5\n"))
    reads = Counter()
    monkeypatch.setattr(list_runs, "_settings", lambda path, faults: reads.update([path.parent.name]) or {})
    lines(capsys, folder)
    assert reads == Counter(["early", "number", "dead", "broken"])
    lines(capsys, folder, "--json")
    assert reads["late"] == 1


def test_no_torch_is_imported(folder):
    code = f"import sys; from trainer.cli import run; run(['runs', {str(folder)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
