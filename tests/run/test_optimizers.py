"""Optimizers and schedules: a run in float64 equals a plain loop but for rounding, and resumes bit for bit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.problems import make_model
from helpers.resumed import TINY, FewDigits, losses, recipe, resume, saved
from helpers.rounding import EPS, round_otherwise, rounding
from helpers.tiny import prediction_of, recipe_of
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer import Memory, Optim, RecipeError
from trainer.api import fit
from trainer.checkpoint.manifest import read_manifest
from trainer.cli import run
from trainer.engine.data_feed import fill_from_data
from trainer.engine.order import batch_indices
from trainer.engine.schedule import decay
from trainer.memory.custom_optimizer import probe_optimizer
from trainer.memory.ema import WeightEMA
from trainer.memory.optimizer import build_optimizer
from trainer.memory.parameter_groups import layer_depths, set_requires_grad
from trainer.memory.plan import decide_plan
from trainer.models import VisionTransformer
from trainer.run.resume import ValidCheckpoint, load_whole_model
from trainer.weights.blocks import find_blocks

pytestmark = pytest.mark.usefixtures("no_pictures")

STEPS = 10  # two epochs
# Of the longest chain of sums: a forward sums over some 300 numbers one layer after another (patches 48, each of two
# blocks 110, the head 32), a backward over as many, and a gradient over 5 tokens of 12 images.
TERMS = 660
EVALUATED = {"evaluate": True, "best": "last"}
WARM = {"schedule": "cosine", "warmup_ratio": 0.25, "min_lr": 1e-4}


@dataclass
class Textbook:
    """What a plain loop calls, and when."""

    optimizer: torch.optim.Optimizer
    stepped: Callable[[], Any]  # after every step
    evaluated: Callable[[float], Any] = lambda loss: None  # with the validation loss, after every second step


def settings_of(optim: Optim) -> dict[str, Any]:
    """Of a run in float64, with a validation set; evaluated after every second step."""
    data = FewDigits(test_fraction=0.965, val_fraction=0.2)
    model = VisionTransformer("custom", **TINY | {"dropout": 0.0})
    memory = {"precision": "64-true", "micro_batch_size": 3}
    chosen: dict[str, Any] = {"optim": optim, "data": data, "model": model, "memory": memory, "batch_size": 12}
    return chosen | {"eval_every": 2, "run": dict(EVALUATED)}


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """The weights that a run has written."""
    return load_file(run_dir / "model" / "model.safetensors")


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of two states, relative to the expected one."""
    assert found.keys() == expected.keys()
    ours, plain = (torch.cat([state[name].flatten() for name in sorted(state)]) for state in (found, expected))
    assert ours.dtype == torch.float64
    return float((ours - plain).norm() / plain.norm())


