"""Samples drawn with replacement: by their chances, the same for any cut and any ranks, and refused by name."""

from collections import Counter
from functools import partial
from itertools import chain

import pytest
import torch
from helpers.prepared import prepared
from helpers.problems import Problem, engine_run, errors, make_samples
from helpers.rounding import ROUNDING

from trainer.contract import Data
from trainer.data import Digits
from trainer.data.fingerprint import fingerprint
from trainer.data.loader import Loader
from trainer.engine.cut import Cut
from trainer.engine.data_feed import make_windows
from trainer.engine.order import batch_indices, weighted_draws
from trainer.engine.window import Windows
from trainer.errors import RecipeError
from trainer.models import MLP
from trainer.recipe import Memory, Recipe
from trainer.values import SampleWeights, ShuffleGroups


class Noisy(list):
    augmented = True

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "pixel_values": sample["pixel_values"] + torch.randn(sample["pixel_values"].shape)}


def draw(stepper, windows, problem):
    windows.sample_weights = SampleWeights([1 + 5 * (index % 3) for index in range(problem.size)])
    if problem.name == "vit":
        windows.augmented, windows.fetch = True, Loader(Noisy(make_samples(problem)), Data().collate)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["vit", "distilbert"])
def test_neither_the_cut_nor_the_ranks_change_what_is_trained(name, ranks):
    whole = Problem(name, 19, 8, 1000)
    plain = engine_run(whole, 1, partial(draw, problem=whole))
    for cut, world_size in ((1, 1), (3, 1), (3, 2), (1, 2)):
        problem = Problem(name, 19, 8, cut)
        run = partial(engine_run, problem, world_size, partial(draw, problem=problem))
        for answer in [run()] if world_size == 1 else ranks(2).run(run):
            found = errors(answer, plain)
            assert max(found["weights"], found["losses"]) < ROUNDING, found
    uniform = engine_run(whole)
    assert errors(uniform, plain)["losses"] > 1e-3


def test_samples_are_drawn_by_their_chances_anew_in_every_epoch():
    chances = SampleWeights([0.0, 1.0, 3.0, 0.0, 6.0, 0.0] * 5000)
    counts = Counter((weighted_draws(1, 0, chances) % 6).tolist())
    assert sum(counts.values()) == 30_000
    assert {place: round(count / 30_000, 1) for place, count in counts.items()} == {1: 0.1, 2: 0.3, 4: 0.6}
    assert not torch.equal(weighted_draws(1, 0, chances), weighted_draws(1, 1, chances))
    assert not torch.equal(weighted_draws(1, 0, chances), weighted_draws(2, 0, chances))
    batches = [batch_indices(1, 0, step, 30_000, 64, None, chances) for step in range(469)]
    assert list(chain.from_iterable(batches)) == weighted_draws(1, 0, chances).tolist()


def windows(rank=0, world_size=1, cut=3):
    chances = SampleWeights([1.0, 0.0, 20.0, 1.0, 1.0, 4.0, 1.0])
    part = Cut(5, cut, 2)
    return Windows(
        7, lambda _: part, iter, lambda _: {"loss": 1.0}, 3, rank, world_size, sample_weights=chances, augmented=True
    )


def test_a_sample_that_comes_again_draws_anew_and_a_resume_goes_on_where_it_was():
    requests = [[micro.batch for micro in window] for window in windows().epoch(4)]
    drawn = [pair for step in requests for one in step for pair in zip(one.indices, one.seeds, strict=True)]
    assert len(drawn) == 7
    assert Counter(index for index, _ in drawn)[2] > 1
    assert len({seed for _, seed in drawn}) == 7
    assert [[micro.batch for micro in window] for window in windows().epoch(4, first_step=1)] == requests[1:]
    for kind in (
        [windows(rank, 2, 1) for rank in range(2)],
        [windows(cut=5)],
    ):
        found = [
            pair
            for one in kind
            for window in one.epoch(4)
            for micro in window
            if not micro.is_empty
            for pair in zip(micro.batch.indices, micro.batch.seeds, strict=True)
        ]
        assert sorted(found) == sorted(drawn)


def test_balanced_draws_classes_alike_and_a_mapping_as_it_says():
    rare = {str(digit): 1.0 if digit else 0.0 for digit in range(10)} | {"7": 4.0}
    for sampling, wanted in (("balanced", [0.1] * 10), (rare, [0.0] + [1 / 12] * 6 + [4 / 12] + [1 / 12] * 2)):
        data = prepared(Digits(sampling=sampling))
        chances = torch.as_tensor(data.sample_weights(), dtype=torch.float64)
        shares = torch.zeros(10, dtype=torch.float64).index_add(0, data.train.labels, chances) / chances.sum()
        counts = torch.bincount(data.train.labels).double()
        wanted = torch.tensor(wanted, dtype=torch.float64)
        if sampling != "balanced":  # relative to others: a class with more samples is drawn more often
            wanted = wanted * counts / (wanted * counts).sum()
        torch.testing.assert_close(shares, wanted)
    assert fingerprint(prepared(Digits())) != fingerprint(data)
    assert Digits().sample_weights() is None


class Own(Data):
    """Chances of its own."""

    def __init__(self, chances, groups=None):
        self.given = chances
        self.train = type("Split", (list,), {"groups": groups})([0] * 4)

    def sample_weights(self):
        return self.given


@pytest.mark.parametrize(
    ("chances", "message"),
    [
        ([1.0], r"Own\.sample_weights\(\) returns 1 numbers for 4 training samples: return one per sample"),
        ([1.0, -1.0, 1.0, 1.0], r"Own\.sample_weights\(\) must return finite numbers of at least 0"),
        ([0.0] * 4, r"Own\.sample_weights\(\) must return finite numbers of at least 0, and not only zeros"),
        ([1.0] * 4, r"Own reads groups of samples in sequence and cannot draw single ones"),
    ],
)
def test_chances_that_cannot_be_are_refused(chances, message):
    data = Own(chances, ShuffleGroups((2, 2), 2))
    recipe = Recipe(model=MLP(), data=data, batch_size=4, memory=Memory(micro_batch_size=2))
    with pytest.raises(RecipeError, match=message):
        make_windows(recipe, iter)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ("balance", r"data\.sampling='balance' must be uniform, balanced or a mapping"),
        ({"1": -2.0}, r"data\.sampling: 1: -2\.0 must be a number of at least 0"),
        ({"seven": 1.0}, r"data\.sampling: there is no class seven; the classes are 0, 1"),
        ({"7": 1.0}, r"data\.sampling gives no number for 0, 1, 2"),
        ({str(digit): 0.0 for digit in range(10)}, r"data\.sampling gives 0 to every class that has samples"),
    ],
)
def test_sampling_that_cannot_be_is_refused(sampling, message):
    with pytest.raises(RecipeError, match=message):
        prepared(Digits(sampling=sampling)).sample_weights()
