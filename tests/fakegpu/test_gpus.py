"""The table of GPUs: figures that are known, names that people write, and the card of the machine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import RecipeError
from trainer.fakegpu.gpus import GIB, GPUS, MIB, gpu_named, gpu_of, nccl_bytes, usable_memory
from trainer.system.machine import query_gpus


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "gib"),
    [  # memory is what torch finds
        ("a100", "bfloat16", 312, 79.2),
        ("a100", "tfloat32", 156, 79.2),
        ("h100", "bfloat16", 989.4, 79.3),
        ("h200", "float16", 989.4, 139.8),
        ("4090", "bfloat16", 165.2, 23.6),  # 330.3 is with sums in fp16, 660.6 with sparsity
        ("5090", "float16", 209.6, 31.4),  # 209.5 in the white paper, which rounds
        ("3060", "bfloat16", 25.4, 11.7),
        ("t4", "float16", 65, 14.6),
    ],
)
def test_figures_of_data_sheets(name: str, dtype: str, tflops: float, gib: float) -> None:
    assert gpu_named(name).flops[dtype] == pytest.approx(tflops * 1e12, rel=1e-3)
    assert gpu_named(name).memory / GIB == pytest.approx(gib, rel=0.01)


def test_every_row_is_plausible() -> None:
    """A typing error of a factor of ten, or a figure in the wrong column, would fall out of these bands."""
    for name, gpu in GPUS.items():
        assert gpu_named(name).name == gpu.name == name.lower()
        assert 6 * GIB < usable_memory(gpu, 1) < gpu.memory < 200 * GIB, name
        assert 250e9 < gpu.bandwidth < 9e12, name
        assert 2 <= gpu.flops["float16"] / gpu.flops["float32"] <= 30, name
        assert gpu.flops["float64"] <= gpu.flops["float32"], name
        assert ("bfloat16" in gpu.flops) == ("tfloat32" in gpu.flops) == (gpu.capability >= (8, 0)), name
        assert 10e9 < gpu.bus <= gpu.link <= 720e9, name
        assert gpu.reported, name
        assert not gpu.estimated, name


def test_bus_is_what_a_copy_reaches() -> None:
    assert gpu_named("a100").bus == pytest.approx(25.2e9)  # of 31.5 nominal
    assert gpu_named("a100").link == pytest.approx(240e9)  # of 300
    assert gpu_named("a100-80gb-pcie").link == gpu_named("a100-80gb-pcie").bus


def test_workspaces_of_cublas() -> None:
    ampere, hopper = 4096 * 1024 * 2 + 16 * 1024 * 8, 32 * MIB
    sizes = dict.fromkeys(("t4", "a100", "4090"), ampere) | dict.fromkeys(("h100", "h200", "b200", "5090"), hopper)
    assert {name: gpu_named(name).cublas_workspace for name in sizes} == sizes


SAID = {"a100": "a100-80gb", "A100-40GB": "a100-40gb", "h100": "h100-sxm", "4090": "rtx-4090", "RTX 4090": "rtx-4090"}
SAID |= {"NVIDIA GeForce RTX 4070 Ti SUPER": "rtx-4070-ti-super", "rtx_3080": "rtx-3080", "A6000": "rtx-a6000"}
SAID |= {"4060ti-16gb": "rtx-4060-ti-16gb", "6000 ada": "rtx-6000-ada"}


def test_names_that_people_write() -> None:
    assert {said: gpu_named(said).name for said in SAID} == SAID


@pytest.mark.parametrize(("said", "nearest"), [("a100-90gb", "a100-80gb"), ("rtx4900", "rtx-4090"), ("voodoo", "")])
def test_an_unknown_name_is_refused_with_the_nearest_and_all(said: str, nearest: str) -> None:
    hint = f"; did you mean {nearest}\\? It" if nearest else r"\. It"
    listed = f"--gpu={said} is not in the planner's table{hint} has: a10, .*h100-nvl.*rtx-5090"
    with pytest.raises(RecipeError, match=listed) as caught:
        gpu_named(said)
    assert "\n" not in str(caught.value)


def test_margins_grow_with_ranks() -> None:
    assert [nccl_bytes(ranks) for ranks in (1, 2, 8)] == [0, 350_000_000, 550_000_000]
    gpu = gpu_named("a100")
    assert usable_memory(gpu, 1) == gpu.memory - gpu.cuda_context_bytes
    assert usable_memory(gpu, 1) > usable_memory(gpu, 2) > usable_memory(gpu, 64)


def test_the_table_loads_no_torch() -> None:
    code = "import sys, trainer.fakegpu.gpus, trainer.fakegpu.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def detect(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    return gpu_of(query_gpus()[0])


def test_a_known_card_has_the_memory_that_is_there_which_tells_cards_of_one_name_apart(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert query_gpus() == []
    found = detect(monkeypatch, name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0)
    assert (found.name, found.memory, found.estimated) == ("h200", 150_000_000_000, False)
    name = "NVIDIA GeForce RTX 3080"
    assert detect(monkeypatch, name=name, total_memory=int(9.77 * GIB), major=8, minor=6).name == "rtx-3080"
    assert detect(monkeypatch, name=name, total_memory=int(11.77 * GIB), major=8, minor=6).name == "rtx-3080-12gb"


def test_an_unknown_card_is_estimated_from_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the units and clocks of an A100, the estimate comes out at the A100's data sheet."""
    clocks = {"clock_rate": 1_410_000, "memory_clock_rate": 1_593_000, "memory_bus_width": 5120}
    card = {"name": "Something New", "total_memory": 80 * GIB, "major": 8, "minor": 0, "multi_processor_count": 108}
    found, known = detect(monkeypatch, **card, **clocks), gpu_named("a100")
    assert found.estimated
    assert "Something New" in found.note
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=0.01)
    for dtype in ("float32", "tfloat32", "bfloat16"):
        assert found.flops[dtype] == pytest.approx(known.flops[dtype], rel=0.01)


def test_a_slice_of_a_card_is_not_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "total_memory": 39 * GIB, "multi_processor_count": 42}
    found = detect(monkeypatch, **card, major=8, minor=0)
    assert found.estimated
    assert found.flops["bfloat16"] < gpu_named("a100").flops["bfloat16"] / 2