def far(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two lists of losses."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


@dataclass
class Plain:
    """What a plain loop gives, and how far another order of its sums takes that."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    moved: float = 0.0
    losses_moved: float = 0.0


def plain_run(optim: Optim, of: Callable[[nn.Module], Textbook]) -> Plain:
    """A loop of plain PyTorch on whole batches, and its condition: what it gives if its gradients round otherwise."""
    plain, otherwise = plain_loop(optim, of), plain_loop(optim, of, TERMS)
    plain.moved = distance(otherwise.weights, plain.weights) + rounding(STEPS)  # each step rounds the weights, too
    plain.losses_moved = far(otherwise.losses, plain.losses) + rounding(TERMS)
    return plain


def plain_loop(optim: Optim, of: Callable[[nn.Module], Textbook], terms: int = 0) -> Plain:
    """The weights and losses of the loop; its gradients are rounded as sums of ``terms`` numbers may be."""
    run = recipe(Path("nowhere"), **settings_of(optim))
    run.data.prepare()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(run.seed)
    module = fill_from_data(run.model, run.data).build().train()
    torch.set_default_dtype(torch.float32)
    book, size, step = of(module), len(run.data.train), 0
    found: list[float] = []

    def loss_of(split: Any, indices: Any) -> torch.Tensor:
        batch = run.data.collate([split[index] for index in indices])
        pixels = batch["pixel_values"].double().expand(-1, 3, -1, -1)
        return cross_entropy(module(pixels), batch["labels"])

    for epoch in range(run.epochs):
        for number in range(-(-size // run.batch_size)):
            loss = loss_of(run.data.train, batch_indices(run.seed, epoch, number, size, run.batch_size))
            loss.backward()
            found.append(loss.item())
            round_otherwise([p.grad for p in module.parameters() if p.grad is not None], terms)
            nn.utils.clip_grad_norm_(module.parameters(), optim.clip_norm or float("inf"))
            book.optimizer.step()
            book.optimizer.zero_grad()
            book.stepped()
            step += 1
            is_last = number == -(-size // run.batch_size) - 1
            if step % run.eval_every == 0 or is_last:
                with torch.no_grad():
                    book.evaluated(loss_of(run.data.val, range(len(run.data.val))).item())
    assert step == STEPS
    return Plain({name: value.detach() for name, value in module.state_dict().items()}, found)


def decayed(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def with_warm_cosine(module: nn.Module) -> Textbook:
    optimizer = torch.optim.AdamW(decayed(module, 0.1), lr=1e-2, betas=(0.8, 0.95), eps=1e-4)
    warm = LinearLR(optimizer, 1 / 4, total_iters=3)  # a quarter of 10 steps, rounded up
    schedule = SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, STEPS - 3, eta_min=1e-4)], [3])
    return Textbook(optimizer, schedule.step)


def with_one_cycle(module: nn.Module) -> Textbook:
    optimizer = torch.optim.SGD(decayed(module, 0.1), lr=1e-2, momentum=0.9, nesterov=True)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=STEPS, cycle_momentum=False)
    rest = iter([schedule.step] * (STEPS - 1))  # it refuses one step more
    return Textbook(optimizer, lambda: next(rest, lambda: None)())


def with_plateau(module: nn.Module) -> Textbook:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.02)
    return Textbook(optimizer, lambda: None, schedule.step)


def with_groups(module: nn.Module) -> Textbook:
    """Written out: layers by their names, the head ten times as fast and without decay, positions frozen."""
    groups = []
    for name, parameter in module.named_parameters():
        block = re.search(r"encoder_layer_(\d)", name)
        layer = int(block[1]) + 1 if block else 3 if name.startswith(("heads", "encoder.ln")) else 0
        rate, weight_decay = 1e-2 * 0.5 ** (3 - layer), 0.1 if parameter.ndim >= 2 else 0.0
        if name.startswith("heads"):
            rate, weight_decay = 10 * rate, 0.0
        if name.endswith("ln_1.bias"):
            weight_decay = 0.3
        if name == "encoder.pos_embedding":
            parameter.requires_grad_(False)
        else:
            groups.append({"params": [parameter], "lr": rate, "weight_decay": weight_decay})
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=EPS)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    return Textbook(optimizer, schedule.step)


def with_average(module: nn.Module, decay: Any = 0.8) -> Textbook:
    optimizer = torch.optim.AdamW(decayed(module, 0.1), lr=1e-2, eps=EPS)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average.update_parameters(module)  # the first one copies

    def evaluated(loss: float) -> None:
        with torch.no_grad():  # the averages take the weights' place after the last step
            for parameter, value in zip(module.parameters(), average.module.parameters(), strict=True):
                parameter.copy_(value)

    steps = iter(range(1, STEPS + 1))
    return Textbook(optimizer, lambda: (average.update_parameters(module), next(steps) == STEPS and evaluated(0.0)))


def with_warm_average(module: nn.Module) -> Textbook:
    timm = pytest.importorskip("timm.utils")
    average = timm.ModelEmaV3(module, decay=0.8, use_warmup=True)
    book, steps = with_average(module), iter(range(1, STEPS + 1))

    def stepped() -> None:
        step = next(steps)
        average.update(module, step=step)
        if step == STEPS:
            module.load_state_dict(average.module.state_dict())

    return Textbook(book.optimizer, stepped)


@dataclass
class Two:
    """Two optimizers for the parameters of one module."""

    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


MATRICES = ("self_attention.in_proj_weight", "self_attention.out_proj.weight", "mlp.0.weight", "mlp.3.weight")


def with_muon(module: nn.Module, **arguments: Any) -> Textbook:
    """torch's Muon for the four matrices of each block, AdamW for everything else."""
    named = dict(module.named_parameters())
    hidden = [named[f"encoder.layers.encoder_layer_{block}.{at}"] for block in (0, 1) for at in MATRICES]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, **arguments)
    ids = set(map(id, hidden))
    groups = [group | {"params": [p for p in group["params"] if id(p) not in ids]} for group in decayed(module, 0.1)]
    both: Any = Two((muon, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=EPS)))
    return Textbook(both, lambda: None)


