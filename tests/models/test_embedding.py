"""Mistakes with pairs of texts, and commands on a run with them."""

from __future__ import annotations

import pytest

import trainer
from trainer import Memory, Optim, Recipe, Run
from trainer.cli import run
from trainer.data import TextFiles
from trainer.doctor import samples
from trainer.doctor.context import CheckContext, findings
from trainer.errors import RecipeError
from trainer.launching.world import World
from trainer.models import SentenceEmbedder
from trainer.planner.predict import prepare_recipe

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def file(tmp_path):
    rows = [f"words {number},{'more ' * (number % 3)}of {number}\n" for number in range(12)]
    (tmp_path / "pairs.csv").write_text("".join(["anchor,positive\n", *rows]))
    return tmp_path / "pairs.csv"


def recipe_of(file, batch_size=4, **settings):
    columns = {"text_column": "anchor", "pair_column": "positive", "max_length": 16, "val_fraction": 0.25} | settings
    return Recipe(
        model=SentenceEmbedder("bert", tokenizer="bytes", config=TINY),
        data=TextFiles(str(file), cache_dir=str(file.parent), **columns),
        optim=Optim("adamw", lr=1e-3),
        batch_size=batch_size,
        epochs=1,
        memory=Memory(micro_batch_size=min(2, batch_size)),
        run=Run(dir=str(file.parent / "run")),
    )


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"pair_column": "anchor"}, "text_column and data.pair"),
        ({"negative_column": "positive"}, "pair_column and data.n"),
    ],
)
def test_a_column_of_two_texts_is_rejected(file, settings, keys):
    data = recipe_of(file, **settings).data
    data.use_model(SentenceEmbedder("bert", tokenizer="bytes"))
    with pytest.raises(RecipeError, match=rf"data\.{keys}\w+ are both '\w+': they must differ"):
        data.require_files()


def test_doctor_loads_pairs(file):
    subject = CheckContext(prepare_recipe(recipe_of(file)), "own", World("python", "cpu", 1), True)
    found = list(findings("samples", lambda: samples.samples(subject)))
    assert [one.status for one in found] == ["ok", "ok"]


def test_a_decoder_is_rejected():
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    with pytest.raises(RecipeError, match=r"model\.name='t5' has a decoder: use an encoder"):
        SentenceEmbedder("t5", tokenizer="bytes", config=sizes).build()


def test_a_model_of_images_is_rejected():
    with pytest.raises(RecipeError, match=r"model\.name='vit' does not read tokens: use a text model"):
        SentenceEmbedder("vit", tokenizer="bytes", config=TINY).build()


def test_a_run_is_evaluated_without_its_training_file(file, capsys):
    recipe = recipe_of(file)
    trainer.fit(recipe)
    other = file.rename(file.with_name("other.csv"))
    assert run(["evaluate", recipe.run.dir, str(other)]) == 0
    assert "recall_at_1" in capsys.readouterr().out


def test_a_batch_of_one_pair_warns(file, capsys):
    trainer.fit(recipe_of(file, batch_size=1))
    printed = capsys.readouterr()
    assert "batch_size=1: other pairs of the batch are the negatives, and there are none" in printed.out + printed.err
