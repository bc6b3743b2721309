"""Image classifiers of transformers and timm: built, loaded, streamed, exported, and what they say of their images."""

import dataclasses
import json
import sys

import pytest
import torch
from helpers.prepared import prepared
from PIL import Image
from transformers import AutoModelForImageClassification

from trainer.checkpoint.export import load_model, save_model
from trainer.contract import prepare_data
from trainer.data import ImageFolder
from trainer.errors import RecipeError
from trainer.models import ImageClassifier
from trainer.weights.blocks import describe_blocks, find_blocks
from trainer.weights.streaming import build_streamed

VIT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
TIMM = {"model_args": {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 3}}
KINDS = {
    "vit": ({**VIT, "intermediate_size": 32}, "3 ViTLayer"),
    "dinov2": ({**VIT, "drop_path_rate": 0.0}, "3 Dinov2Layer"),
    "resnet": (RESNET, "2 ResNetStage"),
    "timm/vit_tiny_patch16_224": (TIMM, "2 Block"),
}
PROCESSOR = {"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}


def classifier(name="vit", **changes):
    settings = {"config": KINDS[name][0], "num_classes": 3, "image_size": 32, "class_names": ["a", "b", "c"], **changes}
    return ImageClassifier(name, **settings)


def saved(folder, model=None):
    torch.manual_seed(0)
    model = model or classifier()
    module = model.build()
    folder.mkdir()
    save_model(model, module, folder)
    return module.eval()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_built_is_saved_loaded_by_transformers_and_streamed(name, tmp_path):
    model = classifier(name)
    module = saved(tmp_path / "model", model)
    assert describe_blocks(find_blocks(module)) == KINDS[name][1]
    batch = {"pixel_values": torch.randn(2, 1, 32, 32), "labels": torch.tensor([0, 2])}  # grey becomes three channels
    loss = next(model.losses(module, batch))
    pixels = batch["pixel_values"].expand(-1, 3, -1, -1)
    expected = torch.nn.functional.cross_entropy(module(pixel_values=pixels).logits, batch["labels"], reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    loss.total.backward()
    assert [key for key, value in module.named_parameters() if value.requires_grad and value.grad is None] == []
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "model", trust_remote_code=False).eval()
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    ours = [load_model(model, tmp_path / "model"), build_streamed(model.saved_in(tmp_path / "model")), theirs]
    for again in ours:
        assert torch.equal(again.eval()(pixel_values=pixels).logits, module(pixel_values=pixels).logits)


def test_a_new_head_is_the_same_however_the_rest_is_loaded(tmp_path):
    source = saved(tmp_path / "model")
    model = ImageClassifier(str(tmp_path / "model"), weights=str(tmp_path / "model"), num_classes=5)
    built = []
    for build in (model.build, lambda: build_streamed(model)):
        torch.manual_seed(1)
        built.append(build().state_dict())
    assert all(torch.equal(value, built[1][key]) for key, value in built[0].items())
    assert built[0]["classifier.weight"].shape == (5, 16)
    assert torch.equal(built[0]["vit.layernorm.weight"], source.vit.layernorm.weight)


def test_images_of_another_size_have_their_position_embeddings_interpolated(tmp_path):
    source = saved(tmp_path / "model")
    model = ImageClassifier(str(tmp_path / "model"), weights=str(tmp_path / "model"), num_classes=3, image_size=48)
    module, pixels = model.build().eval(), torch.randn(2, 3, 48, 48)
    found = next(model.losses(module, {"pixel_values": pixels, "labels": torch.tensor([0, 1])})).logits
    assert torch.equal(found, source(pixel_values=pixels, interpolate_pos_encoding=True).logits)


def test_size_and_normalisation_that_the_data_leaves_open_are_the_models(tmp_path):
    saved(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            Image.new("RGB", (40, 40), (255, 0, 0)).save(tmp_path / "photos" / part / name / "1.png")
    model = ImageClassifier(str(tmp_path / "model"), weights=str(tmp_path / "model"))
    data = ImageFolder(str(tmp_path / "photos"), cache_dir=str(tmp_path / "cache"))
    plain = dataclasses.replace(data, image_size=16, normalize="imagenet")
    for one in (data, plain):
        prepare_data(one, model, None)
    assert (data.image_size, plain.image_size) == (32, 16)
    pixels = data.train[0]["pixel_values"]
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([(1 - 0.5) / 0.2, -0.4 / 0.2, -0.3 / 0.1]))
    torch.testing.assert_close(plain.train[0]["pixel_values"][0, 0, 0], torch.tensor((1 - 0.485) / 0.229))
    whole = dataclasses.replace(model, num_classes=3)
    save_model(whole, whole.build(), tmp_path)  # the export has the processor, too
    assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == PROCESSOR
    assert prepared(ImageFolder(data.root)).image_size == 224  # with no model to ask


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])  # with a fixed size of images, and without
def test_timm_models_take_images_of_any_size(name):
    model = ImageClassifier(f"timm/{name}", image_size=32, num_classes=3)
    batch = {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2).long()}
    assert next(model.losses(model.build().eval(), batch)).logits.shape == (2, 3)


def test_a_misspelt_timm_model_is_suggested_by_its_beginning():
    with pytest.raises(RecipeError, match=r"did you mean timm/vit_tiny_patch16_224\?"):
        ImageClassifier("timm/vit_tinny").prepare()


def test_timm_says_which_images_its_models_were_trained_on(tmp_path):
    seen = ImageClassifier("timm/vit_tiny_patch16_224", num_classes=3).image_input()
    assert (seen.size, seen.mean) == (224, (0.5, 0.5, 0.5))
    saved(tmp_path / "model", classifier("timm/vit_tiny_patch16_224"))
    assert ImageClassifier(str(tmp_path / "model")).image_input() == seen


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ImageClassifier("timm/resnet1888").prepare(),
            r"name='timm/resnet1888': .*did you mean timm/res",
        ),
        (lambda: classifier(task="token"), r"model\.task='token' is not one of single_label, multi_label"),
        (lambda: classifier(dropout=2.0), r"model\.dropout=2\.0 must be in \[0, 1\)"),
        (lambda: classifier(num_classes=None).build(), r"model\.num_classes of ImageClassifier is not set"),
        (lambda: classifier(config={"hidden_siz": 8}).prepare(), "no setting 'hidden_siz'; did you mean hidden_size"),
        (
            lambda: ImageClassifier("timm/resnet10t", config={"model_args": {"checkpoint_path": "x.pth"}}).prepare(),
            r"name='timm/resnet10t': its configuration asks for timm's checkpoint_path, a file that may be a pickle",
        ),
        (lambda: ImageClassifier("./nowhere").prepare(), r"model\.name=\./nowhere is not a folder"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_without_timm_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RecipeError, match=r"model\.name=timm/resnet10t needs the package timm .*\[timm\]"):
        ImageClassifier("timm/resnet10t").prepare()
