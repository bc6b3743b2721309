"""Weights streamed into FSDP2's shards: each rank reads its slices, and all of them are the model.

That it trains as one that was built is in ``tests/memory``: ``test_combinations.py``, ``init`` meta.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from helpers.live_bytes import LiveBytes
from helpers.pretrained import saved, text, vit
from lightning_fabric import Fabric
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer import Data, Memory, Optim, PretrainedWeights, Recipe, Run
from trainer.api import fit
from trainer.contract import Streamable
from trainer.data import Digits
from trainer.memory.initialize import build_module, build_on_meta, materialise
from trainer.memory.plan import decide_plan
from trainer.memory.precision import weights_dtype
from trainer.models import VisionTransformer
from trainer.weights.blocks import find_blocks
from trainer.weights.streaming import WeightFiles, tensors_in

SEED = 4
MAKE = {"vit": partial(vit, image_size=24), "text": partial(text, dropout=0.0, train_last_blocks=2)}


def stream(model, precision, mesh):
    """The sharded module, how many elements of which tensor this rank read, and the most bytes that lived meanwhile."""
    dtype = weights_dtype(Memory(precision=precision))
    module = build_on_meta(model, SEED, dtype)
    for part in (*find_blocks(module), module):
        fully_shard(part, mesh=mesh)
    assert all(isinstance(p, DTensor) and p.is_meta for p in module.parameters())
    elements, read = Counter(), WeightFiles.read

    def spy(files, file, key, index=()):
        value = read(files, file, key, index)
        elements[key] += value.numel()
        return value

    with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:
        patch.setattr(WeightFiles, "read", spy)
        materialise(module, model, torch.device("cpu"), dtype, SEED)
    return module, elements, live.peak


def check_sharded(kind, weights, precision, replicas):
    ranks = torch.distributed.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names) if replicas > 1 else None
    model = MAKE[kind](weights=weights)
    sharded, elements, peak = stream(model, precision, mesh)
    memory = Memory(precision=precision, micro_batch_size=1)
    plan = decide_plan(Recipe(model=model, data=Data(), batch_size=1, memory=memory), 1)
    whole = build_module(Fabric(accelerator="cpu", devices=1), model, SEED, plan)
    local = {name: p.to_local() for name, p in sharded.named_parameters()}
    assert_equal(sharded, whole)
    # What differs between ranks comes last: one that fails before a collective would leave the other waiting in it.
    check_reads(local, elements, model)
    head = sum(4 * p.numel() for name, p in whole.named_parameters() if "head." in name or "classifier" in name)
    largest = max(4 * p.numel() for p in whole.parameters())
    own = sum(tensor.nbytes for tensor in local.values())
    assert peak <= 1.1 * own + head + largest, (peak, own, head, largest)
    return elements


def assert_equal(sharded, whole):
    ours, theirs = dict(sharded.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter.full_tensor(), theirs[name]), name
        assert parameter.requires_grad == theirs[name].requires_grad, name
        assert parameter.dtype == theirs[name].dtype, name
    for (name, ours), (_, theirs) in zip(sharded.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def check_reads(local, elements, model):
    """Of every tensor exactly the own rows; all of one that is interpolated, if any row of it is this rank's."""
    pretrained, found = model.pretrained(), tensors_in(model.weights)
    expected = {}
    for name, place in pretrained.stored.items():
        size = local[name].numel()
        if size:
            expected[place.key] = torch.Size(found[place.key][1]).numel() if place.transform else size
    assert elements == expected
    assert len(pretrained.new) > 0


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "precision"), [("vit", "bf16-true"), ("text", "32-true")])
def test_each_rank_reads_its_slices_and_together_they_are_the_model(ranks, tmp_path, kind, precision):
    weights = saved(tmp_path, kind, num_classes=7)
    results = ranks(2).run(check_sharded, kind, weights, precision, 1)
    new = ("heads.", "classifier.")
    for key, (_, shape) in tensors_in(weights).items():
        total = sum(elements.get(key, 0) for elements in results)
        assert total == (0 if key.startswith(new) else torch.Size(shape).numel()), key
    whole = sum(sum(elements.values()) for elements in results)
    assert all(sum(elements.values()) < 0.6 * whole for elements in results)


def test_replicas_without_shards_each_read_everything_once(ranks, tmp_path):
    weights = saved(tmp_path, "text", num_classes=7)
    first, second = ranks(2).run(check_sharded, "text", weights, "32-true", 2)
    assert first == second


class TiedNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(11, 3), nn.Linear(3, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("positions", torch.arange(7))

    def forward(self, ids):
        return self.output(self.embedding(ids) * self.scale)


@dataclass
class Tied(Streamable):
    file: str = ""

    def skeleton(self):
        return TiedNetwork()

    def pretrained(self):
        return PretrainedWeights({key: place for key, (place, _) in tensors_in(self.file).items()})


def check_tied(file):
    model = Tied(file)
    module = build_on_meta(model, SEED)
    fully_shard(module)
    materialise(module, model, torch.device("cpu"))
    assert module.output.weight is module.embedding.weight
    assert len(list(module.parameters())) == 2
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(torch.arange(11)).square().sum().backward()
    optimizer.step()
    assert module.output.weight is module.embedding.weight
    return module.embedding.weight.full_tensor().detach(), module.positions


def test_tied_parameters_stay_tied_in_shards_and_in_training(ranks, tmp_path):
    network = TiedNetwork()
    state = {"output.weight": network.output.weight.detach(), "scale": torch.full((1,), 2.0)}
    save_file(state, tmp_path / "w.safetensors")
    (weight, positions), _ = ranks(2).run(check_tied, str(tmp_path / "w.safetensors"))
    network.scale.data.fill_(2.0)
    network(torch.arange(11)).square().sum().backward()
    torch.testing.assert_close(weight, network.embedding.weight - network.embedding.weight.grad)
    assert positions.tolist() == list(range(7))


def train(weights, run_dir, init):
    recipe = Recipe(
        model=VisionTransformer("custom", weights=weights, dropout=0.1, **SHAPE),
        data=Digits(),
        optim=Optim("adamw", lr=1e-2),
        batch_size=32,
        max_steps=2,
        memory=Memory(micro_batch_size=8, init=init),
        run=Run(dir=run_dir, devices=2, accelerator="cpu", progress=False),
    )
    return fit(recipe).metrics


SHAPE = {"patch_size": 4, "layers": 1, "heads": 2, "width": 16, "mlp_width": 32}


def test_a_ddp_run_from_meta_is_the_run_from_the_device(ranks, tmp_path):
    file = str(tmp_path / "w.safetensors")
    save_file(VisionTransformer("custom", num_classes=3, image_size=8, **SHAPE).build().state_dict(), file)
    device, meta = (ranks(2).run(train, file, str(tmp_path / init), init) for init in ("device", "meta"))
    assert device == meta
