"""Predictions of files, folders and tables: the model's own, for every input, in order, in a file that is whole."""

from __future__ import annotations

import csv
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers.pretrained import text
from PIL import Image
from torch import nn

from trainer import Data, FinishedRun, Loss, Model, Recipe, RecipeError, evaluate, predict
from trainer.after import predict as prediction
from trainer.checkpoint.export import save_model
from trainer.data import ImageFolder, TextFiles
from trainer.models import MLP

NAMES = ["ant", "bee", "cat", "dog", "elk"]
COUNT = 9
READER = r"(?<=<_io.BufferedReader ).*?(?=>)"  # an open file


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[Any, Path, list[list[float]]]:
    """A run whose model reads images, a folder of them, and the probabilities of all, in the order of their names."""
    torch.manual_seed(0)
    folder, run_dir = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("run")
    (folder / "sub" / ".thumbnails").mkdir(parents=True)
    for number in range(COUNT):
        pixels = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / ("sub" if number > 5 else ".") / f"{number}.png")
    (folder / "sub" / ".thumbnails" / "no.png").write_bytes(b"hidden")
    (folder / "notes.txt").write_text("no image")
    data = ImageFolder(root=str(folder), image_size=8)
    model = MLP([16], image_size=8, channels=3, num_classes=5, class_names=NAMES)
    module = model.build().eval()
    save_model(model, module, run_dir / "model")
    paths = [
        *(folder / f"{number}.png" for number in range(6)),
        *(folder / "sub" / f"{n}.png" for n in range(6, COUNT)),
    ]
    batch = {
        "pixel_values": torch.stack([data.load_image(path) for path in paths]),
        "labels": torch.zeros(COUNT).long(),
    }
    wanted = next(model.losses(module, batch)).logits.softmax(-1).tolist()
    return Recipe(model=model, data=data, batch_size=1), run_dir, wanted


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    run_dir = tmp_path_factory.mktemp("run")
    model = text(class_names=NAMES)
    save_model(model, model.build().eval(), run_dir / "model")
    return Recipe(batch_size=1, model=model, data=TextFiles("absent.csv", text_column="review", max_length=32)), run_dir


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return [{key: cell or None for key, cell in row.items()} for row in csv.DictReader(file)]
    if path.suffix == ".jsonl":
        return list(map(json.loads, path.read_text().splitlines()))
    return pandas.read_parquet(path).astype(object).where(lambda table: table.notna(), None).to_dict("records")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_folder_becomes_a_file_with_the_models_own_probabilities(images, tmp_path, capsys, kind):
    recipe, run_dir, wanted = images
    out = tmp_path / f"out.{kind}"
    assert (
        predict(recipe, run_dir, paths=[recipe.data.root], output=str(out), top_k=2, probabilities=True, batch_size=4)
        == []
    )
    rows = read(out)
    names = ["input", "label", "probability", "label_2", "probability_2", *(f"p_{name}" for name in NAMES), "error"]
    assert list(rows[0]) == names
    assert [Path(row["input"]).name for row in rows] == [f"{number}.png" for number in range(COUNT)]
    for row, probabilities in zip(rows, wanted, strict=True):
        first, second = sorted(range(5), key=lambda k: -probabilities[k])[:2]
        assert (row["label"], row["label_2"], row["error"]) == (NAMES[first], NAMES[second], None)
        assert [float(row[f"p_{name}"]) for name in NAMES] == pytest.approx(probabilities, rel=1e-5)
        assert float(row["probability"]) == pytest.approx(probabilities[first], rel=1e-5)
    said = capsys.readouterr()
    assert said.out == f"{COUNT} predictions: {out}\n"
    assert f"{COUNT}/{COUNT}" in said.err
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_command_leaves_what_the_next_one_removes(images, tmp_path, monkeypatch):
    recipe, run_dir, _ = images
    out, given = tmp_path / "out", tmp_path / "list.csv"
    out.mkdir()
    given.write_text(f"photo\n{recipe.data.root}/0.png\n")
    how = {"paths": [str(given)], "column": "photo", "output": str(out / "o.csv")}
    with monkeypatch.context() as dying:
        dying.setattr(prediction, "answers", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        pid = os.fork()
        if pid == 0:
            predict(recipe, run_dir, **how)
        os.waitpid(pid, 0)
    (left,) = out.iterdir()
    assert left.name.startswith(".o.csv.")
    predict(recipe, run_dir, **how)
    assert [path.name for path in out.iterdir()] == ["o.csv"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_the_precision_is_the_one_asked_for(images, capsys, precision):
    recipe, run_dir, wanted = images
    exact = predict(recipe, run_dir, paths=[f"{recipe.data.root}/?.png"])
    assert [probability for _, probability in exact] == pytest.approx([max(row) for row in wanted[:6]], rel=1e-6)
    found = predict(recipe, run_dir, paths=[f"{recipe.data.root}/?.png"], precision=precision, device="cpu")
    assert [name for name, _ in found] == [name for name, _ in exact]
    far = max(abs(a - b) for (_, a), (_, b) in zip(found, exact, strict=True))
    assert 0 < far < 0.02 if precision.startswith("bf16") else far < 1e-6
    assert len(capsys.readouterr().out.splitlines()) == 12


def test_what_cannot_be_read_is_named_and_the_others_are_answered(images, tmp_path, capsys, golden):
    recipe, run_dir, wanted = images
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.open(f"{recipe.data.root}/0.png").save(tmp_path / "good.png")
    table = tmp_path / "list.csv"
    table.write_text("photo,note\ngood.png,\nbroken.png,\ngone.png,\n,empty\ngood.png,\n")
    out = tmp_path / "out.csv"
    with golden.raises(RecipeError, "table", hide=[READER]):
        predict(recipe, run_dir, paths=[str(table)], column="photo", output=str(out), batch_size=2)
    rows = read(out)
    assert [row["photo"] for row in rows] == ["good.png", "broken.png", "gone.png", None, "good.png"]
    assert [row["label"] is None for row in rows] == [row["error"] is not None for row in rows] == [0, 1, 1, 1, 0]
    for row in rows[::4]:
        assert float(row["probability"]) == pytest.approx(max(wanted[0]), rel=1e-5)
    assert capsys.readouterr().err.count("warning: left out: ") == 3
    with golden.raises(RecipeError, "image", hide=[READER]):
        predict(recipe, run_dir, images=[str(tmp_path / "broken.png")])


def test_texts_of_tables_and_files_are_those_of_the_command_line(texts, tmp_path, golden):
    recipe, run_dir = texts
    said = ["w1 w2 w3", "w4 w3 w2 w1 w7 w7", "w5", " ".join(f"w{k}" for k in range(1, 30))]
    alone = [predict(recipe, run_dir, texts=[one])[0] for one in said]
    table = tmp_path / "a.jsonl"
    table.write_text("".join(json.dumps({"n": k, "review": one}) + "\n" for k, one in enumerate(said)))
    for number, one in enumerate(said):
        (tmp_path / f"{number}.txt").write_text(one)
    for paths in ([str(table)], [str(tmp_path)]):
        found = predict(recipe, run_dir, paths=paths, batch_size=3)
        assert [name for name, _ in found] == [name for name, _ in alone]
        assert [p for _, p in found] == pytest.approx([p for _, p in alone], rel=1e-4)
    (tmp_path / "b.csv").write_text(f"review,n\n{said[0]},1\n   ,2\n{said[1]},3\n")
    with golden.raises(RecipeError, "empty text"):
        predict(recipe, run_dir, paths=[str(tmp_path / "b.csv")])
    with golden.raises(RecipeError, "column"):
        predict(recipe, run_dir, paths=[str(table)], column="reviev")
    with golden.raises(RecipeError, "image"):
        predict(recipe, run_dir, images=["a.png"])


def test_an_evaluation_reads_the_model_and_one_file(texts, tmp_path):
    recipe, run_dir = texts  # its training file does not exist
    table = tmp_path / "other.csv"
    rows = [(f"w{number} w{number + 1}", NAMES[number % 3]) for number in range(9)]  # two classes are absent
    table.write_text("review,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    answers = FinishedRun(recipe, run_dir).predict([text for text, _ in rows])
    right = [found == label for (found, _), (_, label) in zip(answers, rows, strict=True)]
    assert evaluate(recipe, run_dir, table).metrics()["accuracy"] == pytest.approx(sum(right) / len(rows))
    table.write_text(table.read_text() + "w1,fox\n")
    with pytest.raises(RecipeError, match=r"other\.csv row 11 .*: label 'fox' is not one of ant, bee, cat, dog, elk"):
        evaluate(recipe, run_dir, table)
    with pytest.raises(RecipeError, match=r"train_file='absent\.csv': there is no file"):
        evaluate(recipe, run_dir)


def test_a_string_is_one_text_and_top_k_returns_pairs(texts, images):
    recipe, run_dir = texts
    run = FinishedRun(recipe, run_dir)
    assert run.predict(texts="w1 w2") == run.predict(["w1 w2"])
    assert len(run.predict("w1 w2 w3")) == 1
    image_recipe, image_dir, probabilities = images
    path = f"{image_recipe.data.root}/0.png"
    (pairs,) = FinishedRun(image_recipe, image_dir).predict(images=path, top_k=2)
    best = sorted(zip(NAMES, probabilities[0], strict=True), key=lambda pair: -pair[1])[:2]
    assert [name for name, _ in pairs] == [name for name, _ in best]
    assert [value for _, value in pairs] == pytest.approx([value for _, value in best], rel=1e-5)


def test_the_weights_stay_loaded_unless_device_or_precision_change(images, monkeypatch):
    recipe, run_dir, _ = images
    loads = []
    load_model = prediction.load_model
    monkeypatch.setattr(prediction, "load_model", lambda *args: loads.append(args) or load_model(*args))
    run = FinishedRun(recipe, run_dir)
    path = f"{recipe.data.root}/0.png"
    exact = run.predict(images=path)
    assert run.predict(images=path) == exact
    assert len(loads) == 1
    run.predict(images=path, precision="bf16-true")
    assert run.predict(images=path) == exact  # not the rounded weights
    assert len(loads) == 3


REFUSED: list[dict[str, Any]] = [
    {"output": "out.xlsx"},
    {"output": "there.csv"},
    {"top_k": 6},
    {"max_new_tokens": 5},
    {"temperature": 0.5},
    {"temperature": "hot"},
    {"top_p": 1.5},
    {"seed": -1},
    {"batch_size": 0},
    {"precision": "fp8"},
    {"device": "gpu"},
    {"device": "cuda:99"},
    {"paths": ["there.csv"], "column": "a"},
    {"paths": ["none/*.png"]},
    {"paths": ["empty"]},
    {"paths": ["there.csv"]},
]


@pytest.mark.parametrize("how", REFUSED, ids=str)
def test_what_cannot_work_is_refused_with_its_key_and_leaves_no_file(images, tmp_path, monkeypatch, golden, how):
    recipe, run_dir, _ = images
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.csv").write_text("a,b\n1,2\n")
    with golden.raises(RecipeError, hide=[r"(?<=this machine has ).*(?=: use)", r"(?<=no images \().*?(?=\))"]):
        predict(recipe, run_dir, **{"paths": [f"{recipe.data.root}/0.png"], "output": "out.csv", **how})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "there.csv"]


@dataclass
class Regressor(Model):
    """A model of one's own that gives figures."""

    class_names = None

    def build(self) -> nn.Module:
        return nn.Linear(3, 1)

    def losses(self, module, batch):
        yield Loss(module(batch["points"]).sum(), 1.0)


@dataclass
class Points(Data):
    def prepare(self, tokenizer=None):
        self.train = []


@dataclass
class Pictures(Points):
    def load_image(self, path):
        return torch.ones(3)


@dataclass
class SeesPictures(Regressor):
    def losses(self, module, batch):
        yield Loss(module(batch["pixel_values"]).sum(), 1.0)


@pytest.mark.parametrize(
    ("model", "data", "inputs"),
    [
        (Regressor(), Points(), {"texts": ["a"]}),
        (Regressor(), Pictures(), {"texts": ["a"]}),
        (Regressor(), Points(), {"images": ["a.png"]}),
        (Regressor(), Points(), {"paths": ["a.png"]}),
        (SeesPictures(), Pictures(), {"images": ["a.png"]}),
    ],
    ids=lambda value: str(value).removesuffix("()"),
)
def test_an_own_model_that_cannot_predict_hears_why(model, data, inputs, golden, tmp_path, monkeypatch):
    save_model(model, model.build(), tmp_path / "run" / "model")
    (tmp_path / "a.png").touch()
    monkeypatch.chdir(tmp_path)
    with golden.raises(RecipeError):
        predict(Recipe(model=model, data=data, batch_size=1), tmp_path / "run", **inputs)
