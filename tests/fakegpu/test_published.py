"""The peaks that others have published, replayed on a simulated GPU: see ``published.py``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from helpers.warm import forks
from published import ROWS, OldTarget, old_gpu
from test_trace_kernels import BF16, attended

from trainer.errors import RecipeError
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.system.child_jobs import run_in_child

TOLERANCE = 0.03


def predicted(script: str) -> float:
    """The peak of reserved memory, GB."""
    with old_gpu("a100-80gb", "2.1") as gpu:
        ROWS[script][1]()
    return gpu.reserved / 1e9


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """One that never trained: what it forks can compute gradients."""
    with ProcessPoolExecutor(1, forks) as pool:
        yield pool


@pytest.mark.slow
def test_table(process, record_property) -> None:
    lines = [f"{'script':26} {'published':>10} {'predicted':>10} {'error':>8}  (peak reserved, GB)"]
    for script, (published, _) in ROWS.items():
        found = process.submit(run_in_child, partial(predicted, script)).result()
        lines.append(f"{script:26} {published:10.2f} {found:10.2f} {found / published - 1:+8.1%}")
        assert found == pytest.approx(published, rel=TOLERANCE)
    record_property("table", "\n".join(lines))  # printed at the end of the session: see conftest.py


def test_within_3_percent_of_what_was_published(process) -> None:
    """The others in the table: micro-batches, other precisions and optimizers."""
    script = "07-02_init-module.py"
    found = process.submit(run_in_child, partial(predicted, script)).result()
    assert found == pytest.approx(ROWS[script][0], rel=TOLERANCE)


def test_the_first_flash_attention_takes_smaller_heads() -> None:
    for size, kernel in ((160, "efficient"), (128, "flash")):
        assert OldTarget(gpu_named("a100-80gb"), (2, 1)).attention.choose(*attended(BF16, size=size)) == kernel


@pytest.mark.parametrize("version", [(2, 3), (2, 1), (3, 0)])
def test_kernels_of_versions_that_are_not_known_are_refused(version: tuple[int, int]) -> None:
    with pytest.raises(
        RecipeError, match=rf"torch_version={version[0]}\.{version[1]}: kernels are known for torch 2\.4"
    ):
        Target(gpu_named("a100-80gb"), version)


def test_a_card_that_the_installed_cudnn_refuses_can_be_planned_for(monkeypatch) -> None:
    def refuse() -> int:
        raise RuntimeError("cuDNN is not compatible with devices with SM < 7.5")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert Target(gpu_named("v100-16gb")).attention.choose(*attended(torch.float16)) == "efficient"
