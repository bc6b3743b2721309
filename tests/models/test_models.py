"""The models: shapes, weights, freezing and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torchvision
from helpers.problems import make_model
from helpers.rounding import ROUNDING
from safetensors.torch import load_file, save_file

from trainer.errors import RecipeError
from trainer.models import MLP, BigBird, CausalLM, TextClassifier, VisionTransformer
from trainer.models.hub import require_moderate_config

SMALL = {"patch_size": 4, "layers": 3, "heads": 2, "width": 16, "mlp_width": 32}


def small_vit(**changes):
    return VisionTransformer("custom", **{"num_classes": 5, "image_size": 8, **SMALL, **changes})


def text(**changes):
    return dataclasses.replace(make_model("distilbert"), **changes)


def text_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(2, 120, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.arange(len(lengths)) % 2}


@pytest.mark.slow
def test_what_is_heavy_is_not_imported_before_it_is_needed():
    heavy = "{'torch', 'torchvision', 'datasets', 'sklearn', 'transformers', 'numpy', 'pandas'}"
    code = f"""
import sys, trainer, trainer.data, trainer.models
trainer.data.Digits()
assert not {heavy} & set(sys.modules)
import trainer.weights.nf4
assert 'triton' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["vit_b_16", "vit_l_32", "vit_h_14"])
def test_the_sizes_are_torchvisions(name):
    model = VisionTransformer(name, num_classes=7, image_size=224, dropout=0.1)
    with torch.device("meta"):
        module = model.build()
        reference = getattr(torchvision.models, name)(num_classes=7)
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    assert shapes == {key: value.shape for key, value in reference.state_dict().items()}
    assert {m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


def test_local_weights_are_loaded_a_head_that_fits_is_kept_and_positions_are_interpolated(tmp_path):
    source = small_vit().build()
    torch.nn.init.normal_(source.heads.head.weight)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    torch.save(source.state_dict(), tmp_path / "w.pth")
    for weights in (str(tmp_path / "w.safetensors"), (tmp_path / "w.pth").as_uri()):
        loaded = small_vit(weights=weights).build()
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), loaded.parameters(), strict=True))
    loaded = small_vit(weights=str(tmp_path / "w.safetensors"), image_size=16, num_classes=3).build()
    assert loaded.encoder.pos_embedding.shape == (1, 17, 16)
    assert torch.equal(loaded.conv_proj.weight, source.conv_proj.weight)
    assert torch.equal(loaded.encoder.pos_embedding[:, :1], source.encoder.pos_embedding[:, :1])
    assert loaded(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_vit(weights="nowhere/w.safetensors").build(), r"nowhere/w\.safetensors does not exist"),
        (lambda: small_vit(weights="DEFAULT").build(), r"model\.weights=DEFAULT is a torchvision name"),
        (lambda: small_vit(image_size=9).build(), r"image_size=9 is not a multiple of the patch size 4.*image_size 8"),
        (lambda: small_vit(num_classes=None).build(), r"model\.num_classes of VisionTransformer is not set"),
        (lambda: small_vit(train_last_blocks=4).build(), "train_last_blocks=4 must be between 0 and .* 3"),
        (lambda: VisionTransformer("vit_b_16", weights="IMAGENET").prepare(), r"IMAGENET1K_V1.*IMAGENET1K_SWAG"),
        (lambda: VisionTransformer("vit_x"), r"model\.name='vit_x' is not one of"),
        (lambda: VisionTransformer("custom", width=8), r"needs model\.patch_size, model\.layers"),
        (lambda: VisionTransformer("vit_b_16", layers=3), r"model\.layers cannot be set for model\.name=vit_b_16"),
        (lambda: small_vit(heads=3), r"model\.width=16 must be a multiple of model\.heads=3"),
        (lambda: small_vit(heads=0), r"model\.heads=0 must be an integer of at least 1"),
        (lambda: small_vit(dropout=1.0), r"model\.dropout=1\.0"),
        (lambda: MLP([0]), r"model\.hidden=\[0\]"),
        (lambda: TextClassifier(dropout=-1.0), r"model\.dropout=-1\.0"),
        (lambda: BigBird(attention="sparse"), r"model\.attention='sparse' is not one of full, block_sparse"),
        (lambda: text(config={"n_layers": 10**9}).prepare(), r"model\.config: n_layers .* 1,000,000,000 layers"),
        (lambda: text(config={"num_labels": 10**9}).prepare(), r"model\.config: num_labels has 1,000,000,000 labels"),
        (lambda: text(config={"n_layer": 2}).prepare(), r"has no setting 'n_layer'; did you mean n_layers\?"),
        (lambda: text(tokenizer="./nowhere").prepare(), r"model\.tokenizer=\./nowhere is not a folder"),
        (lambda: text(tokenizer=None).prepare(), r"tokenizer is missing, and model\.name=distilbert is a model type"),
        (lambda: text(name="file:///no/such").prepare(), r"model\.name=file:///no/such is not a folder"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_counts_of_every_name_are_bounded_and_sizes_are_not(tmp_path):
    config = {"model_type": "bart", "encoder_layers": 3, "decoder_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = rf"model\.name='{tmp_path}': decoder_layers .* 1,000,000,000 layers.*lower it"
    with pytest.raises(RecipeError, match=said):
        text(name=str(tmp_path), tokenizer="none").prepare()
    many = {"no_rope_layers": [1] * 500, "kv_source_layers": list(range(500)), "vocab_size_per_layer_input": 262_144}
    many |= {"text_config": {"num_labels": 21_841}, "layer_norm_eps": 1e-5, "layer_types": ["a"]}
    require_moderate_config("it", many)
    too_many = {"depths": [6_000, 6_000], "n_blocks": 20_000, "encoder": {"depth": 20_000}, "layers": [1, 20_000]}
    for key, value in too_many.items():
        with pytest.raises(RecipeError, match=r"it: .* the max is 10,000"):
            require_moderate_config("it", {key: value})


def test_freezing_all_but_the_last_blocks():
    module = small_vit(train_last_blocks=1).build()
    trained = {name.rsplit(".", 2)[0] for name, p in module.named_parameters() if p.requires_grad}
    assert any("encoder_layer_2" in name for name in trained)
    assert not any("encoder_layer_1" in name or "conv_proj" in name for name in trained)
    assert module.heads.head.weight.requires_grad
    assert not module.class_token.requires_grad
    assert not module.encoder.pos_embedding.requires_grad
    text = dataclasses.replace(make_model("distilbert"), train_last_blocks=0).build()
    assert {n.split(".")[0] for n, p in text.named_parameters() if p.requires_grad} == {"pre_classifier", "classifier"}


def test_fused_attention_changes_neither_results_nor_names():
    from transformers import BigBirdForSequenceClassification

    module = make_model("bigbird").build().eval()
    theirs = BigBirdForSequenceClassification(module.config).eval()
    theirs.load_state_dict(module.state_dict())
    inputs = {key: value for key, value in text_batch([5, 17, 30]).items() if key != "labels"}
    torch.testing.assert_close(theirs(**inputs).logits, module(**inputs).logits, rtol=1e-5, atol=1e-6)
    assert list(module.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("name", ["distilbert", "bigbird"])
def test_padding_does_not_change_the_loss(name):
    model = make_model(name)
    module = model.build().eval().double()
    short, long = text_batch([5]), text_batch([5, 31])
    (alone,) = model.losses(module, short)
    (both,) = model.losses(module, long)
    torch.testing.assert_close(alone.logits[0], both.logits[0], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", ["distilbert", "bigbird"])
def test_a_saved_text_model_is_what_transformers_loads(name, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = dataclasses.replace(make_model(name), class_names=["a", "b", "c", "d", "e"])
    module = model.build().eval()
    model.save(module, tmp_path, module.state_dict())
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ours = model.saved_in(tmp_path).build().eval()
    inputs = {key: value for key, value in text_batch([7, 19]).items() if key != "labels"}
    torch.testing.assert_close(theirs(**inputs).logits, module(**inputs).logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours(**inputs).logits, module(**inputs).logits)
    assert theirs.config.id2label[3] == "d"
    assert AutoTokenizer.from_pretrained(tmp_path)("w5 w7")["input_ids"] == [5, 7]


def test_text_settings_reach_the_configuration():
    model = dataclasses.replace(make_model("distilbert"), dropout=0.3)
    config = model.build().config
    assert (config.n_layers, config.vocab_size, config.pad_token_id) == (2, 120, 0)
    assert (config.dropout, config.attention_dropout, config.seq_classif_dropout) == (0.3, 0.3, 0.3)
    with torch.device("meta"):
        assert all(p.is_meta for p in make_model("distilbert").build().parameters())


def test_dropout_is_every_rate_of_a_configuration_and_nothing_else():
    for name, rates in {
        "seed_oss": ("attention_dropout", "residual_dropout"),
        "starcoder2": ("attention_dropout", "residual_dropout", "embedding_dropout"),
        "modernbert": ("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"),
        "t5": ("dropout_rate", "classifier_dropout"),
    }.items():
        config = TextClassifier(name, tokenizer="none", dropout=0.3)._configuration()
        assert [getattr(config, rate) for rate in rates] == [0.3] * len(rates), name
    config = CausalLM("biogpt", tokenizer="none", dropout=0.3)._configuration()
    assert (config.hidden_dropout_prob, config.activation_dropout, config.layerdrop) == (0.3, 0.3, 0.0)


def test_a_corrupt_and_a_foreign_text_model_are_refused(tmp_path):
    model = make_model("distilbert")
    model.save(module := model.build(), tmp_path, module.state_dict())
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    body = next(name for name in state if "attention.q_lin.weight" in name)
    save_file({**state, body: torch.zeros(3, 3)}, weights, metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"do not fit this distilbert: .*q_lin\.weight are missing or have"):
        model.saved_in(tmp_path).build()
    save_file({**state, "classifier.bias": torch.zeros(3)}, weights, metadata={"format": "pt"})
    assert model.saved_in(tmp_path).build().classifier.out_features == 5  # a head may be new
    weights.write_bytes(b"\xff" * 2000)
    with pytest.raises(RecipeError, match=r"model\.weights=.* cannot be loaded"):
        model.saved_in(tmp_path).build()


def test_weights_by_torchvisions_name(tmp_path, monkeypatch):
    """As downloaded: a file in torch.hub's folder under the name that torchvision gives it."""
    model = VisionTransformer("vit_b_32", weights="DEFAULT")
    url = torchvision.models.ViT_B_32_Weights.IMAGENET1K_V1.url
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    fetched = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, file, digest, progress: fetched.append(digest))
    file = tmp_path / "checkpoints" / url.rsplit("/", 1)[1]
    assert model._weights_file() == file
    assert fetched == [file.stem.rsplit("-", 1)[1]]
    file.touch()
    assert model._weights_file() == file
    assert len(fetched) == 1
