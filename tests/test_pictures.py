"""The pictures of the docs: what they show is measured, they stand alone, and they name no folder of a machine."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SPEC = importlib.util.spec_from_file_location("picture_of_memory", ROOT / "docs" / "pictures" / "memory.py")
assert SPEC is not None
assert SPEC.loader is not None
memory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(memory)


def words(svg: str) -> list[str]:
    """The texts of an SVG, in their order."""
    return [re.sub(r"<[^>]*>", "", text).strip() for text in re.findall(r"<text.*?</text>", svg, re.DOTALL)]


@pytest.mark.slow
def test_the_picture_of_memory_shows_what_was_measured(tmp_path):
    memory.draw(picture=tmp_path / "memory.svg")
    drawn, committed = (path.read_text() for path in (tmp_path / "memory.svg", IMAGES / "memory.svg"))
    assert words(drawn) == words(committed)
    runs = json.loads(memory.RESULTS.read_text())["runs"]
    assert {run["setting"] for run in runs} == memory.SETTINGS.keys()
    assert {f"{1000 * run['peak_gb']:,.0f} MB" for run in runs} <= set(words(committed))
    assert memory.largest_difference(runs) < 1e-5  # float32, summed in another order: measured 6e-07
    assert all(run["losses"][-1] < run["losses"][0] for run in runs)


@pytest.mark.parametrize("name", ["memory.svg", "resume.svg"])
def test_an_svg_stands_alone_and_names_no_folder_of_a_machine(name):
    text = (IMAGES / name).read_text()
    assert re.findall(r"/tmp|/home|/root|/work|/Users|<script|javascript:|@import|url\((?!#)", text) == []
    assert set(re.findall(r"href=\"(.)", text)) <= {"#"}
    assert len(text) < 200_000


def test_the_recording_shows_a_kill_a_resume_and_equal_weights():
    shown = words((IMAGES / "resume.svg").read_text())
    text = " ".join(shown).replace("\xa0", " ")
    for part in ("kill -9 $!", "Killed", "resuming from", "the weights are equal, byte by byte"):
        assert part in text
