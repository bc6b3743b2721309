"""The comparison of losses in the first steps: it finds means, refuses no sum, and leaves no trace."""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.problems import make_fabric
from helpers.resumed import saved
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from trainer import Checkpoint, Data, Memory, Optim, Recipe, RecipeError, Run, fit
from trainer.contract import Model
from trainer.engine.forward import Forward
from trainer.engine.loss_check import WATCHED, LossCheck
from trainer.engine.order import batch_indices
from trainer.engine.window import MicroBatch, Window
from trainer.values import Loss

pytestmark = pytest.mark.usefixtures("no_pictures")

CLASSES, WIDTH = 4, 6


class Net(nn.Module):
    """Two linear layers, with something between them; ``forward`` of most subclasses is ``between``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.make()

    def make(self) -> None: ...

    def between(self, h):
        return h

    def forward(self, x):
        return self.last(torch.tanh(self.between(self.first(x))))


class Counter(Net):
    """Counts its forwards in a buffer, as annealing does."""

    def between(self, h):
        self.count += 1
        return h * (1 + self.count / 10).to(h)


class Seen(Net):
    """Counts samples in a buffer."""

    def between(self, h):
        self.count += len(h)
        return h * (1 + self.count / 100).to(h)


class Replaced(Net):
    """Puts a new tensor in the place of a buffer."""

    def between(self, h):
        self.count = self.count + 1
        return h * (1 + self.count / 10).to(h)


class ActNorm(Net):
    """Initialises a scale from the first samples, as published."""

    def make(self):
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def between(self, h):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (h.std(0, correction=0) + 0.1))
                self.ready.fill_(True)
        return h * self.scale


class Attribute(Net):
    """Counts its forwards in attributes of several kinds."""

    def make(self):
        self.steps, self.log, self.table, self.recent = 0, [], {"steps": 0}, deque(maxlen=3)

    def between(self, h):
        self.steps += 1
        self.log.append(self.steps)
        self.table["steps"] += 1
        self.recent.append(self.steps)
        count = self.steps + len(self.log) + self.table["steps"] + sum(self.recent)
        return h * (1 + count / 10)


class Momentum(Net):
    """Moves a copy of a layer after the layer by assigning to ``data``, and another one in place."""

    def make(self):
        torch.manual_seed(5)
        self.key, self.other = nn.Linear(WIDTH, 8).requires_grad_(False), nn.Linear(WIDTH, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for key, other, query in zip(
                self.key.parameters(), self.other.parameters(), self.first.parameters(), strict=True
            ):
                key.data = key.data * 0.9 + query.data * 0.1
                other.mul_(0.9).add_(query, alpha=0.1)
        return self.last(torch.tanh(self.first(x) + self.key(x) + self.other(x)))


class Running(Net):
    """Normalises by a running mean that every forward updates, whatever the mode."""

    def make(self):
        self.register_buffer("mean", torch.zeros(8))

    def between(self, h):
        out = h - self.mean
        self.mean.lerp_(h.detach().mean(0).to(self.mean), 0.1)
        return out


KINDS = {kind.__name__: kind for kind in (Net, Counter, Seen, Replaced, ActNorm, Attribute, Momentum, Running)}


@dataclass
class Of(Model):
    """One of these modules, and a loss.

    Args:
        kind: of module.
        how: the loss is computed.
    """

    kind: str = "Net"
    how: str = "sum"
    blocks = (nn.Linear,)

    def build(self):
        torch.manual_seed(0)
        return KINDS[self.kind]()

    def losses(self, module, batch):
        yield loss_of(module(batch["x"]), batch["labels"], self.how)


def loss_of(logits, labels, how="sum"):
    labels, rows = labels.flatten(), len(labels)
    weights = torch.tensor([1.0, 1.0, 20.0, 1.0]).to(logits)
    logits = logits.flatten(0, -2)
    count = int((labels != -100).sum())
    total = {
        "sum": lambda: F.cross_entropy(logits, labels, reduction="sum"),
        "mean": lambda: F.cross_entropy(logits, labels),
        "class-weighted mean": lambda: F.cross_entropy(logits, labels, weights) * count,
        "class-weighted sum": lambda: F.cross_entropy(logits, labels, weights, reduction="sum"),
        "mean of tokens": lambda: F.cross_entropy(logits, labels) * rows,
    }[how]()
    return Loss(total, rows if how == "mean of tokens" else count)


@dataclass
class Points(Data):
    """Points, whose labels are drawn, or those that ``labels`` has for the order of the first epoch.

    Args:
        size: of samples.
        seed: of labels; 5 % are 2, and at least one, all others 0.
    """

    size: int = 32
    seed: int | None = None

    def prepare(self, tokenizer: Any = None) -> None:
        generator = torch.Generator().manual_seed(1 if self.seed is None else self.seed)
        labels = torch.randint(CLASSES, (self.size,), generator=generator)
        if self.seed is not None:
            labels = (torch.rand(self.size, generator=generator) < 0.05) * 2
            labels[self.seed % self.size] = 2
        points = torch.randn(self.size, WIDTH, generator=generator)
        self.train = [{"x": point, "labels": label} for point, label in zip(points, labels, strict=True)]


def recipe(folder, kind, how="sum", memory=(), data=None, **settings):
    chosen = {"micro_batch_size": 8, "precision": "64-true"} | dict(memory)
    return Recipe(
        model=Of(kind, how),
        data=data or Points(),
        optim=Optim("sgd", lr=0.1),
        batch_size=settings.pop("batch_size", 8),
        epochs=2,
        memory=Memory(**chosen),
        checkpoint=Checkpoint(every=settings.pop("every", None), keep_last=99),
        run=Run(
            dir=str(folder), accelerator="cpu", progress=False, evaluate=False, predict=False, recover=False, **settings
        ),
    )


def weights_of(run_dir):
    from safetensors.torch import load_file

    return load_file(run_dir / "model" / "model.safetensors")


def plain_loop(kind):
    """The state after two epochs of whole batches, as plain PyTorch has it."""
    torch.set_default_dtype(torch.float64)
    try:
        module = Of(kind).build()
    finally:
        torch.set_default_dtype(torch.float32)
    data, optimizer = Points(), torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    data.prepare()
    for step in range(8):
        rows = [data.train[index] for index in batch_indices(0, *divmod(step, 4), 32, 8)]
        optimizer.zero_grad()
        logits = module(torch.stack([row["x"] for row in rows]).double())
        (F.cross_entropy(logits, torch.stack([row["labels"] for row in rows]), reduction="sum") / 8).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, 8) for kind in KINDS),
        *((kind, "auto") for kind in ("Counter", "ActNorm")),
        *(pytest.param(kind, "auto", marks=pytest.mark.slow) for kind in KINDS if kind not in ("Counter", "ActNorm")),
    ],
)
def test_a_run_of_a_module_that_changes_itself_is_the_plain_loop_and_resumes_bit_for_bit(kind, size, tmp_path):
    """With micro-batches of ``auto`` size, a batch is tried before training: that leaves no trace, either."""
    fit(recipe(tmp_path / "whole", kind, memory={"micro_batch_size": size}, every=3))
    expected = plain_loop(kind)
    found = weights_of(tmp_path / "whole")
    assert found.keys() == expected.keys()
    wrong = [name for name, value in found.items() if not torch.allclose(value, expected[name], rtol=1e-11, atol=1e-13)]
    assert not wrong
    if kind != "Attribute":  # which no checkpoint has
        resumed = str(tmp_path / "whole" / "checkpoints" / "step-00000003")
        fit(recipe(tmp_path / "rest", kind, memory={"micro_batch_size": size}, every=3, resume=resumed))
        assert saved(tmp_path / "rest", 8) == saved(tmp_path / "whole", 8)


WAYS = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "cpu_offload": "parameters"},
    {"strategy": "ddp", "cpu_offload": "optimizer"},
    {"strategy": "ddp", "micro_batch_size": "auto"},
    {"strategy": "fsdp", "micro_batch_size": "auto"},
]


def _compared_and_not(folder, ways=WAYS, kinds=tuple(KINDS)):
    """Which runs have other weights if nothing is compared, or tried out, before them; the first rank knows."""
    wrong, world = [], torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for number, way in enumerate(ways):
        if world == 1 and way["strategy"] == "ddp":
            way = way | {"strategy": "single"}
        for kind in kinds:
            paths = [folder / f"{number}{kind}{end}" for end in ("", "-not")]
            fit(recipe(paths[0], kind, memory={"micro_batch_size": 2} | way))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LossCheck, "check_additive", lambda *args: None)
                patch.setattr("trainer.engine.loop.rehearse", lambda *args: None)
                fit(recipe(paths[1], kind, memory={"micro_batch_size": 2} | way))
            if world == 1 or torch.distributed.get_rank() == 0:
                found, expected = map(weights_of, paths)
                # The buckets of DDP change after its first backward, and sums of three ranks with them.
                rounds = 1e-12 if world > 2 and "auto" in way.values() else 0.0
                far = [
                    name for name, value in expected.items() if not torch.allclose(found[name], value, rounds, rounds)
                ]
                wrong += [(way, kind, name) for name in far]
    return wrong


@pytest.mark.slow
def test_the_comparison_changes_no_bit_of_a_run_of_one_rank_with_fsdp(tmp_path):
    assert _compared_and_not(tmp_path, WAYS[1:3], ("Counter", "Seen", "ActNorm", "Attribute")) == []


@pytest.mark.slow
def test_the_comparison_changes_no_bit_of_a_run_of_two_ranks(ranks, tmp_path):
    assert ranks(2).run(_compared_and_not, tmp_path, WAYS[:2], ("Seen", "ActNorm")) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_comparison_changes_no_bit_under_any_strategy(world_size, ranks, tmp_path):
    assert ranks(world_size).run(_compared_and_not, tmp_path) == [[]] * world_size


def _ends(folder, kind, how, memory, **settings):
    try:
        fit(recipe(folder, kind, how, memory, **settings))
    except RecipeError as error:
        return str(error)
    return "trained"


REFUSED = "must return the sum over the samples"


# Samples that differ.


def checked(model, module, windows, count=WATCHED):
    """Compare what the first ``count`` windows have, micro-batches each; how many of them were needed."""
    forward, check = Forward(make_fabric("32-true", 1), model, module), LossCheck(model)
    for number, batches in enumerate(windows[:count], start=1):
        micro = [MicroBatch(batch, 0, False, False, range(len(batch["labels"]))) for batch in batches]
        check.check_additive(forward, Window(micro, {}, 1), 1, torch.default_generator)
        if check.check_complete(0 if check.steps else check.seen.update(dict.fromkeys(model.loss_names, 0)) or 0):
            return number
    return count


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_a_class_weighted_mean_is_refused_whatever_the_order_of_rare_labels(seed, size, tmp_path):
    for how in ("mean", "sum"):
        options = {"data": Points(64, seed), "batch_size": 32}
        found = _ends(tmp_path / how, "Net", f"class-weighted {how}", {"micro_batch_size": size}, **options)
        assert (REFUSED in found) == (how == "mean"), found


def batch_of(labels, generator, shape=(WIDTH,)):
    return {"x": torch.randn(len(labels), *shape, generator=generator), "labels": torch.tensor(labels)}


def test_samples_are_compared_when_the_first_ones_with_another_label_come():
    """All samples of the first 60 steps are alike."""
    generator, model = torch.Generator().manual_seed(0), Of(how="class-weighted mean")
    windows = [[batch_of([1] * 4, generator)] for _ in range(60)] + [[batch_of([1, 1, 2, 1], generator)]] * 9
    assert checked(model, model.build(), windows, 60) == 60
    with pytest.raises(RecipeError, match=REFUSED):
        checked(model, model.build(), windows)
    assert checked(replace(model, how="class-weighted sum"), model.build(), windows) == 61


def test_samples_that_stay_alike_are_not_looked_at_for_ever():
    generator, model = torch.Generator().manual_seed(0), Of()
    assert checked(model, model.build(), [[batch_of([1] * 4, generator)]] * (WATCHED + 9)) == WATCHED


class Tokens(Of):
    """A class for each of several tokens."""

    def weigh(self, batch):
        return {"loss": float(len(batch["labels"]) if "mean" in self.how else (batch["labels"] != -100).sum())}


def tokens_of(lengths, generator):
    labels = torch.randint(CLASSES, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = {"x": torch.randn(*labels.shape, WIDTH, generator=generator), "attention_mask": mask.long()}
    return batch | {"labels": labels.masked_fill(~mask, -100)}


@pytest.mark.parametrize("how", ["mean of tokens", "sum"])
@pytest.mark.parametrize("size", [8, 2])
def test_a_mean_of_tokens_is_refused_where_the_first_samples_have_equally_many(how, size):
    generator, model = torch.Generator().manual_seed(0), Tokens(how=how)
    lengths = [5, 5, 5, 5, 9, 3, 5, 5]
    window = [tokens_of(lengths[begin : begin + size], generator) for begin in range(0, 8, size)]
    if how == "sum":
        checked(model, model.build(), [window])
        return
    with pytest.raises(RecipeError, match=REFUSED):
        checked(model, model.build(), [window])


def _rare_on_the_last_rank():
    """What each rank says of a mean, if only the last one gets samples that differ, in a later step."""
    fabric = make_fabric("32-true", torch.distributed.get_world_size())
    model = Of(how="class-weighted mean")
    module, check = model.build(), LossCheck(model)
    forward, generator, is_last = Forward(fabric, model, module), torch.Generator().manual_seed(0), fabric.global_rank
    said = []
    for step in range(3):
        labels = [1, 1, 1, 2 if step == 2 and is_last else 1]
        micro = MicroBatch(batch_of(labels, generator), 0, True, False, range(4))
        try:
            check.check_additive(forward, Window([micro], {}, 4), fabric.world_size, torch.default_generator)
        except RecipeError:
            return [*said, "refused"]
        check.steps += 1
        said.append(check.is_done)
    return said


def test_all_ranks_compare_when_one_of_them_gets_samples_that_differ(ranks):
    assert ranks(2).run(_rare_on_the_last_rank) == [[False, False, False], [False, False, "refused"]]


# Sums that are not refused: modules that draw, cache, count, normalise, or have tensors of the same number of rows.


class Drawn(Net):
    def between(self, h):
        return h * (1 + torch.rand_like(h))


class DrawnFromNumpy(Net):
    def make(self):
        self.own = np.random.default_rng(0)

    def between(self, h):
        return h * float(1 + self.own.random()) * float(1 + np.random.rand())


class DrawnFromItsOwn(Net):
    def make(self):
        self.own, self.other = torch.Generator().manual_seed(3), random.Random(3)

    def between(self, h):
        return h * (1 + torch.rand(h.shape, generator=self.own)) * (1 + self.other.random())


class DroppedAlways(Net):
    def between(self, h):
        return F.dropout(h, 0.5, training=True)


class Cached(Net):
    cached = None

    def between(self, h):
        if self.cached is None or len(self.cached) < len(h):
            self.cached = torch.linspace(0, 1, h.shape[-1]).expand(len(h), -1)
        self.hidden, self.size = h.detach(), len(h)
        return h + self.cached[: len(h)]


class Scratch(Net):
    """Computes with a buffer that it has written to just before."""

    def make(self):
        self.register_buffer("scratch", torch.arange(64.0 * 8).reshape(64, 8))

    def between(self, h):
        with torch.no_grad():
            self.scratch[: len(h)] = h
        return h + self.scratch[: len(h)].clone()


class Normalised(Net):
    def make(self):
        self.norm = nn.BatchNorm1d(8)

    def between(self, h):
        return self.norm(h)


class NormalisedByBatches(Normalised):
    """Has no running statistics: uses those of a micro-batch in eval mode, too."""

    def make(self):
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)


class NormalisedInTraining(Normalised):
    def between(self, h):
        return F.batch_norm(h, self.norm.running_mean, self.norm.running_var, training=True)


class NormalisedByInstances(Normalised):
    def make(self):
        self.norm = nn.InstanceNorm1d(1, affine=True)

    def between(self, h):
        return self.norm(h[:, None])[:, 0]


class Spectral(Net):
    def make(self):
        self.first = parametrizations.spectral_norm(parametrizations.weight_norm(self.first))

    def between(self, h):
        self.train()  # as some do that call parts of theirs in another mode
        return h


class Looked(Net):
    """Looks words up in an embedding that clips their norm, in place."""

    def make(self):
        self.words = nn.Embedding(9, 8, max_norm=0.5)

    def between(self, h):
        return h + self.words((h[:, 0] > 0).long())


class Differentiated(Net):
    """Takes a gradient within its forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = super().forward(x)
            return out + grad(out.square().sum(), x, create_graph=True)[0][:, :CLASSES]