class SignMomentum(torch.optim.Optimizer):
    """One of one's own: a moment, and a step by its sign."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group)

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["moment"], state["steps"] = torch.zeros_like(parameter), 0
        state["steps"] += 1
        state["moment"].lerp_(parameter.grad, 1 - group["beta"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(state["moment"].tanh(), alpha=group["lr"])


class ByNorm(SignMomentum):
    """As LARS and LAMB: the step of a tensor is as long as the tensor."""

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad / parameter.grad.norm() * parameter.norm(), alpha=group["lr"])


class Together(SignMomentum):
    """Its step is relative to that of all parameters."""

    def step(self, closure: Any = None) -> None:
        found = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._length = torch.stack(found).norm()
        super().step()

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad / self._length, alpha=group["lr"])


class Counting(SignMomentum):
    """Has state where nobody looks for it."""

    count = 0

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        super().move(parameter, group)


class Private(SignMomentum):
    """Hides it a little better."""

    _count = 0

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        self._count += 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / self._count)


class Common(SignMomentum):
    """Keeps what belongs to no parameter."""

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / self.state["all"]["steps"])


class Wrapper(SignMomentum):
    """Lets another one take the steps."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)
        self._inner = SignMomentum(self.param_groups)

    def step(self, closure: Any = None) -> None:
        self._inner.step()


def with_own(kind: Any, module: nn.Module, **arguments: Any) -> Textbook:
    return Textbook(kind(decayed(module, 0.1), lr=1e-2, **arguments), lambda: None)


OWN = Optim(factory=SignMomentum, lr=1e-2, weight_decay=0.1, arguments={"beta": 0.8}, clip_norm=1.0)
NADAM = Optim("torch.optim.NAdam", lr=1e-2, weight_decay=0.1, arguments={"momentum_decay": 0.01, "eps": EPS})
GROUPS = {
    "heads*": {"lr_scale": 10, "weight_decay": 0.2},
    "*pos_embedding": {"frozen": True},
    "*ln_1.bias": {"weight_decay": 0.3},
    "heads.head.*": {"weight_decay": 0},
}
GROUPED = Optim(
    "adamw", lr=1e-2, weight_decay=0.1, eps=EPS, schedule="cosine", clip_norm=1.0, layer_decay=0.5, groups=GROUPS
)
AVERAGED = Optim("adamw", lr=1e-2, weight_decay=0.1, eps=EPS, ema=0.8)
MUON = Optim("muon", lr=1e-2, weight_decay=0.1, betas=[0.8, 0.95], eps=EPS)
OTHER_MUON: dict[str, Any] = {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}
PLATEAU = Optim("sgd", lr=0.1, schedule="plateau", plateau_factor=0.5, plateau_patience=0, min_lr=0.02)
CASES: dict[str, tuple[Optim, Callable[[nn.Module], Textbook]]] = {
    "betas, eps and a warm cosine": (
        Optim("adamw", lr=1e-2, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-4, clip_norm=1.0, **WARM),
        with_warm_cosine,
    ),
    "Nesterov in one cycle": (
        Optim("sgd", lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=True, schedule="one_cycle"),
        with_one_cycle,
    ),
    "plateau": (PLATEAU, with_plateau),
    "layers and groups": (GROUPED, with_groups),
    "averaged": (AVERAGED, with_average),
    "NAdam": (NADAM, partial(with_own, torch.optim.NAdam, momentum_decay=0.01, eps=EPS)),
    "Muon": (MUON, partial(with_muon, adjust_lr_fn="match_rms_adamw")),
    "Muon without Nesterov": (replace(MUON, arguments=OTHER_MUON, clip_norm=1.0), partial(with_muon, **OTHER_MUON)),
    "one's own": (replace(OWN, clip_norm=None), partial(with_own, SignMomentum, beta=0.8)),
    "averaged, warm": (dataclasses.replace(AVERAGED, ema_warmup=True), with_warm_average),
}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "host": (1, {"cpu_offload": "optimizer"}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "split": (2, {"tensor_parallel": 2}),
    "streamed": (1, {"cpu_offload": "parameters"}),
    "shards on the host": (2, {"strategy": "fsdp", "cpu_offload": "optimizer"}),
}


