"""The loader: the same bits for any number of workers and any cut, and failures that name their sample."""

import os
import pickle
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.contract import Data
from trainer.data import CIFAR10, Digits
from trainer.data.loader import Loader, SampleError
from trainer.data.workers import decide_workers
from trainer.engine.window import Cut, Windows
from trainer.errors import RecipeError
from trainer.values import Groups, Request


@pytest.fixture(scope="module")
def augmented(sample_data):
    data = CIFAR10(root=str(sample_data / "cifar10" / "cifar10_subset.npz"), augment="crop_flip")
    data.prepare()
    return data


def cut(indices, size):
    """Requests of ``size`` samples, each seeded by a function of its position."""
    return [
        Request(list(indices[start : start + size]), [7919 * (start + k) for k in range(len(indices[start:][:size]))])
        for start in range(0, len(indices), size)
    ]


def pixels(loader, requests):
    return torch.cat([batch["pixel_values"] for batch in loader(requests)])


INDICES = [3, 1, 4, 15, 9, 26, 5, 35, 8, 97, 93]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_no_bit_and_no_order(augmented, workers):
    requests = cut(INDICES, 3)
    here = list(Loader(augmented.train, augmented.collate)(requests))
    there = list(Loader(augmented.train, augmented.collate, workers=workers)(requests))
    assert [len(batch["labels"]) for batch in there] == [3, 3, 3, 2]
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["labels"], other["labels"])


@pytest.mark.parametrize("size", [1, 4, 11])
def test_the_cut_changes_no_bit_of_any_sample(augmented, size):
    loader = Loader(augmented.train, augmented.collate)
    assert torch.equal(pixels(loader, cut(INDICES, size)), pixels(loader, cut(INDICES, 2)))


def test_another_seed_draws_another_image(augmented):
    loader = Loader(augmented.train, augmented.collate)
    batch = next(loader([Request([5] * 8, list(range(8)))]))
    assert len({image.numpy().tobytes() for image in batch["pixel_values"]}) > 4


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_random_numbers_go_on_undisturbed(augmented, workers):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(Loader(augmented.train, augmented.collate, workers=workers)(cut(INDICES, 4)))
    assert torch.equal(before, torch.get_rng_state())


def test_plain_arrays_are_fetched_whole():
    data = Digits()
    data.prepare()

    def refuse(_):
        raise AssertionError("collated sample by sample")

    (batch,) = Loader(data.train, refuse)([Request([5, 2, 5])])
    expected = data.collate([data.train[i] for i in (5, 2, 5)])
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert torch.equal(batch["labels"], expected["labels"])


def test_requests_are_taken_one_by_one():
    data = Digits()
    data.prepare()
    taken = []

    def requests():
        for i in range(3):
            taken.append(i)
            yield Request([i])

    batches = Loader(data.train, data.collate)(requests())
    next(batches)
    assert taken == [0]


class Squares:
    """A dataset as a user may write it: samples are tuples, row 6 is broken."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 6:
            raise OSError("image file is truncated")
        return torch.tensor(index), torch.tensor(index**2)


class Named(Squares):
    def describe(self, index):
        return f"squares.csv row {index + 2}"


class Listed(Squares):
    """Torch's convention: a list of samples for a list of indices."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


@pytest.mark.parametrize("split", [Squares(), Listed()])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_needs_no_more_than_len_and_getitem(split, workers):
    batches = list(Loader(split, Data().collate, workers=workers)([Request([2, 3]), Request([4])]))
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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("change", [-1, 1, -5])
def test_another_number_of_samples_than_asked_for_is_refused(change, collated, workers):
    loader = Loader(Short(change, collated), Data().collate, workers=workers)
    said = rf"Short\.__getitems__ was asked for 5 samples \(sample 1 of Short, .*\) and returned {5 + change}: it must"
    with pytest.raises(SampleError, match=said):
        list(loader([Request([1, 2, 3, 4, 5])]))


def test_a_sample_may_have_several_labels():
    (batch,) = Loader(Several(), Data().collate)([Request([1, 2])])
    assert batch["labels"].tolist() == [1, 1, 2, 2]


class Several(Squares):
    def __getitems__(self, indices):
        return {"labels": torch.tensor(indices).repeat_interleave(2)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_sample_is_named_in_the_first_line(workers):
    loader = Loader(Named(), Data().collate, workers=workers)
    with pytest.raises(SampleError) as caught:
        list(loader([Request([1, 2]), Request([5, 6])]))
    first = str(caught.value).splitlines()[0]
    assert first == "squares.csv row 8 could not be loaded: OSError: image file is truncated"
    assert isinstance(caught.value, RecipeError)


def test_samples_that_do_not_collate_are_named():
    def refuse(_):
        raise RuntimeError("stack expects each tensor to be equal size")

    with pytest.raises(SampleError, match=r"squares\.csv row 2, squares\.csv row 5 could not be loaded: RuntimeError"):
        list(Loader(Named(), refuse)([Request([0, 3])]))


class Noisy:
    """Draws from the three global generators, as a user's transforms may."""

    augmented = True

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_drawn_from_random_and_numpy_follows_the_seed_of_the_sample(workers):
    random.seed(3), np.random.seed(4)
    before = random.getstate(), np.random.get_state()[1].tolist()
    requests = [Request([i, i + 1], [2**62 + i, i + 1]) for i in range(0, 8, 2)]
    drawn = torch.cat(list(Loader(Noisy(), Data().collate, workers=workers)(requests)))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    for index, seed in ((4, 2**62 + 4), (7, 7)):  # by the one request of a resumed run
        (alone,) = Loader(Noisy(), Data().collate)([Request([index], [seed])])
        assert torch.equal(alone[0], drawn[index])
    assert len(set(drawn[:, 1:].flatten().tolist())) == 24  # no draw is another's


def test_a_failure_leaves_the_random_numbers_alone():
    class Broken(Named):
        augmented = True

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(SampleError):
        list(Loader(Broken(), Data().collate)([Request([6], [0])]))
    assert torch.equal(before, torch.get_rng_state())


class Counting:
    """Knows which samples it was asked for."""

    def __init__(self, size):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(index)
        return {"labels": torch.tensor(index % 2)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "known",
    [{}, {"lengths": [7 * i % 50 + 1 for i in range(95)]}, {"groups": Groups([10] * 9 + [5], 30)}],
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
        assert sorted(own) == sorted(set(own))
        split.asked = own
    assert sorted(index for split in splits for index in split.asked) == list(range(95))
    assert max(len(split.asked) for split in splits) - min(len(split.asked) for split in splits) <= 4 * 4


def test_a_split_travels_to_a_spawned_worker(augmented):
    again = pickle.loads(pickle.dumps(Loader(augmented.test, augmented.collate)))
    assert torch.equal(pixels(again, [Request([1])]), augmented.test[1]["pixel_values"][None])


@pytest.mark.parametrize(
    ("workers", "accelerator", "ranks", "cores", "shared", "decided"),
    [
        (None, "cuda", 1, 16, 2e9, 4),
        (None, "cuda", 8, 16, 2e9, 2),
        (None, "cuda", 8, 4, 2e9, 0),
        (None, "cuda", 1, 16, 64e6, 0),
        (None, "cpu", 1, 16, 2e9, 0),
        (0, "cuda", 1, 16, 2e9, 0),
        (9, "cuda", 1, 4, 64e6, 9),
    ],
)
def test_workers_that_nobody_asked_for(monkeypatch, workers, accelerator, ranks, cores, shared, decided):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=shared))
    assert decide_workers(CIFAR10(workers=workers), accelerator, ranks) == decided
