"""The loader: the same bits for any number of workers and any cut, and failures that name their sample."""

import os
import pickle
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.prepared import prepared

from trainer.contract import Data
from trainer.data import CIFAR10, Digits
from trainer.data.loader import Loader, SampleError
from trainer.data.workers import decide_workers
from trainer.engine.cut import Cut
from trainer.engine.window import Windows
from trainer.errors import RecipeError
from trainer.values import Request, ShuffleGroups


@pytest.fixture(scope="module")
def augmented(sample_data):
    return prepared(CIFAR10(str(sample_data / "cifar10" / "cifar10_subset.npz"), augment="crop_flip"))


INDICES = [3, 1, 4, 15, 9, 26, 5, 35, 8, 97, 93]


def cut(size):
    """Requests of ``size`` samples, each seeded by a function of its position."""
    pieces = [range(start, min(start + size, len(INDICES))) for start in range(0, len(INDICES), size)]
    return [Request([INDICES[k] for k in piece], [7919 * k for k in piece]) for piece in pieces]


def load(split, requests, collate=None, **settings):
    return list(Loader(split, collate or Data().collate, **settings)(requests))


@pytest.mark.parametrize("workers", [0, 2])
def test_neither_workers_nor_the_cut_change_a_bit_of_any_sample_or_the_callers_random_numbers(augmented, workers):
    here = load(augmented.train, cut(3))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    there = load(augmented.train, cut(3), workers=workers)
    assert torch.equal(before, torch.get_rng_state())
    assert [len(batch["labels"]) for batch in there] == [3, 3, 3, 2]
    for batches in (there, *(load(augmented.train, cut(size)) for size in (1, 11))):
        for key in ("pixel_values", "labels"):
            assert torch.equal(torch.cat([one[key] for one in here]), torch.cat([one[key] for one in batches]))


def test_plain_arrays_are_fetched_whole_and_requests_taken_one_by_one():
    data, taken = prepared(Digits()), []

    def requests():
        for indices in ([5, 2, 5], [1]):
            taken.append(indices)
            yield Request(indices)

    batch = next(Loader(data.train, lambda _: pytest.fail("collated sample by sample"))(requests()))
    expected = data.collate([data.train[i] for i in (5, 2, 5)])
    assert all(torch.equal(batch[key], expected[key]) for key in ("pixel_values", "labels"))
    assert taken == [[5, 2, 5]]


class Squares:
    """A dataset as a user may write it: samples are tuples, row 6 is broken."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 6:
            raise OSError("image file is truncated")
        return torch.tensor(index), torch.tensor(index**2)


class Named(Squares):
    augmented = True

    def describe(self, index):
        return f"squares.csv row {index + 2}"


class Listed(Squares):
    """Torch's convention: a list of samples for a list of indices."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


@pytest.mark.parametrize(("split", "workers"), [(Squares(), 0), (Squares(), 1), (Listed(), 0)])
def test_a_dataset_needs_no_more_than_len_and_getitem(split, workers):
    batches = load(split, [Request([2, 3]), Request([4])], workers=workers)
    assert [batch[1].tolist() for batch in batches] == [[4, 9], [16]]


class Short(Squares):
    """Returns ``change`` samples more than it is asked for, as a list or collated."""

    def __init__(self, change, collated):
        self.change, self.collated = change, collated

    def __getitems__(self, indices):
        chosen = [*indices, 0, 0][: len(indices) + self.change]
        if not self.collated:
            return [self[i] for i in chosen]
        return {"pixel_values": torch.zeros(len(chosen), 2), "labels": torch.tensor(chosen)}


