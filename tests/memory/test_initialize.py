"""How weights come to be: on the device, or streamed into a module that was made on meta."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.live_bytes import LiveBytes, weight_bytes
from helpers.pretrained import saved, text, vit
from helpers.problems import make_model
from lightning_fabric import Fabric
from safetensors.torch import load_file, save_file
from torch import nn

from trainer import Data, Memory, Model, Optim, PretrainedWeights, Recipe, RecipeError, StoredTensor
from trainer.contract import Streamable
from trainer.memory.initialize import build_module, build_on_meta, materialise
from trainer.memory.plan import decide_plan
from trainer.memory.precision import weights_dtype
from trainer.models import MLP, VisionTransformer
from trainer.weights.streaming import PIECE_ELEMENTS, WeightFiles, skeleton_on_meta, tensors_in

CPU = torch.device("cpu")
SEED = 3
LARGE = {"n_layers": 2, "dim": 256, "hidden_dim": 1024, "n_heads": 4, "vocab_size": 8000}


def plan_of(model, **knobs):
    memory = Memory(micro_batch_size=1, **knobs)
    return decide_plan(Recipe(model=model, data=Data(), optim=Optim("sgd"), batch_size=1, memory=memory), 1)


def on_device(model, precision="32-true"):
    return build_module(Fabric(accelerator="cpu", devices=1), model, SEED, plan_of(model, precision=precision))


def on_meta(model, precision="32-true", seed=SEED):
    dtype = weights_dtype(Memory(precision=precision))
    module = build_on_meta(model, seed, dtype)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    materialise(module, model, CPU, dtype, seed)
    return module


def assert_same(first, second):
    """Everything: names, values bit for bit, types, what trains, and the mode."""
    a, b = (dict(m.named_parameters(remove_duplicate=False)) | dict(m.named_buffers()) for m in (first, second))
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].requires_grad) == (b[name].dtype, b[name].requires_grad), name
        assert torch.equal(a[name], b[name]), name
    assert first.training
    assert second.training


def in_shards(folder: Path) -> None:
    """Cut the model.safetensors of ``folder`` in two, with an index."""
    state = load_file(folder / "model.safetensors")
    names, places = sorted(state), {}
    for number, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: state[name].clone() for name in chosen}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("kind", "weights", "precision"),
    [
        ("vit", None, "bf16-true"),
        ("vit", "safetensors", "32-true"),
        ("vit", "pth", "bf16-true"),
        ("text", None, "32-true"),
        ("text", "folder", "bf16-true"),
    ],
)
def test_building_takes_no_more_than_the_weights(tmp_path, monkeypatch, kind, weights, precision):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what is loaded in other threads could not be counted
    if kind == "vit":
        large = {"layers": 4, "width": 256, "mlp_width": 1024}
        file = saved(tmp_path, "vit", **large) if weights else None
        if weights == "pth":
            torch.save(load_file(file), file := str(tmp_path / "w.pth"))
        model = vit(weights=file, **large)
    else:
        model = text(config=LARGE, weights=saved(tmp_path, "text", config=LARGE) if weights else None)
    model.prepare()
    with LiveBytes() as live:
        module = on_device(model, precision)
    assert 4e6 < weight_bytes(module) <= live.peak <= 1.1 * weight_bytes(module)
    assert {p.dtype for p in module.parameters()} == {weights_dtype(Memory(precision=precision)) or torch.float32}


def test_a_wide_tensor_is_converted_piece_by_piece(tmp_path, monkeypatch):
    """Float32 values for bfloat16 weights: beside the weights there is never more than a piece."""
    save_file({"weight": torch.randn(5000, 2000), "bias": torch.randn(5000)}, tmp_path / "w.safetensors")
    sizes, read = [], WeightFiles.read

    def spy(self, file, key, index=()):
        value = read(self, file, key, index)
        sizes.append(value.nbytes)
        return value

    monkeypatch.setattr(WeightFiles, "read", spy)
    module = on_meta(Linear(2000, 5000, file=str(tmp_path / "w.safetensors")), "bf16-true")
    assert max(sizes) <= 4 * PIECE_ELEMENTS < 4 * 5000 * 2000
    assert sum(sizes) == 4 * (5000 * 2000 + 5000)
    assert torch.equal(module.weight, load_file(tmp_path / "w.safetensors")["weight"].bfloat16())


# --------------------------------------------------------------------------------------------- on meta


@pytest.mark.parametrize(
    ("precision", "classes", "size"), [("bf16-true", 3, 24), ("16-true", 5, 16), ("64-true", 5, 24)]
)
def test_a_vit_streamed_is_the_vit_built(tmp_path, precision, classes, size):
    model = vit(weights=saved(tmp_path, "vit"), num_classes=classes, image_size=size, train_last_blocks=1)
    module = on_meta(model, precision)
    assert_same(module, on_device(model, precision))
    assert bool(module.heads.head.weight.any()) == (classes == 5)  # kept if it fits, else zero as torchvision's


@pytest.mark.parametrize(("precision", "classes", "shards"), [("32-true", 3, True), ("bf16-true", 5, False)])
def test_a_text_model_streamed_is_what_transformers_loads(tmp_path, precision, classes, shards):
    folder = saved(tmp_path, "text")
    if shards:
        in_shards(tmp_path)
    model = text(weights=folder, num_classes=classes, train_last_blocks=2)
    module, built = on_meta(model, precision), on_device(model, precision)
    assert_same(module, built)
    another = on_meta(model, precision, seed=SEED + 1).classifier.weight
    assert torch.equal(module.classifier.weight, another) == (classes == 5)
    batch = {"input_ids": torch.arange(2, 8).view(2, 3), "attention_mask": torch.ones(2, 3)}
    assert torch.equal(module.eval()(**batch).logits, built.eval()(**batch).logits)


def test_new_heads_are_drawn_as_transformers_draws_them(tmp_path):
    torch.manual_seed(0)
    body = text().build().distilbert
    body.save_pretrained(tmp_path)  # keys without the prefix, no head at all
    model = text(weights=str(tmp_path), name=str(tmp_path), config={}, num_classes=400)
    module = on_meta(model)
    torch.manual_seed(SEED)
    torch.rand(7)  # the state of the generator, which differs between devices, does not matter, the seed does
    for built in (on_device(model), model.build().train()):
        assert_same(module, built)
    assert torch.equal(module.distilbert.embeddings.word_embeddings.weight, body.embeddings.word_embeddings.weight)
    assert module.pre_classifier.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert module.classifier.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not module.classifier.bias.any()


def test_bigbird_streams_with_its_buffers_its_fused_attention_and_its_frozen_pooler(tmp_path):
    model = make_model("bigbird")
    torch.manual_seed(0)
    model.save(module := model.build(), tmp_path, module.state_dict())
    model = dataclasses.replace(model, weights=str(tmp_path), num_classes=2)
    module = on_meta(model)
    assert_same(module, on_device(model))
    assert torch.equal(module.bert.embeddings.position_ids, torch.arange(64)[None])
    assert not any(parameter.requires_grad for parameter in module.bert.pooler.parameters())
    assert type(module.bert.encoder.layer[0].attention.self).__module__ == "trainer.models.block_sparse"


def test_weights_of_another_body_are_refused_in_both_ways(tmp_path):
    folder, vit_file = saved(tmp_path, "text"), saved(tmp_path, "vit", layers=2)
    state = load_file(tmp_path / "model.safetensors")
    del state["distilbert.transformer.layer.1.attention.q_lin.weight"]
    state["distilbert.embeddings.position_embeddings.weight"] = torch.zeros(3, 3)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lost = r"position_embeddings\.weight, \S+q_lin\.weight are missing or have another shape"
    for start in (on_meta, on_device):
        with pytest.raises(RecipeError, match=rf"do not fit this distilbert: .*{lost}"):
            start(text(weights=folder))
        with pytest.raises(RecipeError, match=r"do not fit this custom: .* and 9 more differ"):
            start(vit(weights=vit_file))


def test_files_that_cannot_be_streamed_are_refused(tmp_path):
    folder, file = saved(tmp_path, "text"), tmp_path / "w.safetensors"
    in_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    file.write_bytes(b"\xff" * 500)
    for spoil, model, message in (
        (lambda: None, vit(weights=str(file)), r"w\.safetensors is corrupt or not a safetensors file"),
        (lambda: None, vit(weights=f"{file}.safetensors"), r"w\.safetensors\.safetensors does not exist"),
        (
            (tmp_path / "model-00002-of-00002.safetensors").unlink,
            text(weights=folder),
            r"model-00002-of-00002\.safetensors does not exist",
        ),
        (lambda: index.write_text("{}"), text(weights=folder), r"index\.json is corrupt or not an index"),
        (index.unlink, text(weights=folder), r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
        (
            lambda: None,
            VisionTransformer("vit_b_16", weights="w.pt", num_classes=2, image_size=224),
            r"is a pickle, which",
        ),
    ):
        spoil()
        with pytest.raises(RecipeError, match=message):
            on_meta(model)


# --------------------------------------------------------------------------------------------- a model of one's own


class TiedNetwork(nn.Module):
    """Tied embeddings, buffers, BatchNorm, a scalar, a head: what real models have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(10, classes)
        self.register_buffer("positions", torch.arange(7))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)


