"""What a search says of what it found: order, reasons, explanations, table; with predictions that are made up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from trainer.commands.recipes import load_recipe
from trainer.errors import RecipeError
from trainer.fakegpu.cost import StepCost
from trainer.fakegpu.prediction import Prediction
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan
from trainer.planner import search as searching
from trainer.planner.lower_bound import ModelSize, WeightBytes
from trainer.planner.report import PlanReport, best_of_each, explanation_text, table, wrap_command
from trainer.planner.search import plan, search_for
from trainer.recipe import Recipe
from trainer.settings import change
from trainer.system.child_jobs import ChildError
from trainer.system.text import WIDTH
from trainer.weights.nf4 import WeightCounts

GB = 1_000_000_000


def made_up(recipe: Recipe, plan: Plan, target: Target, *, capacity: int, **_: Any) -> dict[str, Any]:
    """Weights and optimizer of 8 GB, activations of 0.1 GB a sample; a micro-step takes 10 ms and 1 ms a sample."""
    memory, size = plan.memory, plan.initial_cut.micro_batch_size
    weights = {"none": 8 * GB, "optimizer": 2 * GB, "parameters": GB // 2}[memory.cpu_offload]
    weights = weights // 2 if memory.precision == "bf16-true" else weights
    weights = weights * 3 // 4 if memory.optimizer_state_bits == 8 else weights
    weights = weights // plan.world_size if memory.strategy == "fsdp" else weights
    kept = {"none": 10, "selective": 6, "full": 2}.get(str(memory.activation_checkpointing), 10)
    kept = 1 if memory.activation_offload else kept
    slower = {10: 1.0, 6: 1.1, 2: 1.3, 1: 1.6}[kept]
    weights += 2 * GB if memory.optimizer_in_backward else 0  # else it would be the answer to nearly all
    slower *= {"none": 1, "optimizer": 1.2, "parameters": 2}[memory.cpu_offload]
    slower *= 1.05 if memory.strategy == "fsdp" else 1
    share = memory.activation_checkpointing
    if isinstance(share, float):
        kept, slower = 10 - 8 * share, slower * (1 + 0.3 * share)
    reserved = int(weights + size * kept * GB / 100)
    step_ms = plan.initial_cut.accumulate * (10 + size) * slower + 5
    costs = {"ib-hdr": StepCost(step_ms, step_ms, 5, 0, 0, 0, 0, 0)}
    line = {"allocated": {"params": [0, weights]}, "reserved": [0, reserved], "marks": [[0, "init"]]}
    phases, largest = {"forward": {"allocated": reserved, "reserved": reserved}}, [["params", "empty", "init", weights]]
    figures = (reserved - GB // 10, reserved, 8 * GB - weights, phases, {"params": weights}, largest, "forward", costs)
    return asdict(Prediction(*figures, {}, 0.0, timeline=line, retries=0 if reserved <= capacity else None))


def answers(calls: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
    """As ``run_in_children``, here: an error is an answer, too."""

    def answer(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RecipeError, ChildError) as error:
            return error

    return enumerate(map(answer, calls))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanReport]:
    """The report of a search on a GPU of 80 GB, with changes to the recipe of the digits."""
    monkeypatch.setattr(searching, "predict_in_process", made_up)
    monkeypatch.setattr(searching, "run_in_children", lambda calls: enumerate(call() for call in calls))
    monkeypatch.setattr(searching, "run_in_child", lambda call: call())

    def search(
        budget: str, devices: int = 1, lossy: bool = False, everything: bool = False, **changes: Any
    ) -> PlanReport:
        recipe = change(load_recipe("vit_digits")[0], {"memory.micro_batch_size": "auto"}, changes)
        return plan(recipe, gpu="a100-80gb", devices=devices, budget=budget, lossy=lossy, everything=everything)

    return search


def test_the_fastest_that_fits_is_chosen_and_first_and_it_says_what_would_be_faster(searched):
    report = searched("8.9GB")
    # 8 GB of weights and 10 samples of 0.06 GB, or 64 of 0.01 GB; offloading the optimizer costs 20 %, but the larger
    # micro-batches that it allows gain more.
    chosen = report.chosen
    assert chosen is report.candidates[0] is report.drawn
    assert dict(chosen.flags) == {"memory.cpu_offload": "optimizer", "memory.micro_batch_size": 64}
    assert chosen.reserved == 2 * GB + 64 * GB // 10
    assert chosen.step_ms == pytest.approx(74 * 1.2 + 5)
    fitting = [one for one in report.candidates if one.fits]
    assert [one.step_ms for one in fitting] == sorted(one.step_ms for one in fitting)
    others = [one for one in report.candidates if not one.fits and one.reserved]
    assert [one.reserved for one in others] == sorted(one.reserved for one in others)
    assert all(one.reserved * 1.03 <= 8.9e9 for one in fitting)
    assert all(one.reserved * 1.03 > 8.9e9 for one in others)

    tried, not_tried, faster = report.explanations
    assert re.match(r"tried: \d+ of 27 combinations of knobs .* to 64: (\d+) plans, \1 traced; \d+ fit", tried)
    assert re.match(
        r"not tried: the other combinations, which cannot be faster or cannot fit; trainer plan --all tries", not_tried
    )
    next_one = max((one for one in others if one.step_ms < chosen.step_ms), key=lambda one: one.step_ms)
    assert faster.startswith(
        f"the next faster plan does not fit: {next_one.plan}: {next_one.step_ms:.1f} ms per step, "
    )
    assert next_one.reason in faster


def test_every_row_of_everything_is_there_and_those_between_two_traces_are_marked(searched):
    changes = {"memory.activation_checkpointing": "full", "memory.cpu_offload": "optimizer"}
    quick, whole = (searched("2.2GB", everything=everything, **changes) for everything in (False, True))
    assert dict(quick.chosen.flags) == {"memory.activation_offload": True, "memory.micro_batch_size": 13}
    assert (quick.chosen.flags, quick.chosen.step_ms) == (whole.chosen.flags, whole.chosen.step_ms)
    assert len(quick.candidates) < len(whole.candidates) == 2 * 15
    assert all(one.traced for one in quick.candidates)
    assert not all(one.traced for one in whole.candidates)
    assert whole.chosen.traced
    whole.candidates.insert(0, next(one for one in whole.candidates if not one.traced))  # stands for its combination
    assert re.search(r"~\d\.\d\d GB +~?\d\.\d\d GB +~[\d,.]+ ", table(whole))
    assert "~ interpolated between the traces" in table(whole)


def test_without_need_there_is_no_technique_and_one_trace_is_enough(searched):
    report = searched("20GB")
    assert report.chosen.command == "--memory.micro_batch_size 64"
    assert len(report.candidates) == 1
    assert report.chosen.prediction.timeline is not None
    assert "--all tries" in report.explanations[1]
    assert report.explanations[-1].startswith("no memory technique is needed beyond what the recipe sets: ")


def test_a_budget_that_is_more_than_the_card_has_is_cut_and_that_is_said(searched):
    assert searched("100GB").explanations[0] == (
        "memory.budget: 100GB was asked for, and A100 80 GB (SXM) has no more than 84.48 GB for torch"
    )
    assert not any("asked for" in line for line in searched("20GB").explanations)
    recipe = load_recipe("vit_digits")[0]  # NCCL's buffers for eight take more than a tenth of a small card
    cut = [search_for(recipe, "rtx-4060", 8, 1, budget).cut_budget for budget in (None, "90%")]
    assert [len(lines) for lines in cut] == [0, 1]


def test_ddp_and_fsdp_are_compared(searched):
    report = searched("20GB", devices=2, everything=True)
    assert dict(report.chosen.flags) == {"memory.strategy": "ddp", "memory.micro_batch_size": 32}
    strategies = {row.split()[3] for row in table(report).splitlines() if " × " in row}
    assert strategies == {"ddp", "fsdp", "fsdp*", "fsdp+", "fsdp*+"}
    assert "\n* keeps whole weights" in table(report)
    assert "\n+ sums gradients" in table(report)


def test_when_nothing_fits_it_says_what_is_missing_and_what_would_do_at_a_loss(searched):
    report = searched("0.45GB")
    assert report.chosen is None
    assert report.drawn is report.smallest is report.candidates[0]
    assert report.smallest.reserved == GB // 2 + GB // 100
    assert report.smallest.prediction.timeline is not None
    text = "\n".join(report.explanations)
    assert re.search(r"no plan fits in 450 MB: .* 510 MB \(batch 64 = .* 60 MB more than the budget", text)
    assert re.search(r"lossy, .*--memory\.precision bf16-true: 260 MB, would fit", text)
    assert re.search(r"lossy, .*: --memory\.cpu_offload parameters", text)
    assert "--lossy true" in report.explanations[-1]
    at_a_loss = searched("0.45GB", lossy=True)
    assert at_a_loss.chosen.flags["memory.precision"] == "bf16-true"
    assert "lossy" in table(at_a_loss).splitlines()[0]


def test_the_table_has_a_row_a_combination_and_fits_the_screen(searched):
    for report in (searched("8.9GB"), searched("0.45GB"), searched("3GB", devices=4), searched("0.45GB", lossy=True)):
        lines = table(report).splitlines()
        assert max(map(len, lines)) <= 120, lines[0]
        assert lines[0].startswith("micro-batch")
        rows = [line for line in lines[2:] if " × " in line]
        assert len(rows) == len(best_of_each(report.candidates))
        assert (rows[0].split()[-2:] == ["yes", "chosen"]) == (report.chosen is not None)
        assert max(map(len, explanation_text(report).splitlines())) <= WIDTH


def test_refused_plans_are_kept_with_their_reason(searched):
    report = searched("8.9GB", **{"optim.name": "adafactor"})
    refused = [one for one in report.candidates if one.reserved is None]
    assert refused
    assert all("adafactor" in one.reason for one in refused)
    assert "rejected: " in explanation_text(report)
    assert json.loads(json.dumps(report.to_json()))["candidates"][-1]["predicted_reserved_gb"] is None


def test_a_value_that_is_always_refused_is_ruled_out_also_where_only_some_plans_have_its_key(searched, monkeypatch):
    asked = []

    def refusing(recipe: Recipe, plan: Plan, *arguments: Any, **options: Any) -> dict[str, Any]:
        asked.append(plan)
        if plan.memory.precision == "bf16-true":
            raise RecipeError("memory.precision=bf16-true cannot be")
        return made_up(recipe, plan, *arguments, **options)

    monkeypatch.setattr(searching, "predict_in_process", refusing)
    monkeypatch.setattr(searching, "run_in_children", answers)
    report = searched("2.2GB", lossy=True)
    assert report.chosen.fits
    assert any(plan.memory.precision == "bf16-true" for plan in asked)
    assert re.search(r"; \d+ fit; \d+ other combinations were rejected", report.explanations[0])


def test_what_cannot_be_traced_is_asked_about_once_and_one_size_does_not_rule_out_the_others(searched, monkeypatch):
    asked, fails = [], {64, 32}

    def failing(recipe: Recipe, plan: Plan, *arguments: Any, **options: Any) -> dict[str, Any]:
        asked.append(plan)
        if plan.initial_cut.micro_batch_size in fails:
            raise ChildError("odd")
        return made_up(recipe, plan, *arguments, **options)

    monkeypatch.setattr(searching, "predict_in_process", failing)
    monkeypatch.setattr(searching, "run_in_children", answers)
    for everything in (False, True):
        report = searched("20GB", everything=everything)
        assert report.explanations == ["the model cannot be traced, and no other plan was tried: odd"]
    assert (report.chosen, len(asked)) == (None, 2)
    fails = {13}  # which would be chosen
    changes = {"memory.activation_checkpointing": "full", "memory.cpu_offload": "optimizer"}
    chosen = searched("2.2GB", **changes).chosen
    assert dict(chosen.flags) == {"memory.activation_offload": True, "memory.micro_batch_size": 11}


def test_json_has_the_promised_keys_in_gb(searched):
    report = searched("8.9GB")
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    promised = {"flags", "predicted_allocated_gb", "predicted_reserved_gb", "predicted_host_gb"}
    promised |= {"predicted_step_ms", "fits", "retries", "reason"}
    assert all(promised <= set(one) for one in content["candidates"])
    first = content["candidates"][0]
    assert first.items() <= content["chosen"].items()
    assert (first["predicted_reserved_gb"], first["predicted_allocated_gb"]) == (8.4, 8.3)
    assert (first["predicted_host_gb"], first["fits"], content["budget_gb"]) == (6.0, True, 8.9)
    assert re.search("fastest.* 500 MB", first["reason"])


def test_the_heading_says_what_lies_outside_of_the_budget():
    recipe = load_recipe("vit_digits")[0]
    search = search_for(recipe, "a100-80gb", 2, 1, "8.9GB")
    weights = WeightBytes(4000, 40, 4000)
    search.size = ModelSize(WeightCounts(1000, 0, 10), weights, weights)
    text = search.heading()
    said = [
        "VisionTransformer: 1,000 parameters (10 trained)",
        "64 samples per step",
        "2 × A100 80 GB (SXM) of 84.98 GB",
    ]
    said += ["8.90 GB on each device for torch; 3 % is kept free as a margin"]
    said += ["about 500 MB for the CUDA context and 350 MB for NCCL"]
    assert [words for words in said if words not in text] == []


def test_a_long_command_is_cut_between_flags():
    words = ["trainer fit x", *(f"--memory.knob_{number} value" for number in range(12))]
    text = wrap_command(words)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.replace(" \\\n   ", "").split() == " ".join(words).split()
