"""Files that somebody else may have put there, texts that steer terminals, and what a control group leaves."""

import errno
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from trainer.system import machine
from trainer.system.files import open_regular, open_writable, read_regular
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


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path, kind in ((tmp_path / "pipe", "a named pipe"), ("/dev/zero", "a device"), (tmp_path, "a directory")):
            with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
                open_regular(path)
        with pytest.raises(OSError, match="socket"):
            open_regular(tmp_path / "socket")


def test_a_file_of_our_own_is_made_and_opened_again_and_is_no_pipe(tmp_path):
    for content in (b"first", b"second"):
        descriptor = open_writable(tmp_path / "own", os.O_RDWR | os.O_CREAT)
        os.pwrite(descriptor, content, 0)
        os.close(descriptor)
    assert (tmp_path / "own").read_bytes() == b"second"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="named pipe"):
        open_writable(tmp_path / "pipe", os.O_RDWR | os.O_CREAT)


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
