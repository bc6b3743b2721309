"""A killed writer leaves a hidden file or folder: the next writer of the same target removes it, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from trainer.system import files
from trainer.system.files import replace_folder, scratch_folder, staged_file, staged_folder, temporary_path

if not hasattr(os, "fork"):
    pytest.skip("forks", allow_module_level=True)

WRITERS = {"file": staged_file, "folder": staged_folder, "scratch": scratch_folder}


def fill(part: Path) -> None:
    (part / "content" if part.is_dir() else part).write_text("whole")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def forked(job) -> int:
    """The number of a process that does ``job``."""
    pid = os.fork()
    if pid == 0:
        try:
            job()
        finally:
            os._exit(0)
    return pid


def killed_within(writer, target: Path) -> None:
    def job() -> None:
        with writer(target) as part:
            fill(part)
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(job), 0)


@pytest.mark.parametrize("first", WRITERS)
@pytest.mark.parametrize("then", WRITERS)
def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path, first, then):
    killed_within(WRITERS[first], tmp_path / "out.csv")
    (left,) = names(tmp_path)
    assert left.startswith(".out.csv.")
    with WRITERS[then](tmp_path / "out.csv") as part:
        assert names(tmp_path) == [part.name]
        fill(part)
    assert names(tmp_path) == ([] if then == "scratch" else ["out.csv"])


@pytest.mark.parametrize("kind", WRITERS)
def test_the_part_of_a_writer_that_lives_stays(tmp_path, kind):
    (here, there), (begun, begin) = os.pipe(), os.pipe()

    def job() -> None:
        with WRITERS[kind](tmp_path / "out") as part:
            fill(part)
            os.write(begin, b"x")
            os.read(here, 1)

    pid = forked(job)
    os.read(begun, 1)
    (part,) = names(tmp_path)
    with staged_file(tmp_path / "out") as mine:
        fill(mine)
        assert part in names(tmp_path)
    (tmp_path / "out").unlink()
    os.write(there, b"x")
    os.waitpid(pid, 0)
    assert names(tmp_path) == ([] if kind == "scratch" else ["out"])


def test_files_of_persons_of_other_machines_and_of_other_targets_stay(tmp_path, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(files, "MACHINE", ["123456", "abcdef"])
        theirs = temporary_path(tmp_path / "out", "part")
    others = [theirs.name, temporary_path(tmp_path / "out.csv", "part").name, ".out.mine.part", ".out.part", ".out"]
    for name in others:
        (tmp_path / name).write_text("stays")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("stays")
    linked = temporary_path(tmp_path / "out", "part")
    linked.symlink_to(tmp_path / "victim")
    with staged_file(tmp_path / "out") as part:
        fill(part)
    assert names(tmp_path) == sorted([*others, "out", "victim", linked.name])
    assert (tmp_path / "victim" / "file").read_text() == "stays"


@pytest.mark.parametrize("machine", [["123456", files.MACHINE[1]], [files.MACHINE[0], "abcdef"]])
def test_leftovers_of_another_container_and_of_an_earlier_boot_of_this_machine_are_removed(
    tmp_path, monkeypatch, machine
):
    with monkeypatch.context() as before:
        before.setattr(files, "MACHINE", machine)
        temporary_path(tmp_path / "out", "part").mkdir()
    with staged_file(tmp_path / "out") as part:
        fill(part)
    assert names(tmp_path) == ["out"]


def test_a_folder_that_was_moved_out_of_the_way_is_moved_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    fill(target)

    def job() -> None:
        renamed = []

        def rename(source, to) -> None:
            renamed.append(source)
            if len(renamed) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            os.replace(source, to)

        files.os.rename = rename
        part = temporary_path(target, "part")
        part.mkdir()
        replace_folder(part, target)

    os.waitpid(forked(job), 0)
    assert len(names(tmp_path)) == 2
    assert not target.exists()
    with scratch_folder(target):
        assert (target / "content").read_text() == "whole"
    assert names(tmp_path) == ["model"]


def test_all_files_of_a_folder_have_the_mode_that_new_files_have(tmp_path):
    with staged_folder(tmp_path / "model") as folder:
        (folder / "own").mkdir()
        (folder / "usual").touch()
        for path in (folder / "weights", folder / "own" / "weights"):
            path.touch(mode=0o600)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert modes["weights"] == modes["usual"]
    assert (tmp_path / "model" / "own" / "weights").stat().st_mode == modes["usual"]
