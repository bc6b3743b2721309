"""The packaged recipes, on real samples: what they say about models and data fits together and runs."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.shards import write_shards

from trainer.cli import run
from trainer.commands.recipes import load_recipe, packaged_recipes, recipes_folder


def flags(name, data, folder):
    """What makes a recipe small, and where its data and vocabulary are here; ``folder`` gets some of the reviews."""
    names = f"--model.tokenizer={data}/tokenizers/"
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = ["--model.weights=null", "--memory.precision=32-true", "--data.max_length=48", f"--data.cache_dir={folder}"]
    if name == "masked_lm":
        files = [
            f"--data.{part}_files={recipes_folder()}/[{first}]*.py"
            for part, first in (("train", "a-l"), ("val", "m-z"))
        ]
        return ["--data.max_length=96", f"--data.cache_dir={folder}", f"--model.config={sizes}", *files]
    if name == "sentence_pairs":
        pairs = [f"words {number},more of {number}\n" for number in range(40)]
        (folder / "pairs.csv").write_text("".join(["anchor,positive\n", *pairs]))
        shape = [f"--model.config={sizes}", "--memory.micro_batch_size=3"]
        return [*shape, f"--data.train_file={folder}/pairs.csv", f"--data.cache_dir={folder}"]
    if name.startswith("lm_"):
        return language_flags(name, folder)
    if "imdb" in name or name == "text_files":
        (folder / "reviews").mkdir()
        for split, step in (("train", 20), ("test", 10)):
            with open(data / "imdb" / f"{split}.csv", newline="\n") as source:
                head, *lines = source
            (folder / "reviews" / f"{split}.csv").write_text("".join([head, *lines[::step]]))
        parts = [f"--data.{split}_file={folder}/reviews/{split}.csv" for split in ("train", "test")]
        text += parts if name == "text_files" else [f"--data.root={folder}/reviews"]
    if "streaming" in name:
        shards = write_shards(folder / "shards", shards=5, rows=40, group=16)
        text += [f"--data.train_files={shards}/part-0[0-3].parquet", f"--data.test_files={shards}/part-04.parquet"]
    if name == "image_folder":
        shape = ["--model.name=vit", "--model.weights=null", f"--model.config={sizes}", "--data.image_size=32"]
        return [f"--data.root={data}/cifar10/folder", f"--data.cache_dir={folder}", *shape]
    if "distilbert" in name or name == "text_files":
        shape = "--model.config={n_layers: 1, dim: 16, hidden_dim: 16, n_heads: 2}"
        return [*text, "--model.name=distilbert", f"{names}bert-base-uncased", shape]
    if "bigbird" in name:
        shape = [f"--model.config.{key}={value}" for key, value in sizes.items()]
        return [*text, "--model.name=big_bird", f"{names}bigbird-roberta-base", *shape]
    if "cifar10" in name:
        sizes = {"patch_size": 8, "layers": 1, "heads": 2, "width": 16, "mlp_width": 16}
        shape = ["--model.name=custom", "--model.weights=null", *(f"--model.{k}={v}" for k, v in sizes.items())]
        return [f"--data.root={data}/cifar10/cifar10_subset.npz", "--data.image_size=32", *shape]
    return [f"--data.root={data}/fashion_mnist_small", "--data.download=false"] if "fashion" in name else []


def language_flags(name, folder):
    """A model of two blocks that reads bytes, on Python files that are here, or on conversations of two sentences."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 256}
    small = ["--data.max_length=96", f"--data.cache_dir={folder}", f"--model.config={sizes}"]
    if name == "lm_bytes":
        recipes = recipes_folder()
        return [*small, f"--data.train_files={recipes}/[a-l]*.py", f"--data.val_files={recipes}/[m-z]*.py"]
    if name == "lm_dpo":
        pairs = [{"prompt": "Is it so?", "chosen": "It is." * (1 + row % 3), "rejected": "No."} for row in range(40)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        return [*small, f"--data.train_files={folder}/pairs.jsonl", "--data.val_fraction=0.2"]
    say = [{"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": "It is."}]
    for split, rows in (("train", 40), ("test", 5)):
        lines = [json.dumps({"messages": say * (1 + number % 2)}) + "\n" for number in range(rows)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    files = [f"--data.{split}_files={folder}/{split}.jsonl" for split in ("train", "test")]
    none = [f"--{key}=null" for key in ("data.name", "data.config", "data.test_split", "model.weights")]
    lora = ["--model.lora.rank=2"] if name == "lm_qlora" else []
    return [*small, *files, *none, *lora, "--model.name=llama", "--model.tokenizer=bytes", "--memory.precision=32-true"]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", packaged_recipes())
def test_a_packaged_recipe_trains_evaluates_and_predicts(name, sample_data, tmp_path, capsys, no_pictures):
    run_dir, more = tmp_path / "run", tmp_path / "more"
    more.mkdir()
    assert run(["fit", name, "--max_steps", "2", "--run.dir", str(run_dir), *flags(name, sample_data, more)]) == 0
    said = capsys.readouterr().err
    assert name != "distilbert_imdb" or "padding: none, the model computes on real tokens only" in said
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    recipe, source = load_recipe(str(run_dir / "recipe.yaml"))
    assert source == name
    assert recipe.batch_size == load_recipe(name)[0].batch_size

    figures = summary["metrics"].get("test") or summary["metrics"]["val"]
    if name == "lm_dpo":
        assert list(figures) == ["reward_accuracy", "reward_margin", "loss"]
        assert run(["evaluate", str(run_dir)]) == 2
        assert "compare with the model before training" in capsys.readouterr().err
        assert run(["predict", str(run_dir), "--text", "def main(", "--max-new-tokens", "4"]) == 0
        return
    assert run(["evaluate", str(run_dir)]) == 0
    assert f"loss {figures['loss']:.4f}" in capsys.readouterr().out

    if name == "masked_lm":
        assert list(figures) == ["perplexity", "loss"]
        assert run(["predict", str(run_dir), "--text", "def main("]) == 2
        assert "fine-tune it" in capsys.readouterr().err
        return
    if name.startswith("lm_"):
        assert list(figures) == ["perplexity", *(["bits_per_byte"] if name == "lm_bytes" else []), "loss"]
        shutil.rmtree(more)
        assert run(["predict", str(run_dir), "--text", "def main(", "--max-new-tokens", "4"]) == 0
        assert capsys.readouterr().out.startswith("def main(" if name == "lm_bytes" else "")
        return
    if name == "sentence_pairs":
        assert list(figures) == ["recall_at_1", "mrr", "loss"]
        assert run(["predict", str(run_dir), "--text", "words"]) != 0
        assert "trainer predict is not for embeddings" in capsys.readouterr().err
        return
    sample = ["--image", str(next((sample_data / "cifar10" / "folder" / "test" / "frog").iterdir()))]
    if any(model in name for model in ("distilbert", "bigbird", "text_files")):
        sample = ["--text", "a wonderful film", "dreadful"]
        shutil.rmtree(more)  # prediction needs the run directory only
    assert run(["predict", str(run_dir), *sample]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sample) - 1
    assert all(0 <= float(line.split("\t")[1]) <= 1 for line in lines)
