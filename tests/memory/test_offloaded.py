"""Parts of offloading whose faults show on a GPU only: what can be seen of them without one.

That is where each copy is made, and what is computed, bit for bit, by the branch for CUDA, with streams that do all at
once: on a CPU the trainer takes other branches, and ``tests/test_races.py``, which takes these, computes nothing.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.language import language_model, language_samples
from helpers.matrix import Case, set_up
from helpers.rounding import ROUNDING
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.contract import Model
from trainer.fakegpu.torch_patches import FakeEvent, FakeStream, OnStream
from trainer.memory import activation_offload, optimizer_offload
from trainer.memory.activation_offload import ActivationOffloader
from trainer.memory.optimizer_offload import CHUNK, MAX_PIECE, PIECE, StreamedGradientSync, TransferStream, in_pieces
from trainer.memory.plan import decide_plan
from trainer.memory.sharding import local_shard
from trainer.memory.stack import PreparedModel, full_state_dict
from trainer.recipe import Memory, Optim

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


def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without a GPU no memory can be pinned."""
    return lambda *args, pin_memory=False, **options: make(*args, **options)


@pytest.fixture
def streams(monkeypatch):
    """Streams that run everything at once, what is left of a GPU on a CPU; every tensor is large enough to be moved."""
    for name, value in {"Stream": FakeStream, "Event": FakeEvent, "stream": OnStream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream.current)
    monkeypatch.setattr(activation_offload, "_stream", lambda device: FakeStream())
    monkeypatch.setattr(activation_offload, "MIN_OFFLOAD_BYTES", 16)
    for name in ("empty", "empty_like", "zeros"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))


def test_an_expanded_tensor_stays():
    shelf = ActivationOffloader(CPU, 16, lambda tensor: False)
    mask = torch.ones(2, 1, 8, 8)
    assert shelf.pack(mask) is not mask
    expanded = mask.expand(2, 4, 8, 8)
    assert shelf.pack(expanded) is expanded


def qwen3_4b() -> list[tuple[int, ...]]:
    """The shapes of all weights of Qwen3-4B: 36 layers, embedding and head tied."""
    attention = [(4096, 2560), (1024, 2560), (1024, 2560), (2560, 4096), (128,), (128,)]
    layer = [*attention, (9728, 2560), (9728, 2560), (2560, 9728), (2560,), (2560,)]
    return [(151936, 2560), *layer * 36, (2560,)]


def distilbert() -> list[tuple[int, ...]]:
    layer = [*[(768, 768), (768,)] * 4, (3072, 768), (3072,), (768, 3072), *[(768,)] * 5]
    return [(30522, 768), (512, 768), (768,), (768,), *layer * 6]


@pytest.mark.parametrize(("shapes", "lost"), [(qwen3_4b(), 0.02), (distilbert(), 0.03)], ids=["qwen3_4b", "distilbert"])
def test_little_of_pinned_memory_is_lost_to_rounding(shapes, lost):
    """Torch takes the next power of two. One by one, Qwen3-4B's weights would take 22.7 GB instead of 16.1."""
    with FakeTensorMode():
        like = {nn.Parameter(torch.empty(0)): torch.empty(shape) for shape in shapes}
        made = list(in_pieces(like, pinned=False))
    taken = sum(2 ** (piece.nbytes - 1).bit_length() for piece, _ in made)
    assert taken <= (1 + lost) * 4 * sum(map(math.prod, shapes))
    cut = {parameter: part for _, parts in made for parameter, part in parts.items()}
    assert all(cut[parameter].shape == tensor.shape for parameter, tensor in like.items())


