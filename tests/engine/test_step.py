"""What a step does besides adding up gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers.problems import TwoLosses, host_sum, make_fabric, make_model
from torch import nn

from trainer.contract import Model
from trainer.engine.cut import Cut
from trainer.engine.events import Listener
from trainer.engine.loop import Engine, NonFiniteError
from trainer.engine.loss_check import LossCheck
from trainer.engine.model_state import BatchNormStatistics
from trainer.engine.schedule import CheckpointableLambdaLR
from trainer.engine.step import Stepper
from trainer.engine.window import Windows
from trainer.errors import RecipeError
from trainer.values import Loss


@dataclasses.dataclass
class Linear(Model):
    """Squared error of a linear model, so that a sample decides how large the gradient is."""

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def weigh(self, batch):
        return {"loss": float(len(batch["x"]))}

    def losses(self, module, batch):
        yield Loss((module(batch["x"]) - 1).square().sum(), float(len(batch["x"])))


class Normalised(Linear):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))


class Recorder(Listener):
    def __init__(self):
        self.results = []

    def on_step(self, counters, result) -> None:
        self.results.append(result)


def engine_of(values, model=None, *, fetch=None, precision="32-true", world_size=1, batch_size=2, micro=1):
    """An engine, its module and what it recorded; of ``Linear`` on ``values``, one sample a micro-batch, by default."""
    fabric, model = make_fabric(precision, world_size), model or Linear()
    torch.manual_seed(0)
    module = model.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = CheckpointableLambdaLR(optimizer, lambda step: 1 / (1 + step))
    stepper = Stepper(fabric, model, fabric.setup_module(module), optimizer)
    stepper.scheduler = scheduler
    windows = Windows(
        size=len(values),
        cut_at=lambda epoch: Cut(batch_size, micro, batch_size // micro),
        fetch=fetch or (lambda requests: ({"x": torch.tensor([[values[i]] for i in r.indices])} for r in requests)),
        weigh=model.weigh,
        seed=0,
        rank=fabric.global_rank,
        world_size=world_size,
        reduce=list if world_size == 1 else host_sum,
    )
    recorder = Recorder()
    return Engine(stepper, windows, listeners=[recorder]), module, recorder.results


def copy_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def is_as(module, before):
    return all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_non_finite_step_moves_no_weight_no_momentum_and_no_schedule(bad):
    engine, module, results = engine_of([1.0, bad])
    before = copy_of(module)
    engine.fit(epochs=3)
    assert engine.counters.skipped_steps == engine.counters.step == 3
    assert is_as(module, before)
    assert not engine.stepper.optimizer.state
    assert engine.stepper.scheduler.last_epoch == 0
    assert all(p.grad is None for p in module.parameters())
    assert all(result.skipped for result in results)


def test_training_goes_on_after_a_bad_batch_and_stops_after_too_many_in_a_row():
    engine, module, _ = engine_of([1.0] * 9 + [math.nan], batch_size=1)
    engine.fit(epochs=2, max_skipped=2)
    assert (engine.counters.step, engine.counters.skipped_steps) == (20, 2)
    assert all(p.isfinite().all() for p in module.parameters())
    engine, _, _ = engine_of([math.nan] * 10, batch_size=1)
    with pytest.raises(NonFiniteError, match=r"step 4 .*loss 'loss' is nan.*4 steps in a row were skipped.*optim\.lr"):
        engine.fit(epochs=2, max_skipped=4)


def test_the_fp16_scaler_steps_once_a_window_and_an_overflow_halves_the_scale_once_and_skips():
    engine, module, _ = engine_of([0.5, 1.0, 1.5, 2.0], precision="16-mixed", batch_size=4)
    engine.stepper.precision.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy_of(module)
    engine.fit(epochs=3)
    assert engine.counters.skipped_steps == 0
    assert scaler._growth_tracker.item() == 3  # finite updates since the scale last changed
    assert not is_as(module, before)
    engine, module, _ = engine_of([1.0, 200.0], precision="16-mixed")
    scaler = engine.stepper.precision.scaler
    start, before = scaler.get_scale(), copy_of(module)
    engine.fit(epochs=1)
    assert engine.counters.skipped_steps == 1
    assert scaler.get_scale() == start / 2
    assert is_as(module, before)


def test_one_graph_is_alive_at_a_time():
    seen = []

    class Watcher(TwoLosses):
        def losses(self, module, batch):
            for loss in super().losses(module, batch):
                yield loss
                # After the engine's backward the graph's buffers are gone.
                with pytest.raises(RuntimeError, match="second time"):
                    torch.autograd.grad(loss.total, module.trunk.weight)
                seen.append(loss.name)

    batch = {"pixel_values": torch.randn(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    engine, _, _ = engine_of([1.0, 2.0], Watcher(), fetch=lambda requests: (batch for _ in requests))
    engine.fit(epochs=1)
    assert seen == ["left", "right"] * 2


def test_a_micro_step_reads_nothing_back_from_the_device(monkeypatch):
    """Counted on tensors: item(), float() and bool() all end in one of these."""
    reads = []
    engine, _, _ = engine_of([1.0, 2.0, 3.0, 4.0], batch_size=4)
    (first,), (second,) = (list(engine.windows.epoch(epoch)) for epoch in range(2))
    engine.stepper.step(first)  # which also checks weights
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)

        def read(self, *args, _name=name, _original=original, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, read)
    engine.stepper.step(second)
    assert len(second) == 4
    assert reads.count("tolist") == 1  # the one read of a step
    # What is left comes from the optimizer's own step counter, once a step, not from the micro-steps.
    assert len(reads) <= 2


def test_dropout_depends_on_the_micro_batch_and_not_on_what_ran_before():
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def fetch(requests):
        for request in requests:
            yield {"pixel_values": images[request.indices], "labels": torch.tensor(request.indices) % 5}

    def run(noise):
        model = dataclasses.replace(make_model("mlp"), dropout=0.5)
        engine, _, results = engine_of(images, model, fetch=fetch, batch_size=8, micro=2)
        engine.at_boundary = lambda engine: torch.rand(noise)
        engine.fit(epochs=2)
        return [result.loss for result in results]

    assert run(noise=1) == run(noise=1000)


def test_batchnorm_forgets_as_much_in_k_micro_steps_as_in_one_step():
    layer, whole, batch = nn.BatchNorm1d(3, momentum=0.1), nn.BatchNorm1d(3, momentum=0.1), torch.randn(64, 3)
    corrected = BatchNormStatistics(layer)
    whole(batch)
    for _ in range(4):  # the same batch four times: what is left of the past is what counts
        corrected.set_momentum(4, is_empty=False)
        layer(batch)
    torch.testing.assert_close(layer.running_mean, whole.running_mean)
    torch.testing.assert_close(layer.running_var, whole.running_var)
    before = layer.running_mean.clone()
    corrected.set_momentum(4, is_empty=True)
    layer(batch)
    assert torch.equal(layer.running_mean, before)


def test_a_skipped_step_leaves_no_trace_in_batchnorm():
    batches = [{"x": torch.tensor([[1.0], [other]])} for other in (2.0, math.nan)]
    engine, module, results = engine_of([0, 0, 0, 0], Normalised(), fetch=lambda requests: iter(batches), micro=2)
    before = []
    engine.at_boundary = lambda engine: before.append(copy_of(module))
    engine.fit(epochs=1)
    assert [result.skipped for result in results] == [False, True]
    assert not is_as(module, before[0])
    assert is_as(module, before[1])


@pytest.mark.parametrize(
    ("names", "weight", "message"),
    [
        (["loss", "other"], 1.0, r"losses\(\) yields 'other', but loss_names has loss and weigh\(\) returns loss"),
        ([], 1.0, r"yielded 'loss' 0 times in 2 micro-batches"),
        (["loss"], 1000.0, r"Own: loss 'loss' reports weight 1, but weigh\(\) returned 1000"),
    ],
)
def test_losses_must_be_the_declared_ones_of_the_promised_weight(names, weight, message):
    class Own(Linear):
        def weigh(self, batch):
            return {"loss": weight}

        def losses(self, module, batch):
            for name in names:
                (loss,) = super().losses(module, batch)
                yield dataclasses.replace(loss, name=name)

    engine, _, _ = engine_of([1.0, 2.0], Own())
    engine.stepper.check = LossCheck(Own())
    engine.stepper.check.is_done = True
    with pytest.raises(RecipeError, match=message):
        engine.fit(epochs=1)


def test_a_batch_without_labels_is_skipped_and_the_reason_is_said():
    class Weightless(Linear):
        def weigh(self, batch):
            return {"loss": 0.0}

        def losses(self, module, batch):
            yield Loss((module(batch["x"]) * 0).sum(), 0.0)

    engine, _, results = engine_of([1.0, 2.0], Weightless())
    with pytest.raises(NonFiniteError, match=r"all items of the batch have weight 0.*samples of the step: \d, \d$"):
        engine.fit(epochs=5, max_skipped=3)
    assert len(results) == 3
    assert all(math.isnan(result.loss) for result in results)  # and not 0, which would be a perfect one
