"""Finds phrases of the project's former private dialect in docstrings, comments, messages and documentation.

``python tests/helpers/prose.py PATH...`` lists the matches in files and folders. The limits are in tests/test_house.py.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Unit(NamedTuple):
    """One piece of prose: a docstring, a message, a block of comments, a trailing comment or a Markdown paragraph."""

    line: int
    kind: str  # doc, string, comment, or page
    text: str


BANNED = {
    ("doc", "string", "comment", "page"): [
        r"\b(?:[Aa]ny|[Ss]ome|[Nn]o)body(?:'s)?\b|\b[Ww]h(?:o|at)ever\b|\b(?:a|the|this) person(?:'s)?\b",
        r"\b(?:[Oo]ne's|[Oo]f (?:your|its|their|our|his)) own\b|\b(?:of ours|ours is|words of ours)\b",
        r"\b(?:is|are|be|was|were) (?:told|said)\b|\b(?:is|are|was|were) meant\b|\btold (?:of|about|apart|from|by)\b",
        r"\bhear(?:s|d)? (?:of|what|where|how|why)\b|\bknows? (?:of|nothing)\b|\bsays? so\b|\bwithout a word\b",
        r"\b(?:that|which) (?:is|are|was|were) not there\b|\bnot be there\b",
        r"(?<!that )(?<!which )\b(?:be|is|are) not there\b",
        r"(?<!so )(?<!than )\bthat (?:there (?:is|are)|is there|are there)\b",
        r"\b(?:go|goes|going|gone|went) on (?:from|with|by|at|to)\b|\blets? go of\b",
        r"(?<=[.:;] )Of (?:a|an|the|what|every|each|all|those|these|it|many|several|models?|split|two)\b",
        r"\b[Ww]here (?:there (?:is|are|was|were)|nobody|none|nothing|no one)\b",
        r"(?:^|[.:;] )[Ww]here (?:a|an|it|they|one|some|that|this) ",
        r"\b(?:anew|alike|likewise|besides?|seldom|midst|[Hh]ardly)\b|\b[Mm]end(?:s|ed|ing)?\b|\b[Ww]ish(?:es)?\b",
        r"\b(?:at times|by then|in peace|most of all|for want of|inside of|but for|in the place of)\b|, of which\b",
        r"\b(?:all|nothing|none) but\b|\bso (?:many|much)\b|\bone (?:after|behind) the other\b",
        r"(?<!there )\b(?:is|are|was|were) no (?:number|figure|text|tensor|folder|file|device|class|list|label|word"
        r"|batch|part|JSON|loss|matrix|rank|gradient|template|step|array|dict|image|table|encoding|name)s?\b",
        r"\b(?:to|can|could|cannot) be had\b|\b(?:com(?:e|es|ing)|came) to (?:be|(?:its|their|an|the) end)\b",
        r"\bmakes? of (?:it|them|some|the|its|what|that|a)\b|\bat a loss\b(?! of)|\bof before\b(?! \d)",
        r"\b(?:bytes|bits|[kKMGT]B|GiB|ms|µs|seconds?|samples|tokens|requests|times|reviews|images|numbers|sums|ranks"
        r"|kernels?|calls?) an? (?:step|second|weight|GB|block|node|token|sample|update|rank|machine|micro-step"
        r"|parameter|element|epoch|batch|GPU|line)\b",
        r"\b(?:is|are|was|were) of (?!type|dtype|shape|length)|\b(?:is|are) (?:not )?waited for\b",
        r"\bto those (?:who|that)\b|\bfor (?:those|all|any) who\b|\bfor who(?:ever)?\b",
        r"\bdealt (?:out|to)\b|\bis dealt\b|\bthe least (?:that|of|once)\b|\b[Tt]he most (?:that|of a|once)\b",
    ],
    ("doc", "comment"): [r"^Of ", r"^(?:of|that|whose|which|where|for which|in which|of which|to be) "],
    ("doc",): [r"^(?:What|Where|That|How|Why|Which|Who|As|In|By|Over|At|With|From|Of|For|To|On) |^Nothing[:.,]"],
}
"""Regular expressions by the kinds of units that they are searched in."""

PATTERNS = [(kinds, re.compile("|".join(patterns))) for kinds, patterns in BANNED.items()]


def _plain(text: str) -> str:
    """``text`` without inline code and link targets, with single blanks."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.split())


def _comments(source: str) -> Iterator[Unit]:
    """Trailing comments, and blocks of consecutive lines that are comments only."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type: ignore|ruff:|!)", token.string):
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        if token.line.lstrip() != token.line[token.start[1] :]:
            yield Unit(line, "comment", text)
            continue
        if block and line != last + 1:
            yield Unit(start, "comment", " ".join(block))
            block = []
        start = start if block else line
        block.append(text)
        last = line
    if block:
        yield Unit(start, "comment", " ".join(block))


def _strings(source: str) -> Iterator[Unit]:
    """Docstrings, and other strings that contain a blank; a placeholder of an f-string is an X."""
    tree = ast.parse(source)
    docs, inner = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docs.add(first.value)
        if isinstance(node, ast.JoinedStr):
            inner.update(node.values)
            inner.update(part for value in node.values for part in ast.walk(value) if value is not part)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values]
            yield Unit(node.lineno, "string", "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and node not in inner:
            yield Unit(node.lineno, "doc" if node in docs else "string", node.value)


def _paragraphs(source: str) -> Iterator[Unit]:
    """Markdown paragraphs outside fenced code."""
    fenced, start, lines = False, 1, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        if fenced or not line.strip():
            if lines:
                yield Unit(start, "page", " ".join(lines))
            lines = []
            continue
        start = start if lines else number
        lines.append(line)


def units(path: Path) -> Iterator[Unit]:
    """The prose of a Python or Markdown file."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from _paragraphs(source)
    else:
        yield from _comments(source)
        yield from _strings(source)


def matches(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every banned phrase in ``path``."""
    for unit in units(path):
        text = _plain(unit.text)
        for kinds, pattern in PATTERNS:
            if unit.kind in kinds:
                for found in pattern.finditer(text):
                    yield unit.line, text[max(found.start() - 20, 0) : found.end() + 20]


def files(place: Path) -> list[Path]:
    """The Python and Markdown files at ``place``."""
    return [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])


if __name__ == "__main__":
    found = [(path, *match) for place in sys.argv[1:] for path in files(Path(place)) for match in matches(path)]
    for path, line, text in found:
        print(f"{path}:{line}: {text!r}")
    print(f"{len(found)} matches")
