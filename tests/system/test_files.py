"""Files that somebody else may have put there."""

import errno
import os
import socket

import pytest

from trainer.system.files import open_own, open_regular, read_regular


def test_a_regular_file_is_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert read_regular(file, 7) == b"content"
    (tmp_path / "link").symlink_to(file)
    with open_regular(tmp_path / "link") as opened:
        assert opened.read() == b"content"


def test_one_byte_too_many_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    with pytest.raises(OSError, match=r"larger than the 6e-06 MB") as caught:
        read_regular(file, 6)
    assert caught.value.errno == errno.EFBIG


def test_what_states_no_size_is_bounded_all_the_same():
    with pytest.raises(OSError, match="larger than"):
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


def test_a_file_of_our_own_is_made_and_opened_again(tmp_path):
    for content in (b"first", b"second"):
        descriptor = open_own(tmp_path / "own", os.O_RDWR | os.O_CREAT)
        os.pwrite(descriptor, content, 0)
        os.close(descriptor)
    assert (tmp_path / "own").read_bytes() == b"second"


@pytest.mark.parametrize(
    ("lead", "number"), [(os.symlink, errno.ELOOP), (os.link, errno.EMLINK)], ids=["symlink", "hard link"]
)
def test_what_leads_to_a_file_of_somebody_else_is_not_opened(tmp_path, lead, number):
    (tmp_path / "victim").write_bytes(b"precious")
    lead(tmp_path / "victim", tmp_path / "own")
    with pytest.raises(OSError) as caught:
        open_own(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    assert caught.value.errno == number
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_pipe_is_no_file_of_our_own(tmp_path):
    os.mkfifo(tmp_path / "own")
    with pytest.raises(OSError, match="named pipe"):
        open_own(tmp_path / "own", os.O_RDWR | os.O_CREAT)
