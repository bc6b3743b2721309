"""Loops and scripts on several simulated ranks: process groups, DDP, FSDP2, tensor parallelism, and what is refused."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cli.supervised import fork_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainer.cli import run
from trainer.errors import RecipeError
from trainer.fakegpu import fake_gpu
from trainer.system.child_jobs import run_in_child

SIZE, LAYERS = 2048, 3
WEIGHT = 4 * SIZE * SIZE  # bytes of one layer
NEW = "2.15"  # no cuBLAS workspace stays in memory


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def steps(model: nn.Module, count: int = 3, rows: int = 8) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(count):
        model(torch.randn(rows, SIZE, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def ddp(**options: Any) -> dict[str, Any]:
    with fake_gpu("a100-80gb", torch_version=NEW, ranks=4) as gpu:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        steps(DistributedDataParallel(layers().to("cuda"), **options))
        found = gpu.to_json()
    assert "4" not in os.environ.get("WORLD_SIZE", "")
    assert not dist.is_initialized()
    return found


def test_ddp_keeps_buckets_beside_the_gradients_unless_they_are_views() -> None:
    beside, views = (run_in_child(partial(ddp, gradient_as_bucket_view=view)) for view in (False, True))
    weights = LAYERS * WEIGHT / 1e9
    assert beside["allocated_gb"] - views["allocated_gb"] == pytest.approx(weights, rel=0.01)
    assert beside["categories"]["gradients"] == pytest.approx(2 * weights, rel=0.01)
    assert views["categories"]["gradients"] == pytest.approx(weights, rel=0.01)
    assert views["ranks"]["sent_gb"] == {"all_reduce": pytest.approx(2 * 3 / 4 * weights, abs=1e-4)}  # a ring


def fsdp(ranks: int, rank: int = 0, nodes: int = 1, on_meta: bool = False, width: int = SIZE) -> dict[str, Any]:
    with fake_gpu("a100-80gb", torch_version=NEW, ranks=ranks, nodes=nodes, rank=rank) as gpu:
        dist.init_process_group("nccl")
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("nccl", rank, ranks)
        assert os.environ["LOCAL_RANK"] == str(rank % (ranks // nodes))
        with torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(layers(), nn.Linear(SIZE, width, bias=False))
        for layer in (*model[0], model[1]):
            fully_shard(layer)
        fully_shard(model)
        if on_meta:
            model.to_empty(device="cuda")
            assert gpu.host < WEIGHT, "meta tensors have no memory"
        optimizer = steps(model)  # keeps its state
        torch.cuda.synchronize()
        in_use = torch.cuda.memory_allocated()
        assert optimizer.state
        return gpu.to_json() | {"in_use": in_use}


@pytest.mark.parametrize("on_meta", [False, True])
def test_fsdp2_shards_the_state_and_its_peak_is_the_sum_of_its_parts(on_meta: bool) -> None:
    ranks, whole = 8, (LAYERS + 1) * WEIGHT
    found = run_in_child(partial(fsdp, ranks, nodes=2, on_meta=on_meta))
    shard = whole / ranks
    assert found["in_use"] == pytest.approx(3 * shard, rel=0.01)  # weights and two moments, without gradients
    assert found["categories"]["optimizer"] == pytest.approx(2 * shard / 1e9, rel=0.01)
    sent = found["ranks"]["sent_gb"]
    # The outermost module has no weights of its own. Each layer is gathered in forward and again in backward.
    assert sent["all_gather"] == pytest.approx(2 * whole * 7 / 8 / 1e9, rel=0.01)
    assert sent["reduce_scatter"] == pytest.approx(whole * 7 / 8 / 1e9, rel=0.01)
    assert found["ranks"]["leaving_a_node_gb"] == pytest.approx(3 * whole * 7 / 8 / 1e9, rel=0.01)  # one ring
    assert found["kind"] == "FSDP2"


def test_the_last_rank_of_uneven_shards_needs_less() -> None:
    first, last = (run_in_child(partial(fsdp, 8, rank=rank, width=9)) for rank in (0, 7))
    # Of 9 rows, the first has 2 and the last none. FSDP2 pads the weights of all ranks, but not the two moments.
    assert first["in_use"] - last["in_use"] == 2 * 2 * SIZE * 4
    assert last["ranks"]["rank"] == 7


def tensor_parallel() -> dict[str, Any]:
    with fake_gpu("h100-sxm", torch_version=NEW, ranks=8) as gpu:
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
        model = nn.Sequential(nn.Linear(SIZE, 4 * SIZE, bias=False), nn.GELU(), nn.Linear(4 * SIZE, SIZE, bias=False))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model.to("cuda"), mesh["tensor"], plan)
        optimizer = steps(model, rows=16)
        assert optimizer.state
        return gpu.to_json() | {"in_use": torch.cuda.memory_allocated()}


def test_tensor_parallelism_shards_the_state_and_sums_activations() -> None:
    found = run_in_child(tensor_parallel)
    assert found["in_use"] == pytest.approx(3 * 8 * WEIGHT / 4, rel=0.02)
    assert found["ranks"]["sent_gb"]["all_reduce"] >= 2 * 3 / 4 * 16 * SIZE * 4 / 1e9 * 0.99


def objects() -> None:
    with fake_gpu("t4", ranks=2) as gpu:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        every = [None, None]
        dist.all_gather_object(every, {"rank": 0})
        assert every == [{"rank": 0}] * 2
        dist.broadcast_object_list([1, 2])
        dist.barrier()
        group = dist.new_group([0, 1], backend="gloo")
        counts = torch.ones(3, dtype=torch.int64, device="cuda")
        dist.all_reduce(counts, group=group)
        assert counts.tolist() == [2, 2, 2]
        dist.destroy_process_group()
    assert gpu.traffic == {}


def test_objects_and_known_numbers_are_exchanged() -> None:
    run_in_child(objects)


def refused(what: str) -> None:
    with fake_gpu("t4", ranks=2):
        if what == "mpi":
            dist.init_process_group("mpi")
        elif what == "world_size":
            dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1", world_size=4, rank=0)
        elif what == "spawn":
            torch.multiprocessing.spawn(steps, nprocs=4)
        elif what == "FSDP1":
            FullyShardedDataParallel(nn.Linear(2, 2))
        else:
            dist.init_process_group("nccl")
            dist.send(torch.zeros(2, device="cuda"), 1)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("mpi", "the backend mpi cannot be simulated: use init_process_group"),
        ("world_size", "the script starts 4 ranks, but 2 are planned: plan with --devices 4, or ranks=4"),
        ("spawn", "the script starts 4 ranks, but 2 are planned: plan with --devices 4"),
        ("FSDP1", r"FSDP1 is not simulated: use fully_shard \(FSDP2\), in Accelerate with FSDP_VERSION=2"),
        ("send", "send: pipelines and other messages between two ranks are not simulated"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_with_the_fix(what: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        run_in_child(partial(refused, what))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 7, "nodes": 2}, "7 ranks .* on 2 nodes: the ranks must be a multiple of the nodes"),
        ({"ranks": 20_000}, "give 1 to 16,384"),
        ({"ranks": 2, "rank": 2}, "rank=2 must be from 0 to 1"),
        ({"ranks": 2, "interconnect": "100gb"}, "100gbe"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_before_the_block(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told), fake_gpu("t4", **options):
        pytest.fail("the block has run")


SCRIPT = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0))
    if dist.get_world_size() > 1:
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), "8")
        assert os.environ["MASTER_ADDR"] and os.environ["LOCAL_WORLD_SIZE"] == "4" and torch.cuda.device_count() == 4
    torch.cuda.set_device(local)
    model = DDP(nn.Linear(1024, 1024).to(local), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    extra = torch.empty(25_000_000 if rank else 0, device=f"cuda:{local}")  # of the last rank
    while True:
        model(torch.randn(4, 1024)).sum().backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fork_processes(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(dedent(SCRIPT))
    return "train.py"


def test_a_script_runs_as_the_first_and_the_last_rank_of_torchrun(script: str, capsys: Any) -> None:
    flags = ["--devices", "8", "--nodes", "2", "--interconnect", "100gbe"]
    assert run(["plan", "--script", script, "--gpu", "a100-80gb", "--out", "out", *flags]) == 0
    found = json.loads(Path("out/plan.json").read_text())
    printed = capsys.readouterr().out
    peaks = found["traced_ranks"]
    assert peaks["7"]["allocated_gb"] - peaks["0"]["allocated_gb"] == pytest.approx(0.1, rel=0.01)
    assert found["allocated_gb"] == peaks["7"]["allocated_gb"]
    assert found["ranks"]["rank"] == 7
    assert found["ranks"]["exposed_ms"] > 0
    sent = r"7.\d MB by all_reduce; 7.\d MB leave its node over 100gbe"
    assert re.search(rf"rank      7 of 8 on 2 nodes sends {sent}", printed)
    assert "traced    rank 0: " in printed
    assert Path("out/rank7.log").exists()


def test_nccl_with_one_rank_does_not_abort(script: str) -> None:
    assert run(["plan", "--script", script, "--gpu", "a100-80gb", "--out", "out"]) == 0


def test_nodes_that_do_not_divide_the_devices(script: str, capsys: Any) -> None:
    assert run(["plan", "--script", script, "--gpu", "t4", "--devices", "3", "--nodes", "2"]) == 2
    assert "3 ranks (devices) on 2 nodes: the ranks must be a multiple of the nodes" in capsys.readouterr().err
