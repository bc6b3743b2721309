"""Liger's kernels on a GPU: certified there as in Triton's interpreter, in bf16."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainer.models.liger import ARCHITECTURES, PARTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@cache
def benchmark() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import liger

    sys.path.remove(str(BENCHMARKS))
    return liger


@pytest.mark.parametrize("kind", [kinds.split()[-1] for kinds in PARTS.values()])
def test_the_kernels_are_certified_as_in_the_interpreter(kind: str) -> None:
    pytest.importorskip("liger_kernel")
    assert tuple(benchmark().certify(kind).parts) == ARCHITECTURES[kind]


@pytest.mark.slow
def test_every_architecture_is_what_the_table_says() -> None:
    pytest.importorskip("liger_kernel")
    kinds = json.loads((BENCHMARKS / "results/liger.json").read_text())["certificates"]
    assert {kind: tuple(benchmark().certify(kind).parts) for kind in kinds} == {
        kind: ARCHITECTURES.get(kind, ()) for kind in kinds
    }
