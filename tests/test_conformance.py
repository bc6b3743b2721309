"""The suite finds planted defects, a correct loop is exact, and the page shows the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.__main__ import chosen, trainers
from conformance.cases import CASES, FEATURES
from conformance.page import END, PAGE, START, render
from conformance.planted import DEFECTS
from conformance.verdict import KINDS, weights_text

ROOT = Path(__file__).parents[1]


def measured(trainer: str, case: str, folder: Path) -> str:
    """The verdict on a cell, measured in a process as the command does it."""
    command = [sys.executable, "-m", "conformance.cell", trainer, "120", str(folder), case]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"{case}.json").read_text())["verdict"]


@pytest.mark.parametrize(
    "defect", [pytest.param("mean-of-means"), *(pytest.param(d, marks=pytest.mark.slow) for d in DEFECTS)]
)
def test_a_planted_defect_has_its_verdict(defect, tmp_path):
    case, verdict = DEFECTS[defect]
    assert measured(f"planted:{defect}", case, tmp_path) == verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ragged", "padded", "masked", "gpt2", "momentum", "schedule-short", "2-ranks-uneven"])
@pytest.mark.parametrize("trainer", ["planted", "ours"])
def test_a_correct_loop_and_our_fit_are_exact(trainer, case, tmp_path):
    assert measured(trainer, case, tmp_path) == "exact"


def test_every_verdict_and_case_is_known():
    assert {verdict for _, verdict in DEFECTS.values()} <= set(KINDS)
    assert {case for case, _ in DEFECTS.values()} <= CASES.keys()
    assert set().union(*(case.needs for case in CASES.values())) == set(FEATURES)
    for case in CASES.values():
        windows = case.windows()
        assert sorted(number for window in windows for number in window) == sorted(
            [*range(1, case.samples + 1)] * case.epochs
        )


def test_unknown_names_are_rejected_with_the_nearest():
    assert chosen("trainer", "all", trainers()) == trainers()
    with pytest.raises(SystemExit, match="no trainer 'acelerate'; did you mean accelerate"):
        chosen("trainer", "acelerate", trainers())


def test_the_page_shows_the_results():
    content = json.loads((ROOT / "conformance" / "results.json").read_text())
    shown = PAGE.read_text().split(START)[1].split(END)[0].strip()
    assert shown == render(content["cells"]).strip(), "python -m conformance report"


def test_weights_of_samples_are_joined():
    assert weights_text([1, 2, 3, 4], [0.5, 0.5, 2.0, 0.5]) == "1 to 2: 0.5, 3: 2, 4: 0.5"
