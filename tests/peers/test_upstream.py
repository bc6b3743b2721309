"""The reproductions in docs/upstream still show the defects that they are about."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.environments import CACHE

PAGES = sorted(path for path in (Path(__file__).parents[2] / "docs/upstream").glob("*.md") if path.stem != "README")


def python_with(package):
    """Return an interpreter with a package: that of its conformance environment, or this one."""
    found = sorted(CACHE.glob(f"{package}-*/complete")) or sorted(CACHE.glob("base-*/complete"))
    pythons = [one.parent / "bin/python" for one in found]
    for python in pythons:
        code = f"import sys; from importlib.util import find_spec; sys.exit(find_spec('{package}') is None)"
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            return str(python)
    return sys.executable if find_spec(package) else None


def blocks(page):
    """Return the reproduction of a page and its output."""
    text = page.read_text()
    return [re.search(rf"```{kind}\n(.*?)```", text, re.S).group(1) for kind in ("python", "text")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_reproduction_shows_the_defect(page, tmp_path):
    package = page.stem.partition("-")[0]
    python = python_with(package)
    if python is None:
        pytest.skip(f"needs {package}")
    code, expected = blocks(page)
    (tmp_path / "repro.py").write_text(code)
    if package == "llamafactory":
        (tmp_path / "torchaudio.py").touch()  # it imports torchaudio for audio, which no environment of ours has
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [python, *(torchrun if "# torchrun" in code else []), "repro.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    for line in expected.splitlines():
        assert line in done.stdout, done.stdout + done.stderr[-2000:]


def test_every_page_is_in_the_index_and_imports_nothing_of_ours():
    index = (PAGES[0].parent / "README.md").read_text()
    for page in PAGES:
        assert f"({page.name})" in index
        assert "trainer.integrations" not in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_reproduction_is_short_and_says_what_it_needs(page):
    code = blocks(page)[0]
    assert code.startswith("# pip install ")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 25
    compile(code, page.name, "exec")
