"""With ``run.deterministic`` a run is the same bit for bit whatever number of ranks, and strategy, it is resumed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.resumed import losses, recipe, resume

from trainer.fit import fit

STRICT = {"run": {"deterministic": True, "allow_change": ["memory"]}}


def train(run_dir: Path, memory: dict[str, Any]) -> None:
    fit(recipe(run_dir, memory=memory, **STRICT))


def go_on(source: Path, run_dir: Path, memory: dict[str, Any]) -> None:
    resume(source, run_dir, 2, memory=memory, **STRICT)


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("size", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp"), pytest.param(4, "fsdp", marks=pytest.mark.slow)]
)
def test_the_rest_of_a_run_is_the_same_on_any_ranks(size, strategy, ranks, tmp_path):
    memory = {"micro_batch_size": 4, "strategy": "ddp"}
    ranks(2).run(train, tmp_path / "whole", memory)
    call = (tmp_path / "whole", tmp_path / "rest", memory | {"strategy": strategy})
    if size == 1:
        go_on(*call)
    else:
        ranks(size).run(go_on, *call)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