@cache
def plain_of(case: str) -> Plain:
    """The plain run of a case, which several tests compare with."""
    return plain_run(*CASES[case])


def train(run_dir: Path, **changes: Any) -> None:
    fit(recipe(run_dir, **changes))


QUICK = {
    ("layers and groups", "fsdp"),
    ("averaged", "host"),
    ("plateau", "ddp"),
    ("one's own", "fsdp"),
    ("Muon", "ddp"),
    ("Muon without Nesterov", "fsdp"),
}
QUICK |= {(case, "single") for case in CASES if case != "averaged"}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(case, world, marks=() if (case, world) in QUICK else pytest.mark.slow)
        for case in CASES
        for world in WORLDS
        if not (world == "split" and CASES[case][0].name == "muon")  # rejected
    ],
)
def test_a_run_equals_the_plain_loop(case, world, ranks, tmp_path):
    settings, (size, memory) = settings_of(CASES[case][0]), WORLDS[world]
    call = partial(train, tmp_path, **settings | {"memory": settings["memory"] | memory})
    call() if size == 1 else ranks(size).run(call)
    plain = plain_of(case)
    assert distance(weights_of(tmp_path), plain.weights) <= plain.moved
    assert far(losses(tmp_path), plain.losses) <= plain.losses_moved


@pytest.mark.parametrize("case", CASES)
def test_gradients_that_were_rounded_to_fp32_are_found(case):
    """The smallest fault that the tolerance should not hide."""
    optim, book = CASES[case]

    def rounded(parameter: nn.Parameter) -> None:
        parameter.grad.copy_(parameter.grad.float())

    def faulty(module: nn.Module) -> Textbook:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(rounded)
        return book(module)

    plain, found = plain_of(case), plain_loop(optim, faulty)
    assert distance(found.weights, plain.weights) > 100 * plain.moved
    assert far(found.losses, plain.losses) > 50 * plain.losses_moved


def test_eps_is_torchs_unless_it_is_given():
    for optim, eps in ((Optim("adamw"), 1e-8), (Optim("adamw", eps=EPS), EPS)):
        made = build_optimizer([nn.Parameter(torch.zeros(2, 2))], optim, Memory(), torch.device("cpu"))
        assert [group["eps"] for group in made.param_groups] == [eps] * len(made.param_groups)


def test_layers_are_counted_from_the_embeddings_to_the_head():
    for name, first, last in (
        ("vit", ("class_token", "conv_proj.weight", "encoder.pos_embedding"), ("encoder.ln.weight", "heads.head.bias")),
        ("distilbert", ("distilbert.embeddings.word_embeddings.weight",), ("pre_classifier.bias", "classifier.weight")),
    ):
        module = make_model(name).build()
        layers, depth = layer_depths(module), len(find_blocks(module))
        assert layers.keys() == dict(module.named_parameters()).keys()
        assert {layers[key] for key in first} == {0}
        assert {layers[key] for key in last} == {depth + 1}
        for key, layer in layers.items():
            number = re.search(r"layers?\.(?:encoder_layer_)?(\d)", key)
            assert number is None or layer == int(number[1]) + 1


