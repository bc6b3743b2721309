"""The table of GPUs: figures that are known, names that people write, and the card of the machine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import RecipeError
from trainer.planner.gpus import ALIASES, GIB, GPUS, MIB, gpu_named, gpu_of, nccl_bytes, usable_memory
from trainer.system.machine import seen_gpus


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("a100", "bfloat16", 312),
        ("a100", "tfloat32", 156),
        ("a100", "float32", 19.5),
        ("h100", "bfloat16", 989.4),
        ("h200", "float16", 989.4),
        ("4090", "bfloat16", 165.2),  # 330.3 is with sums in fp16, 660.6 with sparsity
        ("5090", "float16", 209.6),  # 209.5 in the white paper, which rounds
        ("3090", "bfloat16", 71.2),
        ("l4", "bfloat16", 121),
        ("t4", "float16", 65),
    ],
)
def test_figures_of_data_sheets(name: str, dtype: str, tflops: float) -> None:
    assert gpu_named(name).flops[dtype] == pytest.approx(tflops * 1e12, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gib"), [("a100", 79.2), ("h100", 79.3), ("h200", 139.8), ("4090", 23.6), ("3060", 11.7), ("t4", 14.6)]
)
def test_memory_is_what_torch_finds(name: str, gib: float) -> None:
    assert gpu_named(name).memory / GIB == pytest.approx(gib, rel=0.01)


def test_no_bf16_before_ampere() -> None:
    for gpu in GPUS.values():
        assert ("bfloat16" in gpu.flops) == ("tfloat32" in gpu.flops) == (gpu.capability >= (8, 0))


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_row_is_plausible(gpu: Any) -> None:
    """A typing error of a factor of ten, or a figure in the wrong column, would fall out of these bands."""
    assert 6 * GIB < usable_memory(gpu, 1) < gpu.memory < 200 * GIB
    assert 250e9 < gpu.bandwidth < 9e12
    assert 2 <= gpu.flops["float16"] / gpu.flops["float32"] <= 30
    assert gpu.flops["float64"] <= gpu.flops["float32"]
    assert 10e9 < gpu.bus <= gpu.link <= 720e9
    assert gpu.name == gpu.name.lower()
    assert gpu.reported
    assert not gpu.estimated


def test_bus_is_what_a_copy_reaches() -> None:
    assert gpu_named("a100").bus == pytest.approx(25.2e9)  # of 31.5 nominal
    assert gpu_named("a100").link == pytest.approx(240e9)  # of 300
    assert gpu_named("a100-80gb-pcie").link == gpu_named("a100-80gb-pcie").bus


def test_workspaces_of_cublas() -> None:
    ampere = 4096 * 1024 * 2 + 16 * 1024 * 8
    assert {name: gpu_named(name).cublas_workspace for name in ("t4", "a100", "4090")} == dict.fromkeys(
        ("t4", "a100", "4090"), ampere
    )
    assert {gpu_named(name).cublas_workspace for name in ("h100", "h200", "b200", "5090")} == {32 * MIB}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("a100", "a100-80gb"),
        ("A100-40GB", "a100-40gb"),
        ("h100", "h100-sxm"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("rtx_3080", "rtx-3080"),
        ("4060ti-16gb", "rtx-4060-ti-16gb"),
        ("6000 ada", "rtx-6000-ada"),
        ("A6000", "rtx-a6000"),
    ],
)
def test_names_that_people_write(said: str, name: str) -> None:
    assert gpu_named(said).name == name


def test_every_name_means_itself() -> None:
    assert [gpu_named(name).name for name in GPUS] == list(GPUS)
    assert set(ALIASES.values()) <= set(GPUS)


@pytest.mark.parametrize(("said", "nearest"), [("a100-90gb", "a100-80gb"), ("h2000", "h200"), ("rtx4900", "rtx-4090")])
def test_an_unknown_name_is_refused_with_the_nearest(said: str, nearest: str) -> None:
    with pytest.raises(RecipeError, match=f"--gpu={said} .*did you mean {nearest}\\?.*h100-nvl.*rtx-5090") as caught:
        gpu_named(said)
    assert "\n" not in str(caught.value)


def test_nothing_like_it_is_refused_with_the_list_only() -> None:
    with pytest.raises(RecipeError, match="--gpu=voodoo is not in the planner's table\\. It has: a10, "):
        gpu_named("voodoo")


def test_margins_grow_with_ranks() -> None:
    assert [nccl_bytes(ranks) for ranks in (1, 2, 8)] == [0, 350_000_000, 550_000_000]
    gpu = gpu_named("a100")
    assert usable_memory(gpu, 1) == gpu.memory - gpu.context
    assert usable_memory(gpu, 1) > usable_memory(gpu, 2) > usable_memory(gpu, 64)


def test_the_table_loads_no_torch() -> None:
    code = "import sys, trainer.planner.gpus, trainer.planner.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def detect(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    return gpu_of(seen_gpus()[0])


def test_no_card_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert seen_gpus() == []


def test_a_known_card_has_the_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect(monkeypatch, name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0)
    assert (found.name, found.memory, found.estimated) == ("h200", 150_000_000_000, False)


def test_two_cards_of_one_name_are_told_apart_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA GeForce RTX 3080"
    assert detect(monkeypatch, name=name, total_memory=int(9.77 * GIB), major=8, minor=6).name == "rtx-3080"
    assert detect(monkeypatch, name=name, total_memory=int(11.77 * GIB), major=8, minor=6).name == "rtx-3080-12gb"


def test_an_unknown_card_is_estimated_from_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the units and clocks of an A100, the estimate comes out at the A100's data sheet."""
    found = detect(
        monkeypatch,
        name="Something New",
        total_memory=80 * GIB,
        major=8,
        minor=0,
        multi_processor_count=108,
        clock_rate=1_410_000,
        memory_clock_rate=1_593_000,
        memory_bus_width=5120,
    )
    known = gpu_named("a100")
    assert found.estimated
    assert "Something New" in found.note
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=0.01)
    for dtype in ("float32", "tfloat32", "bfloat16"):
        assert found.flops[dtype] == pytest.approx(known.flops[dtype], rel=0.01)


def test_a_slice_of_a_card_is_not_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect(
        monkeypatch,
        name="NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        total_memory=39 * GIB,
        major=8,
        minor=0,
        multi_processor_count=42,
    )
    assert found.estimated
    assert found.flops["bfloat16"] < gpu_named("a100").flops["bfloat16"] / 2
