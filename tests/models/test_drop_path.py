"""Drop path: draws of each sample, so that neither the cut, the ranks nor computing again changes them."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.problems import LR, Problem, engine_run, errors, flat, make_model, make_samples, plain_indices
from helpers.rounding import ROUNDING
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trainer.contract import Data
from trainer.data.loader import Loader
from trainer.engine.order import derive_seed
from trainer.errors import RecipeError
from trainer.models import VisionTransformer
from trainer.models.drop_path import DropPath, sample_drop_paths, uniform
from trainer.values import Request

RATE = 0.4
MASK = 2**64 - 1


def model_and_module():
    """Four blocks, so that rates are 0, 1/3, 2/3 and all of ``RATE``."""
    model = replace(make_model("vit"), layers=4, drop_path=RATE)
    torch.manual_seed(0)
    module = model.build().double().train()
    torch.nn.init.normal_(module.heads[0].weight, std=0.3)  # torchvision's zeros would hide what is behind them
    return model, module


def splitmix(seed, count):
    """As it is published, on Python's integers."""
    numbers = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        mixed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append((mixed ^ (mixed >> 31)) >> 11)
    return [number / 2**53 for number in numbers]


def prepare(stepper, windows, problem):
    windows.augmented = True
    windows.fetch = Loader(make_samples(problem), Data().collate, seeded=True)


def plain_run(problem):
    """Whole batches, and every factor computed by hand."""
    samples, (_, module) = make_samples(problem), model_and_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    run = {"before": flat(module), "losses": [], "norms": []}
    parts = [part for part in module.modules() if isinstance(part, DropPath)]
    for step in range(problem.steps):
        indices = plain_indices(problem, step)
        epoch = step // -(-problem.size // problem.batch_size)
        drawn = [splitmix(derive_seed(problem.seed, epoch, index), len(parts)) for index in indices]
        for number, part in enumerate(parts):
            rate = RATE * (number // 2) / 3
            factors = [(row[number] >= rate) / (1 - rate) for row in drawn]
            part.kept = torch.tensor(factors, dtype=torch.float64)
        batch = Data().collate([samples[index] for index in indices])
        loss = cross_entropy(module(batch["pixel_values"].double()), batch["labels"])
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


def ours(problem, world_size=1):
    return engine_run(problem, world_size, partial(prepare, problem=problem), model_and_module())


def test_numbers_are_splitmix64s():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of seed 0
    assert uniform(torch.tensor([0]), 3)[:, 0].tolist() == [(number >> 11) / 2**53 for number in published]
    seeds = [0, 1, 2**62 + 12345, 2**63 - 1]
    assert uniform(torch.tensor(seeds), 9).T.tolist() == [splitmix(seed, 9) for seed in seeds]


@pytest.mark.parametrize("size", [19, 17])
def test_every_cut_equals_the_plain_loop(size):
    for cut in (1, 3, 1000):
        problem = Problem("vit", size, 8, cut)
        require_equal(ours(problem), plain_run(problem))


def test_and_so_do_two_ranks_with_uneven_shares(ranks):
    for problem in (Problem("vit", 19, 8, 3), Problem("vit", 17, 8, 1)):
        plain = plain_run(problem)
        for answer in ranks(2).run(ours, problem, 2):
            require_equal(answer, plain)


def test_a_block_that_is_computed_again_leaves_out_the_same():
    (_, kept), (_, again) = model_and_module(), model_and_module()
    pixels, seeds = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6)
    for block in again.encoder.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for module in (kept, again):
        sample_drop_paths(module, seeds)
        module(pixels).square().sum().backward()
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_rates_rise_from_0_names_stay_and_evaluations_leave_out_nothing():
    model, module = model_and_module()
    parts = [part for part in module.modules() if isinstance(part, DropPath)]
    assert [round(part.rate, 6) for part in parts] == [0, 0, 0.133333, 0.133333, 0.266667, 0.266667, 0.4, 0.4]
    plain = replace(model, drop_path=0.0).build().double()
    plain.load_state_dict(module.state_dict())
    pixels = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(module.eval()(pixels), plain.eval()(pixels))
    module.train()
    sample_drop_paths(module, torch.arange(20_000))
    for part in parts:
        shares = (part.kept == 0).double().mean().item()
        assert abs(shares - part.rate) < 0.015
        assert part.kept.max().item() == pytest.approx(1 / (1 - part.rate))
    attention, mlp = parts[-2].kept == 0, parts[-1].kept == 0
    assert abs((attention & mlp).double().mean().item() - RATE**2) < 0.015  # each branch draws by itself
    for part in parts:
        part.kept = None
    torch.manual_seed(0)
    assert not torch.equal(module(pixels), module(pixels))  # a loop of one's own


def test_what_cannot_be_is_refused():
    shape = {"patch_size": 4, "heads": 2, "width": 16, "mlp_width": 32}
    with pytest.raises(RecipeError, match=r"model\.drop_path=1\.0 must be in \[0, 1\)"):
        VisionTransformer("vit_b_16", drop_path=1.0)
    with pytest.raises(RecipeError, match=r"model\.drop_path=0\.1 has no effect with model\.layers=1"):
        VisionTransformer("custom", layers=1, drop_path=0.1, **shape)
    loader = Loader([(torch.ones(2), 1)], Data().collate, seeded=True)
    with pytest.raises(RecipeError, match=r"the model draws by batch\['seeds'\], but the batch is a list"):
        list(loader([Request([0], [1])]))
