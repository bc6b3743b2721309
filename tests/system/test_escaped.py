"""Control characters are written out."""

import os

import pytest

from trainer.system.text import escaped


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
def test_what_steers_a_terminal_is_written_out(text, shown):
    assert escaped(text) == shown
    assert shown.encode()


def test_what_is_meant_stays():
    assert escaped("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"
