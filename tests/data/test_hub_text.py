"""Any dataset that ``load_dataset`` reads, here from folders, and pairs of texts."""

import gzip
import zipfile

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.prepared import prepared, refused

from trainer.data import HubText, TextFiles
from trainer.errors import RecipeError

PAIRS = pandas.DataFrame(
    {"first": ["a cat", "two dogs", "rain"], "second": ["an animal", "one dog", "sun"], "label": [0, 1, 1]}
)


@pytest.fixture
def folder(tmp_path):
    """A dataset with named classes in a train and a validation split, and a test split without labels, as GLUE has."""
    features = datasets.Features(
        first=datasets.Value("string"), second=datasets.Value("string"), label=datasets.ClassLabel(names=["yes", "no"])
    )
    (tmp_path / "pairs").mkdir()
    for split, labels in (("train", [0, 1, 1]), ("validation", [0, 1, 0]), ("test", [-1, -1, -1])):
        table = datasets.Dataset.from_dict({**PAIRS.to_dict("list"), "label": labels}, features=features)
        table.to_parquet(tmp_path / "pairs" / f"{split}.parquet")
    return tmp_path


def hub(folder, **settings):
    settings = {"text_column": "first", "test_split": "validation", "cache_dir": str(folder / "cache"), **settings}
    return HubText(str(folder / "pairs"), **settings)


def test_splits_columns_and_named_classes_are_those_of_the_dataset(folder, tokenizer):
    data = prepared(hub(folder), tokenizer)
    assert (len(data.train), data.val, len(data.test)) == (3, None, 3)
    assert data.class_names == ["yes", "no"]
    assert [data.test[number]["labels"] for number in range(3)] == [0, 1, 0]
    assert data.train[1]["input_ids"] == tokenizer("two dogs")["input_ids"]
    part = prepared(hub(folder, train_split="train[:2]", val_split="train[2:]", test_split=None), tokenizer)
    assert (len(part.train), len(part.val), part.test) == (2, 1, None)
    assert part.val[0]["labels"] == 1
    assert data.train.describe(2).startswith(f"{folder}/pairs train row 2 (the first is row 0")


@pytest.mark.slow
def test_a_pair_is_encoded_as_one_sample_of_two_texts(folder, tokenizer):
    PAIRS.to_csv(folder / "pairs.csv", index=False)
    common = {"text_column": "first", "pair_column": "second", "cache_dir": str(folder / "cache")}
    for data in (hub(folder, pair_column="second"), TextFiles(str(folder / "pairs.csv"), **common)):
        prepared(data, tokenizer)
        wanted = tokenizer("two dogs", "one dog")
        assert data.train[1]["input_ids"] == wanted["input_ids"]
        assert data.train.lengths[1] == len(wanted["input_ids"])
        encoded = data.encode(["two dogs\tone dog"], tokenizer)["input_ids"][0]
        assert encoded[: len(wanted["input_ids"])].tolist() == wanted["input_ids"]
        with pytest.raises(RecipeError, match=r"data\.pair_column='second' needs two texts per sample"):
            data.encode(["two dogs"], tokenizer)
    alone = prepared(hub(folder), tokenizer)  # of the same rows: nothing of the one is taken for the other
    assert alone.train[1]["input_ids"] == tokenizer("two dogs")["input_ids"]


def test_token_types_tell_the_two_texts_apart_where_the_tokenizer_has_them(folder, sample_data):
    from transformers import BertTokenizerFast

    bert = BertTokenizerFast.from_pretrained(sample_data / "tokenizers" / "bert-base-uncased")
    data = prepared(hub(folder, pair_column="second"), bert)
    batch = data.train.__getitems__([0, 1])
    wanted = bert("two dogs", "one dog")["token_type_ids"]
    assert batch["token_type_ids"][1, : len(wanted)].tolist() == wanted
    assert set(wanted) == {0, 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_split": "tests"}, r"could not be loaded .*Unknown split \"tests\".*data\.test_split"),
        ({"test_split": "test"}, r"pairs test row 0 .*: label '-1' is not one of 0, 1"),
        ({"pair_column": "secnd"}, r"data\.pair_column='secnd': .*did you mean 'second'\?"),
        ({"label_column": "labels"}, r"data\.label_column='labels': .*did you mean 'label'\?"),
    ],
)
def test_what_the_dataset_does_not_have_is_named(folder, tokenizer, settings, message):
    refused(message, hub(folder, **settings), tokenizer)


def test_a_folder_that_is_missing_is_no_name_of_the_hub(tmp_path):
    for name in (str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(RecipeError, match=r"data\.name=.*: there is no folder"):
            HubText(name).require_files()
    HubText("nyu-mll/glue").require_files()
    with pytest.raises(RecipeError, match=r"data\.val_split='v' and data\.val_fraction=0\.1 exclude each other"):
        HubText("a/b", val_split="v", val_fraction=0.1)


@pytest.mark.slow
def test_files_of_a_folder_that_would_take_the_machine_are_refused_by_name(folder, tokenizer):
    with zipfile.ZipFile(folder / "pairs" / "train-more.csv", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.csv", "first,label\n" + "a,0\n" * 1_000)
    refused(r"pairs/train-more\.csv is compressed or an archive: unpack it first", hub(folder), tokenizer)
    (folder / "pairs" / "train-more.csv").unlink()
    (folder / "pairs" / ".hidden.gz").write_bytes(gzip.compress(b"a"))  # datasets does not read it
    assert len(prepared(hub(folder), tokenizer).train) == 3
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array(["y" * 3_000_000]))
    table = pa.table({"first": texts, "label": [0] * 2_000})
    pq.write_table(table, folder / "pairs" / "train.parquet", compression="none")
    refused(r"pairs/train\.parquet row group 0: first would be decoded to 6,000,000,000 bytes", hub(folder), tokenizer)