@dataclass
class TiedModel(Streamable):
    file: str = ""
    classes: int = 2
    new: tuple[str, ...] = ("head.weight", "head.bias")

    def skeleton(self) -> nn.Module:
        return TiedNetwork(self.classes)

    def pretrained(self) -> PretrainedWeights:
        stored = {key: place for key, (place, _) in tensors_in(self.file).items() if key not in self.new}
        return PretrainedWeights(stored, self.new)


@dataclass
class Linear(Streamable):
    inputs: int
    outputs: int
    file: str
    names: tuple[str, ...] = ("weight", "bias")

    def skeleton(self) -> nn.Module:
        return nn.Linear(self.inputs, self.outputs)

    def pretrained(self) -> PretrainedWeights:
        return PretrainedWeights({name: StoredTensor(Path(self.file), name) for name in self.names})


def saved_network(folder: Path, **changes) -> tuple[str, TiedNetwork]:
    torch.manual_seed(5)
    network = TiedNetwork(2)
    network.norm(torch.randn(8, 4))  # running statistics that are not the initial ones
    state = {name: value.clone() for name, value in network.state_dict().items() if name != "output.weight"}
    save_file({**state, **changes}, folder / "own.safetensors")
    return str(folder / "own.safetensors"), network


def test_tied_parameters_buffers_and_scalars_of_a_model_of_ones_own(tmp_path):
    file, network = saved_network(tmp_path)
    skeleton, module = skeleton_on_meta(TiedModel()), on_meta(TiedModel(file, new=()))
    assert skeleton.output.weight is skeleton.embedding.weight
    assert skeleton.positions.tolist() == list(range(7))
    assert module.output.weight is module.embedding.weight
    assert len(list(module.parameters())) == len(list(network.parameters()))
    for name, value in network.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert torch.equal(module.hidden, torch.arange(3.0))


