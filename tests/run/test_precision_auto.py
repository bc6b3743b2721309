"""``memory.precision=auto``: decided by the card, printed, stored, and never changed silently by a resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.resumed import recipe

from trainer import Memory, Recipe, RecipeError
from trainer.after.predict import PredictOptions
from trainer.api import fit
from trainer.cli import run
from trainer.commands.recipes import load_recipe, packaged_recipes
from trainer.fakegpu.gpus import GPUS, gpu_named, host_as_device
from trainer.launching.world import World
from trainer.memory.plan import decide_plan, with_precision
from trainer.run import run_prediction, setup
from trainer.run.run_prediction import decided

pytestmark = pytest.mark.usefixtures("no_pictures")

GPU_WORLD, CPU_WORLD = World("python", "cuda", 1), World("python", "cpu", 1)


def auto(**memory: Any) -> Recipe:
    return recipe(Path("unused"), memory={"precision": "auto"} | memory)


def of_run(run_dir: Path) -> tuple[str, str, set[str]]:
    """The precision in ``recipe.yaml``, the plan in ``status.json``, and the precision in all checkpoints."""
    stored = yaml.safe_load((run_dir / "recipe.yaml").read_text())["memory"]["precision"]
    plan = json.loads((run_dir / "status.json").read_text())["plan"]
    manifests = (run_dir / "checkpoints").glob("step-*/manifest.json")
    return stored, plan, {json.loads(path.read_text())["recipe"]["memory.precision"] for path in manifests}


@pytest.mark.parametrize(
    ("card", "precision"),
    [
        ("h100-sxm", "bf16-mixed"),  # 9.0
        ("a100-80gb", "bf16-mixed"),  # 8.0
        ("rtx-3060", "bf16-mixed"),
        ("t4", "32-true"),  # 7.5
        ("v100-16gb", "32-true"),  # 7.0
    ],
)
def test_the_card_decides(monkeypatch: pytest.MonkeyPatch, card: str, precision: str) -> None:
    monkeypatch.setattr(run_prediction, "gpu_here", lambda: gpu_named(card))
    found, world = decided(auto(), GPU_WORLD)
    assert (found.memory.precision, world) == (precision, GPU_WORLD)
    assert precision in decide_plan(found, 1).describe().split(", ")
    assert found == auto(precision=precision)  # nothing else has changed


def test_every_card_of_the_table_that_is_given_bf16_has_units_for_it() -> None:
    for gpu in GPUS.values():
        given = with_precision(auto(), gpu.capability).memory.precision
        assert (given == "bf16-mixed") == ("bfloat16" in gpu.flops), gpu.name


def test_a_cpu_computes_in_fp32_and_a_card_is_asked_for_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_prediction, "gpu_here", lambda: pytest.fail("nobody needs to know"))
    assert decided(auto(), CPU_WORLD)[0].memory.precision == "32-true"
    assert with_precision(auto(), host_as_device().capability).memory.precision == "32-true"
    for precision in ("32-true", "16-mixed", "bf16-true"):
        asked = auto(precision=precision)
        assert decided(asked, GPU_WORLD)[0] is asked


def test_nobody_plans_with_a_precision_that_is_open(golden) -> None:
    with golden.raises(RecipeError):
        decide_plan(auto(), 1)


def test_predictions_are_asked_for_in_a_precision(golden) -> None:
    with golden.raises(RecipeError):
        PredictOptions(precision="auto").check()


def test_two_packaged_recipes_leave_it_open_and_custom_ones_compute_in_fp32() -> None:
    left_open = {name for name in packaged_recipes() if load_recipe(name)[0].memory.precision == "auto"}
    assert left_open == {"text_files", "image_folder"}
    assert Memory().precision == "32-true"


def test_a_flag_may_say_it_and_help_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "vit_digits", "--memory.precision", "auto", "--print_config"]) == 0
    assert "  precision: auto" in capsys.readouterr().out.splitlines()
    assert run(["fit", "text_files", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "or auto: bf16-mixed on GPUs that support it (compute capability 8.0 or higher), 32-true on others" in shown


def test_what_was_decided_is_printed_and_stored_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = recipe(tmp_path / "run", memory={"precision": "auto"}, run={"progress": True}, max_steps=4)
    fit(asked)
    assert "single, 32-true on CPU" in "".join(capsys.readouterr())
    stored, plan, saved = of_run(tmp_path / "run")
    assert (stored, saved) == ("32-true", {"32-true"})
    assert "32-true" in plan
    fit(asked.replace(max_steps=5, run=dataclasses.replace(asked.run, resume="auto", allow_change=["max_steps"])))
    assert "resuming from" in "".join(capsys.readouterr())


def test_a_resume_on_another_kind_of_card_is_refused_and_names_the_flag(tmp_path: Path, golden) -> None:
    """A run that began on a card with units for bfloat16, and goes on where there are none."""
    begun = recipe(tmp_path / "run", memory={"precision": "bf16-mixed"}, max_steps=2)
    fit(begun)
    assert of_run(tmp_path / "run")[2] == {"bf16-mixed"}
    again = begun.replace(
        memory=dataclasses.replace(begun.memory, precision="auto"),
        max_steps=4,
        run=dataclasses.replace(begun.run, resume="auto", allow_change=["max_steps"]),
    )
    with golden.raises(RecipeError):
        fit(again)
    fit(again.replace(memory=begun.memory))  # as it says
    assert of_run(tmp_path / "run")[2] == {"bf16-mixed"}


def test_machines_whose_cards_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden) -> None:
    monkeypatch.setattr(setup, "all_gather_json", lambda fabric, value: [value, "bf16-mixed"])
    with golden.raises(RecipeError):
        fit(recipe(tmp_path, memory={"precision": "auto"}))


def test_settings_that_contradict_what_is_decided_are_refused_and_others_are_not(golden) -> None:
    rounds = with_precision(auto(stochastic_rounding=True), (9, 0))
    with golden.raises(RecipeError):
        decide_plan(rounds, 1)
    plain = with_precision(auto(), (9, 0))
    same_bits = plain.replace(run=dataclasses.replace(plain.run, deterministic=True))
    assert decide_plan(same_bits, 2).memory.precision == "bf16-mixed"
