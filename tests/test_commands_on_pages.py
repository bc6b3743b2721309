"""Every command on a page is executed, or marked with the reason why it is not.

The line above a block of commands is a comment, which no reader sees:

    <!-- executed -->                          each line runs here, a `trainer fit` for two steps
    <!-- executed by tests/FILE.py::TEST -->   that test runs it
    <!-- flags checked: REASON -->             its flags are parsed here, with the values; REASON why it is not run
    <!-- not executed: REASON -->              nothing can be checked
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.warm import python

from trainer.cli import COMMANDS, run

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:^<!-- ((?:(?!-->).)*) -->\n)?^```(?:bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"executed|executed by (\S+)::(\w+)|flags checked: .+|not executed: .+")
NAMED = re.compile(rf"\btrainer ({'|'.join(COMMANDS)})\b")
WITH_RECIPE = ("fit", "doctor", "plan", "ladder", "sweep")
SHORT = ["--max_steps", "2", "--run.predict", "false"]
README = "flags checked: the README has no marks"


class Block(NamedTuple):
    """A block of commands on a page."""

    page: str
    mark: str
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.commands[0][:40]}"


def blocks() -> list[Block]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = str(path.relative_to(ROOT))
        for mark, text in BLOCK.findall(path.read_text()):
            commands = tuple(text.replace("\\\n", " ").strip().splitlines())
            found.append(Block(page, mark or (README if page == "README.md" else ""), commands))
    return found


BLOCKS = blocks()


def printed(*argv: str) -> tuple[int, str]:
    """Exit code and output of ``trainer ARGV``."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = run(argv)
    return code, output.getvalue()


def test_every_block_of_commands_has_a_mark():
    assert len(BLOCKS) > 60
    for block in BLOCKS:
        mark = MARK.fullmatch(block.mark)
        assert mark, f"{block} needs a mark: see {Path(__file__).name}"
        if mark[1]:
            assert f"def {mark[2]}(" in (ROOT / mark[1]).read_text(), block.mark
    assert sum(block.mark.startswith("executed") for block in BLOCKS) >= 9


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_the_flags_of_every_command_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in BLOCKS:
        if block.page != page or block.mark.startswith("not executed"):
            continue
        for line in block.commands:
            if (found := NAMED.search(line)) and not line.startswith("pip"):
                words = shlex.split(line[found.end() :].partition(" > ")[0].replace("…", ""), comments=True)
                check(found[1], words, line)


def check(command: str, words: list[str], line: str) -> None:
    """Parse a command line: flags with their values if it takes a recipe, else the names of flags."""
    if command == "run":
        known = printed("run", "--help")[1]
        own = words[: words.index("--")]
        assert flags_of(own) <= set(re.findall(r"--[\w-]+", known)), line
        command, words = "fit", words[len(own) + 1 :]
    of_script = "--script" in words
    if command in WITH_RECIPE and not of_script and not words[0].startswith("hf:") and "--help" not in words:
        recipe = "vit_digits" if words[0] in ("my_recipe.py", "my.csv", "runs/mine/recipe.yaml") else words[0]
        if "--config" in words:  # of a file that the page writes
            at = words.index("--config")
            del words[at : at + 2]
        code, output = printed(command, recipe, *words[1:], "--print_config")
        assert code == 0, (line, output)
    else:
        known = printed(command, *(["--script", "FILE"] if of_script else []), "--help")[1]
        words = words[: words.index("--")] if "--" in words else words
        assert flags_of(words) - {"--help"} <= set(re.findall(r"--[\w-]+", known)), line


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark == "executed"], ids=str)
def test_commands_run_as_shown(block, tmp_path):
    for line in block.commands:
        name, *words = shlex.split(line, comments=True)
        assert name == "trainer", line
        done = python("-m", "trainer", *words, *(SHORT if words[0] == "fit" else []), cwd=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