def test_build_is_made_of_skeleton_and_pretrained(tmp_path):
    file, network = saved_network(tmp_path)
    model = TiedModel(file, classes=6)
    module = on_meta(model, "bf16-true")
    assert_same(module, on_device(model, "bf16-true"))
    assert torch.equal(module.embedding.weight.float(), network.embedding.weight.to(module.scale.dtype).float())
    bound = 10**-0.5  # of Linear.reset_parameters
    assert 0.5 * bound < module.head.weight.abs().max() <= bound


class MetaBuffer(TiedModel):
    def skeleton(self) -> nn.Module:
        module = super().skeleton()
        module.register_buffer("late", torch.empty(3, device="meta"), persistent=False)
        return module


class NoReset(TiedModel):
    def pretrained(self) -> PretrainedWeights:
        found = super().pretrained()
        return PretrainedWeights({k: v for k, v in found.stored.items() if k != "scale"}, ["scale"])


class Forgetful(TiedModel):
    def pretrained(self) -> PretrainedWeights:
        return dataclasses.replace(super().pretrained(), initialise=lambda skeleton: skeleton.head.weight.zero_())


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            lambda f: TiedModel(f, classes=6, new=()),
            {},
            r"head\.weight in .* has shape \(2, 10\), but .*\(6, 10\)",
        ),
        (lambda f: TiedModel(f, new=("head.weight",)), {"x": torch.ones(1)}, r"names x, which the module does not"),
        (lambda f: TiedModel(f), {"output.weight": torch.ones(10, 4)}, r"embedding\.weight and output\.weight are one"),
        (lambda f: MetaBuffer(f), {}, r"late are still on meta"),
        (lambda f: NoReset(f, new=()), {}, r"the module is new, and TiedNetwork has no reset_parameters"),
        (lambda f: Forgetful(f), {}, r"head\.bias are new, and pretrained\(\)\.initialise does not set their values"),
        (lambda f: Linear(4, 10, f, ("weight",)), {"weight": torch.ones(10, 4)}, r"bias have no value"),
        (lambda f: Linear(4, 10, f), {"weight": torch.ones(10, 4)}, r"has no tensor bias"),
    ],
)
def test_what_pretrained_leaves_open_is_refused(tmp_path, model, changes, message):
    file, _ = saved_network(tmp_path, **changes)
    with pytest.raises(RecipeError, match=message):
        materialise(build_on_meta(model(file), SEED), model(file), CPU)
    with pytest.raises(NotImplementedError, match=r"Model must define build"):
        Model().build()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (vit(), r"memory\.init=meta streams pretrained weights, but model\.weights is null"),
        (vit(weights="w.pth"), r"model\.weights=w\.pth is a pickle: convert it with safetensors"),
        (MLP(), r"memory\.init=meta needs skeleton\(\) and pretrained\(\), which MLP does not define"),
    ],
)
def test_meta_is_refused_where_it_cannot_work(model, message):
    with pytest.raises(RecipeError, match=message):
        plan_of(model, init="meta")
    plan_of(model)