def test_a_piece_is_cut_between_tensors_and_none_overlap():
    sizes = (MAX_PIECE + 3, PIECE, 5, 0, PIECE - 5, 1)
    like = {nn.Parameter(torch.empty(0)): torch.empty(size, device="meta") for size in sizes}
    like[nn.Parameter(torch.empty(0))] = torch.empty(7, device="meta", dtype=torch.bfloat16)
    with FakeTensorMode():
        made = list(in_pieces(like, pinned=False))
    for piece, parts in made:
        ends = [(part.storage_offset(), part.storage_offset() + part.numel()) for part in parts.values()]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == piece.numel()
        assert all(part.dtype == like[parameter].dtype for parameter, part in parts.items())
    assert {p: part.numel() for _, parts in made for p, part in parts.items()} == {
        p: t.numel() for p, t in like.items()
    }


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true"])
def test_a_frozen_weight_needs_no_master_if_half_precision_has_all_of_it(precision):
    case = Case("vit", Memory(micro_batch_size=3, precision=precision, cpu_offload="optimizer"))
    plan = decide_plan(case.recipe, 1)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    exact, inexact, trains = (layer.weight for layer in module)
    with torch.no_grad():
        exact.copy_(exact.bfloat16().clamp(0.01).half().float().bfloat16().float())
    for layer in module[:2]:
        layer.requires_grad_(False)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    masters = optimizer_offload.make_host_master_weights(module, plan, CPU)
    assert exact not in masters
    assert {inexact, trains} <= masters.keys()
    assert [*masters] == [p for p in module.parameters() if p in masters]
    assert [weight.requires_grad for weight in (masters[inexact], masters[trains])] == [False, True]
    assert exact.element_size() == inexact.element_size() == 2
    saved = full_state_dict(PreparedModel(module, module, masters))
    for name, weight in before.items():
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], weight)
        assert saved[name].untyped_storage().nbytes() == weight.nbytes  # else saving would copy it once more


def test_one_chunk_comes_while_another_goes(streams, monkeypatch):
    monkeypatch.setattr(optimizer_offload, "CHUNK", 3)
    carrier, home, gradient = TransferStream(CPU, torch.float32), torch.arange(8.0), torch.full((8,), 0.5)
    with Copies() as copies:
        carrier.gradient_to_host(gradient, home, adds=True)
    assert torch.equal(home, torch.arange(8.0) + 0.5)
    assert [stream for stream, _, _ in copies.seen] == [carrier.coming, carrier.going] * 3


