"""The command says so if another distribution has replaced the package `trainer`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from exactbatch_trainer import entry, find_problem


def test_this_package_is_accepted() -> None:
    assert find_problem() is None


@pytest.mark.parametrize("source", ["from trainer.trainer import *\n", None], ids=["another package", "no __init__.py"])
def test_another_package_of_the_name_is_one_line_and_is_not_executed(source, tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    if source:
        (package / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, "trainer")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed = {"trainer": ["exactbatch-trainer", "x"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: installed)
    with pytest.raises(SystemExit) as ended:
        entry()
    place = package / "__init__.py" if source else package
    cause = "is not of exactbatch-trainer, but of x, which has a package of the same name"
    fix = "pip uninstall x, then pip install --force-reinstall --no-deps exactbatch-trainer"
    assert str(ended.value) == f"trainer: error: {place} {cause}: {fix}"