@pytest.mark.slow
def test_averages_may_be_begun_and_left_on_resume_and_are_what_export_gives(tmp_path, golden):
    settings, plain = settings_of(AVERAGED), settings_of(dataclasses.replace(AVERAGED, ema=None))
    allowed = {"run": EVALUATED | {"allow_change": ["optim.ema"]}}
    train(tmp_path / "plain", **plain)
    train(tmp_path / "averaged", **settings)
    with golden.raises(RecipeError):
        resume(tmp_path / "plain", tmp_path / "refused", 4, **settings)
    resume(tmp_path / "plain", tmp_path / "begun", 4, **settings | allowed)
    resume(tmp_path / "averaged", tmp_path / "left", 4, **plain | allowed)
    plain_weights = weights_of(tmp_path / "plain")
    assert distance(weights_of(tmp_path / "left"), plain_weights) == 0
    assert distance(weights_of(tmp_path / "begun"), plain_weights) > 1e-3
    found = ValidCheckpoint(path := tmp_path / "averaged" / "checkpoints" / f"step-{STEPS:08d}", read_manifest(path))
    run = recipe(tmp_path, **settings)
    run.data.prepare()
    module = load_whole_model(found, fill_from_data(run.model, run.data))
    assert distance(weights_of(tmp_path / "averaged"), module.state_dict()) == 0


def test_averages_of_half_precision_are_exchanged_and_put_back_bit_for_bit():
    weights = torch.full((4, 4), 1.0, dtype=torch.bfloat16)
    averages = WeightEMA([weights], Optim(ema=0.9), lambda: None)
    weights.fill_(3.0)
    for updates in range(3):
        averages.update(updates)
    before = averages.values[weights].clone()
    assert before.dtype == torch.float32
    torch.testing.assert_close(before, torch.full((4, 4), 3 - 2 * 0.9**3))
    with averages.swapped_in():
        assert torch.equal(weights, before.bfloat16())
    assert torch.equal(weights, torch.full_like(weights, 3.0))
    assert torch.equal(averages.values[weights], before)


@pytest.mark.first(1)
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_planner_counts_the_averages_where_they_are(offload):
    optim, memory = Optim("sgd", lr=0.1), Memory(cpu_offload=offload)
    plain, averaged = (prediction_of(recipe_of("tower", memory, replace(optim, ema=ema))) for ema in (None, 0.9))
    size = 4 * sum(p.numel() for p in recipe_of("tower").model.build().parameters())
    more = averaged.categories.get("optimizer", 0) - plain.categories.get("optimizer", 0)
    assert more == pytest.approx(size if offload == "none" else 0, rel=0.1)  # rounded up to what the allocator gives
    assert averaged.host - plain.host == (0 if offload == "none" else size)
    assert any(note.startswith("optim.ema: ") for note in averaged.notes)


def short(settings: dict[str, Any]) -> str:
    """An identifier without addresses of functions."""
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in settings.items())


OWN_BAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "adamx"}, {}),
    ({"name": "torch.optim.NAdm"}, {}),
    ({"name": "torch.optim.LBFGS"}, {}),
    ({"name": "torch.optim.SparseAdam"}, {}),
    ({"name": "nowhere.Lion"}, {}),
    ({"name": "os.path"}, {}),
    ({"name": "pathlib.Path"}, {}),
    ({"factory": lambda groups, lr: 3}, {}),
    ({"arguments": {"betas": [0.9, 0.9]}}, {}),
    ({"name": "torch.optim.NAdam", "betas": [0.9, 0.9]}, {}),
    ({"name": "torch.optim.NAdam", "arguments": {"lr": 1}}, {}),
    ({"name": "torch.optim.NAdam", "arguments": {"momentum_decy": 0.1}}, {}),
    ({"name": "torch.optim.Rprop", "weight_decay": 0.1}, {}),
    ({"factory": Counting}, {}),
    ({"factory": Private}, {}),
    ({"factory": Common}, {}),
    ({"factory": Wrapper}, {}),
    ({"factory": ByNorm}, {"strategy": "fsdp"}),
    ({"factory": Together}, {"cpu_offload": "optimizer"}),
    ({"factory": SignMomentum}, {"optimizer_state_bits": 8}),
]


@pytest.mark.parametrize(("optim", "memory"), OWN_BAD, ids=short)
def test_an_optimizer_that_could_not_be_exact_is_refused_by_its_name(optim, memory, golden, tmp_path):
    with golden.raises(RecipeError, hide=[r"(?<=TypeError: ).*?(?=; did you mean|$)", r"(?<=matrices: ).*"]):
        decide_plan(recipe(tmp_path, optim=Optim(**optim), memory={"precision": "32-true"} | memory), 1)