def test_a_micro_step_of_four_billion_weights_takes_at_most_a_thousand_chunks(streams):
    """At about 50 us of Python for each, that is 0.05 s; chunks of 2 MB were 7,871."""
    sizes = [math.prod(shape) for shape in qwen3_4b()]
    with FakeTensorMode():
        carrier = TransferStream(CPU, torch.float32, largest=max(sizes))
        cuts = [carrier.chunks(torch.empty(size), torch.empty(size), carrier.chunk) for size in sizes]
        assert sum(1 for cut in cuts for _ in cut) <= 1000
        assert carrier.staging.nbytes == 64 * 2**20
    small = TransferStream(CPU, torch.float32, largest=10**6)
    assert small.chunk == CHUNK  # small models keep small staging memory
    home, gradient = torch.zeros(CHUNK + 1), torch.ones(CHUNK + 1, dtype=torch.bfloat16)
    for adds, copied in ((False, 2), (True, 2)):
        with Copies() as copies:
            small.gradient_to_host(gradient, home, adds)
        assert len(copies.seen) == 2 * copied  # of each of two chunks: to where it is summed, and home


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to the nearest half precision, of two as near to the even one: by integers for bf16, by fp64 for fp16."""
    if dtype == torch.bfloat16:
        bits = values.view(torch.int32).long()
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
    step = 2.0 ** (values.double().abs().clamp_min(2.0**-14).log2().floor() - 10)
    return torch.round(values.double() / step).mul(step).half()  # torch.round takes the even one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_weights_are_rounded_on_the_host_and_travel_in_half_precision(dtype, streams):
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -(2.0**-24) * 1.5, 65000.0, 1e-39, 0.0])
    values = torch.cat([ties, torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    masters = {parameter: values.clone().requires_grad_()}
    sync = optimizer_offload.HostGradientSync(masters, CPU, torch.optim.SGD(list(masters.values())), 1)
    sync.carrier = TransferStream(CPU, torch.float32)
    kept: list[tuple[Tensor, Tensor]] = []

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                kept.append((args[0], args[1]))
            return func(*args, **(kwargs or {}))

    with Sent():
        sync.copy_to_device()
    (room, _), (target, source) = kept
    assert source.dtype == dtype
    assert target.data_ptr() == parameter.data_ptr()
    assert room.data_ptr() == source.data_ptr() == sync.accumulators[parameter].data_ptr()  # memory that was there
    assert torch.equal(parameter.view(torch.int16), rounded(values, dtype).view(torch.int16))


def test_what_autocast_made_of_a_weight_is_not_moved():
    def gradients(shelf: ActivationOffloader) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.MultiheadAttention(8, 2).out_proj)
        with saved_tensors_hooks(shelf.pack, shelf.unpack), torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(64, 8, requires_grad=True)).float().square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    moved, stays = (
        ActivationOffloader(CPU, 16, lambda tensor: False),
        ActivationOffloader(CPU, 2**30, lambda tensor: False),
    )
    for ours, plain in zip(gradients(moved), gradients(stays), strict=True):
        assert torch.equal(ours, plain)
    assert moved.items
    assert all(64 in saved.host.shape for saved in moved.items)  # activations, no weight


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_gradients_of_streamed_weights_add_up_in_memory_that_is_kept(precision):
    """FSDP itself would have made fresh memory for them in every micro-step, and waited for each copy."""
    case = Case("vit", Memory(micro_batch_size=3, precision=precision, cpu_offload="parameters"))
    _, stepper, windows, _ = set_up(case, decide_plan(case.recipe, 1))
    homes = {parameter: home.data_ptr() for parameter, home in stepper.sync.accumulators.items()}
    for window in windows.epoch(0, 0, 2):
        stepper.accumulate(window)
        found = {parameter: parameter.grad.to_local().data_ptr() for parameter in stepper.parameters}
        assert found == homes
        assert not stepper.sync.in_one.numel()  # nothing of what FSDP reduced is held
        stepper.abandon()


def streamed(case: Case) -> tuple[str, list[Any]]:
    """How gradients come together, and what two steps leave on this rank."""
    _, stepper, windows, _ = set_up(case, decide_plan(case.recipe, case.world_size))
    stepper.clip_norm = 0.5
    results = [stepper.step(window) for window in windows.epoch(0, 0, 2)]
    seen = torch.tensor([(result.loss, result.grad_norm) for result in results], dtype=torch.float64)
    return type(stepper.sync).__name__, [seen, *(local_shard(parameter.detach()) for parameter in stepper.parameters)]


def on_both_ways(case: Case) -> tuple[set[str], list[bool]]:
    """The two ways, and which of all tensors are the same on both, to the bit."""
    ours, found = streamed(case)
    serves = StreamedGradientSync.serves
    StreamedGradientSync.serves = staticmethod(lambda *_: False)  # type: ignore[method-assign]
    try:
        fsdps, plain = streamed(case)
    finally:
        StreamedGradientSync.serves = serves  # type: ignore[method-assign]
    return {ours, fsdps}, list(map(torch.equal, found, plain))


@pytest.mark.first(1)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_gradients_of_streamed_weights_are_those_of_fsdp(precision, world_size, ranks):
    sgd = {"optim": Optim("sgd", lr=0.1)} if precision == "16-true" else {}  # AdamW is refused
    memory = Memory(micro_batch_size=2, precision=precision, cpu_offload="parameters")
    case = Case("vit", memory, world_size, **sgd)
    found = [on_both_ways(case)] if world_size == 1 else ranks(2).run(on_both_ways, case)
    for ways, same in found:
        assert ways == {"StreamedGradientSync", "ShardedSync"}
        assert all(same)


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_what_a_recovery_drops_is_freed(offload):
    """Torch never frees a parameter whose hook refers to it; under FSDP the process group would stay, too."""
    case = Case("vit", Memory(micro_batch_size=3, precision="32-true", cpu_offload=offload))
    built = set_up(case, decide_plan(case.recipe, 1))
    stepper, windows = built[1:3]
    stepper.accumulate(next(windows.epoch(0, 0, 1)))
    sync = weakref.ref(stepper.sync)
    del built, stepper, windows
    gc.collect()
    assert sync() is None


@dataclass(frozen=True)
class Spoken(Case):
    """A language model whose head is tied to its embedding, of which one token is padding."""

    @property
    def model(self) -> Model:
        return language_model(self.name, loss_chunk=7, config={"pad_token_id": 5})

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        return language_samples(self.size)


def accumulated(case: Case, carried: bool) -> tuple[list[Tensor], list[int], int]:
    """The gradients of a batch, how many numbers came to the host at a time, and how many the tied weight has."""
    _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, 1))
    sync, sizes = stepper.sync, []
    sync.carrier = TransferStream(CPU, sync.pieces[0].dtype, sync.sharded) if carried else None
    bring_home = sync.accumulate_on_host
    sync.accumulate_on_host = lambda *args, **options: sizes.append(args[0].numel()) or bring_home(*args, **options)
    (window,) = windows.epoch(0, 0, 1)
    assert len(window) > 1
    stepper.accumulate(window)
    whole = stack.module.get_input_embeddings().weight.numel()
    return [local_shard(parameter.grad).clone() for parameter in stepper.parameters], sizes, whole


@pytest.mark.first(1)
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
@pytest.mark.parametrize("family", ["gpt2", "smollm2"])
def test_the_gradient_of_a_tied_embedding_arrives_in_rows(family, offload, streams, monkeypatch):
    monkeypatch.setattr(optimizer_offload, "CHUNK", 37)
    case = Spoken(family, Memory(micro_batch_size=3, precision="64-true", cpu_offload=offload))
    copied, sizes, whole = accumulated(case, False)
    assert max(sizes) < whole
    carried, _, _ = accumulated(case, True)
    assert all(torch.equal(one, other) for one, other in zip(copied, carried, strict=True))
    monkeypatch.setattr("trainer.memory.stack.offload_tied_gradient_by_rows", lambda module, sync: None)
    dense, sizes, _ = accumulated(case, False)
    assert whole in sizes
    for one, other in zip(copied, dense, strict=True):
        assert (one - other).norm() <= ROUNDING * other.norm()


class Branching(nn.Module):
    """A convolution, linear layers, and a head that only some micro-batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(180, 11), nn.LayerNorm(11))
        self.head = nn.Linear(11, 7)

    def forward(self, x: Tensor, to_the_end: bool) -> Tensor:
        x = self.stem(x)
        return self.head(x) if to_the_end else x


