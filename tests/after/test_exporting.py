"""Exported models give the trained model's outputs, whatever the shape; what does not is refused and not kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.language import language_model
from helpers.pretrained import text, vit
from safetensors.torch import load_file, save_file

from trainer import RecipeError
from trainer.after import export as exporting
from trainer.after.export import export, is_the_same
from trainer.checkpoint.export import save_model
from trainer.data import Digits, Documents, TextFiles
from trainer.errors import RunError
from trainer.models import MLP, LoRA
from trainer.recipe import Memory, Recipe
from trainer.weights.streaming import default_dtype

NAMES = ["ant", "bee", "cat", "dog", "elk"]
WITH_BYTES = {"tokenizer": "bytes", "config": {"vocab_size": 300}}


def made(folder: Path, kind: str) -> tuple[Any, Path]:
    """The recipe and the directory of a run with an untrained model."""
    torch.manual_seed(0)
    model: Any
    if kind == "text":
        model, data = text(class_names=NAMES), TextFiles("absent.csv", max_length=32)
    elif kind == "vit":
        model, data = vit(), Digits(image_size=16)
    else:
        model, data = MLP([16], image_size=8, channels=1, num_classes=10), Digits()
    module = model.build().eval()
    for parameter in module.parameters():  # also heads that start at zero
        torch.nn.init.normal_(parameter, std=0.2)
    save_model(model, module, folder / "model")
    return Recipe(model=model, data=data, batch_size=2, memory=Memory(micro_batch_size=2)), folder


@pytest.mark.parametrize(
    "kind", ["mlp", pytest.param("vit", marks=pytest.mark.slow), pytest.param("text", marks=pytest.mark.slow)]
)
def test_onnx_gives_the_outputs_for_any_number_and_length(tmp_path, kind):
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    recipe, run_dir = made(tmp_path, kind)
    said = export(recipe, run_dir, "onnx", None, None, False)
    assert said.startswith(f"{run_dir / 'model.onnx'}: checked: same outputs")
    session = runtime.InferenceSession(run_dir / "model.onnx")
    (output,) = session.get_outputs()
    assert (output.name, output.shape[1]) == ("logits", 5 if kind != "mlp" else 10)
    if kind == "mlp":
        images = torch.randn(11, 1, 8, 8)
        (found,) = session.run(None, {"pixel_values": images.numpy()})
        module = exporting.load_model(recipe.model, run_dir / "model").eval()
        wanted = next(recipe.model.losses(module, {"pixel_values": images, "labels": torch.zeros(11).long()})).logits
        assert torch.allclose(torch.from_numpy(found), wanted, atol=1e-5)
    with pytest.raises(RecipeError, match=r"--output=.*model.onnx exists: remove it"):
        export(recipe, run_dir, "onnx", None, None, False)


def test_a_folder_of_transformers_is_checked_by_loading_it(tmp_path):
    from transformers import AutoModelForSequenceClassification

    recipe, run_dir = made(tmp_path, "text")
    said = export(recipe, run_dir, "hf", str(tmp_path / "out"), None, False)
    assert said.startswith(f"{tmp_path / 'out'}: checked: same outputs as the trained model, within 0.0e+00")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert list(loaded.config.id2label.values()) == NAMES


BF16 = torch.bfloat16


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "base", "dtype", "options"),
    [
        *[("text", "full", None, {}), ("text", "nf4", None, {}), ("language", "full", None, {})],
        *[("language", "nf4", BF16, {}), ("language", "full", None, {"dora": True, "rank_stabilized": True})],
    ],
)
def test_adapters_alone_are_what_peft_loads_onto_the_weights(tmp_path, kind, base, dtype, options):
    import transformers
    from peft import PeftModel

    torch.manual_seed(0)
    model: Any = text(class_names=NAMES) if kind == "text" else language_model("gpt2", **WITH_BYTES)
    model.save(module := model.build(), tmp_path / "base", module.state_dict())
    model = dataclasses.replace(model, name=str(tmp_path / "base"), weights=str(tmp_path / "base"), config={})
    model = dataclasses.replace(model, lora=LoRA(rank=2, base=base, **options))
    with default_dtype(dtype):
        module = model.build().eval()
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    save_model(model, module, tmp_path / "model")
    data = TextFiles("absent.csv") if kind == "text" else Documents("absent.txt")
    recipe = Recipe(model=model, data=data, batch_size=2)
    said = export(recipe, tmp_path, "peft", None, None, False)
    assert said.startswith(f"{tmp_path / 'peft'}: checked: same outputs as the trained model")
    assert ("(base weights in NF4, as in training)" in said) == (base == "nf4")
    plain = getattr(transformers, model.auto).from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "peft")
    kept = {name.replace(".default", ""): tensor for name, tensor in loaded.state_dict().items()}
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert sum(".lora_" in name for name in adapters) == (24 if kind == "text" else 12 if options else 8)
    full = {name: f"{name}.weight" if name.endswith("magnitude_vector") else name for name in adapters}
    assert all(torch.equal(kept[full[name]], adapters[name]) for name in adapters if ".lora_" in name)
    assert {name.split(".")[2] for name in adapters if ".lora_" not in name} == (
        {"pre_classifier", "classifier"} if kind == "text" else set()
    )
    own = json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text()) == own
    if base == "full":  # as anybody loads it
        inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
        torch.testing.assert_close(loaded.eval()(**inputs).logits, module(**inputs).logits, rtol=1e-4, atol=1e-5)


def changed(path: Path, **values: Any) -> None:
    """Set ``values`` in a JSON file of a model, or remove those that are ``...``; then no hash of it is known."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    for folder in path.parents[:2]:
        (folder / "files.json").unlink(missing_ok=True)


