"""A fingerprint follows content: not paths, processes or generators, and every change of a sample shows."""

import dataclasses
import random
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from trainer.contract import Data
from trainer.data import CIFAR10, Digits, ImageFolder, IMDb, TextFiles
from trainer.data.fingerprint import BLOCK, Content, blocks, fingerprint, split_fingerprint, spread, tokenizer_hash
from trainer.errors import RecipeError


def prepared(data, tokenizer=None):
    data.prepare(tokenizer)
    return data


@pytest.fixture
def folder(sample_data, tmp_path):
    """2 classes, 4 training and 2 test images of each."""
    for part, count in (("train", 4), ("test", 2)):
        for name in ("cat", "ship"):
            (tmp_path / "a" / part / name).mkdir(parents=True)
            for source in sorted((sample_data / "cifar10" / "folder" / part / name).iterdir())[:count]:
                shutil.copy(source, tmp_path / "a" / part / name)
    return tmp_path / "a"


def test_a_folder_of_images_elsewhere_is_the_same_and_any_changed_byte_is_not(folder, tmp_path):
    before = fingerprint(prepared(ImageFolder(str(folder))))
    moved = shutil.copytree(folder, tmp_path / "b")
    assert fingerprint(prepared(ImageFolder(str(moved)))) == before
    assert fingerprint(prepared(ImageFolder(str(folder), workers=3, max_bad_samples=2))) == before
    changed = [{"augment": "flip"}, {"image_size": 32}, {"val_fraction": 0.25}]
    changed = [ImageFolder(str(folder), **settings) for settings in changed]
    images = sorted((moved / "test" / "ship").iterdir())
    with images[0].open("ab") as file:
        file.write(b"\0")  # behind the image: it is read as before
    changed.append(ImageFolder(str(moved)))
    found = {fingerprint(prepared(data)) for data in changed}
    assert len(found | {before}) == len(changed) + 1


def test_a_file_that_moves_to_another_class_changes_it(folder):
    before = fingerprint(prepared(ImageFolder(str(folder))))
    last = sorted((folder / "train" / "cat").iterdir())[-1]
    last.rename(folder / "train" / "ship" / "0000.png")  # the first ship instead of the last cat: the same order
    assert fingerprint(prepared(ImageFolder(str(folder)))) != before


def test_every_pixel_label_and_setting_of_arrays_counts(sample_data):
    def read(**settings):
        return prepared(CIFAR10(str(sample_data / "cifar10" / "cifar10_subset.npz"), **settings))

    before = fingerprint(read())
    assert fingerprint(read()) == before
    pixel, label, order = read(), read(), read()
    pixel.train.images[4321, 2, 31, 31] ^= 1
    label.test.labels[999] = (label.test.labels[999] + 1) % 10
    order.train.images[[0, 1]] = order.train.images[[1, 0]]
    others = [pixel, label, order, read(augment="flip"), read(augment="crop_flip"), read(image_size=40)]
    others += [read(normalize="dataset"), read(val_fraction=0.1)]
    assert len({fingerprint(data) for data in others} | {before}) == len(others) + 1


def test_texts_are_the_same_from_another_folder_and_differ_by_a_word_a_label_or_the_tokenisation(tmp_path, tokenizer):
    rows = [("good film", 1), ("bad film", 0), ("dull", 0), ("great", 1)]

    def read(name, rows, **settings):
        path = tmp_path / name / "reviews.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        return fingerprint(prepared(TextFiles(str(path), cache_dir=str(tmp_path / name / "c"), **settings), tokenizer))

    before = read("a", rows)
    assert read("b", rows) == before
    others = [
        read("c", [*rows[:3], ("greatest", 1)]),
        read("d", [*rows[:3], ("great", 0)]),
        read("e", [rows[1], rows[0], *rows[2:]]),
        read("f", rows[:3]),
        read("g", rows, max_length=3),
        read("h", rows, val_fraction=0.5),
    ]
    assert len({before, *others}) == len(others) + 1


