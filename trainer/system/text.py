"""Texts for people: what came from outside must not steer their terminal, nor look like a line of ours."""

from __future__ import annotations

import re

# Controls of C0 and C1 (escape sequences begin with one), what turns the direction of writing, separators of lines, and
# the lone surrogates by which Python keeps bytes of a file name that are no text: no stream could encode these.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object, keep: str = "") -> str:
    r"""``text`` with control characters written out: ``\x1b``, ``\n``, ``\u202e``.

    Args:
        text: a name, a label, a message; anything else is made a string.
        keep: control characters that are meant, such as ``"\n"`` in a text of several lines.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _written_out(found[0]), str(text))


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
