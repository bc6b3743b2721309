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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_reproduction_shows_the_defect(page, tmp_path):
    package = page.stem.partition("-")[0]
    measured = sorted(CACHE.glob(f"{package}-*/bin/python"))  # the environment of conformance
    if find_spec(package) is None and not measured:
        pytest.skip(f"needs {package}")
    python = sys.executable if find_spec(package) else str(measured[0])
    code, expected = (
        re.search(rf"```{kind}\n(.*?)```", page.read_text(), re.S).group(1) for kind in ("python", "text")
    )
    (tmp_path / "repro.py").write_text(code)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [python, *(torchrun if code.startswith("# torchrun") else []), "repro.py"]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_reproduction_has_at_most_25_lines(page):
    code = page.read_text().split("```python\n")[1].split("```")[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 25


def test_every_page_is_in_the_index_and_imports_nothing_of_ours():
    index = (PAGES[0].parent / "README.md").read_text()
    for page in PAGES:
        assert f"({page.name})" in index
        assert "trainer.integrations" not in page.read_text()
