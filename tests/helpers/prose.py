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


SCOPES = {"all": {"doc", "string", "comment", "page"}, "code": {"doc", "comment"}, "doc": {"doc"}}
"""The kinds of units that a pattern is searched in."""

BANNED: list[tuple[str, str]] = [
    (r"\b[Aa]nybody(?:'s)?\b", "all"),
    (r"\b[Ss]omebody(?:'s)?\b", "all"),
    (r"\b[Nn]obody(?:'s)?\b", "all"),
    (r"\b[Ww]hoever\b", "all"),
    (r"\b[Oo]ne's own\b", "all"),
    (r"\b[Oo]f (?:your|its|their|our|his) own\b", "all"),
    (r"\b(?:of ours|ours is|words of ours)\b", "all"),
    (r"\b(?:is|are|be|was|were) told\b", "all"),
    (r"\btold (?:of|about|apart|from|by)\b", "all"),
    (r"\bhear(?:s|d)? (?:of|what|where|how|why)\b", "all"),
    (r"\b(?:is|are|was|were) meant\b", "all"),
    (r"\bbesides\b", "all"),
    (r"\bbeside\b", "all"),
    (r"\b(?:that|which) (?:is|are|was|were) not there\b", "all"),
    (r"(?<!that )(?<!which )\b(?:be|is|are) not there\b|\bnot be there\b", "all"),
    (r"(?<!so )(?<!than )\bthat (?:there (?:is|are)|is there|are there)\b", "all"),
    (r"\b(?:go|goes|going|gone|went) on (?:from|with|by|at|to)\b", "all"),
    (r"\banew\b", "all"),
    (r"^Of ", "code"),
    (r"(?<=[.:;] )Of (?:a|an|the|what|every|each|all|those|these|it|many|several|models?|split|two)\b", "all"),
    (r"^(?:of|that|whose|which|where|for which|in which|of which|to be) ", "code"),
    (r"^What ", "doc"),
    (r"^Where ", "doc"),
    (r"^(?:That|How|Why|Which|Who) ", "doc"),
    (r"^(?:As|In|By|Over|At|With|From|Of|For|To|On) ", "doc"),
    (r"^Nothing[:.,]", "doc"),
    (r"\b[Ww]here (?:there (?:is|are|was|were)|nobody|none|nothing|no one)\b", "all"),
    (r"(?:^|[.:;] )[Ww]here (?:a|an|it|they|one|some|that|this) ", "all"),
    (r"\bin the place of\b", "all"),
    (r", of which\b", "all"),
    (r"\bso (?:many|much)\b", "all"),
    (
        r"(?<!there )\b(?:is|are|was|were) no (?:number|figure|text|tensor|folder|file|device|class|list|label|word"
        r"|batch|part|JSON|loss|matrix|rank|gradient|template|step|array|dict|image|table|encoding|name)s?\b",
        "all",
    ),
    (r"\b(?:all|nothing|none) but\b", "all"),
    (r"\bbut for\b", "all"),
    (r"\b[Mm]end(?:s|ed|ing)?\b", "all"),
    (r"\blikewise\b", "all"),
    (r"\b(?:is|are|be|was|were) said\b", "all"),
    (r"\bwithout a word\b", "all"),
    (r"\b(?:a|the|this) person(?:'s)?\b", "all"),
    (r"\b(?:to|can|could|cannot) be had\b", "all"),
    (r"\bcom(?:e|es|ing) to be\b|\bcame to be\b", "all"),
    (r"\bmakes? of (?:it|them|some|the|its|what|that|a)\b", "all"),
    (r"\bat a loss\b(?! of)", "all"),
    (r"\balike\b", "all"),
    (r"\bby then\b", "all"),
    (r"\bat times\b|\bseldom\b", "all"),
    (r"\bfor want of\b", "all"),
    (r"\bof before\b(?! \d)", "all"),
    (r"\bin peace\b|\bmidst\b", "all"),
    (r"\b[Hh]ardly\b", "all"),
    (r"\b[Ww]hatever\b", "all"),
    (r"\bsays? so\b", "all"),
    (r"\blets? go of\b", "all"),
    (r"\bknows? (?:of|nothing)\b", "all"),
    (r"\b[Ww]ish(?:es)?\b", "all"),
    (
        r"\b(?:bytes|bits|[kKMGT]B|GiB|ms|µs|seconds?|samples|tokens|requests|times|reviews|images|numbers|sums|ranks"
        r"|kernels?|calls?) an? (?:step|second|weight|GB|block|node|token|sample|update|rank|machine|micro-step"
        r"|parameter|element|epoch|batch|GPU|line)\b",
        "all",
    ),
    (r"\b(?:is|are|was|were) of (?!type|dtype|shape|length)", "all"),
    (r"\binside of\b", "all"),
    (r"\bcom(?:e|es|ing) to (?:its|their|an|the) end\b|\bcame to (?:its|their|an|the) end\b", "all"),
    (r"\bmost of all\b", "all"),
    (r"\bone after the other\b|\bone behind the other\b", "all"),
    (r"\bto those (?:who|that)\b|\bfor (?:those|all|any) who\b|\bfor who(?:ever)?\b", "all"),
    (r"\bthe least (?:that|of|once)\b", "all"),
    (r"\b[Tt]he most (?:that|of a|once)\b", "all"),
    (r"\b(?:is|are) (?:not )?waited for\b", "all"),
    (r"\bdealt (?:out )?to\b|\bis dealt\b|\bdealt out\b", "all"),
]
"""Regular expressions and their scopes."""

PATTERNS = [(re.compile(pattern), SCOPES[scope]) for pattern, scope in BANNED]


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


def matches(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, pattern and matched text of every banned phrase in ``path``."""
    for unit in units(path):
        text = _plain(unit.text)
        for regex, kinds in PATTERNS:
            if unit.kind in kinds:
                for found in regex.finditer(text):
                    yield unit.line, regex.pattern, text[max(found.start() - 20, 0) : found.end() + 20]


def files(place: Path) -> list[Path]:
    """The Python and Markdown files at ``place``."""
    return [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])


if __name__ == "__main__":
    found = [(path, *match) for place in sys.argv[1:] for path in files(Path(place)) for match in matches(path)]
    for path, line, pattern, text in found:
        print(f"{path}:{line}: {text!r}  [{pattern}]")
    print(f"{len(found)} matches")