def trained(dtype: torch.dtype, carried: bool) -> list[Tensor]:
    """The weights after three steps of three micro-steps."""
    torch.manual_seed(0)
    module = Branching()
    masters: dict[nn.Parameter, Tensor] = {p: p.detach().clone().requires_grad_() for p in module.parameters()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = torch.optim.AdamW(list(masters.values()), lr=0.1, fused=True)
    sync = optimizer_offload.HostGradientSync(masters, CPU, optimizer, 1)
    sync.carrier = TransferStream(CPU, torch.float32) if carried else None
    for step in range(3):
        for micro in range(3):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(micro)).to(dtype)
            module(x, to_the_end=micro == step).float().square().sum().backward()
        sync.after_last_backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_are_carried_in_chunks(dtype, streams, monkeypatch):
    monkeypatch.setattr(optimizer_offload, "CHUNK", 37)
    assert all(p.numel() % optimizer_offload.CHUNK for p in Branching().parameters())  # the last chunk is short
    for plain, carried in zip(trained(dtype, False), trained(dtype, True), strict=True):
        assert plain.dtype == dtype
        assert torch.equal(plain, carried)


class Packed(nn.Module):
    """Attention whose queries, keys and values are slices of one tensor, with gaps between their elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, dtype=dtype)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16)
        return self.block(y) * y.exp()


def gradients(dtype: torch.dtype, offloaded: bool) -> list[Tensor]:
    """Of two micro-steps."""
    torch.manual_seed(0)
    module = Packed(dtype)
    if offloaded:
        activation_offload.offload_activations(module, CPU)
    for _ in range(2):
        module(torch.randn(2, 6, 16, dtype=dtype)).sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activations_that_were_away(dtype, streams):
    plain = gradients(dtype, False)
    offloaded = gradients(dtype, True)
    assert len(plain) == len(list(Packed(dtype).parameters()))
    assert all(map(torch.equal, plain, offloaded))
