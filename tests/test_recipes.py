"""The packaged recipes, on real samples: what they say about models and data fits together and runs."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.shards import write_shards

from trainer.cli import run
from trainer.commands.recipes import load_recipe, packaged_recipes


def flags(name, data):
    """What makes a recipe small, and where its data and vocabulary are here."""
    small = ["--model.weights", "null", "--memory.precision", "32-true", "--data.max_length", "48"]
    text = [*small, "--data.root", str(data / "imdb"), "--data.cache_dir", "CACHE"]
    distilbert = [
        *("--model.name", "distilbert", "--model.tokenizer", str(data / "tokenizers" / "bert-base-uncased")),
        *("--model.config", "{n_layers: 1, dim: 16, hidden_dim: 16, n_heads: 2}"),
    ]
    return {
        "vit_digits": [],
        "mlp_fashion_mnist": ["--data.root", str(data / "fashion_mnist_small"), "--data.download", "false"],
        "vit_cifar10": [
            *("--data.root", str(data / "cifar10" / "cifar10_subset.npz"), "--data.image_size", "32"),
            *("--model.name", "custom", "--model.weights", "null", "--model.patch_size", "8", "--model.layers", "1"),
            *("--model.heads", "2", "--model.width", "16", "--model.mlp_width", "16"),
        ],
        "distilbert_imdb": [*distilbert, *text],
        "distilbert_streaming": [
            *(*distilbert, *small, "--data.cache_dir", "CACHE"),
            *("--data.train_files", "SHARDS/part-0[0-3].parquet", "--data.test_files", "SHARDS/part-04.parquet"),
        ],
        "bigbird_imdb": [
            *("--model.name", "big_bird", "--model.tokenizer", str(data / "tokenizers" / "bigbird-roberta-base")),
            *("--model.config.num_hidden_layers", "1", "--model.config.hidden_size", "16"),
            *("--model.config.intermediate_size", "16", "--model.config.num_attention_heads", "2", *text),
        ],
    }[name]


def given(name, data, tmp_path):
    """The flags of a recipe, with a cache and shards of its own."""
    if "streaming" in name:
        write_shards(tmp_path / "shards", shards=5, rows=40, group=16)
    cache, shards = str(tmp_path / "cache"), str(tmp_path / "shards")
    return [flag.replace("CACHE", cache).replace("SHARDS", shards) for flag in flags(name, data)]


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_packaged_recipe_trains_evaluates_and_predicts(name, sample_data, tmp_path, capsys):
    run_dir = tmp_path / "run"
    own = given(name, sample_data, tmp_path)
    assert run(["fit", name, "--max_steps", "2", "--run.dir", str(run_dir), *own]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    recipe, source = load_recipe(str(run_dir / "recipe.yaml"))
    assert source == name
    assert recipe.batch_size == load_recipe(name)[0].batch_size

    capsys.readouterr()
    assert run(["evaluate", str(run_dir)]) == 0
    assert f"loss {summary['metrics']['test']['loss']:.4f}" in capsys.readouterr().out

    if "distilbert" in name or "bigbird" in name:
        sample = ["--text", "a wonderful film", "dreadful"]
        for folder in ("cache", "shards"):  # prediction needs the run directory only
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
    else:
        sample = ["--image", str(next((sample_data / "cifar10" / "folder" / "test" / "frog").iterdir()))]
    assert run(["predict", str(run_dir), *sample]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sample) - 1
    assert all(0 <= float(line.split("\t")[1]) <= 1 for line in lines)


def test_reviews_are_cut_by_length_and_it_is_said(sample_data, tmp_path, capsys):
    own = given("distilbert_imdb", sample_data, tmp_path)
    assert run(["fit", "distilbert_imdb", "--max_steps", "1", "--run.dir", str(tmp_path / "r"), *own]) == 0
    assert "% of the tokens, micro-batches cut by length" in capsys.readouterr().err