def test_the_chunks_of_a_table_do_not_count(sample_data, tokenizer, tmp_path):
    data = prepared(IMDb(str(sample_data / "imdb_folder"), cache_dir=str(tmp_path)), tokenizer)
    before = data.train.fingerprint()
    table = data.train.table
    data.train.table = datasets.concatenate_datasets([table.select(range(7)), table.select(range(7, len(table)))])
    assert data.train.table.data.column(0).num_chunks > table.data.column(0).num_chunks
    assert data.train.fingerprint() == before


def test_another_process_with_another_hash_seed_agrees():
    code = "from trainer.data import Digits; from trainer.data.fingerprint import fingerprint\n"
    code += "d = Digits(val_fraction=0.1); d.prepare(); print(fingerprint(d), end='')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == fingerprint(prepared(Digits(val_fraction=0.1)))


class Own(Data):
    def __init__(self, train, test=None):
        self.train, self.test = train, test


def samples(size=200):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, generator=generator), "labels": i % 3, "text": f"t{i}"} for i in range(size)]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop(),
        lambda s: s[0].update(labels=1),
        lambda s: s[-1]["x"].add_(1e-6),
        lambda s: s[-1].update(x=s[-1]["x"].double()),
        lambda s: s[0].update(text="t1"),
        lambda s: s[0].pop("text"),
        lambda s: s[0].update(labels=0.0),
        lambda s: s.reverse(),
    ],
)
def test_a_list_of_ones_own_is_known_by_size_and_samples(change):
    before, again, changed = samples(), samples(), samples()
    change(changed)
    assert fingerprint(Own(before)) == fingerprint(Own(again))
    assert fingerprint(Own(before)) != fingerprint(Own(changed))
    assert fingerprint(Own(before)) != fingerprint(Own(None, before))


def test_a_small_split_is_seen_whole_and_a_large_one_at_64_places():
    assert spread(64, 64) == list(range(64))
    assert spread(1_000_001, 64)[0] == 0
    assert spread(1_000_001, 64)[-1] == 1_000_000
    assert len(set(spread(1_000_001, 64))) == 64
    points = torch.randn(64, 2)
    before = split_fingerprint(TensorDataset(points))
    for i in range(64):
        changed = points.clone()
        changed[i, 1] += 1
        assert split_fingerprint(TensorDataset(changed)) != before


class Drawn:
    """Samples that draw from all three generators."""

    augmented = True

    def __init__(self, noise=1.0):
        self.noise = noise

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 7:
            raise OSError("unreadable")
        return index, (torch.rand(2) + random.random() + np.random.rand()) * self.noise


def test_augmented_samples_are_drawn_with_fixed_seeds_and_nobodys_generator_moves():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    first = split_fingerprint(Drawn())
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == drawn
    assert split_fingerprint(Drawn()) == first
    assert split_fingerprint(Drawn(2.0)) != first


def test_lengths_count_also_where_no_sample_is_looked_at():
    class WithLengths(list):
        lengths: list[int]

    def read(at):
        split = WithLengths(samples(1000))
        split.lengths = [5 + (i == at) for i in range(1000)]
        return split_fingerprint(split)

    assert read(1) != read(2)


def test_a_split_may_have_a_fingerprint_of_its_own():
    class Versioned(list):
        def fingerprint(self):
            return self[0]

    assert fingerprint(Own(Versioned(["v1", 1]))) == fingerprint(Own(Versioned(["v1", 2])))
    assert fingerprint(Own(Versioned(["v1", 1]))) != fingerprint(Own(Versioned(["v2", 1])))
    with pytest.raises(RecipeError, match=r"Versioned\.fingerprint\(\) returned 3"):
        fingerprint(Own(Versioned([3])))


def test_every_row_of_a_table_counts_and_of_a_huge_one_spread_blocks(tmp_path):
    rows = {"text": [f"row {i}" for i in range(5000)], "label": [i % 2 for i in range(5000)]}
    before = split_fingerprint(datasets.Dataset.from_dict(rows))
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "t", num_shards=3)
    assert split_fingerprint(datasets.load_from_disk(tmp_path / "t")) == before
    rows["text"][3001] = "row 3002"  # none of the 64 samples
    assert split_fingerprint(datasets.Dataset.from_dict(rows)) != before
    assert sum(map(len, blocks(5000, 10**6))) == 5000
    chosen = blocks(10**8, 10**11)  # 100 GB
    assert 0.8 * 2**30 < sum(map(len, chosen)) * 1000 < 1.1 * 2**30
    assert (chosen[0], chosen[-1].stop) == (range(BLOCK), 10**8)


