"""``trainer fit my.csv``: what is inferred from files and folders, and what the user has to decide."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.cli import run
from trainer.commands.own_data import Inferred, infer
from trainer.errors import RecipeError

STARS = ["gut", "mittel", "schlecht"]


def rows(count: int = 60) -> list[dict[str, object]]:
    return [{"id": n, "review": f"a film of {n} words", "stars": STARS[n % 3]} for n in range(count)]


def table(path: Path, content: list[dict[str, object]], sep: str = ",", encoding: str = "utf-8") -> Path:
    lines = [sep.join(content[0]), *(sep.join(map(str, row.values())) for row in content)]
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def json_lines(path: Path, content: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def flags_of(found: Inferred) -> str:
    """The flags without those of files and of the held-out share."""
    own = {name: text for name, text in found.flags.items() if "file" not in name and name != "data.val_fraction"}
    return " ".join([found.recipe, *(f"{name}={text}" for name, text in own.items())])


REVIEWS = "text_files data.text_column=review data.label_column=stars"


@pytest.mark.parametrize("kind", ["csv", "semicolon", "tsv", "utf-16", "jsonl", "parquet"])
def test_every_kind_of_table_is_read_alike(kind, tmp_path):
    suffix = {"semicolon": "csv", "utf-16": "csv"}.get(kind, kind)
    path = tmp_path / f"my.{suffix}"
    if kind == "jsonl":
        json_lines(path, rows())
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows()), path)
    else:
        table(path, rows(), {"semicolon": ";", "tsv": "\t"}.get(kind, ","), "utf-16" if kind == "utf-16" else "utf-8")
    found = infer(str(path), {})
    assert flags_of(found) == REVIEWS
    assert found.flags["data.val_fraction"] == "0.1"
    assert found.data.startswith("60 rows; text in column 'review', label in column 'stars': 3 classes (gut 20, ")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"premise": "a b", "hypothesis": "c d", "label": 1},
            "text_column=premise pair_column=hypothesis label_column=label",
        ),
        ({"text": "a b", "price": 1.5}, "text_column=text label_column=price"),
        ({"text": "a b", "title": "two words", "label": "x"}, "text_column=text label_column=label"),
        (
            {"abstract": "a b c d e f", "headline": "a b", "n": 1, "label": "x"},
            "text_column=abstract label_column=label",
        ),
    ],
)
def test_columns_are_found_by_name_then_by_content(row, expected, tmp_path):
    path = json_lines(tmp_path / "my.jsonl", [row] * 30)
    assert flags_of(infer(str(path), {})) == " ".join(["text_files", *(f"data.{word}" for word in expected.split())])


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        ([n / 7 for n in range(30)], "regression"),
        ([["a", "b"], ["a"]] * 15, "multi_label"),
        (["a|b", "a"] * 15, "multi_label"),
        ([0, 1] * 15, "single_label"),
    ],
)
def test_the_task_follows_the_labels(labels, task, tmp_path):
    path = json_lines(tmp_path / "my.jsonl", [{"text": "a b", "label": label} for label in labels])
    assert infer(str(path), {}).flags.get("model.task", "single_label") == task


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
    ],
)
def test_conversations_are_for_a_language_model(row, tmp_path):
    found = infer(str(json_lines(tmp_path / "chats.jsonl", [row] * 3)), {})
    assert (flags_of(found), found.flags["data.train_files"]) == ("lm_chat", str(tmp_path / "chats.jsonl"))


def test_files_and_folders_around_are_used(tmp_path):
    for part in ("train", "valid", "test"):
        table(tmp_path / f"{part}.csv", rows(30))
    for reference in (tmp_path, tmp_path / "train.csv"):
        found = infer(str(reference), {})
        files = {name: Path(text).name for name, text in found.flags.items() if name.endswith("_file")}
        expected = {"data.train_file": "train.csv", "data.val_file": "valid.csv", "data.test_file": "test.csv"}
        assert files == expected
        assert "data.val_fraction" not in found.flags


def test_folders_of_images_and_of_texts(tmp_path):
    for place in (
        "photos/cat/a.jpg",
        "photos/dog/b.PNG",
        "split/train/cat/a.jpg",
        "split/train/dog/b.jpg",
        "notes/a.txt",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    shutil.copytree(tmp_path / "split/train", tmp_path / "split/val")
    assert infer(str(tmp_path / "photos"), {}).flags == {
        "data.root": str(tmp_path / "photos"),
        "data.val_fraction": "0.1",
    }
    assert infer(str(tmp_path / "split"), {}).flags == {"data.root": str(tmp_path / "split")}
    assert flags_of(infer(str(tmp_path / "notes"), {})) == "lm_chat data=Documents"


def test_two_readings_name_both_commands_and_a_flag_decides(tmp_path):
    path = table(
        tmp_path / "my.csv",
        [{"review": f"{n} good words", "lang": "de" if n % 2 else "en", "mood": STARS[n % 3]} for n in range(60)],
    )
    ways = f"trainer fit {path} --data.label_column lang or trainer fit {path} --data.label_column mood"
    with pytest.raises(RecipeError) as caught:
        infer(str(path), {})
    assert str(caught.value).endswith(f"'lang', 'mood' can be the labels: choose {ways}")
    found = infer(str(path), {"data.label_column": "mood"})
    assert found.flags["data.text_column"] == "review"
    assert "data.label_column" not in found.flags  # the user has given it


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"prompt": "a b", "chosen": "c d", "rejected": "e f"}, "lm_dpo --data.val_files null --data.train_files"),
        ({"chosen": [{"role": "user"}], "rejected": []}, "lm_dpo --data.val_files null --data.train_files"),
        ({"anchor": "a b", "positive": "c d"}, "sentence_pairs --data.train_file"),
    ],
)
def test_pairs_name_the_recipe_that_reads_them(row, fix, tmp_path):
    path = json_lines(tmp_path / "my.jsonl", [row] * 3)
    with pytest.raises(RecipeError, match=f"my.jsonl has columns .*: run trainer plan {fix} {path}$"):
        infer(str(path), {}, "plan")


BROKEN = {
    "empty.csv": ("", "has no rows: add some"),
    "header.csv": ("text,label\n", "has no rows: add some"),
    "broken.jsonl": ("{", "cannot be read as jsonl"),
    "list.jsonl": ("[1]\n", "line 1 is not a JSON object"),
    "bad.parquet": ("no parquet", "cannot be read as parquet"),
    "numbers.csv": ("a,b\n1,2\n", "no column looks like texts; it has 'a', 'b': name one by --data.text_column"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_line(name, tmp_path, capsys):
    content, expected = BROKEN[name]
    (tmp_path / name).write_text(content)
    code = run(["fit", str(tmp_path / name), "--print_config"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert expected in error
    assert name in error


def test_the_command_is_printed_and_can_be_repeated(tmp_path, capsys):
    path = table(tmp_path / "my.csv", rows())
    assert run(["fit", str(path), "--epochs=2", "--print_config"]) == 0
    said = capsys.readouterr()
    config = said.out.splitlines()
    data, same_as, *_ = said.err.splitlines()
    assert data.startswith(f"{path}: 60 rows; ")
    command = same_as.removeprefix("same as: trainer ").split()
    assert run([*command, "--epochs=2", "--print_config"]) == 0
    assert capsys.readouterr().out.splitlines() == config


def test_ragged_rows_and_values_that_json_lacks(tmp_path):
    path = table(tmp_path / "my.csv", rows())
    path.write_text(path.read_text() + "60,a film of many words,gut,one cell too many\n")
    assert flags_of(infer(str(path), {})) == REVIEWS
    when = [row | {"when": datetime(2026, 1, 1 + n % 28)} for n, row in enumerate(rows())]
    pq.write_table(pa.Table.from_pylist(when), tmp_path / "my.parquet")
    assert flags_of(infer(str(tmp_path / "my.parquet"), {})) == REVIEWS


def test_long_texts_are_read_whole(tmp_path):
    long = "word " * 300_000  # more than the limit of the csv module, and than a buffer
    path = table(tmp_path / "my.csv", [{"text": long, "label": n % 2} for n in range(3)])
    assert flags_of(infer(str(path), {})) == "text_files data.text_column=text data.label_column=label"
    path = json_lines(tmp_path / "my.jsonl", [{"messages": [{"role": "user", "content": long}]}] * 2)
    assert infer(str(path), {}).recipe == "lm_chat"


def test_a_parquet_file_that_expands_excessively_is_refused(tmp_path):
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["a" * 40_000_000] * 3, "label": ["x", "y", "z"]}), path, compression="zstd")
    assert path.stat().st_size < 200_000
    with pytest.raises(RecipeError, match=r"bomb\.parquet"):
        infer(str(path), {})


def test_a_packaged_recipe_is_meant_where_a_folder_has_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "vit_digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(["fit", "vit_digits", "--print_config"]) == 0
    assert "recipe: vit_digits" in capsys.readouterr().out


def test_what_is_no_data_is_named(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for word, expected in (
        (tmp_path / "model", "it is a model; use --model.name"),
        (tmp_path / "nothing", "has none of these: two or more class folders with images, train.csv, or .txt files"),
        (tmp_path / "gone.csv", "no such file"),
    ):
        assert run(["fit", str(word)]) == 2
        assert expected in capsys.readouterr().err
