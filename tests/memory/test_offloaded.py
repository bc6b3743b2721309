"""Parts of offloading whose faults show on a GPU only: what can be seen of them without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.matrix import Case, set_up
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.memory import activation_offload, optimizer_offload
from trainer.memory.activation_offload import Shelf
from trainer.memory.optimizer_offload import PIECE, Carrier, ReduceAfterCarrying, _accumulators
from trainer.memory.plan import decide_plan
from trainer.memory.precision import precision_plugin
from trainer.planner.fake_patches import FakeEvent, FakeStream, OnStream
from trainer.recipe import Memory

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """The copies that are made: the stream, and the strides of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[FakeStream, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((FakeStream.current, args[0].stride(), args[1].stride()))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch):
    """Streams that run everything at once: what is left of a GPU on a CPU."""
    empty_like = torch.empty_like
    for name, value in {"Stream": FakeStream, "Event": FakeEvent, "stream": OnStream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream.current)
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **options: empty_like(*args, **options))
    monkeypatch.setattr(activation_offload, "_stream", lambda device: FakeStream())


def test_an_expanded_tensor_stays():
    shelf = Shelf(CPU, 16, lambda tensor: False)
    mask = torch.ones(2, 1, 8, 8)
    assert shelf.put(mask) is not mask
    expanded = mask.expand(2, 4, 8, 8)
    assert shelf.put(expanded) is expanded


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_loss_scale_is_where_the_gradients_are(strategy, offload):
    plugin = precision_plugin(Memory(strategy=strategy, precision="16-mixed", cpu_offload=offload), "cpu")
    plugin.scaler._lazy_init_scale_growth_tracker(torch.device("meta"))  # as of a loss on a GPU
    assert plugin.scaler._scale.device.type == ("cpu" if offload == "optimizer" else "meta")


def test_accumulators_are_cut_between_parameters():
    masters = {nn.Parameter(torch.empty(0)): torch.empty(size, device="cpu") for size in (PIECE, 5, PIECE - 5, 1)}
    pieces, homes = _accumulators(masters, pinned=False)
    assert [piece.numel() for piece in pieces] == [PIECE, PIECE, 1]
    for parameter, master in masters.items():
        assert homes[parameter].shape == master.shape


def test_one_chunk_comes_while_another_goes(streams, monkeypatch):
    monkeypatch.setattr(optimizer_offload, "CHUNK", 3)
    carrier, home, gradient = Carrier(CPU, torch.float32), torch.arange(8.0), torch.full((8,), 0.5)
    with Copies() as copies:
        carrier.carry(gradient, home, adds=True)
    assert torch.equal(home, torch.arange(8.0) + 0.5)
    assert [stream for stream, _, _ in copies.seen] == [carrier.coming, carrier.going] * 3


def test_a_sum_is_read_when_it_has_been_written(streams, monkeypatch):
    carrier, one, other = Carrier(CPU, torch.float32), torch.zeros(4), torch.zeros(4)
    waits = []
    monkeypatch.setattr(FakeStream, "wait_stream", lambda stream, other: waits.append((stream, other)))
    carrier.carry(torch.ones(4), one, adds=False)
    carrier.carry(torch.ones(4), other, adds=False)
    assert (carrier.coming, carrier.going) not in waits
    carrier.carry(torch.ones(4), one, adds=True)
    carrier.carry(torch.ones(4), other, adds=True)
    assert waits.count((carrier.coming, carrier.going)) == 1  # once a micro-step, not once a gradient
    carrier.carry(torch.ones(4), one, adds=True)
    assert waits.count((carrier.coming, carrier.going)) == 2
    assert torch.equal(one, torch.full((4,), 3.0))


def test_of_all_streams_that_on_which_fsdp_makes_gradients_waits_for_them_to_leave(streams, monkeypatch):
    carrier = Carrier(CPU, torch.float32, told=True)
    comm, waits, reducing = ReduceAfterCarrying(carrier), [], FakeStream()
    carrier.carry(torch.ones(4), torch.zeros(4), adds=False)
    assert not carrier.in_flight  # so that its memory is FSDP's again
    monkeypatch.setattr(FakeStream, "wait_stream", lambda stream, other: waits.append((stream, other)))
    comm.allocate((8,), dtype=torch.float32, device=CPU)
    assert waits == []
    with OnStream(reducing):
        comm.allocate((4,), dtype=torch.float32, device=CPU)
    assert waits == [(reducing, carrier.going)]


def test_activations_with_gaps_are_copied_without_a_detour(streams):
    shelf = Shelf(CPU, 16, lambda tensor: False)
    query = torch.randn(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)[0]  # packed with keys and values
    with Copies() as copies:
        ticket = shelf.put(query)
    assert torch.equal(shelf.get(ticket), query)
    assert copies.seen[-1][0] is shelf.stream
    assert copies.seen[-1][1] == copies.seen[-1][2]  # torch copies to pinned memory directly where strides are equal


def test_what_autocast_made_of_a_weight_is_not_moved():
    def gradients(shelf: Shelf) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.MultiheadAttention(8, 2).out_proj)
        with saved_tensors_hooks(shelf.put, shelf.get), torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(64, 8, requires_grad=True)).float().square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    moved, stays = Shelf(CPU, 16, lambda tensor: False), Shelf(CPU, 2**30, lambda tensor: False)
    for ours, plain in zip(gradients(moved), gradients(stays), strict=True):
        assert torch.equal(ours, plain)
    assert moved.items
    assert all(64 in saved.host.shape for saved in moved.items)  # activations, no weight


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_of_streamed_weights_add_up_in_memory_that_is_kept(precision):
    """FSDP itself would have made fresh memory for them in every micro-step, and waited for each copy."""
    case = Case("vit", Memory(micro_batch_size=3, precision=precision, cpu_offload="parameters"))
    _, stepper, windows, _ = set_up(case, decide_plan(case.recipe, 1))
    homes = {parameter: home.data_ptr() for parameter, home in stepper.sync.homes.items()}
    for window in windows.epoch(0, 0, 2):
        stepper.accumulate(window)
        found = {parameter: parameter.grad.to_local().data_ptr() for parameter in stepper.parameters}
        assert found == homes
        assert not stepper.sync.in_one.numel()  # nothing of what FSDP reduced is held
        stepper.abandon()
