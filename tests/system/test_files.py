"""Files of other persons, leftovers of killed writers, and texts with control characters."""

from __future__ import annotations

import errno
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from trainer.system import files, machine
from trainer.system.files import (
    open_regular,
    open_writable,
    read_regular,
    replace_folder,
    scratch_folder,
    staged_file,
    staged_folder,
    temporary_path,
)
from trainer.system.text import escaped


def test_a_regular_file_is_read_and_no_byte_beyond_the_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert read_regular(file, 7) == b"content"
    (tmp_path / "link").symlink_to(file)
    with open_regular(tmp_path / "link") as opened:
        assert opened.read() == b"content"
    with pytest.raises(OSError, match=r"larger than the limit of 6e-06 MB") as caught:
        read_regular(file, 6)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OSError, match="larger than"):  # what states no size is bounded all the same
        read_regular("/proc/self/maps", 10)


def test_a_socket_is_no_file(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="socket"):
            open_regular(tmp_path / "socket")


def test_a_file_of_our_own_is_made_and_opened_again(tmp_path):
    for content in (b"first", b"second"):
        descriptor = open_writable(tmp_path / "own", os.O_RDWR | os.O_CREAT)
        os.pwrite(descriptor, content, 0)
        os.close(descriptor)
    assert (tmp_path / "own").read_bytes() == b"second"


@pytest.mark.parametrize(("lead", "number"), [(os.symlink, errno.ELOOP), (os.link, errno.EMLINK)])
def test_what_leads_to_a_file_of_somebody_else_is_not_opened(tmp_path, lead, number):
    (tmp_path / "victim").write_bytes(b"precious")
    lead(tmp_path / "victim", tmp_path / "own")
    with pytest.raises(OSError) as caught:
        open_writable(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    assert caught.value.errno == number
    assert (tmp_path / "victim").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ümläut, 漢字 and 🙂", "plain, ümläut, 漢字 and 🙂"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\r\tc\x7f\x9b2J", "a\\nb\\r\\tc\\x7f\\x9b2J"),
        ("abc\u202edcba\u2028", "abc\\u202edcba\\u2028"),
        (os.fsdecode(b"caf\xe9"), "caf\\udce9"),
        (12.5, "12.5"),
    ],
)
def test_what_steers_a_terminal_is_written_out_and_what_is_meant_stays(text, shown):
    assert escaped(text) == shown
    assert shown.encode()
    assert escaped(f"two\nlines{text}", keep="\n").startswith("two\nlines")


def test_what_is_available_within_a_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=32 * 1024))
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_bytes() == 32 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("9000\n")
    assert machine.available_bytes() == 32 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert machine.available_bytes() == 1000
    (tmp_path / "memory.stat").write_text("anon 2000\nactive_file 3000\ninactive_file 4000\n")
    assert machine.available_bytes() == 5000


# What a killed writer leaves

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
def test_leftovers_of_another_container_and_of_an_earlier_boot_are_removed(tmp_path, monkeypatch, machine):
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