class Checkpointed(Net):
    def between(self, h):
        return checkpoint(torch.tanh, h, use_reentrant=False)


class Attending(Net):
    def make(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
        self.encoder, self.recurrent = nn.TransformerEncoder(layer, 2), nn.LSTM(8, 8, batch_first=True)

    def between(self, h):
        h = h[:, None] * torch.arange(1, 4)[:, None].to(h)
        return self.recurrent(self.encoder(h, src_key_padding_mask=torch.zeros(h.shape[:2], dtype=torch.bool)))[0][
            :, -1
        ]


class Flexible(Net):
    """Attends by an operator that takes functions."""

    def between(self, h):
        h = h[:, None, None] * torch.arange(1, 17)[:, None].to(h)
        return flex_attention(h, h, h)[:, 0, -1]


class Annealed(Net):
    """Counts samples in an attribute, over a length as it is usual."""

    seen = 0

    def between(self, h):
        self.seen += len(h)
        return h * (1 + min(1.0, self.seen / 1e5))


class SeenInAttribute(Annealed):
    """The same, but its loss depends on the count as much as on the samples: the cut would change the gradient."""

    def between(self, h):
        self.seen += len(h)
        return h * (1 + self.seen / 10)


class Starting(Net):
    """Its last layer is zero, so that all samples of a class have one loss."""

    def make(self):
        nn.init.zeros_(self.last.weight)


class Scripted(Net):
    def make(self):
        self.first = torch.jit.script(nn.Sequential(self.first, nn.BatchNorm1d(8)))


DRAWN = (Drawn, DrawnFromNumpy, DrawnFromItsOwn, DroppedAlways)
UNCOMPARED = (*DRAWN, NormalisedByBatches, NormalisedInTraining)
OTHERS = (
    *(Cached, Scratch, Normalised, NormalisedByInstances, Spectral, Looked, Differentiated, Checkpointed, Attending),
    *(Annealed, Starting, Scripted, Flexible),
)
EVERY = [*KINDS.values(), *UNCOMPARED, *OTHERS]


def state_of(module):
    """All that a module has, copied; and the next number of every generator."""
    kinds = (int, float, list, dict, deque)
    parts = {name: vars(part).items() for name, part in module.named_modules()}
    own = {
        name: [item for item in items if isinstance(item[1], kinds) and item[0][0] != "_"]
        for name, items in parts.items()
    }
    attributes = repr(own)
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    drawn = [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return attributes, tensors, drawn


def same(one, other):
    tensors = one[1].keys() == other[1].keys() and all(torch.equal(other[1][name], one[1][name]) for name in one[1])
    return (one[0], one[2]) == (other[0], other[2]) and tensors


def windows_of(kind, batch_size=8):
    generator = torch.Generator().manual_seed(zlib.crc32(kind.__name__.encode()))
    return [[batch_of([0, 1, 2, 3, 0, 0, 2, 1][:batch_size], generator)] for _ in range(2)]


@pytest.mark.first(11)
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_a_sum_is_not_refused_and_the_module_is_as_it_was(kind, monkeypatch):
    """Whatever is drawn next, too."""
    monkeypatch.setitem(KINDS, kind.__name__, kind)
    model = Of(kind.__name__)
    module = model.build().train()
    before, x = state_of(module), torch.ones(5, WIDTH)
    torch.manual_seed(1)
    twin = model.build().train()
    torch.manual_seed(7), np.random.seed(7)
    with torch.no_grad():
        expected = twin(x)
    torch.manual_seed(7), np.random.seed(7)
    before = state_of(module)
    for size in (8, 3, 1):
        checked(model, module, windows_of(kind, size))
        assert same(state_of(module), before)
    with torch.no_grad():
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("kind", [*KINDS.values(), *OTHERS], ids=lambda kind: kind.__name__)
def test_a_mean_of_such_a_module_is_refused(kind, monkeypatch):
    """A loss that hangs on a counter is not taken for one that is drawn."""
    monkeypatch.setitem(KINDS, kind.__name__, kind)
    model = Of(kind.__name__, "mean")
    with pytest.raises(RecipeError, match=REFUSED):
        checked(model, model.build().train(), windows_of(kind))


def test_a_loss_that_depends_on_how_many_samples_an_attribute_has_counted_is_refused(monkeypatch):
    monkeypatch.setitem(KINDS, "SeenInAttribute", SeenInAttribute)
    model = Of("SeenInAttribute")
    with pytest.raises(RecipeError, match="samples_interact = True"):
        checked(model, model.build(), windows_of(SeenInAttribute))


class Shared(Of):
    """Batches have weights of the classes, of which there are as many as samples; not a row for each sample."""

    def losses(self, module, batch):
        yield Loss(
            F.cross_entropy(module(batch["x"]), batch["labels"], batch["weights"], reduction="sum"), len(batch["x"])
        )


class Prototypes(Of):
    """The module's output has as many rows as there are samples, one for each class."""

    def losses(self, module, batch):
        logits = batch["x"] @ module(torch.eye(WIDTH)[:CLASSES]).repeat(1, 2)[:, :WIDTH].T
        yield loss_of(logits, batch["labels"], self.how)


def test_tensors_of_as_many_rows_as_samples_are_no_false_alarm():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of([0, 1, 2, 3], generator)
    checked(Shared(), Of().build(), [[batch | {"weights": torch.tensor([1.0, 5.0, 0.2, 2.0])}]])
    checked(Prototypes(), Of().build(), [[batch]])
    with pytest.raises(RecipeError, match=REFUSED):
        checked(Prototypes(how="mean"), Of().build(), [[batch]])


class Counting(Of):
    """The model itself counts, not its module."""

    calls = 0

    def losses(self, module, batch):
        self.calls += 1
        for loss in super().losses(module, batch):
            yield replace(loss, total=loss.total * (1 + self.calls / 10))


def test_what_a_model_counts_is_as_it_was():
    for how in ("sum", "mean"):
        model = Counting(how=how)
        try:
            checked(model, model.build(), windows_of(Net))
        except RecipeError:
            assert how == "mean"
        assert "calls" not in vars(model)
