"""Mixup and CutMix: partners of the whole batch, so that neither the cut nor the ranks change what is trained."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.problems import (
    CLASSES,
    LR,
    Problem,
    engine_run,
    errors,
    flat,
    initial_module,
    make_model,
    make_samples,
    plain_indices,
)
from helpers.rounding import ROUNDING
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from trainer.contract import Data, mixed_sample_weights
from trainer.data import Digits
from trainer.data.loader import Loader
from trainer.data.mixup import apply_mixup, cutmix_box
from trainer.engine.data_feed import make_windows
from trainer.engine.order import derive_seed, draw_mix
from trainer.errors import RecipeError
from trainer.models import MLP
from trainer.models.base import Objective
from trainer.recipe import Recipe
from trainer.values import MixupConfig, MixupDraw, PartialBatch, Request

KINDS = {
    "mixup": MixupConfig(mixup=0.8),
    "cutmix": MixupConfig(cutmix=1.0),
    "both, sometimes": MixupConfig(mixup=0.4, cutmix=1.0, probability=0.7),
}
CUTS = (1, 3, 1000)


class Noisy(list):
    """Samples that are drawn; those in ``bad`` cannot be loaded."""

    augmented, bad = True, ()

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError("broken")
        sample = super().__getitem__(index)
        return {**sample, "pixel_values": sample["pixel_values"] + torch.randn(sample["pixel_values"].shape)}


def mix(stepper, windows, problem, mixing):
    windows.mixing, windows.augmented = mixing, True
    windows.fetch = Loader(Noisy(make_samples(problem)), Data().collate)


def soft(logits, labels, others, share):
    """Cross entropy with soft labels, as a textbook writes it."""
    mean = share * one_hot(labels, CLASSES).double() + (1 - share) * one_hot(others, CLASSES).double()
    return cross_entropy(logits, mean)


WEIGHTS = [0.5, 1.0, 3.0, 0.25, 2.0]


def weighted(logits, labels, others, share):
    """Smoothed cross entropy with class weights, of both labels, over the sum of both weights."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    options = {"weight": weights, "label_smoothing": 0.1, "reduction": "sum"}
    total = share * cross_entropy(logits, labels, **options) + (1 - share) * cross_entropy(logits, others, **options)
    return total / (share * weights[labels].sum() + (1 - share) * weights[others].sum())


