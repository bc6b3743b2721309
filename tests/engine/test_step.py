"""What a step does besides adding up gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers.problems import Problem, TwoLosses, engine_run, errors, make_fabric, make_model, plain_run
from torch import nn

from trainer.contract import Model
from trainer.engine.batchnorm import BatchNormStatistics
from trainer.engine.check import LossCheck
from trainer.engine.events import Counters, Events, Listener
from trainer.engine.loop import Engine, NonFiniteError
from trainer.engine.order import batch_indices
from trainer.engine.schedule import lr_factor
from trainer.engine.step import Stepper
from trainer.engine.window import Cut, Windows
from trainer.errors import RecipeError
from trainer.recipe import Optim
from trainer.values import Loss


def test_clipping_sees_the_gradient_of_the_whole_batch():
    problem = Problem("mlp", 24, 8, 3, clip_norm=0.05)
    ours, plain = engine_run(problem), plain_run(problem)
    assert min(plain["norms"]) > 0.05  # it does clip
    assert errors(ours, plain)["change"] < 1e-10
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-10)


@dataclasses.dataclass
class Linear(Model):
    """Squared error of a linear model, so that a sample decides how large the gradient is."""

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def weigh(self, batch):
        return {"loss": float(len(batch["x"]))}

    def losses(self, module, batch):
        yield Loss((module(batch["x"]) - 1).square().sum(), float(len(batch["x"])))


def linear_engine(values, *, precision="32-true", world_size=1, reduce=list, batch_size=2, listener=None, **options):
    """An engine on ``values``, one sample a micro-batch, in their order."""
    fabric = make_fabric(precision, world_size)
    torch.manual_seed(0)
    module = Linear().build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    stepper = Stepper(fabric, Linear(), fabric.setup_module(module), optimizer, scheduler, **options)
    windows = Windows(
        size=len(values),
        cut_at=lambda epoch: Cut(batch_size, 1, batch_size),
        fetch=lambda requests: ({"x": torch.tensor([[values[i]] for i in r.indices])} for r in requests),
        weigh=Linear().weigh,
        seed=0,
        rank=fabric.global_rank,
        world_size=world_size,
        reduce=reduce,
    )
    return Engine(stepper, windows, events=Events([listener] if listener else [])), module


class Recorder(Listener):
    def __init__(self):
        self.results = []

    def on_step(self, counters: Counters, result) -> None:
        self.results.append(result)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_non_finite_step_moves_no_weight_no_momentum_and_no_schedule(bad):
    recorder = Recorder()
    engine, module = linear_engine([1.0, bad], listener=recorder)
    before = [p.clone() for p in module.parameters()]
    engine.fit(epochs=3)
    assert engine.counters.skipped_steps == engine.counters.step == 3
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert not engine.stepper.optimizer.state
    assert engine.stepper.scheduler.last_epoch == 0
    assert all(p.grad is None for p in module.parameters())
    assert all(result.skipped for result in recorder.results)


def test_training_goes_on_after_a_bad_batch_and_stops_after_too_many_in_a_row():
    engine, module = linear_engine([1.0] * 9 + [math.nan], batch_size=1)
    engine.fit(epochs=2, max_skipped=2)
    assert (engine.counters.step, engine.counters.skipped_steps) == (20, 2)
    assert all(p.isfinite().all() for p in module.parameters())
    engine, _ = linear_engine([math.nan] * 10, batch_size=1)
    with pytest.raises(NonFiniteError, match=r"step 4 .*loss 'loss' is nan.*4 steps in a row were skipped.*optim\.lr"):
        engine.fit(epochs=2, max_skipped=4)


def _bad_on_one_rank():
    from helpers.problems import host_sum

    recorder = Recorder()
    # Two samples a step, one on each rank: only one of them has the bad one.
    engine, module = linear_engine([1.0, 2.0, math.nan, 4.0], world_size=2, reduce=host_sum, listener=recorder)
    engine.fit(epochs=2)
    weights = [p.detach().tolist() for p in module.parameters()]
    return [result.skipped for result in recorder.results], weights, engine.counters.skipped_steps


def test_a_bad_sample_on_one_rank_skips_the_step_on_all(ranks):
    answers = ranks(2).run(_bad_on_one_rank)
    assert answers[0] == answers[1]
    assert answers[0][2] == 2
    assert sorted(answers[0][0]) == [False, False, True, True]


def test_the_fp16_scaler_steps_once_a_window():
    engine, module = linear_engine([0.5, 1.0, 1.5, 2.0], precision="16-mixed", batch_size=4)
    engine.stepper.precision.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.clone() for p in module.parameters()]
    engine.fit(epochs=3)
    assert engine.counters.skipped_steps == 0
    assert scaler._growth_tracker.item() == 3  # finite updates since the scale last changed
    assert not all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_an_fp16_overflow_halves_the_scale_once_and_skips():
    engine, module = linear_engine([1.0, 200.0], precision="16-mixed")
    scaler = engine.stepper.precision.scaler
    start = scaler.get_scale()
    before = [p.clone() for p in module.parameters()]
    engine.fit(epochs=1)
    assert engine.counters.skipped_steps == 1
    assert scaler.get_scale() == start / 2
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_losses_that_do_not_weigh_what_they_promised_are_refused():
    @dataclasses.dataclass
    class Liar(TwoLosses):
        def weigh(self, batch):
            return {"left": float(len(batch["labels"])), "right": 1000.0}

    engine, _ = linear_engine([1.0, 2.0])
    fabric = make_fabric("32-true", 1)
    module = Liar().build()
    stepper = Stepper(fabric, Liar(), fabric.setup_module(module), torch.optim.SGD(module.parameters(), lr=0.1))
    batch = {"pixel_values": torch.zeros(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    windows = dataclasses.replace(engine.windows, fetch=lambda rs: (batch for _ in rs), weigh=Liar().weigh)
    with pytest.raises(RecipeError, match=r"Liar: loss 'right' reports weight 1 .* weighed 1000"):
        stepper.step(next(windows.epoch(0)))


def test_one_graph_is_alive_at_a_time():
    alive = []

    class Watcher(TwoLosses):
        def losses(self, module, batch):
            for loss in super().losses(module, batch):
                node = loss.total.grad_fn
                yield loss
                # After the engine's backward the graph's buffers are gone.
                with pytest.raises(RuntimeError, match="second time"):
                    torch.autograd.grad(loss.total, module.trunk.weight)
                alive.append(node is not None)

    fabric = make_fabric("32-true", 1)
    module = Watcher().build()
    stepper = Stepper(fabric, Watcher(), fabric.setup_module(module), torch.optim.SGD(module.parameters(), lr=0.1))
    batch = {"pixel_values": torch.randn(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    engine, _ = linear_engine([1.0, 2.0])
    windows = dataclasses.replace(engine.windows, fetch=lambda rs: (batch for _ in rs), weigh=Watcher().weigh)
    stepper.step(next(windows.epoch(0)))
    assert len(alive) == 2 * 2


def test_a_micro_step_reads_nothing_back_from_the_device(monkeypatch):
    """Counted on tensors: item(), float() and bool() all end in one of these."""
    reads = []
    engine, _ = linear_engine([1.0, 2.0, 3.0, 4.0], batch_size=4)
    windows = list(engine.windows.epoch(0))
    engine.stepper.step(windows[0])  # the first step also checks weights
    windows = list(engine.windows.epoch(1))
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)

        def read(self, *args, _name=name, _original=original, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, read)
    engine.stepper.step(windows[0])
    assert reads.count("tolist") == 1  # the one read of a step
    assert len(windows[0]) == 4
    # What is left comes from the optimizer's own step counter, once a step, not from the micro-steps.
    assert len(reads) <= 2


def test_dropout_depends_on_the_micro_batch_and_not_on_what_ran_before():
    def run(noise):
        model = dataclasses.replace(make_model("mlp"), dropout=0.5)
        fabric = make_fabric("32-true", 1)
        torch.manual_seed(0)
        module = model.build()
        stepper = Stepper(fabric, model, fabric.setup_module(module), torch.optim.SGD(module.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(8, 3, 4, 4, generator=generator)
        windows = Windows(
            size=8,
            cut_at=lambda epoch: Cut(8, 2, 4),
            fetch=lambda rs: ({"pixel_values": images[r.indices], "labels": torch.tensor(r.indices) % 5} for r in rs),
            weigh=model.weigh,
            seed=0,
        )
        losses = []
        for epoch in range(2):
            torch.rand(noise)
            losses += [stepper.step(window).loss for window in windows.epoch(epoch)]
        return losses

    assert run(noise=1) == run(noise=1000)


def test_batchnorm_forgets_as_much_in_k_micro_steps_as_in_one_step():
    layer = nn.BatchNorm1d(3, momentum=0.1)
    corrected = BatchNormStatistics(layer)
    batch = torch.randn(64, 3)
    whole = nn.BatchNorm1d(3, momentum=0.1)
    whole(batch)
    for _ in range(4):  # the same batch four times: what is left of the past is what counts
        corrected.set(4, is_empty=False)
        layer(batch)
    torch.testing.assert_close(layer.running_mean, whole.running_mean)
    torch.testing.assert_close(layer.running_var, whole.running_var)
    before = layer.running_mean.clone()
    corrected.set(4, is_empty=True)
    layer(batch)
    assert torch.equal(layer.running_mean, before)


@dataclasses.dataclass
class Normalised(Linear):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))


def test_a_skipped_step_leaves_no_trace_in_batchnorm():
    fabric = make_fabric("32-true", 1)
    module = Normalised().build()
    stepper = Stepper(fabric, Normalised(), fabric.setup_module(module), torch.optim.SGD(module.parameters(), lr=0.1))
    engine, _ = linear_engine([1.0, 2.0])
    good, bad = (torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [math.nan]]))

    def step(values):
        windows = dataclasses.replace(engine.windows, fetch=lambda rs: ({"x": values} for _ in rs))
        return stepper.step(next(windows.epoch(0))).skipped

    stepper.module.train()
    assert not step(good)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert step(bad)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["loss", "other"], r"losses\(\) yields 'other', loss_names are loss and weigh\(\) weighs loss"),
        ([], r"yielded 'loss' 0 times in 2 micro-batches"),
        (["loss", "loss"], r"yields 'loss' twice for a micro-batch"),
    ],
)
def test_losses_must_be_the_declared_ones(names, message):
    class Own(Linear):
        def losses(self, module, batch):
            for name in names:
                (loss,) = super().losses(module, batch)
                yield dataclasses.replace(loss, name=name)

    engine, _ = linear_engine([1.0, 2.0])
    engine.stepper.model = Own()
    engine.stepper.check = LossCheck(Own())
    with pytest.raises(RecipeError, match=message):
        engine.fit(epochs=1)


def test_a_batch_without_labels_is_skipped_and_the_reason_is_said():
    class Weightless(Linear):
        def weigh(self, batch):
            return {"loss": 0.0}

        def losses(self, module, batch):
            yield Loss((module(batch["x"]) * 0).sum(), 0.0)

    class Losses(Listener):
        def on_step(self, counters: Counters, result) -> None:
            losses.append(result.loss)

    losses: list[float] = []
    engine, _ = linear_engine([1.0, 2.0], listener=Losses())
    engine.stepper.model = Weightless()
    engine.stepper.check = LossCheck(Weightless())
    engine.windows.weigh = Weightless().weigh
    with pytest.raises(NonFiniteError, match=r"nothing in the batch has a weight.*samples of the step: \d, \d$"):
        engine.fit(epochs=5, max_skipped=3)
    assert len(losses) == 3
    assert all(map(math.isnan, losses))  # and not 0, which would be a perfect one


def test_schedules_start_warm_and_end_at_zero_with_the_last_step():
    for schedule in ("cosine", "linear"):
        factor = lr_factor(Optim("sgd", lr=1.0, schedule=schedule, warmup_steps=3), 10, lambda step: 1)
        factors = [factor(step) for step in range(11)]
        assert factors[:3] == [0.25, 0.5, 0.75]
        assert factors[3] == 1.0
        assert all(a > b for a, b in zip(factors[3:], factors[4:], strict=False))
        assert factors[10] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("bad", [[], [3], [0, 1, 6]], ids=["none skipped", "one skipped", "three skipped"])
def test_sgd_with_cosine_decay_reaches_its_floor_with_the_last_step(bad):
    """Two micro-batches a step, and steps that are skipped in between: they must not leave the end of the curve off."""
    recorder, steps = Recorder(), 10
    values = [1.0 + number / 40 for number in range(2 * steps)]
    engine, _ = linear_engine(values, batch_size=2, listener=recorder)
    stepper = engine.stepper
    order = [step for step in bad for _ in range(2)]
    for position, sample in enumerate(batch_indices(0, 0, 0, len(values), len(values))):
        values[sample] = math.nan if position // 2 in order else values[sample]
    factor = lr_factor(
        Optim("sgd", lr=0.1, schedule="cosine"), steps, lambda step: 2, skipped_steps=lambda: stepper.skipped_steps
    )
    for group in stepper.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.1
    stepper.scheduler = torch.optim.lr_scheduler.LambdaLR(stepper.optimizer, factor)
    engine.fit(epochs=1)
    assert [number for number, result in enumerate(recorder.results) if result.skipped] == bad
    taken = [result.lr for result in recorder.results if not result.skipped]
    assert all(a > b for a, b in zip(taken, taken[1:], strict=False))
    assert taken[-1] < 0.1 * (0.05 if len(bad) < 3 else 0.06)
    assert stepper.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_the_learning_rate_follows_the_batch_size():
    def factor(rule):
        optim = Optim("sgd", lr=1.0, scale_lr=rule, reference_batch_size=16)
        return lr_factor(optim, 10, lambda step: 64 if step < 5 else 16)

    assert [factor("linear")(step) for step in (0, 9)] == [4.0, 1.0]
    assert [factor("sqrt")(step) for step in (0, 9)] == [2.0, 1.0]
    assert [factor("none")(step) for step in (0, 9)] == [1.0, 1.0]
