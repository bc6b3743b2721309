"""Links in place of the files of a run directory: no file that they point to is changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trainer.checkpoint.folder import CheckpointFolder
from trainer.cli import run
from trainer.errors import RecipeError
from trainer.lab.measured_run import run_trial

SMALL = ["vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--run.logger=[csv,tensorboard]"]
SMALL += ["--checkpoint.every=1", "--checkpoint.keep_last=1", "--checkpoint.asynchronous=false"]
LOCKS = (".run.lock", ".supervisor.lock")
UNSEEN = ("supervisor.json", "quarantine.json", "memory_snapshot.pickle", ".curves.png.part", ".memory.png.part")
"""What this run does not leave, but another may, and names that files had while they were written."""

PRECIOUS = "precious"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(["fit", *SMALL, "--max_steps=2", f"--run.dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture
def victims(tmp_path):
    """A function that replaces ``path`` by a link to another person's file; all such files are checked at the end."""
    folder = tmp_path / "victims"
    folder.mkdir()
    made: list[Path] = []

    def lead_away(path: Path, link=os.symlink) -> None:
        victim = folder / str(len(made))
        victim.write_text(PRECIOUS)
        made.append(victim)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        link(victim, path)

    yield lead_away
    assert made
    assert {victim.read_text() for victim in made} == {PRECIOUS}


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(autouse=True)
def nothing_drawn(request):
    """But where the pictures may be links."""
    if "victims" not in request.fixturenames:
        request.getfixturevalue("no_pictures")


def files_of(run_dir: Path, *parts: str) -> list[Path]:
    """The files in the parts of a run directory; those at its top for none."""
    found = [run_dir / part for part in parts] or [run_dir]
    return [path for folder in found for path in (folder.rglob("*") if parts else folder.iterdir()) if path.is_file()]


def resume(run_dir: Path) -> int:
    """Take one more step; the exit code."""
    more = ["--max_steps=3", '--run.allow_change=["max_steps"]', "--run.resume=auto"]
    return run(["fit", *SMALL, *more, f"--run.dir={run_dir}"])


def results_of(run_dir: Path) -> list[Path]:
    unseen = [run_dir / name for name in UNSEEN]
    return files_of(run_dir) + files_of(run_dir, "model", "tensorboard") + unseen


GROUPS = {
    "results": results_of,
    "checkpoints": lambda run_dir: files_of(run_dir, "checkpoints"),
    "locks": lambda run_dir: [run_dir / name for name in LOCKS],
}


@pytest.mark.first(1)
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_resumed_run_writes_through_no_link(copied, victims, group, link, capsys):
    for path in GROUPS[group](copied):
        victims(path, link)
    assert resume(copied) == (0 if group == "results" else 2)
    if group == "locks":
        assert run(["run", "--restarts", "0", "--", *SMALL, f"--run.dir={copied}"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.first(1)
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_a_new_run_writes_through_no_link(copied, victims, link, tmp_path):
    for group in ("results", "checkpoints"):
        for path in GROUPS[group](copied):
            if path.name != "recipe.yaml":
                victims(path, link)
    (copied / "recipe.yaml").unlink()
    (copied / "recipe.yaml").symlink_to(tmp_path / "not there")
    run(["fit", *SMALL, "--max_steps=1", f"--run.dir={copied}"])
    assert not (tmp_path / "not there").exists()


def test_commands_on_a_run_write_through_no_link(copied, victims, capsys):
    for group in GROUPS:
        for path in GROUPS[group](copied):
            if path.name != "recipe.yaml":
                victims(path)
    for words in (["evaluate"], ["checkpoint", "list"], ["checkpoint", "verify"], ["checkpoint", "export"]):
        run([*words, str(copied)])
    assert "Traceback" not in capsys.readouterr().err


def test_the_log_of_a_trial_is_no_link(tmp_path, victims):
    victims(tmp_path / "01-baseline.log")
    with pytest.raises(RecipeError, match=r"01-baseline\.log cannot be written \(it is a symbolic link: remove it\)"):
        run_trial(["vit_digits"], tmp_path / "01-baseline")


def test_a_model_that_is_a_link_is_replaced_and_what_it_leads_to_stays(copied, tmp_path):
    elsewhere = Path(shutil.move(copied / "model", tmp_path / "elsewhere"))
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    (copied / "model").symlink_to(elsewhere)
    assert resume(copied) == 0
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    assert not (copied / "model").is_symlink()
    assert (copied / "model" / "model.safetensors").is_file()


def test_checkpoints_may_lie_on_another_disk_and_nothing_else_there_is_touched(copied, tmp_path):
    disk = Path(shutil.move(copied / "checkpoints", tmp_path / "disk"))
    (copied / "checkpoints").symlink_to(disk)
    (disk / "notes").write_text(PRECIOUS)
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "notes").write_text(PRECIOUS)
    (disk / ".step-00000009.dead.part").symlink_to(archive)  # as if it were what a dead run has left
    moved = Path(shutil.move(disk / "step-00000002", tmp_path / "moved"))
    shutil.copytree(moved, tmp_path / "step-00000002")
    (disk / "step-00000002").symlink_to(tmp_path / "step-00000002")  # a person has moved it elsewhere
    assert resume(copied) == 0
    assert sorted(path.name for path in disk.iterdir()) == ["notes", "step-00000003"]
    assert {path.read_text() for path in (disk / "notes", archive / "notes")} == {PRECIOUS}
    assert len(list((tmp_path / "step-00000002").iterdir())) == len(list(moved.iterdir()))


def test_the_checkpoints_of_another_run_are_not_taken_over_by_a_link(finished, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(finished / "checkpoints")
    assert resume(tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert f"checkpoints is a link to the checkpoints of another run, {finished}: remove it" in said
    assert CheckpointFolder(finished / "checkpoints").newest_first()
