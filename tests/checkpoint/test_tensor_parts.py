"""Tensors in parts: written by some ranks, read by others."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass

import pytest
import torch
from helpers.matrix import Case, set_up
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from trainer import Memory
from trainer.checkpoint import tensor_parts as made
from trainer.checkpoint.tensor_parts import (
    DTYPES,
    HostStagingBuffers,
    TensorPart,
    assign_to_rank,
    replicated_part,
    view_on_host,
    write_parts,
)
from trainer.contract import Model
from trainer.errors import RecipeError, RunError
from trainer.memory.plan import decide_plan
from trainer.run.state import TensorState


def rows(tensor: torch.Tensor, ranks: int, rank: int) -> TensorPart:
    """The rows that FSDP gives to ``rank``: of equal number but for the last ones, which may get none."""
    size = -(-len(tensor) // ranks)
    start = min(rank * size, len(tensor))
    own = tensor[start : start + size]
    return TensorPart(own, (start, *[0] * (tensor.ndim - 1)), tuple(tensor.shape), rank)


def save(folder, tensors, ranks):
    """Write ``tensors`` by rows from ``ranks`` ranks; return a reader."""
    indices = []
    for rank in range(ranks):
        name = f"rank-{rank}.safetensors"
        parts = view_on_host(assign_to_rank({key: rows(t, ranks, rank) for key, t in tensors.items()}, rank, ranks))
        write_parts(folder / name, parts)
        indices.append(made.index_parts(name, parts))
    return made.PartsReader(folder, indices)


@pytest.mark.slow
@given(
    size=st.integers(0, 13),
    inner=st.lists(st.integers(1, 4), max_size=2),
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]),
)
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path_factory, size, inner, writers, readers, dtype):
    folder = tmp_path_factory.mktemp("parts")
    tensor = torch.arange(size * math.prod(inner)).reshape(size, *inner).to(dtype)
    reader = save(folder, {"w": tensor}, writers)
    if not size:
        return
    for rank in range(readers):
        expected = rows(tensor, readers, rank)
        target = TensorPart(torch.full_like(expected.tensor, 1), expected.offset, expected.shape, rank)
        reader.read_into("w", target)
        assert torch.equal(target.tensor, expected.tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_is_plain_safetensors_and_the_hash_is_that_of_the_file(tmp_path, dtype):
    bytes_of = torch.arange(48, dtype=torch.uint8) % 2 if dtype == torch.bool else torch.arange(48, dtype=torch.uint8)
    tensors = {"vector": bytes_of.view(dtype), "scalar": bytes_of.view(dtype)[3], "none": bytes_of.view(dtype)[:0]}
    path = tmp_path / "a.safetensors"
    entry = write_parts(path, view_on_host({name: replicated_part(tensor) for name, tensor in tensors.items()}))
    content = path.read_bytes()
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for name, tensor in load_file(path).items():
        assert tensor.dtype == dtype
        assert tensor.shape == tensors[name].shape
        assert torch.equal(tensor.view(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8))


def test_an_existing_file_is_never_written_over_and_a_type_without_a_name_refused(tmp_path):
    write_parts(tmp_path / "a.safetensors", {})
    with pytest.raises(FileExistsError):
        write_parts(tmp_path / "a.safetensors", {})
    with pytest.raises(RunError, match=r"buffers/b has dtype torch\.complex128, which safetensors does not support"):
        write_parts(tmp_path / "file", {"buffers/b": replicated_part(torch.zeros(2, dtype=torch.complex128))})


def test_replicated_tensors_are_dealt_out_by_their_bytes_and_copies_of_a_shard_are_not_written():
    parts = {f"t{number}": replicated_part(torch.zeros(size)) for number, size in enumerate((100, 1, 60, 30, 9))}
    shares = [assign_to_rank(parts, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(parts)
    assert max(sum(part.tensor.numel() for part in share.values()) for share in shares) == 100
    copy = TensorPart(torch.ones(2), (0,), (4,), writer_rank=-1)
    assert assign_to_rank({"w": copy}, 0, 2) == assign_to_rank({"w": copy}, 1, 2) == {}


def test_what_is_copied_to_the_host_does_not_change_with_the_original_as_what_is_there_does():
    tensor = torch.zeros(3, requires_grad=True)
    (copy,) = HostStagingBuffers().copy({"w": replicated_part(tensor)}).values()
    (same,) = view_on_host({"w": replicated_part(tensor)}).values()
    with torch.no_grad():
        tensor.add_(1)
    assert not copy.tensor.any()
    assert same.tensor.data_ptr() == tensor.data_ptr()


def test_the_memory_of_copies_is_kept_as_long_as_it_fits():
    copies = HostStagingBuffers()
    tensors = {"a": torch.ones(3).bfloat16(), "b": torch.ones(2, 3).t(), "c": torch.ones(1)}
    first = copies.copy({name: replicated_part(tensor) for name, tensor in tensors.items()})
    again = copies.copy({"a": replicated_part(torch.ones(3)), "b": replicated_part(torch.arange(6.0).view(2, 3).t())})
    assert again["b"].tensor is first["b"].tensor
    assert again["b"].tensor.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert again["b"].tensor.is_contiguous()
    assert again["a"].tensor.dtype is torch.float32
    assert copies.kept.keys() == {"a", "b"}


def test_what_is_missing_or_of_another_shape_is_named(tmp_path):
    reader = save(tmp_path, {"w": torch.ones(4, 2)}, 2)
    with pytest.raises(RecipeError, match=r"v is missing, but the model needs shape \(2,\)"):
        reader.read_into("v", replicated_part(torch.empty(2)))
    with pytest.raises(RecipeError, match=r"w has shape \(4, 2\), but the model needs shape \(4, 3\)"):
        reader.read_into("w", replicated_part(torch.empty(4, 3)))
    del reader.parts["w"]["rank-1.safetensors", "w"]
    with pytest.raises(RecipeError, match="w is incomplete: 4 of 8 numbers were found"):
        reader.read_into("w", replicated_part(torch.empty(4, 2)))


# What a recovery keeps of training while the model is built anew


@dataclass(frozen=True)
class Wide(Case):
    """With matrices that are large enough for states of 8 and 4 bits."""

    @property
    def model(self) -> Model:
        return dataclasses.replace(super().model, width=64, mlp_width=256)


def take_over(case: Case) -> list[str]:
    """Take two steps, build everything anew, and go on in both; the names of this rank's tensors."""
    plan = decide_plan(case.recipe, case.world_size)
    (_, stepper, windows, stack), (_, other, _, built) = set_up(case, plan), set_up(case, plan)
    for window in windows.epoch(0, 0, 2):
        stepper.step(window)
    before, after = TensorState(stack, stepper), TensorState(built, other)
    kept = before.on_host()
    after.make_state(kept)
    after.load_state_dict(kept)
    _require_equal(before, after)
    (window,) = windows.epoch(0, 2, 3)
    assert stepper.step(window) == other.step(window)
    _require_equal(before, after)
    return list(after.parts())


def _require_equal(before: TensorState, after: TensorState) -> None:
    ours, theirs = before.parts(), after.parts()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name].tensor, theirs[name].tensor)] == []
    assert before.scalars() == after.scalars()


MEMORIES = [
    {"strategy": "ddp", "cpu_offload": "optimizer", "precision": "bf16-mixed"},
    {"strategy": "fsdp", "optimizer_state_bits": 8},
    pytest.param({"strategy": "fsdp", "cpu_offload": "parameters"}, marks=pytest.mark.slow),
    pytest.param({"strategy": "ddp", "optimizer_state_bits": 8}, marks=pytest.mark.slow),
    pytest.param({"strategy": "fsdp", "optimizer_state_bits": 4}, marks=pytest.mark.slow),
    pytest.param({"strategy": "fsdp", "precision": "bf16-true", "stochastic_rounding": True}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_what_is_kept_is_what_was_there(memory, ranks):
    names = ranks(2).run(take_over, Wide("vit", Memory(micro_batch_size=2, **memory), 2))[0]
    assert any("/codes@" in name for name in names) == ("optimizer_state_bits" in memory)
