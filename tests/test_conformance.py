"""The suite finds planted defects, a correct loop is exact, and the page shows the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from conformance.__main__ import chosen, main, trainers
from conformance.cases import CASES, FEATURES, loss_of
from conformance.known import KNOWN, known
from conformance.page import END, PAGE, START, is_wrong, render
from conformance.planted import DEFECTS
from conformance.planted import FEATURES as FEATURES_OF_LOOP
from conformance.verdict import KINDS, Reference, weights_text

ROOT = Path(__file__).parents[1]


def measured(trainer: str, names: list[str], folder: Path) -> dict[str, str]:
    """The verdicts on cells, measured in a process as the command does it."""
    command = [sys.executable, "-m", "conformance.cell", trainer, "120", str(folder), *names]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text())["verdict"] for name in names}


def test_planted_defects_have_their_verdicts_and_the_correct_loop_is_exact(tmp_path):
    found = measured("planted", ["ragged", "ragged:mean-of-means", "padded:padding-counted"], tmp_path)
    assert list(found.values()) == ["exact", "ragged", "factor"]


@pytest.mark.slow
def test_every_planted_defect_has_its_verdict(tmp_path):
    wanted = {f"{case}:{defect}": verdict for defect, (case, verdict) in DEFECTS.items()}
    assert measured("planted", list(wanted), tmp_path) == wanted


@pytest.mark.slow
def test_a_correct_loop_is_exact_in_every_case(tmp_path):
    names = [name for name, case in CASES.items() if case.needs <= FEATURES_OF_LOOP and name != "batch-norm"]
    assert measured("planted", names, tmp_path) == dict.fromkeys(names, "exact")


@pytest.mark.slow
def test_our_fit_is_exact_or_rejected(tmp_path):
    wanted = dict.fromkeys(CASES, "exact") | {"moe": "rejected", "batch-norm": "rejected"}
    wanted |= dict.fromkeys(("packed", "dpo", "reward"), "unsupported")
    found = measured("ours", list(CASES), tmp_path)
    assert {name: kind.replace("rounding", "exact") for name, kind in found.items()} == wanted


@pytest.mark.slow
def test_our_language_model_is_exact(tmp_path):
    wanted = dict.fromkeys(("texts", "padded", "gpt2", "packed", "tied", "frozen", "dpo", "2-ranks-fsdp2"), "exact")
    assert measured("ours_language", list(wanted), tmp_path) == wanted


@pytest.mark.slow
def test_two_runs_have_the_same_verdicts(tmp_path):
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        measured("planted", ["texts:mean-of-means", "lora-dropout", "2-ranks-dropout"], folder)
    first, second = (
        {path.name: json.loads(path.read_text()) for path in (tmp_path / name).glob("[0-9a-z]*.json")}
        for name in ("first", "second")
    )
    assert first == second
    assert len(first) == 4  # and the versions


@pytest.mark.parametrize(
    "name", ["ragged", "class-weights", "label-smoothing", "two-losses", "tokens", "regression", "multi-label", "gpt2"]
)
def test_the_reference_agrees_with_finite_differences(name):
    case, change = CASES[name], 1e-5
    reference = Reference(case, case.build())
    reference.load(dict(reference.module.named_parameters()))
    numbers = sorted(case.windows()[0])
    gradient = reference.of_samples(numbers).sum(0)
    parameters = [one for one in reference.module.parameters() if one.requires_grad]
    weights = parameters_to_vector(parameters).detach()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(len(weights), generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            vector_to_parameters(weights + sign * change * direction, parameters)
            total, weight = loss_of(case, reference.module, [reference.samples[number] for number in numbers])
            losses.append(float(total.detach()) / weight)
        # The error is change² times a third derivative, and the rounding of the loss divided by the change.
        assert (losses[0] - losses[1]) / (2 * change) == pytest.approx(float(gradient @ direction), rel=1e-5)


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
    with pytest.raises(SystemExit, match="no case 'ragget'; did you mean ragged"):
        main(["show", "ours", "ragget"])


def test_the_page_shows_the_results():
    content = json.loads((ROOT / "conformance" / "results.json").read_text())
    shown = PAGE.read_text().split(START)[1].split(END)[0].strip()
    assert shown == render(content).strip(), "python -m conformance report"
    assert f"one of {len(DEFECTS)} planted" in PAGE.read_text()


def test_every_known_cause_names_trainers_cases_and_pages_that_exist():
    for one in KNOWN:
        assert set(one.trainers) <= set(trainers())
        assert set(one.cases) <= CASES.keys()
        assert not one.page or (ROOT / "docs" / "upstream" / one.page).exists(), one.page


def test_every_wrong_cell_has_a_cause():
    cells = json.loads((ROOT / "conformance" / "results.json").read_text())["cells"]
    wrong = {tuple(name.split("/")) for name, cell in cells.items() if is_wrong(cell)}
    assert not {f"{trainer}/{case}" for trainer, case in wrong if known(trainer, case) is None}


def test_files_of_results_that_cannot_be_read_have_a_message(tmp_path):
    with pytest.raises(SystemExit, match=r"none\.json does not exist: python -m conformance run writes it"):
        main(["report", "--out", str(tmp_path / "none.json")])
    (tmp_path / "torn.json").write_text('{"cells": {"a/b"')
    with pytest.raises(SystemExit, match=r"torn\.json has no results: delete it"):
        main(["run", "--out", str(tmp_path / "torn.json")])


def test_show_prints_a_reproduction(capsys):
    main(["show", "transformers", "classifier"])
    compile(capsys.readouterr().out, "reproduction", "exec")
    with pytest.raises(SystemExit, match=r"ours/even has no reproduction in docs/upstream; measure it with"):
        main(["show", "ours", "even"])


def test_weights_of_samples_are_joined():
    assert weights_text([1, 2, 3, 4], [0.5, 0.5, 2.0, 0.5]) == "1 to 2: 0.5, 3: 2, 4: 0.5"
