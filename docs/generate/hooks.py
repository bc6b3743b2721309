"""Hooks of MkDocs: pages from outside of ``docs/``, links to them, and the generated reference.

A page links to files as they are in the repository, ``../benchmarks/README.md``, and works on the site as well: a file
that a page links to becomes a page or a file below ``repository/``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from reference import pages

ROOT = Path(__file__).parents[2]
DOCS, OUTSIDE = "docs/", "repository/"
PROJECT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
"""The pages from outside of ``docs/`` that the navigation names. Others are found by their links."""

LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".sbatch": "bash", ".toml": "toml"}
LINK = re.compile(r"(?:(?<=\]\()|(?<=\]: ))(?![a-z]+:|#)([^)#\s]+)(?=[#)\s])")  # [text](target), or [id]: target
FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
NESTED = re.compile(r"^(?:  )+(?=\S)", re.MULTILINE)  # Python-Markdown needs 4 columns a level, GitHub needs 2
ROLE = re.compile(r":(?:class|func|data|meth|mod|attr):(<code>)")


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and everything outside of ``docs/`` that a page links to."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for path in linked_from([*(f"{DOCS}{file.src_uri}" for file in files.documentation_pages()), *PROJECT]):
        whole = ROOT / path
        if is_text := whole.suffix in (".md", *LANGUAGES):
            text = whole.read_text()
            text = text if whole.suffix == ".md" else f"# {path}\n\n```{LANGUAGES[whole.suffix]}\n{text}\n```\n"
        source = {"content": text} if is_text else {"abs_src_path": str(whole)}
        inclusion = InclusionLevel.UNDEFINED if path in PROJECT else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_path(path), inclusion=inclusion, **source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that lead out of ``docs/`` or come from there."""
    here = in_repository(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(here), link[1]))
        if (here.startswith(DOCS) and target.startswith(DOCS)) or not (ROOT / target).exists():
            return link[0]
        return os.path.relpath(site_path(target), os.path.dirname(page.file.src_uri) or ".")

    parts = FENCE.split(markdown)
    return "".join(
        part if FENCE.match(part) else NESTED.sub(r"\g<0>\g<0>", LINK.sub(rewritten, part)) for part in parts
    )


def on_page_content(html: str, **_: Any) -> str:
    """Remove what docstrings have of reStructuredText: roles, as in ``:class:`Recipe```, and ``::`` before code."""
    return ROLE.sub(r"\1", html).replace("::</p>", ":</p>")


def linked_from(starts: list[str]) -> Iterator[str]:
    """Yield the files outside of ``docs/`` that are in ``starts``, or linked to from there, directly or indirectly."""
    found = list(dict.fromkeys(starts))
    for path in found:
        if not path.startswith(DOCS):
            yield path
        if path.endswith(".md") and (ROOT / path).is_file():
            text = "".join(part for part in FENCE.split((ROOT / path).read_text()) if not FENCE.match(part))
            targets = (os.path.normpath(os.path.join(os.path.dirname(path), link)) for link in LINK.findall(text))
            found += [one for one in dict.fromkeys(targets) if (ROOT / one).is_file() and one not in found]


def site_path(path: str) -> str:
    """Return the source path on the site of a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return f"{OUTSIDE}{path}.md" if Path(path).suffix in LANGUAGES else f"{OUTSIDE}{path}"


def in_repository(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"{DOCS}{uri}"
