"""benchmarks/launches.py: it counts what a step does, sees a planted wait, and extrapolates from few layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benchmark import imported
from races import configurations  # noqa: F401 - before processes are forked

from trainer.models import VisionTransformer
from trainer.system.child_jobs import run_in_child

common, launches = imported("common", "launches")
COUNTS, Row = launches.COUNTS, launches.Row
PLANTED = 5


@dataclass
class Waiting(VisionTransformer):
    """Reads every loss, as no model may, and launches operations that nobody needs."""

    def losses(self, module: Any, batch: Any) -> Any:
        for loss in super().losses(module, batch):
            loss.total.item()
            for _ in range(PLANTED):
                loss.total.detach().neg()
            yield loss


def waiting(layers: int, folder: Path, tiny: bool) -> Any:
    recipe = launches.vit(layers, folder, tiny)
    fields = {name: getattr(recipe.model, name) for name in recipe.model.__dataclass_fields__}
    return recipe.replace(model=Waiting(**fields))


def seen(make: Any, folder: Path) -> dict[str, Any]:
    """The counts of a tiny model of two layers."""
    return run_in_child(partial(launches.measure, Row("tiny", make, 12), 2, True, folder))


def test_a_planted_wait_and_planted_operations_are_counted(tmp_path):
    plain, planted = seen(launches.vit, tmp_path), seen(waiting, tmp_path)
    assert len(plain["micro_steps"]) == len(planted["micro_steps"]) == 2
    for one, other in zip(plain["micro_steps"], planted["micro_steps"], strict=True):
        assert one["dispatched"] > one["launched"] > 100
        assert other["launched"] - one["launched"] == PLANTED + 1  # the wait is an operation, too
        assert other["dispatched"] - one["dispatched"] == 2 * PLANTED + 1  # with what detaches
        (found,) = [wait for wait in other["waits"] if wait not in one["waits"]]
        assert found[0] == "_local_scalar_dense"
        assert found[1].startswith("benchmarks/test_launches.py")
        assert found[2] is False
    assert planted["between"]["dispatched"] == plain["between"]["dispatched"] > 0


@pytest.mark.slow
def test_the_real_depth_is_that_of_its_own_trace(tmp_path, monkeypatch):
    (row,) = [row for row in launches.ROWS if row.whole]
    monkeypatch.setattr(launches, "ROWS", [row])
    (name, found), = launches.measure_all("packed", tiny=True)  # fmt: skip
    assert (name, found["linear"]) == (row.name, True)
    assert found["micro_steps"][0]["a_layer"]["dispatched"] > 0


def test_a_weight_in_nf4_is_one_launch():
    found = run_in_child(partial(launches.measure_nf4, True))
    assert found["launched"] == found["dispatched"] == 1
    assert found["bytes_per_weight"] == pytest.approx(2 + launches_nf4_bytes(), rel=1e-6)


def launches_nf4_bytes() -> float:
    """Of codes, for each weight of a tiny matrix."""
    from trainer.weights.nf4 import BYTES_PER_ROW, num_code_rows

    return num_code_rows(64 * 128) * BYTES_PER_ROW / (64 * 128)


def counts(**differing: float) -> dict[str, Any]:
    return {**dict.fromkeys(COUNTS, 0), "waits": [], **differing}


def test_layers_are_extrapolated():
    wait = ["item", "model.py:1", False]
    few, more = counts(dispatched=10, waits=[wait] * 2), counts(dispatched=14, chunks=1, waits=[wait] * 3)
    found = launches._deeper(few, more, Row("row", launches.vit, 12))
    assert launches.SHALLOW == (1, 2)
    assert (found["dispatched"], found["a_layer"]["dispatched"], found["chunks"]) == (14 + 10 * 4, 4, 11)
    assert (found["number_of_waits"], len(found["waits"])) == (13, 3)


def micro(waits: list[Any], **values: float) -> dict[str, Any]:
    one = counts(waits=waits, **values)
    return one | {"a_layer": dict.fromkeys(COUNTS, 1), "number_of_waits": len(waits)}


def test_what_misses_a_target_and_what_was_not_measured():
    late, early = ["item", "model.py:1", False], ["item", "model.py:1", True]
    packed, padded, *_, qwen, _ = (row.name for row in launches.ROWS if row.make is not launches.vit)
    packed, padded = (f"DistilBERT, 4 texts, {how}" for how in ("packed", "padded"))
    rows = {
        packed: {"micro_steps": [micro([late, early], dispatched=160)], "between": micro([])},
        padded: {"micro_steps": [micro([], dispatched=100)], "between": micro([late])},
        qwen: {"micro_steps": [micro([], chunks=2000)], "between": micro([])},
        launches.NF4: {"failed": "RuntimeError: no"},
    }
    found = {what: (said, met) for what, _, said, met in launches.targets(rows)}
    assert found["DistilBERT, 4 texts: operations, packed / padded"] == ("1.60", False)
    assert found[f"{packed}: waits in micro-steps"] == ("1", False)  # but for what was there already
    assert found[f"{padded}: waits between"] == ("1", False)
    assert found[f"{qwen}: s of the host in the carrier"] == ("0.100", False)
    assert found["NF4: launches a weight"] == ("not measured", None)
    shown = launches.report(rows, {**rows, packed: {**rows[packed], "micro_steps": [micro([], dispatched=640)]}})
    assert "640 → 160" in shown
    assert "RuntimeError: no" in shown
    assert json.loads(json.dumps(rows)) == rows  # what is kept is plain


def test_torch_is_as_it_was():
    """Counting changes torch in processes of its own only."""
    assert torch.Tensor.backward.__module__ == "torch._tensor"
