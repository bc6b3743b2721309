"""A fingerprint follows content: not paths, processes or generators, and every change of a sample shows."""

import dataclasses
import datetime
import random
import shutil

import datasets
import numpy as np
import pytest
import torch
from helpers.prepared import prepared
from torch.utils.data import TensorDataset

from trainer.contract import Data
from trainer.data import CIFAR10, Digits, ImageFolder, TextFiles
from trainer.data.cache import evenly_spaced
from trainer.data.fingerprint import (
    BLOCK,
    ContentHasher,
    fingerprint,
    sample_row_blocks,
    split_fingerprint,
    tokenizer_hash,
)
from trainer.errors import RecipeError


def test_a_folder_of_images_elsewhere_is_the_same_and_any_changed_byte_is_not(folder, tmp_path):
    before = fingerprint(prepared(ImageFolder(str(folder))))
    moved = shutil.copytree(folder, tmp_path / "b")
    assert fingerprint(prepared(ImageFolder(str(moved)))) == before
    assert fingerprint(prepared(ImageFolder(str(folder), workers=3, max_bad_samples=2))) == before
    changed = [{"augment": "flip"}, {"image_size": 32}, {"val_fraction": 0.25}]
    found = [fingerprint(prepared(ImageFolder(str(folder), **settings))) for settings in changed]
    with min((moved / "test" / "ship").iterdir()).open("ab") as file:
        file.write(b"\0")  # behind the image: it is read as before
    found.append(fingerprint(prepared(ImageFolder(str(moved)))))
    last = max((folder / "train" / "cat").iterdir())
    last.rename(folder / "train" / "ship" / "0000.png")  # the first ship instead of the last cat: the same order
    found.append(fingerprint(prepared(ImageFolder(str(folder)))))
    assert len({before, *found}) == 6


def test_every_pixel_label_and_setting_of_arrays_counts(tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (60, 32, 32, 3), np.uint8)
    labels, split = np.arange(60) % 3, np.arange(60) // 40
    np.savez(tmp_path / "a.npz", images=images, labels=labels, split=split, class_names=np.array(["a", "b", "c"]))

    def read(**settings):
        return prepared(CIFAR10(str(tmp_path / "a.npz"), **settings))

    before = fingerprint(read())
    assert fingerprint(read()) == before
    pixel, label, order = read(), read(), read()
    pixel.train.images[39, 2, 31, 31] ^= 1
    label.test.labels[19] = (label.test.labels[19] + 1) % 3
    order.train.images[[0, 1]] = order.train.images[[1, 0]]
    settings = [{"augment": "flip"}, {"augment": "crop_flip"}, {"image_size": 40}, {"normalize": "dataset"}]
    others = [pixel, label, order, *(read(**changed) for changed in [*settings, {"val_fraction": 0.1}])]
    assert len({fingerprint(data) for data in others} | {before}) == len(others) + 1


@pytest.mark.slow
def test_texts_are_the_same_from_another_folder_and_differ_by_a_word_a_label_or_the_tokenisation(tmp_path, tokenizer):
    rows = [("good film", 1), ("bad film", 0), ("dull", 0), ("great", 1)]

    def read(name, rows, **settings):
        path = tmp_path / name / "reviews.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        return fingerprint(prepared(TextFiles(str(path), cache_dir=str(tmp_path / name / "c"), **settings), tokenizer))

    before = read("a", rows)
    assert read("b", rows) == before
    changed = [[*rows[:3], ("greatest", 1)], [*rows[:3], ("great", 0)], [rows[1], rows[0], *rows[2:]], rows[:3]]
    others = [read(f"c{number}", other) for number, other in enumerate(changed)]
    others += [read("a", rows, max_length=3), read("a", rows, val_fraction=0.5)]
    assert len({before, *others}) == 7


def test_it_is_the_same_in_every_process_and_version():
    """Or else no run could be resumed: of the classes (a mapping), the digits and their transform."""
    found = fingerprint(prepared(Digits(val_fraction=0.1)))
    assert found == "9a5625ccc1e490af6a3ec3ed55c413e78621ffb3940648eb80848f568835e98c"


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
    assert len({fingerprint(Own(before)), fingerprint(Own(changed)), fingerprint(Own(None, before))}) == 3


def test_a_small_split_is_seen_whole_and_a_large_one_at_64_places():
    assert evenly_spaced(64, 64) == list(range(64))
    large = evenly_spaced(1_000_001, 64)
    assert (large[0], large[-1], len(set(large))) == (0, 1_000_000, 64)
    points = torch.randn(64, 2)
    changed = [points + torch.eye(64)[:, i : i + 1] for i in range(64)]
    assert len({split_fingerprint(TensorDataset(other)) for other in [points, *changed]}) == 65


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
    assert split_fingerprint(Drawn()) == first != split_fingerprint(Drawn(2.0))


