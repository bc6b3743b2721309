"""The models: shapes, weights, freezing and what they refuse."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torchvision
from helpers.problems import flat, make_model, tokenizer_folder
from safetensors.torch import load_file, save_file

from trainer.errors import RecipeError
from trainer.memory.activation_checkpointing import checkpoint_blocks
from trainer.models import MLP, BigBird, TextClassifier, VisionTransformer
from trainer.models.bigbird import use_fused_attention
from trainer.weights.blocks import find_blocks

SMALL = {"patch_size": 4, "layers": 3, "heads": 2, "width": 16, "mlp_width": 32}


def small_vit(**changes):
    return VisionTransformer("custom", **{"num_classes": 5, "image_size": 8, **SMALL, **changes})


def text_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(2, 120, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.arange(len(lengths)) % 2}


def test_importing_the_models_loads_no_torch():
    code = (
        "import trainer, trainer.models, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_all_five_sizes_are_torchvisions(name):
    model = VisionTransformer(name, num_classes=7, image_size=224, dropout=0.1)
    with torch.device("meta"):
        module = model.build()
        reference = getattr(torchvision.models, name)(num_classes=7)
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    assert shapes == {key: value.shape for key, value in reference.state_dict().items()}
    assert {m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


def test_local_weights_are_loaded_and_a_head_that_fits_is_kept(tmp_path):
    source = small_vit().build()
    torch.nn.init.normal_(source.heads.head.weight)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    torch.save(source.state_dict(), tmp_path / "w.pth")
    for weights in (str(tmp_path / "w.safetensors"), (tmp_path / "w.pth").as_uri()):
        loaded = small_vit(weights=weights).build()
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), loaded.parameters(), strict=True))


def test_another_image_size_interpolates_positions_and_another_class_count_gets_a_new_head(tmp_path):
    source = small_vit().build()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    loaded = small_vit(weights=str(tmp_path / "w.safetensors"), image_size=16, num_classes=3).build()
    assert loaded.encoder.pos_embedding.shape == (1, 17, 16)
    assert loaded.heads.head.out_features == 3
    assert torch.equal(loaded.conv_proj.weight, source.conv_proj.weight)
    assert torch.equal(loaded.encoder.pos_embedding[:, :1], source.encoder.pos_embedding[:, :1])
    assert loaded(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "nowhere/w.safetensors"}, r"nowhere/w\.safetensors is not there"),
        ({"weights": "DEFAULT"}, r"model\.weights=DEFAULT is a torchvision name"),
        ({"image_size": 9}, r"image_size=9 is not a multiple of the patch size 4.*image_size 8"),
        ({"num_classes": None}, r"model\.num_classes of VisionTransformer is not set"),
        ({"train_last_blocks": 4}, r"train_last_blocks=4 must be between 0 and the number of blocks, 3"),
    ],
)
def test_vit_refusals_at_build(changes, message):
    with pytest.raises(RecipeError, match=message):
        small_vit(**changes).build()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VisionTransformer("vit_x"), r"model\.name='vit_x' is not one of"),
        (lambda: VisionTransformer("custom", width=8), r"needs model\.patch_size, model\.layers"),
        (lambda: VisionTransformer("vit_b_16", layers=3), r"model\.layers is fixed by model\.name=vit_b_16"),
        (lambda: small_vit(heads=3), r"model\.width=16 must be a multiple of model\.heads=3"),
        (lambda: small_vit(heads=0), r"model\.heads=0 must be an integer of at least 1"),
        (lambda: small_vit(dropout=1.0), r"model\.dropout=1\.0"),
        (lambda: MLP([0]), r"model\.hidden=\[0\]"),
        (lambda: TextClassifier(dropout=-1.0), r"model\.dropout=-1\.0"),
        (lambda: BigBird(attention="sparse"), r"model\.attention='sparse' is not one of full, block_sparse"),
    ],
)
def test_refusals_of_settings(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_unknown_torchvision_weights_are_refused_with_the_known_ones():
    model = VisionTransformer("vit_b_16", weights="IMAGENET", num_classes=5, image_size=224)
    with pytest.raises(RecipeError, match=r"IMAGENET1K_V1.*IMAGENET1K_SWAG"):
        model.prepare()


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


def test_blocks_are_found_by_themselves():
    assert [len(find_blocks(make_model(name).build())) for name in ("distilbert", "bigbird")] == [2, 2]
    assert type(find_blocks(make_model("bigbird").build())[0]).__name__ == "BigBirdLayer"


def test_fused_attention_changes_neither_results_nor_names():
    model = make_model("bigbird")
    module = model.build().eval()
    batch = text_batch([5, 17, 30])
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    fused = module(**inputs).logits
    names = list(module.state_dict())
    plain_class = type(module.bert.encoder.layer[0].attention.self).__mro__[1]
    for layer in module.bert.encoder.layer:
        layer.attention.self.__class__ = plain_class
    torch.testing.assert_close(module(**inputs).logits, fused, rtol=1e-5, atol=1e-6)
    use_fused_attention(module)
    assert list(module.state_dict()) == names
    torch.testing.assert_close(module(**inputs).logits, fused)


def test_block_sparse_stays_block_sparse_on_short_texts():
    config = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config |= {"max_position_embeddings": 128, "block_size": 4, "num_random_blocks": 2}
    model = BigBird(tokenizer=tokenizer_folder(), config=config, num_classes=2, attention="block_sparse")
    module = model.build()
    batch = text_batch([5, 9])
    (loss,) = model.losses(module, batch)
    assert module.bert.attention_type == "block_sparse"
    assert loss.logits.shape == (2, 2)


@pytest.mark.parametrize("name", ["distilbert", "bigbird"])
def test_padding_does_not_change_the_loss(name):
    model = make_model(name)
    module = model.build().eval().double()
    short, long = text_batch([5]), text_batch([5, 31])
    (alone,) = model.losses(module, short)
    (both,) = model.losses(module, long)
    torch.testing.assert_close(alone.logits[0], both.logits[0], rtol=1e-10, atol=1e-10)


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


DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def test_checkpointed_blocks_of_a_decoder_have_the_gradients_of_plain_ones():
    """A cache of keys and values, which transformers makes by default, would grow as a block is computed again."""
    model = TextClassifier("llama", tokenizer=tokenizer_folder(), config=DECODER, num_classes=5)
    module = model.build().double().train()
    batch = text_batch([5, 17, 30])
    plain = gradients(model, module, batch)
    checkpoint_blocks(module, find_blocks(module), "full")
    checkpointed = gradients(model, module, batch)
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    torch.testing.assert_close(checkpointed, plain, rtol=1e-12, atol=1e-15)
    before = flat(module)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    (loss,) = model.losses(module, batch)
    assert loss.total.isfinite()
    assert not torch.equal(flat(module), before)


def gradients(model, module, batch):
    """Of each parameter, of one backward."""
    module.zero_grad()
    (loss,) = model.losses(module, batch)
    loss.total.backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def test_text_settings_reach_the_configuration():
    model = dataclasses.replace(make_model("distilbert"), dropout=0.3)
    config = model.build().config
    assert (config.n_layers, config.vocab_size, config.pad_token_id) == (2, 120, 0)
    assert (config.dropout, config.attention_dropout, config.seq_classif_dropout) == (0.3, 0.3, 0.3)
    with torch.device("meta"):
        double = dataclasses.replace(make_model("distilbert")).build()
    assert all(p.is_meta for p in double.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"n_layers": 10**9}}, r"is configured with 1,000,000,000 layers"),
        ({"config": {"n_layer": 2}}, r"distilbert has no setting 'n_layer'; did you mean n_layers\?"),
        ({"tokenizer": "./nowhere"}, r"model\.tokenizer=\./nowhere is not a folder"),
        ({"tokenizer": None}, r"model\.tokenizer is missing: model\.name=distilbert is a model type"),
        ({"name": "file:///no/such/folder"}, r"model\.name=file:///no/such/folder is not a folder"),
    ],
)
def test_text_refusals(changes, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(make_model("distilbert"), **changes).prepare()


def test_a_pickled_weight_file_of_a_text_model_is_refused(tmp_path):
    model = make_model("distilbert")
    module = model.build()
    model.save(module, tmp_path, module.state_dict())
    (tmp_path / "model.safetensors").unlink()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(RecipeError, match=r"model\.weights=.* cannot be loaded"):
        model.saved_in(tmp_path).build()


def test_a_corrupt_or_foreign_text_model_is_refused(tmp_path):
    model = make_model("distilbert")
    model.save(module := model.build(), tmp_path, module.state_dict())
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    body = next(name for name in state if "attention.q_lin.weight" in name)
    save_file({**state, body: torch.zeros(3, 3)}, weights, metadata={"format": "pt"})
    with pytest.raises(
        RecipeError, match=r"are not those of this distilbert: .*q_lin\.weight are missing or of another"
    ):
        model.saved_in(tmp_path).build()
    save_file({**state, "classifier.bias": torch.zeros(3)}, weights, metadata={"format": "pt"})
    assert model.saved_in(tmp_path).build().classifier.out_features == 5  # a head may be new
    weights.write_bytes(b"\xff" * 2000)
    with pytest.raises(RecipeError, match=r"model\.weights=.* cannot be loaded"):
        model.saved_in(tmp_path).build()


@pytest.mark.slow
def test_weights_by_torchvisions_name(tmp_path, monkeypatch):
    """As downloaded: a file in torch.hub's folder under the name that torchvision gives it (350 MB)."""
    source = torchvision.models.vit_b_32()
    url = torchvision.models.ViT_B_32_Weights.IMAGENET1K_V1.url
    (tmp_path / "checkpoints").mkdir()
    torch.save(source.state_dict(), tmp_path / "checkpoints" / url.rsplit("/", 1)[1])
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    module = VisionTransformer("vit_b_32", weights="DEFAULT", num_classes=10, image_size=96).build()
    assert torch.equal(module.conv_proj.weight, source.conv_proj.weight)
    assert module.encoder.pos_embedding.shape[1] == 10
    assert module.heads.head.out_features == 10
