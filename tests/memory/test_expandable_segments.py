"""``memory.expandable_segments`` reaches torch's allocator, and the planner chooses it where a plan needs it."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from trainer.launching.start import set_expandable_segments
from trainer.system.child_jobs import run_in_child


def applied(value: bool | None, given: str) -> tuple[bool, int]:
    """Apply the setting in a new process, and return what torch's allocator then uses."""
    os.environ["PYTORCH_ALLOC_CONF"] = given
    set_expandable_segments(value)
    settings = torch._C._cuda_memorySnapshot(None)["allocator_settings"]
    return settings["expandable_segments"], settings["max_split_size"]


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("given", ["", "expandable_segments:False", "expandable_segments:True"])
def test_the_setting_takes_precedence_and_other_settings_are_kept(value: bool, given: str) -> None:
    assert run_in_child(partial(applied, value, given))[0] is value
    size = "max_split_size_mb:100"
    assert run_in_child(partial(applied, value, f"{size},{given}".rstrip(","))) == [value, 100 * 2**20]
