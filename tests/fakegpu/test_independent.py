"""The simulated GPU by itself: its public names, what it imports of this project, and what it gives back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny import target_of
from torch import nn
from torch.distributed import device_mesh

import trainer.fakegpu
from trainer.errors import RunError
from trainer.fakegpu import user_loop
from trainer.fakegpu.fake_process_group import TracedDDP, fake_ranks
from trainer.fakegpu.torch_patches import patched_torch
from trainer.system.child_jobs import run_in_child

LOOP = """
import sys
import torch
from trainer.fakegpu import fake_gpu, replay, step_cost, tracing
with fake_gpu("rtx-4090") as gpu:
    model = torch.nn.Linear(1024, 1024).to("cuda")
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
assert gpu.allocated >= 2 * 1024 * 1024 * 4, gpu  # the weights and their gradients
ours = {name.split(".")[1] for name in sys.modules if name.startswith("trainer.")}
print(sorted(ours - {"fakegpu", "system", "errors"}))
"""


@pytest.mark.slow
def test_a_loop_needs_nothing_of_what_trains() -> None:
    """``import trainer`` itself brings the recipe and the contract, which import no torch."""
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['contract', 'recipe', 'values']"


def test_public_names_are_functions_and_no_modules() -> None:
    for name in trainer.fakegpu.__all__:
        assert callable(getattr(trainer.fakegpu, name)), name
    with pytest.raises(AttributeError, match="no attribute 'trace'"):
        _ = trainer.fakegpu.trace


def unregistered(folder: Path) -> str:
    user_loop.draw = None
    with trainer.fakegpu.fake_gpu("rtx-4090") as gpu:
        torch.ones(8, device="cuda")
    with pytest.raises(RunError) as refused:
        gpu.plot(folder / "memory.png")
    return str(refused.value)


def test_a_plot_names_the_package_that_draws(tmp_path: Path) -> None:
    assert run_in_child(lambda: unregistered(tmp_path)).endswith(
        "import fake_gpu from trainer.planner, which provides plots"
    )


def replaced() -> list[bool]:
    def now() -> list:
        return [nn.parallel.DistributedDataParallel, device_mesh.init_device_mesh]

    before = now()
    fake_ranks(2)
    with patched_torch(target_of()):
        ddp, mesh = now()
    return [ddp is TracedDDP, mesh is not before[1], now() == before]


def test_ranks_replace_what_torch_shards_with_until_the_end() -> None:
    assert run_in_child(replaced) == [True, True, True]
