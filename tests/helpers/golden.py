"""Golden texts: messages and tables that tests expect are in ``tests/golden/messages.txt``.

A test passes a text to the fixture ``golden``, or lets it check the message of an error::

    def test_a_misspelt_flag(golden, capsys):
        assert run(["fit", "vit_digits", "--lr", "1"]) == 2
        golden(capsys.readouterr().err)

    @pytest.mark.parametrize("lr", [-1, "fast"])
    def test_a_wrong_rate(golden, lr):
        with golden.raises(RecipeError):
            Optim(lr=lr)

The key of an entry is the test's id, with a name behind it if the test has several texts: ``golden(text, "help")``.
The folder of the test becomes TMP. The repository, temporary folders, process ids and versions get names, too.
What else differs between machines becomes ``…`` if it matches an expression in ``hide``.

``pytest --update-golden FILE`` rewrites the entries of the tests that pass and removes the entries of deleted tests.
Check ``git diff tests/golden`` afterwards: the command accepts every text.
"""

from __future__ import annotations

import difflib
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

FILE = Path("tests", "golden", "messages.txt")
ROOT = Path(__file__).parents[2]
MARGIN = "    "
COMMAND = "pytest --update-golden"
COLLECTED = pytest.StashKey[set[str]]()

Entries = dict[str, str]
Changes = dict[str, str | None]
"""New texts of entries; ``None`` removes an entry."""


def parse(content: str) -> Entries:
    """Read entries: a line with the key, then the text with a margin."""
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in content.split("\n"):
        if line.strip() and not line.startswith(MARGIN):
            lines = entries[line] = []
        else:
            lines.append(line.removeprefix(MARGIN))
    return {key: "\n".join(text).strip("\n") for key, text in entries.items()}


def render(entries: Entries) -> str:
    """Write entries, sorted by key; the inverse of :func:`parse`."""
    blocks = []
    for key, text in sorted(entries.items()):
        lines = [MARGIN + line if line else "" for line in text.split("\n")]
        blocks.append("\n".join([key, *lines]) + "\n")
    return "\n".join(blocks)


@lru_cache
def read(path: Path) -> Entries:
    """Read the entries of the golden file, once per process."""
    return parse(path.read_text(encoding="utf-8")) if path.exists() else {}


def normalise(text: str, paths: Iterable[tuple[object, str]] = (), hide: Iterable[str] = ()) -> str:
    """Replace what differs between machines and runs, and characters that an editor would change.

    Args:
        text: a message or a table.
        paths: folders of the test, each with its name in the golden file.
        hide: regular expressions whose matches become ``…``.
    """
    for path, name in [*paths, (ROOT, "ROOT"), (tempfile.gettempdir(), "TEMP")]:
        text = re.sub(rf"{re.escape(str(path))}(?![\w-])", name, text)
    for library in ("torch", "transformers"):
        text = text.replace(f"{library} {version(library)}", f"{library} VERSION")
    text = re.sub(rf"Python {re.escape(platform.python_version())}\b", "Python VERSION", text)
    text = re.sub(r"\bpid \d+", "pid N", text)
    for pattern in hide:
        text = re.sub(pattern, "…", text)
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(map(_printable, lines)).strip("\n")


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def compare(key: str, expected: str, found: str) -> str:
    """Describe the difference between an entry and a text; empty if there is none."""
    if expected == found:
        return ""
    lines = difflib.ndiff(expected.split("\n"), found.split("\n"))
    return "\n".join([key, "(-: the entry, +: the text found)", *(line.rstrip("\n") for line in lines)])