@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("change", [-1, 1, -5])
def test_another_number_of_samples_than_asked_for_is_refused(change, collated):
    said = rf"Short\.__getitems__ returned {5 + change} instead of 5 samples \(sample 1 of Short, .*\): it must"
    with pytest.raises(SampleError, match=said):
        load(Short(change, collated), [Request([1, 2, 3, 4, 5])])
    several = load(Short(5, True), [Request([1, 2])])  # a sample may have several labels
    assert several[0]["labels"].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_sample_is_named_in_the_first_line(workers):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(RecipeError) as caught:
        load(Named(), [Request([1, 2], [0, 0]), Request([5, 6], [0, 0])], workers=workers)
    first = str(caught.value).splitlines()[0]
    assert first == "squares.csv row 8 could not be loaded: OSError: image file is truncated"
    assert isinstance(caught.value, SampleError)
    assert torch.equal(before, torch.get_rng_state())

    def refuse(_):
        raise RuntimeError("stack expects each tensor to be equal size")

    with pytest.raises(SampleError, match=r"squares\.csv row 2, squares\.csv row 5 could not be loaded: RuntimeError"):
        load(Named(), [Request([0, 3])], refuse, workers=workers)


class Noisy:
    """Draws from the three global generators, as a user's transforms may."""

    augmented = True

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_from_random_and_numpy_follows_the_seed_of_the_sample(workers):
    random.seed(3), np.random.seed(4)
    before = random.getstate(), np.random.get_state()[1].tolist()
    requests = [Request([i, i + 1], [2**62 + i, i + 1]) for i in range(0, 8, 2)]
    drawn = torch.cat(load(Noisy(), requests, workers=workers))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    for index, seed in ((4, 2**62 + 4), (7, 7)):  # by the one request of a resumed run
        (alone,) = load(Noisy(), [Request([index], [seed])])
        assert torch.equal(alone[0], drawn[index])
    assert len(set(drawn[:, 1:].flatten().tolist())) == 24  # no draw is another's


class Counting:
    """Knows which samples it was asked for."""

    def __init__(self, size):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(index)
        return {"labels": torch.tensor(index % 2)}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "known",
    [{}, {"lengths": [7 * i % 50 + 1 for i in range(95)]}, {"groups": ShuffleGroups([10] * 9 + [5], 30)}],
    ids=["plain", "by length", "by groups"],
)
def test_each_rank_loads_the_samples_of_its_own_micro_batches_and_no_others(world_size, known):
    splits = [Counting(95) for _ in range(world_size)]
    for rank, split in enumerate(splits):
        fetch = Loader(split, Data().collate)
        weigh, cut = (lambda batch: {"loss": float(len(batch["labels"]))}), Cut(24, 4, 1)
        windows = Windows(95, lambda epoch, cut=cut: cut, fetch, weigh, 0, rank, world_size, **known)
        own = [i for window in windows.epoch(0) for micro in window if not micro.is_empty for i in micro.indices]
        assert len(split.asked) - len(own) <= 4  # an empty micro-batch borrows a sample
        assert len(own) == len(set(own))
        split.asked = own
    assert sorted(index for split in splits for index in split.asked) == list(range(95))
    assert max(len(split.asked) for split in splits) - min(len(split.asked) for split in splits) <= 4 * 4


def test_a_split_travels_to_a_spawned_worker(augmented):
    again = pickle.loads(pickle.dumps(Loader(augmented.test, augmented.collate)))
    (batch,) = again([Request([1])])
    assert torch.equal(batch["pixel_values"], augmented.test[1]["pixel_values"][None])


@pytest.mark.parametrize(
    ("workers", "place", "ranks", "cores", "shared", "decided"),
    [
        *((None, "cuda", 1, 16, 2e9, 4), (None, "cuda", 8, 16, 2e9, 2), (None, "cuda", 8, 4, 2e9, 0)),
        *((None, "cuda", 1, 16, 64e6, 0), (None, "cpu", 1, 16, 2e9, 0)),
        *((0, "cuda", 1, 16, 2e9, 0), (9, "cuda", 1, 4, 64e6, 9)),
    ],
)
def test_workers_that_nobody_asked_for(monkeypatch, workers, place, ranks, cores, shared, decided):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=shared))
    assert decide_workers(CIFAR10(workers=workers), place, ranks) == decided