def mixed_run(problem, mixing, loss_of=soft):
    """Plain PyTorch, whole batches."""
    samples, module = Noisy(make_samples(problem)), initial_module(problem)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    run = {"before": flat(module), "losses": [], "norms": []}
    for number in range(problem.steps):
        epoch, step = divmod(number, -(-problem.size // problem.batch_size))
        drawn = []
        for index in plain_indices(problem, number):
            torch.manual_seed(derive_seed(problem.seed, epoch, index))
            drawn.append(samples[index])
        pixels, labels = (torch.stack([sample[key] for sample in drawn]) for key in ("pixel_values", "labels"))
        partners, share, centre = draw_mix(problem.seed, epoch, step, len(drawn), mixing)
        if centre is None:
            pixels = pixels * share + pixels[partners] * (1 - share)
        else:
            height, width = pixels.shape[2:]
            (y, x), sides = (int(centre[0] * height), int(centre[1] * width)), math.sqrt(1 - share)
            taken = torch.zeros(height, width, dtype=torch.bool)
            for row in range(height):
                for column in range(width):
                    inside = -(int(height * sides) // 2) <= row - y < int(height * sides) // 2
                    taken[row, column] = inside and -(int(width * sides) // 2) <= column - x < int(width * sides) // 2
            pixels = torch.where(taken, pixels[partners], pixels)
            share = round(256 * (1 - taken.double().mean().item())) / 256
        loss = loss_of(module(pixels.double()), labels, labels[partners], share)
        loss.backward()
        run["norms"].append(torch.nn.utils.clip_grad_norm_(module.parameters(), math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        run["losses"].append(loss.item())
    return run | {"after": flat(module)}


def require_equal(ours, plain):
    found = errors(ours, plain)
    assert max(found["weights"], found["losses"]) < ROUNDING, found
    assert max(found["change"], found["norms"]) < 100 * ROUNDING, found


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_equals_the_plain_loop_over_whole_batches(kind):
    for name, size in (("vit", 19), ("mlp", 17)):  # the last batch is of 3 samples, or of one
        plain = mixed_run(Problem(name, size, 8, 1), KINDS[kind])
        for cut in CUTS:
            problem = Problem(name, size, 8, cut)
            require_equal(engine_run(problem, 1, partial(mix, problem=problem, mixing=KINDS[kind])), plain)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_partners_of_other_ranks_and_uneven_shares_make_no_difference(kind, ranks):
    for size, cuts in ((19, (3, 1000)), (17, (1,))):
        plain = mixed_run(Problem("vit", size, 8, 1), KINDS[kind])
        for cut in cuts:
            problem = Problem("vit", size, 8, cut)
            for answer in ranks(2).run(engine_run, problem, 2, partial(mix, problem=problem, mixing=KINDS[kind])):
                require_equal(answer, plain)


def test_weights_of_classes_and_smoothed_labels_are_mixed_exactly():
    plain = mixed_run(Problem("vit", 19, 8, 1), KINDS["mixup"], weighted)
    model = replace(make_model("vit"), loss=Objective(class_weights=WEIGHTS, label_smoothing=0.1))
    for cut in CUTS:
        problem = Problem("vit", 19, 8, cut)
        prepare = partial(mix, problem=problem, mixing=KINDS["mixup"])
        require_equal(engine_run(problem, 1, prepare, (model, initial_module(problem))), plain)


def test_several_labels_are_mixed_as_targets():
    model = replace(make_model("vit"), task="multi_label", loss=Objective(class_weights=WEIGHTS))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, CLASSES, generator=generator, dtype=torch.float64)
    labels, others = (torch.randint(2, (6, CLASSES), generator=generator).float() for _ in range(2))
    batch = {"labels": labels, "mixed_labels": others, "lam": torch.full((6,), 0.25)}
    targets, weights = (0.25 * labels + 0.75 * others).double(), torch.tensor(WEIGHTS, dtype=torch.float64)
    wanted = binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="sum")
    found = model.loss_of_batch(logits, batch)
    torch.testing.assert_close(found.total, wanted, rtol=ROUNDING, atol=0)
    assert float(found.counted()) == model.weigh(batch)["loss"] == 30


def test_partners_within_the_micro_batch_which_is_usual_would_be_found():
    def within(stepper, windows, problem):
        mix(stepper, windows, problem, KINDS["mixup"])
        honest = windows._own

        def own(epoch, step):
            for request, is_empty in honest(epoch, step):
                turned = MixupDraw(request.indices[::-1], request.seeds[::-1], request.mix.lam)
                yield request._replace(mix=turned), is_empty

        windows._own = lambda epoch, step: list(own(epoch, step))

    problems = [Problem("mlp", 16, 8, cut) for cut in (2, 8)]
    found = [engine_run(problem, 1, partial(within, problem=problem)) for problem in problems]
    assert errors(*found)["losses"] > 1e-4


def test_how_a_batch_is_mixed_follows_from_its_place_alone():
    both = MixupConfig(mixup=0.8, cutmix=1.0, probability=0.75)
    drawn = [draw_mix(3, 1, step, 16, both) for step in range(400)]
    assert drawn == [draw_mix(3, 1, step, 16, both) for step in range(400)]
    assert all(sorted(partners) == list(range(16)) for partners, _, _ in drawn)
    mixed_ones = [(partners, share, centre) for partners, share, centre in drawn if share < 1]
    assert 0.68 < len(mixed_ones) / 400 < 0.82
    assert 0.4 < sum(centre is not None for *_, centre in mixed_ones) / len(mixed_ones) < 0.6
    assert all(share * 256 == int(share * 256) for _, share, _ in drawn)
    shares = [draw_mix(0, 0, step, 4, MixupConfig(mixup=0.2))[1] for step in range(400)]
    assert (
        sum(share in (0, 1) or not 0.05 < share < 0.95 for share in shares) > 200
    )  # most mix little, at such an alpha
    assert draw_mix(0, 0, 0, 4, MixupConfig(mixup=0.2)) != draw_mix(0, 1, 0, 4, MixupConfig(mixup=0.2))


def test_a_rectangle_is_cut_off_at_the_border_and_its_share_is_of_what_is_left():
    assert cutmix_box(0.75, (0.5, 0.5), 8, 8) == (slice(2, 6), slice(2, 6), 0.75)
    assert cutmix_box(0.75, (0.0, 0.99), 8, 8) == (slice(0, 2), slice(5, 8), round(256 * (1 - 6 / 64)) / 256)
    assert cutmix_box(1.0, (0.5, 0.5), 8, 8)[2] == 1.0


def test_a_partner_in_the_micro_batch_is_loaded_once_and_others_besides():
    read = []

    class Counted(Noisy):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    loader = Loader(Counted(make_samples(Problem("mlp", 8, 8, 8))), Data().collate)
    asked = [Request([1, 2, 3], [11, 12, 13], MixupDraw([2, 1, 6], [12, 11, 16], 0.5))]
    (batch,) = loader(asked)
    assert read == [1, 2, 3, 6]
    assert batch["lam"].tolist() == [0.5] * 3
    (alone,) = loader([Request([6], [16])])
    (third,) = loader([Request([3], [13])])
    assert torch.equal(batch["pixel_values"][2:], third["pixel_values"] * 0.5 + alone["pixel_values"] * 0.5)
    assert batch["mixed_labels"][2:].tolist() == alone["labels"].tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sample_whose_partner_cannot_be_loaded_is_mixed_with_itself(size):
    split = Noisy(make_samples(Problem("mlp", 8, 8, 8)))
    split.bad = (6,)
    loader = Loader(split, Data().collate, max_bad_samples=2)
    indices, partners = [1, 6, 3, 2], [2, 3, 6, 1]
    pieces = [slice(at, at + size) for at in range(0, 4, size)]
    asked = [Request(indices[at], indices[at], MixupDraw(partners[at], partners[at], 0.25)) for at in pieces]
    answers = list(loader(asked))
    kept = [answer for answer in answers if not isinstance(answer, PartialBatch) or answer.kept_indices]
    batches = [answer.batch if isinstance(answer, PartialBatch) else answer for answer in kept]
    (plain,) = loader([Request([1, 3, 2], [1, 3, 2])])
    one, three, two = plain["pixel_values"]
    wanted = torch.stack([one * 0.25 + two * 0.75, three * 0.25 + three * 0.75, two * 0.25 + one * 0.75])
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in batches]), wanted)
    bad = [sample.position for answer in answers if isinstance(answer, PartialBatch) for sample in answer.bad]
    assert bad == [6]


def test_labels_that_are_ignored_weigh_by_their_share():
    batch = {"labels": torch.tensor([0, -100, 2]), "lam": torch.full((3,), 0.25)}
    batch["mixed_labels"] = torch.tensor([1, 1, -100])
    model = make_model("vit")
    assert mixed_sample_weights(batch, model.weigh) == model.weigh(batch) == {"loss": 2.0}
    batch["mixed_labels"] = torch.tensor([-100, -100, -100])
    assert model.weigh(batch) == {"loss": 0.5}


class OwnLabels(MLP):
    """A model that knows nothing of mixed labels."""

    mixes = False


def test_what_cannot_be_mixed_is_refused():
    recipe = Recipe(model=OwnLabels(), data=Digits(mixup=0.2), batch_size=4)
    recipe.data.train = [0]
    with pytest.raises(RecipeError, match=r"OwnLabels\.losses\(\) supports one label per sample: set both to 0, or"):
        make_windows(recipe, iter)
    with pytest.raises(
        RecipeError, match=r"data\.mixup and data\.cutmix need batches of tensors with one row per sample"
    ):
        apply_mixup({"input_ids": torch.ones(2, 3), "labels": torch.ones(2)}, [0], [1], MixupDraw([1], None, 0.5))
    for settings, message in (
        ({"mixup": -0.1}, r"data\.mixup=-0\.1 must be a number from 0 to 1000"),
        ({"cutmix": "1"}, r"data\.cutmix='1' must be a number"),
        ({"mix_probability": 0.5}, r"data\.mix_probability=0\.5 has no effect without data\.mixup or data\.cutmix"),
        ({"mixup": 0.2, "mix_probability": 1.5}, r"data\.mix_probability=1\.5 must be a number from 0 to 1"),
    ):
        with pytest.raises(RecipeError, match=message):
            Digits(**settings)