def test_lengths_count_where_no_sample_is_looked_at_and_a_split_may_have_a_fingerprint_of_its_own():
    class WithLengths(list):
        lengths: list[int]

    def read(at):
        split = WithLengths(samples(1000))
        split.lengths = [5 + (i == at) for i in range(1000)]
        return split_fingerprint(split)

    class Versioned(list):
        def fingerprint(self):
            return self[0]

    assert read(1) != read(2)
    first, same, other = (fingerprint(Own(Versioned(split))) for split in (["v1", 1], ["v1", 2], ["v2", 1]))
    assert first == same != other
    with pytest.raises(RecipeError, match=r"Versioned\.fingerprint\(\) returned 3"):
        fingerprint(Own(Versioned([3])))


def test_every_row_of_a_table_counts_and_of_a_huge_one_spread_blocks(tmp_path):
    rows = {"text": [f"row {i}" for i in range(5000)], "label": [i % 2 for i in range(5000)]}
    before = split_fingerprint(datasets.Dataset.from_dict(rows))
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "t", num_shards=3)
    assert split_fingerprint(datasets.load_from_disk(tmp_path / "t")) == before
    rows["text"][3001] = "row 3002"  # none of the 64 samples
    assert split_fingerprint(datasets.Dataset.from_dict(rows)) != before
    assert sum(map(len, sample_row_blocks(5000, 10**6))) == 5000
    chosen = sample_row_blocks(10**8, 10**11)  # 100 GB
    assert 0.8 * 2**30 < sum(map(len, chosen)) * 1000 < 1.1 * 2**30
    assert (chosen[0], chosen[-1].stop) == (range(BLOCK), 10**8)


class Columns(datasets.Dataset):
    """Shows nothing of its rows but its columns."""

    def __getitem__(self, rows):
        return super().__getitem__(rows) if self.format["type"] == "arrow" else None


def test_columns_of_every_kind_count():
    def read(**changes):
        first = {"n": 1, "f": 0.5, "b": True, "s": "x", "l": [1, 2], "d": {"a": 1, "t": "y"}, "none": None}
        first |= {"when": datetime.date(2020, 1, 1), "nested": [[1], [2, 3]], "bytes": b"z"}
        return split_fingerprint(Columns(datasets.Dataset.from_list([first | changes, first]).data))

    others = [read(n=2), read(f=0.25), read(b=False), read(s="z"), read(s=None), read(l=[12]), read(l=[1, 2, 3])]
    others += [read(d={"a": 2, "t": "y"}), read(d={"a": 1, "t": "z"}), read(when=datetime.date(2020, 1, 2))]
    others += [read(nested=[[1, 2], [3]]), read(bytes=b"y"), read(none=1), read(n=None)]
    assert read() == read()
    assert len({read(), *others}) == len(others) + 1


@dataclasses.dataclass
class Point:
    x: int


def test_kinds_are_told_apart():
    values = [0, 0.0, False, None, "0", b"0", [], [[]], {}, "", [0], {"x": 0}, Point(0), Point(1), np.zeros(1)]
    values += [np.zeros(1, "int32"), np.zeros((1, 1)), torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)]
    values += [["ab", "c"], ["a", "bc"], np.array(["a", None], dtype=object)]
    assert len({ContentHasher(value).hexdigest() for value in values}) == len(values)
    turned, plain = torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])
    for one, other in (({"a": 1, "b": 2}, {"b": 2, "a": 1}), (turned, plain)):
        assert ContentHasher(one).hexdigest() == ContentHasher(other).hexdigest()
    itself = []
    itself.append(itself)
    assert ContentHasher(itself).hexdigest()


@pytest.mark.slow
def test_a_tokenizers_hash_does_not_follow_its_use(tokenizer, sample_data):
    from transformers import AutoTokenizer

    place = sample_data / "tokenizers" / "bert-base-uncased"
    again, other, cased = (AutoTokenizer.from_pretrained(place) for _ in range(3))
    again(["a", "longer text"], truncation=True, max_length=3, padding="max_length")
    again.chat_template = "{{ messages }}"
    before = tokenizer_hash(tokenizer)
    assert (tokenizer_hash(again), tokenizer_hash(None)) == (before, None)
    other.add_tokens(["newword"])
    special = AutoTokenizer.from_pretrained(place, mask_token="[PAD]")
    left = AutoTokenizer.from_pretrained(place, truncation_side="left")
    cased.backend_tokenizer.normalizer = None
    assert len({before, *map(tokenizer_hash, (other, special, left, cased))}) == 5


def test_a_slow_tokenizer_is_known_by_its_vocabulary():
    class Slow:
        padding_side = truncation_side = "right"

        def __init__(self, words):
            self.words, self.special_tokens_map = words, {"pad_token": "[PAD]"}

        def get_vocab(self):
            return self.words

    before = tokenizer_hash(Slow({"a": 0, "b": 1}))
    assert tokenizer_hash(Slow({"b": 1, "a": 0})) == before != tokenizer_hash(Slow({"a": 1, "b": 0}))