def test_optimizers_of_whole_tensors_train_where_tensors_are_whole():
    for kind, one_by_one, by_element in (
        (SignMomentum, True, True),
        (ByNorm, True, False),
        (torch.optim.Adafactor, True, False),
        (torch.optim.Adamax, True, True),
    ):
        tried = probe_optimizer(Optim(factory=kind))
        assert (tried.per_parameter, tried.elementwise) == (one_by_one, by_element), kind
        assert not tried.hidden_state


@pytest.mark.slow
def test_the_planner_traces_the_state_of_an_optimizer_of_ones_own():
    peaks = {}
    for name, optim in {"sgd": Optim("sgd"), "one": replace(OWN, clip_norm=None), "two": NADAM}.items():
        peaks[name] = prediction_of(recipe_of("tower", Memory(), optim)).allocated
    size = 4 * sum(p.numel() for p in recipe_of("tower").model.build().parameters())
    # Tensors take whole blocks of 512 bytes, and torch 2.11 splits fewer of them.
    assert peaks["one"] - peaks["sgd"] == pytest.approx(size, rel=0.2)
    # The step of torch 2.11's NAdam has temporaries of the size of the state.
    assert 0.8 * 2 * size <= peaks["two"] - peaks["sgd"] <= 1.2 * 4 * size


def test_an_optimizer_that_a_file_names_is_imported_only_if_the_file_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Mine(torch.optim.SGD):\n    pass\n\n\nopen('imported', 'w').close()\n"
    )
    (tmp_path / "run.yaml").write_text("recipe: vit_digits\noptim: {name: mine.Mine, schedule: constant}\n")
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--run.devices", "1"]):
        assert run(["fit", "run.yaml", "--max_steps", "1", "--run.dir", "out", *flags]) == 2
    assert run(["fit", "vit_digits", "--config", "run.yaml", "--max_steps", "1", "--run.dir", "out"]) == 2
    assert not (tmp_path / "imported").exists()
    short = ["--max_steps", "1", "--run.evaluate", "false", "--run.predict", "false"]
    assert run(["fit", "run.yaml", "--trust-recipe", "--run.dir", "out", *short]) == 0
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize("pattern", ["head", "encoder.layer.0.*"])
def test_a_pattern_of_nothing_is_refused_with_the_nearest_names(pattern, golden, tmp_path):
    with golden.raises(RecipeError):
        train(tmp_path, **settings_of(Optim(groups={pattern: {"lr_scale": 2}})))


def test_groups_of_what_is_frozen_and_layers_of_what_has_none_are_refused(tmp_path, golden):
    model = VisionTransformer("custom", **TINY, train_last_blocks=1)
    with golden.raises(RecipeError, "frozen group"):
        train(tmp_path / "one", model=model, optim=Optim(groups={"conv_proj.*": {"lr_scale": 2}}))
    train(tmp_path / "two", model=model, optim=Optim(groups={"conv_proj.*": {"lr_scale": 2, "frozen": False}}))
    with golden.raises(RecipeError, "no layers"):
        set_requires_grad(Flat(), make_model("mlp"), Optim(layer_decay=0.5))
    with golden.raises(RecipeError, "rate of 0"):
        train(tmp_path / "low", optim=Optim(layer_decay=1e-200))
    with golden.raises(RecipeError, "all frozen"):
        train(tmp_path / "three", model=model, optim=Optim(groups={"*": {"frozen": True}}))