def test_columns_of_every_kind_count():
    import datetime

    def read(**changes):
        first = {"n": 1, "f": 0.5, "b": True, "s": "x", "l": [1, 2], "d": {"a": 1, "t": "y"}, "none": None}
        first |= {"when": datetime.date(2020, 1, 1), "nested": [[1], [2, 3]], "bytes": b"z"}
        return split_fingerprint(_Table(datasets.Dataset.from_list([first | changes, first]).data))

    others = [read(n=2), read(f=0.25), read(b=False), read(s="z"), read(s=None), read(l=[12]), read(l=[1, 2, 3])]
    others += [read(d={"a": 2, "t": "y"}), read(d={"a": 1, "t": "z"}), read(when=datetime.date(2020, 1, 2))]
    others += [read(nested=[[1, 2], [3]]), read(bytes=b"y"), read(none=1), read(n=None)]
    assert read() == read()
    assert len({read(), *others}) == len(others) + 1


class _Table(datasets.Dataset):
    """Shows nothing of its rows but its columns."""

    def __getitem__(self, rows):
        return super().__getitem__(rows) if self.format["type"] == "arrow" else None


def test_kinds_are_told_apart():
    @dataclasses.dataclass
    class Point:
        x: int

    values = [0, 0.0, False, None, "0", b"0", [], [[]], {}, "", [0], {"x": 0}, Point(0), Point(1), np.zeros(1)]
    values += [np.zeros(1, "int32"), np.zeros((1, 1)), torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)]
    values += [["ab", "c"], ["a", "bc"], np.array(["a", None], dtype=object)]
    assert len({Content(value).hexdigest() for value in values}) == len(values)
    assert Content({"a": 1, "b": 2}).hexdigest() == Content({"b": 2, "a": 1}).hexdigest()
    assert (
        Content(torch.arange(6).reshape(2, 3).T).hexdigest()
        == Content(torch.tensor([[0, 3], [1, 4], [2, 5]])).hexdigest()
    )
    itself = []
    itself.append(itself)
    assert Content(itself).hexdigest()


def test_a_tokenizers_hash_does_not_follow_its_use(tokenizer, sample_data):
    from transformers import AutoTokenizer

    place = sample_data / "tokenizers" / "bert-base-uncased"
    before = tokenizer_hash(tokenizer)
    again = AutoTokenizer.from_pretrained(place)
    again(["a", "longer text"], truncation=True, max_length=3, padding="max_length")
    again.chat_template = "{{ messages }}"
    assert tokenizer_hash(again) == before
    assert tokenizer_hash(None) is None
    other = AutoTokenizer.from_pretrained(place)
    other.add_tokens(["newword"])
    special = AutoTokenizer.from_pretrained(place, mask_token="[PAD]")
    left = AutoTokenizer.from_pretrained(place, truncation_side="left")
    cased = AutoTokenizer.from_pretrained(place)
    cased.backend_tokenizer.normalizer = None
    bigbird = AutoTokenizer.from_pretrained(sample_data / "tokenizers" / "bigbird-roberta-base")
    assert len({before, *map(tokenizer_hash, (other, special, left, cased, bigbird))}) == 6


def test_a_slow_tokenizer_is_known_by_its_vocabulary():
    class Slow:
        padding_side = truncation_side = "right"

        def __init__(self, words):
            self.words, self.special_tokens_map = words, {"pad_token": "[PAD]"}

        def get_vocab(self):
            return self.words

    before = tokenizer_hash(Slow({"a": 0, "b": 1}))
    assert tokenizer_hash(Slow({"b": 1, "a": 0})) == before
    assert tokenizer_hash(Slow({"a": 1, "b": 0})) != before
