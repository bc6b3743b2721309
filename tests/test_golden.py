"""The golden file has no unused entries, and ``pytest --update-golden`` rewrites it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.golden import COMMAND, FILE, normalise, parse, read, render, unused_entries


def test_every_entry_belongs_to_a_test(request):
    if not request.config.getoption("--update-golden"):
        assert unused_entries(request.config) == [], f"tests that do not exist; to remove their entries: {COMMAND}"


def test_the_file_is_sorted(request):
    path = request.config.rootpath / FILE
    if not request.config.getoption("--update-golden"):
        assert render(read(path)) == path.read_text(encoding="utf-8"), f"sort it: {COMMAND} tests/test_golden.py"


def test_entries_are_read_as_they_were_written():
    entries = {"b.py::test_b[x y]": "one\n\n    two: ü …\n", "a.py::test_a::name": "", "a.py::test_a": "line"}
    content = render(entries)
    assert content.startswith("a.py::test_a\n    line\n\na.py::test_a::name\n")
    assert parse(content) == {key: text.strip("\n") for key, text in entries.items()}


def test_what_differs_between_machines_is_replaced(tmp_path):
    text = f"{tmp_path}/x {tmp_path}: torch {version('torch')}, pid 17, 3.2 s \n\ta\x1b[2J\udcff\n\n"
    found = normalise(text, [(tmp_path, "TMP")], hide=[r"\d\.\d s"])
    assert found == "TMP/x TMP: torch VERSION, pid N, …\n" + r"\ta\x1b[2J\udcff"


TESTS = """
import pytest

@pytest.mark.parametrize("name", ["a", "b"])
def test_table(golden, name):
    golden({table!r}[name])

def test_several(golden, tmp_path):
    with golden.raises(ValueError, "error"):
        raise ValueError(f"bad {{tmp_path}}/file")
    {more}
"""


def pytest_run(folder: Path, *flags: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "no:cacheprovider", "tests", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_the_file_is_rewritten_from_several_processes(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["helpers.golden"]\n')
    tests = tmp_path / "tests" / "test_one.py"
    tests.write_text(TESTS.format(table={"a": "one", "b": "two"}, more="golden('more', 'second')"))

    missing = pytest_run(tmp_path)
    assert "there is no entry 'test_one.py::test_table[a]'" in missing
    assert f"{COMMAND} tests/test_one.py" in missing

    written = {
        "test_one.py::test_several::error": "bad TMP/file",
        "test_one.py::test_several::second": "more",
        "test_one.py::test_table[a]": "one",
        "test_one.py::test_table[b]": "two",
    }
    former = dict.fromkeys(("test_one.py::test_several::former", "test_one.py::test_table[former]"), "text")
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(render(former | {"test_one.py::test_table[b]": "2"}))
    assert "3 passed" in pytest_run(tmp_path, "--update-golden", "-n", "2")
    assert parse((tmp_path / FILE).read_text()) == written

    tests.write_text(TESTS.format(table={"a": "one", "b": "2"}, more=""))
    changed = pytest_run(tmp_path)
    assert "1 passed" in changed
    assert "- two\n+ 2\n" in changed
    assert "unused entries: ['test_one.py::test_several::second']" in changed


def test_entries_of_deleted_tests_are_found(request, monkeypatch):
    here = f"{Path(__file__).name}::"
    entries = dict.fromkeys((f"{here}test_the_file_is_sorted", f"{here}test_former[x]", "cli/no_file.py::test_x"), "")
    monkeypatch.setattr("helpers.golden.read", lambda _: entries)
    assert unused_entries(request.config) == list(entries)[1:]