@pytest.mark.parametrize("named", [..., [], None, 5, ["Evil"], ["BertModel"], ["__class__"], [5]])
def test_the_class_comes_from_the_recipe_and_from_no_file(trained_text, tmp_path, named):
    recipe, run_dir = trained_text
    shutil.copytree(run_dir, tmp_path / "run")
    changed(tmp_path / "run" / "model" / "config.json", architectures=named)
    said = export(recipe, tmp_path / "run", "hf", str(tmp_path / "out"), None, False)
    assert said.startswith(f"{tmp_path / 'out'}: checked: same outputs as the trained model, within 0.0e+00")


@pytest.fixture(scope="module")
def trained_text(tmp_path_factory):
    return made(tmp_path_factory.mktemp("run"), "text")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> tuple[Any, Path]:
    """The recipe and the directory of a run with adapters, and what ``export`` makes of them."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    model: Any = language_model("gpt2", **WITH_BYTES)
    model.save(module := model.build(), folder / "base", module.state_dict())
    model = dataclasses.replace(model, name=str(folder / "base"), weights=str(folder / "base"), config={})
    model = dataclasses.replace(model, lora=LoRA(rank=2))
    save_model(model, model.build().eval(), folder / "model")
    recipe = Recipe(model=model, data=Documents("absent.txt"), batch_size=2)
    export(recipe, folder, "peft", None, None, False)
    return recipe, folder


@pytest.mark.parametrize(
    "setting",
    [
        {"peft_type": "EVIL"},
        {"r": 10**9},
        {"target_modules": ["nothing"]},
        {"layer_replication": [[0, 10**6]]},
        {"megatron_config": {"a": 1}, "megatron_core": "evil"},
        {"auto_mapping": {"base_model_class": "x", "parent_library": "os"}},
        {"init_lora_weights": "olora"},
        {"task_type": "EVIL", "base_model_name_or_path": "/nowhere"},
    ],
)
def test_the_configuration_of_adapters_comes_from_the_recipe_and_from_no_file(adapted, tmp_path, setting):
    recipe, run_dir = adapted
    shutil.copytree(run_dir / "model", tmp_path / "model")
    changed(tmp_path / "model" / "adapter" / "adapter_config.json", **setting)
    export(recipe, tmp_path, "peft", None, None, False)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "peft" / name).read_bytes() == (run_dir / "peft" / name).read_bytes()


def test_other_adapters_than_those_of_the_recipe_are_refused(adapted, tmp_path, golden):
    recipe, run_dir = adapted
    shutil.copytree(run_dir / "model", tmp_path / "model")
    (tmp_path / "model" / "files.json").unlink(missing_ok=True)
    path = tmp_path / "model" / "adapter" / "adapter_model.safetensors"
    good = load_file(path)
    first = next(iter(good))
    odd = [{}, good | {"more": torch.ones(1)}, good | {first: good[first][:1]}, good | {first: good[first].long()}]
    for tensors in odd:
        save_file(tensors, path)
        with golden.raises(RecipeError, "other adapters"):
            export(recipe, tmp_path, "peft", None, None, False)
    path.write_bytes(b"garbage")
    with golden.raises(RecipeError, "garbage", hide=[r"(?<=safetensors file: ).*"]):
        export(recipe, tmp_path, "peft", None, None, False)
    without = recipe.replace(model=dataclasses.replace(recipe.model, lora=LoRA()))
    with golden.raises(RecipeError, "no adapters"):
        export(without, tmp_path, "peft", None, None, False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_links_and_a_configuration_that_does_not_fit_the_weights_are_refused(trained_text, tmp_path, golden):
    recipe, run_dir = trained_text
    shutil.copytree(run_dir, tmp_path / "run")
    link = tmp_path / "run" / "model" / "more"
    link.symlink_to("/etc")
    with golden.raises(RecipeError, "link"):
        export(recipe, tmp_path / "run", "hf", str(tmp_path / "out"), None, False)
    link.unlink()
    changed(tmp_path / "run" / "model" / "config.json", hidden_dim=10**13)
    with golden.raises(RecipeError, "configuration", hide=[r"(?<=loaded \().*(?=\): was)"]):
        export(recipe, tmp_path / "run", "hf", str(tmp_path / "out"), None, False)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_words_than_the_model_is_refused(trained_text, tmp_path, golden):
    recipe, run_dir = trained_text
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "model" / "tokenizer_config.json").write_text("{}")  # without the names of special tokens
    (tmp_path / "run" / "model" / "files.json").unlink()
    with golden.raises(RecipeError, hide=[r"(?<=tokenizer \().*?(?=\):)"]):
        export(recipe, tmp_path / "run", "hf", None, None, False)


def test_made_up_texts_fit_the_positions_of_the_model(adapted, tmp_path):
    recipe, run_dir = adapted
    reader = exporting.InputReader(recipe.model.saved_in(run_dir / "model"), recipe.data, (), ())
    for room in (7, 64):
        batches = exporting._batches(reader, tmp_path / "out", room)
        assert max(tensor.shape[1] for batch in batches for tensor in batch.values()) <= room
    assert [*tmp_path.iterdir()] == []


def test_what_gives_other_outputs_is_not_kept(tmp_path, monkeypatch):
    recipe, run_dir = made(tmp_path, "text")
    monkeypatch.setattr(exporting._Outputs, "of", lambda self, batch: torch.rand(1, 5))  # no two calls agree
    with pytest.raises(RunError, match=r"the outputs of .*out differ from the trained model's by"):
        export(recipe, run_dir, "hf", str(tmp_path / "out"), None, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_what_cannot_be_exported_is_refused_with_the_fix(tmp_path, monkeypatch, golden):
    recipe, run_dir = made(tmp_path, "mlp")
    with golden.raises(RecipeError, "hf"):
        export(recipe, run_dir, "hf", None, None, False)
    with golden.raises(RecipeError, "peft"):
        export(recipe, run_dir, "peft", None, None, False)
    with golden.raises(RecipeError, "hub"):
        export(recipe, run_dir, "hub", None, "model", False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with golden.raises(RecipeError, "onnx", hide=[r"(?<=onnx \().*?(?=\):)"]):
        export(recipe, run_dir, "onnx", None, None, False)


class Hub:
    """The hub's files, as ``HfApi`` tells of them."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.asked, self.sent = broken, dict[str, Any](), Path()

    def create_repo(self, repo: str, **how: Any) -> None:
        self.asked = {"repo": repo, **how}

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self.sent = Path(folder_path)
        return SimpleNamespace(oid="c0ffee")

    def get_paths_info(self, repo: str, names: list[str], revision: str) -> list[Any]:
        assert revision == "c0ffee"
        return [self.entry(name) for name in names]

    def entry(self, name: str) -> Any:
        content = (self.sent / name).read_bytes()
        content = content[:-1] + b"!" if name == self.broken else content
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if name.endswith(".safetensors") else None
        return SimpleNamespace(path=name, size=len(content), blob_id=blob, lfs=lfs)


def test_the_hub_must_hold_what_was_sent(tmp_path, monkeypatch):
    recipe, run_dir = made(tmp_path, "mlp")
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    assert export(recipe, run_dir, "hub", None, "me/model", False).startswith(
        "https://huggingface.co/me/model: 3 files"
    )
    assert hub.asked == {"repo": "me/model", "private": True, "exist_ok": True}
    for broken in ("model.safetensors", "config.json"):
        monkeypatch.setattr("huggingface_hub.HfApi", lambda broken=broken: Hub(broken))
        with pytest.raises(RunError, match=f"differs from the uploaded files: {broken}; upload again"):
            export(recipe, run_dir, "hub", None, "me/model", True)
    assert not is_the_same(run_dir / "model" / "config.json", None)


def test_without_a_network_the_hub_is_refused_with_the_fix(tmp_path, monkeypatch, golden):
    recipe, run_dir = made(tmp_path, "mlp")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with golden.raises(RecipeError):
        export(recipe, run_dir, "hub", None, "me/model", False)
