"""``--model.name`` alone chooses weights and tokenizer, too; names of other tools lead to ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainer.cli import run

WORDS = ["fit", "text_files", "--print_config"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder as save_pretrained writes it, without content."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert", "max_position_embeddings": 512}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def config(capsys, *words: str) -> dict:
    assert run([*WORDS, *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_a_folder_sets_weights_tokenizer_and_a_fitting_length(folder, capsys):
    found = config(capsys, "--model.name", str(folder))
    assert (found["model"]["weights"], found["model"]["tokenizer"]) == (str(folder), None)
    assert found["data"]["max_length"] == 64


def test_a_run_directory_stands_for_its_model(folder, capsys, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    folder.rename(run_dir / "model")
    found = config(capsys, "--model.name", str(run_dir))["model"]
    assert found["name"] == found["weights"] == str(run_dir / "model")


def test_given_settings_stay(folder, capsys):
    flags = ["--model.name", str(folder), "--model.weights", "null", "--model.tokenizer", "bytes"]
    found = config(capsys, *flags, "--data.max_length", "128")
    assert (found["model"]["weights"], found["model"]["tokenizer"]) == (None, "bytes")
    assert found["data"]["max_length"] == 128  # rejected when the tokenizer is loaded


def test_a_hub_id_sets_weights_and_a_model_type_does_not(capsys):
    assert config(capsys, "--model.name", "org/other")["model"]["weights"] == "org/other"
    assert config(capsys, "--model.name", "bert")["model"]["weights"] == config(capsys)["model"]["weights"]


def test_a_folder_with_a_configuration_alone_sets_nothing(folder, capsys):
    for name in ("model.safetensors", "tokenizer_config.json"):
        (folder / name).unlink()
    assert config(capsys, "--model.name", str(folder))["model"]["weights"] == config(capsys)["model"]["weights"]


@pytest.mark.parametrize("name", ["train_file", "train_files"])
def test_file_and_files_mean_the_same(name, capsys, tmp_path):
    assert config(capsys, f"--data.{name}", "my.csv")["data"]["train_file"] == "my.csv"
    (tmp_path / "a.yaml").write_text(f"recipe: text_files\ndata: {{{name}: my.csv}}\n")
    assert config(capsys, "--config", str(tmp_path / "a.yaml"))["data"]["train_file"] == "my.csv"
    assert run(["fit", "--config", str(tmp_path / "a.yaml"), "--print_config"]) == 0  # the file names its recipe


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--fp16"], "use --memory.precision 16-mixed"),
        (["--load_in_4bit", "true"], "use --model.lora.base nf4 --model.lora.rank 16"),
        (["--lora.r", "8"], "did you mean --model.lora.rank?"),
        (["--model.name_or_path", "x"], "did you mean --model.name?"),
        (["--optim.name", "AdamW8bit"], "the state of adamw in 8 bits is memory.optimizer_state_bits 8"),
        (["epochs", "3"], "did you mean --epochs 3?"),
    ],
)
def test_names_of_other_tools_lead_to_ours(words, hint, capsys):
    assert run([*WORDS, *words]) == 2
    assert hint in capsys.readouterr().err


def test_gpu_is_cuda(capsys):
    assert config(capsys, "--run.accelerator", "gpu")["run"]["accelerator"] == "cuda"