class Golden:
    """The golden texts of one test.

    Attributes:
        test: the test's id without the folder ``tests``.
        used: the texts that the test has compared so far, by key.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.request = request
        self.test = _without_folder(request.node.nodeid)
        self.entries = read(request.config.rootpath / FILE)
        self.updates = request.config.getoption("--update-golden")
        self.used: Entries = {}

    def __call__(self, text: str, name: str = "", hide: Iterable[str] = ()) -> None:
        """Check that ``text`` is the entry of this test, or its entry ``name``; see :func:`normalise` for ``hide``."""
        __tracebackhide__ = True
        key = f"{self.test}::{name}" if name else self.test
        found = normalise(text, self._paths(), hide)
        expected = self.entries.get(key)
        if self.updates:
            expected = self.used.get(key, found)
        self.used[key] = found
        if expected is None:
            self._fail(f"there is no entry {key!r} for this text:\n{found}")
        if difference := compare(key, expected, found):
            self._fail(difference)

    @contextmanager
    def raises(self, error: type[BaseException], name: str = "", hide: Iterable[str] = ()) -> Iterator[Any]:
        """Check that the body raises ``error`` with the message of the entry."""
        __tracebackhide__ = True
        with pytest.raises(error) as caught:
            yield caught
        self(str(caught.value), name, hide)

    def finish(self, properties: list[tuple[str, Any]]) -> None:
        """Pass on the changes of a test that has passed, or check that it has used all its entries."""
        __tracebackhide__ = True
        prefix = f"{self.test}::"
        unused = [key for key in self.entries if key == self.test or key.startswith(prefix)]
        unused = [key for key in unused if key not in self.used]
        if self.updates:
            unused += unused_entries(self.request.config)
            changes: Changes = {**self.used, **dict.fromkeys(unused)}
            properties.append(("golden", changes))
        elif unused:
            self._fail(f"unused entries: {unused}")

    def _paths(self) -> Iterator[tuple[object, str]]:
        folder = self.request.node.funcargs.get("tmp_path")
        if folder is not None:
            yield folder, "TMP"
        yield self.request.config._tmp_path_factory.getbasetemp(), "TEMP"

    def _fail(self, reason: str) -> None:
        __tracebackhide__ = True
        file = self.request.node.nodeid.partition("::")[0]
        pytest.fail(f"{FILE}: {reason}\nif the text is right: {COMMAND} {file}", pytrace=False)


def _without_folder(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """A function: compare a text with its entry in the golden file; see :mod:`helpers.golden`."""
    return Golden(request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Finish the golden texts of a test that passes."""
    result = yield
    texts = getattr(item, "funcargs", {}).get("golden")
    if isinstance(texts, Golden):
        texts.finish(item.user_properties)
    return result


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember which tests there are, including tests that this session does not run."""
    config.stash[COLLECTED] = {_without_folder(item.nodeid) for item in items}


def unused_entries(config: pytest.Config) -> list[str]:
    """List entries whose test no longer exists.

    The file and the function of every entry are looked up. Its parameters are looked up if this session has collected
    the whole file.
    """
    is_partial = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    collected: set[str] = set() if is_partial else config.stash[COLLECTED]
    files = {test.partition("::")[0] for test in collected}
    return [
        key
        for key in read(config.rootpath / FILE)
        if not (_is_collected(key, collected) if key.partition("::")[0] in files else _is_defined(key, config.rootpath))
    ]


def _is_collected(key: str, collected: set[str]) -> bool:
    parts = key.split("::")
    return any("::".join(parts[:number]) in collected for number in range(2, len(parts) + 1))


def _is_defined(key: str, root: Path) -> bool:
    file, _, rest = key.partition("::")
    function = re.split(r"\[|::", rest)[0]
    return f"def {function}(" in _source(root / "tests" / file)


@lru_cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that rewrites the golden file."""
    parser.addoption("--update-golden", action="store_true", help=f"write the texts found to {FILE}")


def pytest_configure(config: pytest.Config) -> None:
    """Collect changes in the process that hears of all tests: the only one, or the one that started the workers."""
    if config.getoption("--update-golden") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Update(config.rootpath / FILE))


class Update:
    """The changes of a session, written to the golden file at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changes: Changes = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the changes of a test that has passed; workers send them with its report."""
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "golden":
                    self.changes |= value

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        before = parse(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        after = {key: text for key, text in (before | self.changes).items() if text is not None}
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(render(after), encoding="utf-8")
