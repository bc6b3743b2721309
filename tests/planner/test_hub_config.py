"""``trainer plan hf:MODEL``: a ``config.json``, and nothing else, is planned as any recipe."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from trainer.cli import run
from trainer.commands.plan import command_for_plan
from trainer.commands.recipes import load_recipe
from trainer.errors import RecipeError
from trainer.memory.plan import with_precision
from trainer.models import CausalLM, LoRA
from trainer.planner.hub_config import FromConfig, hub_recipe, recipe_to_train
from trainer.planner.predict import prepare_recipe
from trainer.planner.report import Candidate, PlanReport
from trainer.settings import change
from trainer.weights.streaming import on_meta

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 1024, "vocab_size": 50257}
PUBLISHED: dict[str, tuple[dict[str, Any], int, str]] = {
    "gpt2": ({**GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12}, 124_439_808, "GPT2LMHeadModel"),
    "vit-base-patch16-224": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 768, "image_size": 224}
        | {"intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16}
        | {"id2label": {str(number): f"class {number}" for number in range(1000)}},
        86_567_656,
        "ViTForImageClassification",
    ),
}
SHIPPED = {
    **dict.fromkeys(("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"), 134_515_008),
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
}
"""Parameters of the language models whose configuration is here, as their cards have them; tied ones once."""
TINY = GPT2Config(n_embd=32, n_head=2, n_layer=2, n_positions=64, vocab_size=97, architectures=["GPT2LMHeadModel"])
TINY_SIZE = (97 + 64) * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32  # words, positions; blocks; the last norm
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "vocab_size": 101, "architectures": ["BertForMaskedLM"]}
GUESSED = "--task is causal-lm, from its config.json"
ONE = ("--memory.cpu_offload", "optimizer", "--memory.activation_checkpointing", "full", "--gpu", "rtx-4090")
ONE += ("--memory.activation_offload", "true", "--memory.micro_batch_size", "2")
"""One combination of knobs to trace."""


def config_in(folder: Path, config: dict[str, Any] | GPT2Config) -> str:
    """``hf:FOLDER``, a new one with that configuration."""
    folder.mkdir(exist_ok=True)
    if isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config))
    else:
        config.save_pretrained(folder)
    return f"hf:{folder}"


def planned(capsys: Any, *argv: str) -> tuple[dict[str, Any], str]:
    """What ``plan.json`` holds, and what else was said."""
    assert run(["plan", *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_gives_the_published_model(name, tmp_path):
    config, published, title = PUBLISHED[name]
    recipe = prepare_recipe(hub_recipe(config_in(tmp_path / name, config).removeprefix("hf:")), outlines=True)
    module = on_meta(recipe.model.unloaded().build)
    assert sum(parameter.numel() for parameter in module.parameters()) == published
    assert type(recipe.model).__name__ == title == type(module).__name__
    sample = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in recipe.data.train[0].items()}
    if name.startswith("vit"):
        assert sample == {"pixel_values": ((3, 224, 224), torch.float32), "labels": ((), torch.int64)}
        assert (recipe.data.num_classes, recipe.model.num_classes) == (1000, 1000)
    else:
        tokens = min(4096, config.get("max_position_embeddings") or config["n_positions"])
        assert sample == dict.fromkeys(("input_ids", "attention_mask", "labels"), ((tokens,), torch.int64))
        assert recipe.data.notes[0] == GUESSED
        assert recipe.data.notes[1].startswith(f"--tokens is {tokens:,}: the model's maximum is ")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_language_models_that_are_named_most_need_no_network(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = hub_recipe(name)
    model: Any = recipe.model
    layers = model._configuration().num_hidden_layers
    model.config = {"num_hidden_layers": 1}  # all are alike
    module = on_meta(prepare_recipe(recipe, outlines=True).model.unloaded().build)
    block, whole = (sum(p.numel() for p in one.parameters()) for one in (module.model.layers[0], module))
    assert whole + (layers - 1) * block == SHIPPED[name]


@pytest.mark.parametrize("task", ["masked-lm", "token-classification", "sequence-classification"])
def test_an_encoder_is_planned_without_padding_only_where_it_reads_one_token_of_a_text(task, tmp_path):
    recipe = prepare_recipe(hub_recipe(config_in(tmp_path, BERT).removeprefix("hf:"), task, tokens=12))
    assert recipe.model.packs() == (task == "sequence-classification")
    batch = recipe.data.collate([recipe.data.train[at] for at in range(3)])
    (loss,) = recipe.model.losses(recipe.model.unloaded().build(), recipe.model.packed(batch))
    assert loss.total.isfinite()


def test_a_planned_model_takes_settings(tmp_path):
    recipe = hub_recipe(config_in(tmp_path, TINY).removeprefix("hf:"), tokens=12, lora=2)
    changed: Any = change(recipe, {"model.lora.base": "nf4"})
    assert changed.model.lora == LoRA(2, base="nf4")


def test_a_language_model_is_planned_as_it_is_trained(tmp_path):
    recipe = prepare_recipe(hub_recipe(config_in(tmp_path, TINY).removeprefix("hf:"), tokens=12))
    model, batch = recipe.model, recipe.data.collate([recipe.data.train[at] for at in range(3)])
    assert isinstance(model, CausalLM)
    (loss,) = model.losses(model.unloaded().build(), model.packed(batch))
    assert model.weigh(batch)["loss"] == float(loss.counted()) == 3 * 11
    assert loss.total.isfinite()


@pytest.mark.slow
def test_a_plan_of_a_folder_prints_its_knobs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config_in(tmp_path / "tiny", TINY)
    content, said = planned(
        capsys, "hf:./tiny", "--batch", "4", *ONE, "--memory.precision", "32-true", "--optim.name", "sgd"
    )
    assert (content["recipe"], content["parameters"], content["command"]) == ("hf:./tiny", TINY_SIZE, None)
    assert "the chosen plan (no packaged recipe trains this model):" in said
    assert "trainer fit" not in said
    rows = dict(line.split("  ", 1) for line in said.splitlines() if "  " in line)
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["samples per micro-batch"] == rows["micro-batches per step and rank"] == "2"
    assert (rows["precision"], rows["optimizer"]) == ("32-true", "sgd")
    assert content["notes"][:2] == [GUESSED, "--tokens is 64: the model's maximum is 64"]
    assert all(note.startswith("faster than ") for note in content["notes"][2:])
    assert next(Path("runs/tiny").iterdir()).name.startswith("plan-")


def test_adapters_are_counted_as_what_trains(tmp_path):
    name = config_in(tmp_path / "tiny", TINY).removeprefix("hf:")
    parameters = list(on_meta(hub_recipe(name, lora=4).model.unloaded().build).parameters())
    adapters = 2 * 4 * (32 + 96 + 32 + 32)  # the two matrices of an attention, in two blocks
    assert sum(parameter.numel() for parameter in parameters) == TINY_SIZE + adapters
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    assert trained == adapters


@pytest.mark.slow
def test_a_table_of_devices_is_made_as_well(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ("--batch", "4", "--devices", "1,2", "--memory.strategy", "ddp", "--memory.micro_batch_size", "2")
    table, _ = planned(capsys, config_in(tmp_path / "tiny", TINY), *flags, "--gpu", "rtx-4090")
    found = [(row["devices"], row["strategy"], row["fits"]) for row in table["rows"]]
    assert found == [(1, "single", True), (2, "ddp", True)]
    assert GUESSED in table["notes"]


def test_a_classifier_of_texts_has_a_command_that_trains_it_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config_in(tmp_path / "bert", BERT | {"id2label": {str(number): str(number) for number in range(5)}})
    ours, packaged = hub_recipe("./bert", "sequence-classification", 40, 6), load_recipe("distilbert_imdb")[0]
    assert ours.optim == packaged.optim
    assert (ours.memory.precision, packaged.memory.precision) == ("auto", "bf16-mixed")
    by, own = recipe_to_train("hf:./bert", ours)
    chosen = Candidate({"memory.micro_batch_size": 2, "memory.cpu_offload": "optimizer"}, "", 1, 1, 1, 1.0, True)
    report = PlanReport(with_precision(ours, (7, 0)), "V100 16 GB", 1, 1, 1, 0.03, 0, chosen, [chosen])
    words = shlex.split(" ".join(command_for_plan(by, [*own.items(), ("optim.lr", "1e-4")], ours, report)))
    assert words[:3] == ["trainer", "fit", "distilbert_imdb"]
    assert run([*words[1:], "--print_config"]) == 0
    lines = set(map(str.strip, capsys.readouterr().out.splitlines()))
    assert {"name: ./bert", "weights: null", "max_length: 40", "batch_size: 6", "micro_batch_size: 2"} <= lines
    assert {"lr: 0.0001", "cpu_offload: optimizer", "devices: 1", "precision: 32-true"} <= lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "precision"), [("h100-sxm", "bf16-mixed"), pytest.param("v100-16gb", "32-true", marks=pytest.mark.slow)]
)
def test_the_card_decides_the_precision_of_a_plan(gpu, precision, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config_in(tmp_path / "bert", BERT)
    few = ("--task", "sequence-classification", "--tokens", "16", "--batch", "4", *ONE, "--gpu", gpu)
    content, said = planned(capsys, "hf:./bert", *few)
    assert f"batch    4 samples per step, {precision}\n" in said
    assert f", {precision}, " in content["chosen"]["plan"]
    assert f"--memory.precision {precision}" in content["command"]
    named = " ".join(note for note in content["notes"] if note.startswith("faster than"))
    assert "--memory.precision" not in named  # it is set, or the card has no units for it


HUGE = 10**9
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
BART = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
SWIN = {"model_type": "swin", "architectures": ["SwinForImageClassification"]}
UNKNOWN = {"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}
QUANTISED = GPT2 | {"quantization_config": {"quant_method": "gptq"}}
ROBERTA = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 514}
REFUSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (GPT2, ["--tokens", "1025"], ["--tokens=1025", "1024", "lower it"]),
    (GPT2, ["--tokens", "1"], ["--tokens=1", "at least 2"]),
    (GPT2, ["--task", "causal"], ["--task='causal'", "causal-lm, masked-lm"]),
    (GPT2, ["--batch", "0"], ["--batch='0'", "from 1 to 1,000,000"]),
    (GPT2, ["--task", "masked-lm"], ["no gpt2 model for --task", "--task causal-lm or sequence-classification"]),
    (ROBERTA | {"pad_token_id": 1}, ["--tokens", "513"], ["--tokens=513", "512"]),
    (PUBLISHED["vit-base-patch16-224"][0], ["--tokens", "8"], ["--tokens is for text", "takes images"]),
    ({"model_type": "gpt2"}, [], ["architectures", "give --task, one of causal-lm"]),
    ({"vocab_size": 7}, [], ["config.json has no model_type"]),
    (QUANTISED, [], ["quantization_config", "name the original model"]),
    (UNKNOWN, [], ["no model_type 'nobodys'", "install a newer transformers"]),
    (UNKNOWN | {"auto_map": {"AutoConfig": "x.Y"}}, [], ["auto_map", "remote code is not executed"]),
    ({"model_type": "bart"}, ["--task", "causal-lm"], ["encoder-decoder", "--task seq2seq-lm"]),
    # What would be built or simulated one by one, without an end.
    (GPT2, ["--batch", "1000000"], ["--batch=1000000 is more than the 100,000 samples", "lower it"]),
    (T5 | {"num_decoder_layers": HUGE}, [], ["num_decoder_layers", "1,000,000,000 layers, and the max is 10,000"]),
    (BART | {"decoder_layers": HUGE}, [], ["decoder_layers", "1,000,000,000 layers", "lower it"]),
    (SWIN | {"depths": [HUGE, 1]}, [], ["depths", "1,000,000,001 layers", "lower it"]),
    (GPT2 | {"text_config": {"layers": HUGE}}, [], ["layers stands for 1,000,000,000 layers"]),
    (BERT | {"num_labels": HUGE}, [], ["num_labels has 1,000,000,000 labels, and the max is 500,000"]),
    (GPT2 | {"n_layer": 0}, [], ["num_hidden_layers 0", "at least 1"]),
    (GPT2 | {"n_layer": -1}, [], ["num_hidden_layers -1", "at least 1"]),
    (T5 | {"num_decoder_layers": -1}, [], ["num_decoder_layers -1", "at least 1"]),
    (BERT | {"hidden_size": 0}, [], ["hidden_size 0"]),
    (BERT | {"num_attention_heads": -2}, [], ["num_attention_heads -2"]),
    (BERT | {"vocab_size": 0}, [], ["vocab_size 0"]),
    *(
        (SWIN | {"image_size": size}, [], ["image_size", "height and width"])
        for size in ([3, 4, 5], "224", 0, -1, HUGE)
    ),
]


@pytest.mark.parametrize(("config", "flags", "parts"), REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_line(config, flags, parts, tmp_path, capsys):
    assert run(["plan", config_in(tmp_path / "it", config), "--gpu", "rtx-4090", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert [part for part in parts if part not in err] == [], err


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2_VL = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
MISTAKES = {
    "images with texts": json.dumps(QWEN2_VL),
    "cut off": json.dumps(LLAMA)[:-3],
    "a list": "[]",
    "no model_type": "{}",
    "negative": json.dumps(LLAMA | {"hidden_size": -5}),
    "a word": json.dumps(LLAMA | {"hidden_size": "large"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages_about_a_configuration_name_the_cause(name, tmp_path, golden):
    (tmp_path / "config.json").write_text(MISTAKES[name])
    with golden.raises(RecipeError):
        hub_recipe(str(tmp_path))


@pytest.mark.parametrize(
    ("reference", "flags", "parts"),
    [
        ("hf:./absent", [], ["hf:./absent: no folder absent"]),
        ("hf:", [], ["hf:: no such folder"]),
        (
            "hf:nobody/absent",
            [],
            ["hf:nobody/absent", "config.json could not be downloaded", "hf:./FOLDER", "HF_TOKEN"],
        ),
        ("vit_digits", ["--tokens", "8"], ["--tokens is for hf:MODEL", "vit_digits"]),
    ],
)
def test_a_name_that_leads_nowhere_is_told_with_the_way_around(reference, flags, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(["plan", reference, "--gpu", "rtx-4090", *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert [part for part in parts if part not in err] == [], err


def test_a_wrong_flag_is_refused_before_torch_is_imported(tmp_path):
    reference = config_in(tmp_path / "it", GPT2)
    script = f"import sys; from trainer.cli import run; print(run(['plan', {reference!r}, '--tokens', '9999']))"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), "--tokens=9999" in done.stderr) == (["2", "False"], True)


def test_a_padding_token_is_found_for_a_decoder_that_classifies(tmp_path):
    config_in(tmp_path, GPT2 | {"eos_token_id": [50256, 3]})
    model = hub_recipe(str(tmp_path), "sequence-classification", 16).model
    assert isinstance(model, FromConfig)
    assert model._configuration().pad_token_id == 50256
