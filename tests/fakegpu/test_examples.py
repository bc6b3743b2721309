"""Every example on the page of the library runs; a memory test fails for a larger model; snapshots agree with peaks."""

from __future__ import annotations

import json
import os
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.warm import python
from torch import nn
from torch.cuda import _memory_viz

from trainer.fakegpu import fake_gpu
from trainer.system.child_jobs import run_in_child

PAGE = (Path(__file__).parents[2] / "docs/planner/fakegpu.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TITLES = ["print(gpu)", *re.findall(r"^\*\*(.*?)\*\*", PAGE, re.MULTILINE)]
PRINTS = {  # what an example must print
    "print(gpu)": [r"reserved  [\d.]+ \wB; tensors take", r"error     14 published peaks like this \(eager"],
    "The largest batch that fits.": [r"a batch of \d+ fits"],
    "What activation checkpointing saves.": [r"checkpointing False: [\d.]+ GB", r"checkpointing True: [\d.]+ GB"],
    "Which card, and how fast.": [r"T4: [\d.]+ ms", r"H100 .*: [\d.]+ ms, fits: True"],
    "What the memory consists of": [r"backward: \d+ MB of tensors", r"'params': '131 MB'", r"float32 backward"],
    "A smaller budget": [r"0.5 GB: fits False", r"2 GB: fits True, releases of the cache: 0"],
    "A compiled loop": [r"compiled \['parts compiled by"],
    "A model of transformers without its weights": [r"frozen False: .* eager", r"frozen True: .* adapters"],
    "DDP": [r"\{'all_reduce': \d+\} card", r"rank      0 of 4 on one node sends 125 MB by all_reduce"],
    "FSDP2": [r"8 GPUs: \d.\d\d GB, \d+ ms, \d+ MB sent\n64 GPUs: \d.\d\d GB, \d+ ms"],
}


def test_there_are_ten_examples_with_titles() -> None:
    assert len(EXAMPLES) == len(TITLES) >= 10
    assert PRINTS.keys() < set(TITLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES) - 1))
def test_an_example_runs(number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    done = python("example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = [line for line in PRINTS.get(TITLES[number], []) if not re.search(line, done.stdout)]
    assert missing == [], done.stdout
    sizes = [float(size) for size in re.findall(r"checkpointing \w+: ([\d.]+) GB", done.stdout)]
    assert sizes == sorted(sizes, reverse=True)
    for path in tmp_path.glob("*.pickle"):
        assert _memory_viz.trace_plot(pickle.loads(path.read_bytes()))


def test_the_memory_test_fails_for_a_larger_model_only(tmp_path: Path) -> None:
    test, name = tmp_path / "test_memory.py", "test_a_step_needs_no_more_memory"
    for change, code in (("", 0), ("1024", 0), ("1030", 1), ("1000", 0)):
        test.write_text(EXAMPLES[-1].replace("1024", change or "1024"))
        done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(test), cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
    assert list(json.loads(test.with_suffix(".peaks.json").read_text())) == [f"{name}, torch {torch.__version__}"]


def remembered(config: str = "") -> list[Any]:
    """A snapshot of three steps, of which the second releases the cache; its peaks by hand, and those predicted."""
    os.environ["PYTORCH_ALLOC_CONF"] = config
    with fake_gpu("a100-80gb") as gpu:
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model(torch.randn(512, 1024).to("cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                torch.cuda.empty_cache()
        now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return [gpu.snapshot(), gpu.allocated, gpu.reserved, now]


def test_a_snapshot_has_the_peaks_and_what_is_left() -> None:
    found, allocated, reserved, now = run_in_child(remembered)
    _memory_viz.segsum(found)  # it checks the sizes of blocks and segments
    assert _memory_viz.trace(found).startswith("Device 0")
    signs = {"alloc": (1, 0), "free_completed": (-1, 0), "segment_alloc": (0, 1), "segment_free": (0, -1)}
    used, taken = [0], [0]
    for entry in found["device_traces"][0]:
        of_blocks, of_segments = signs.get(entry["action"], (0, 0))
        used.append(used[-1] + of_blocks * (-(-entry["size"] // 512) * 512))
        taken.append(taken[-1] + of_segments * entry["size"])
    assert (max(used), max(taken)) == (allocated, reserved)
    assert (used[-1], taken[-1]) == tuple(now)
    assert taken[-1] == sum(segment["total_size"] for segment in found["segments"])
    assert "segment_free" in {entry["action"] for entry in found["device_traces"][0]}
    names = {frame["name"] for entry in found["device_traces"][0] for frame in entry["frames"]}
    assert {"params", "gradients", "optimizer", "2.weight [1024, 4096] float32", "backward"} <= names


def test_a_snapshot_has_the_blocks_of_expandable_segments() -> None:
    found, allocated, _, now = run_in_child(partial(remembered, "expandable_segments:True"))
    used = [0]
    for entry in found["device_traces"][0]:
        change = {"alloc": 1, "free_completed": -1}.get(entry["action"], 0)
        used.append(used[-1] + change * (-(-entry["size"] // 512) * 512))
    assert (max(used), used[-1], found["segments"]) == (allocated, now[0], [])