class Flat(nn.Module):
    """Without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_another_layer_decay_is_refused_on_resume_until_it_is_allowed(tmp_path, golden):
    settings = settings_of(GROUPED)
    train(tmp_path / "whole", **settings)
    settings["optim"] = dataclasses.replace(GROUPED, layer_decay=0.9)
    with golden.raises(RecipeError):
        resume(tmp_path / "whole", tmp_path / "refused", 4, **settings)
    settings["run"] |= {"allow_change": ["optim"]}
    resume(tmp_path / "whole", tmp_path / "rest", 4, **settings)
    rates = saved(tmp_path / "rest", 4 + 2)["state"]["scheduler"]["rates"]
    assert len(set(rates)) == 5  # four layers, and the head ten times as fast
    assert min(rates) / sorted(rates)[1] == pytest.approx(1.0)


USUAL = ("averaged",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(case, ranks, tmp_path):
    settings, plain = settings_of(CASES[case][0]), plain_of(case)
    train(tmp_path / "whole", **settings)
    resume(tmp_path / "whole", tmp_path / "rest", 4, **settings)
    assert saved(tmp_path / "rest", STEPS) == saved(tmp_path / "whole", STEPS)
    memory = settings["memory"] | {"strategy": "fsdp"}
    run = EVALUATED | {"allow_change": ["memory"]}
    ranks(2).run(
        partial(resume, tmp_path / "whole", tmp_path / "sharded", 4, **settings | {"memory": memory, "run": run})
    )
    assert far(losses(tmp_path / "sharded"), losses(tmp_path / "whole")) <= plain.losses_moved
    assert distance(weights_of(tmp_path / "sharded"), weights_of(tmp_path / "whole")) <= plain.moved


def test_a_plateau_of_two_ranks_resumes_bit_for_bit(ranks, tmp_path):
    settings = settings_of(replace(PLATEAU, lr=3.0))  # high enough that the loss rises early on
    settings["memory"] |= {"strategy": "ddp"}
    ranks(2).run(partial(train, tmp_path / "whole", **settings))
    ranks(2).run(partial(resume, tmp_path / "whole", tmp_path / "rest", 4, **settings))
    assert saved(tmp_path / "rest", STEPS) == saved(tmp_path / "whole", STEPS)
    state = saved(tmp_path / "whole", 4)["state"]["scheduler"]
    assert state["plateau"]["factor"] < 1  # or nothing would have been at stake


def test_a_plateau_needs_a_validation_set(tmp_path, golden):
    with golden.raises(RecipeError, "no set"):
        train(tmp_path, optim=PLATEAU, run={"evaluate": True})
    with golden.raises(RecipeError, "no evaluations"):
        recipe(tmp_path, optim=PLATEAU)


@pytest.mark.parametrize("settings", [{}, {"warmup_ratio": 0.15}, {"warmup_steps": 7}, {"min_lr": 1e-3}], ids=str)
@pytest.mark.parametrize("total", [1, 2, 3, 10, 37])
def test_one_cycle_is_torchs(settings, total):
    optim, parameter = Optim("sgd", lr=0.1, schedule="one_cycle", **settings), torch.zeros(1)
    steps = settings.get("warmup_steps", 0)
    if steps >= total:
        assert [decay(optim, step, total) for step in range(total)] == sorted(
            decay(optim, s, total) for s in range(total)
        )
        return
    pct = steps / total if steps else settings.get("warmup_ratio", 0.3)
    last = {"final_div_factor": 0.1 / 25 / 1e-3} if "min_lr" in settings else {}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=total, pct_start=pct, cycle_momentum=False, **last)
    for step in range(total):
        assert 0.1 * decay(optim, step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        if step < total - 1:
            schedule.step()


BAD: list[dict[str, Any]] = [
    {"betas": [0.9]},
    {"betas": [0.9, 1.0]},
    {"name": "sgd", "betas": [0.9, 0.99]},
    {"eps": 0.0},
    {"name": "lion", "eps": 1e-8},
    {"nesterov": True},
    {"min_lr": 1.0, "schedule": "cosine"},
    {"min_lr": 1e-5},
    {"warmup_ratio": 1.0},
    {"warmup_ratio": 0.1, "warmup_steps": 5},
    {"ema": 1.0},
    {"layer_decay": 0.0},
    {"groups": {"*": {"lr": 2}}},
    {"groups": {"*": {"lr_scale": 0}}},
    {"groups": {"*": {"frozen": 1}}},
    {"groups": {"*": 3}},
    {"plateau_patience": -1},
    {"plateau_factor": 1.0},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_what_makes_no_sense_is_refused_by_its_name(settings, golden):
    with golden.raises(RecipeError):
        dataclasses.replace(Optim(), **settings)
