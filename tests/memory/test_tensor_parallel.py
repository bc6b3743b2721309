"""Ranks that share every block take the steps of one rank, and their checkpoints are read by any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.collectives import Noted, reductions, watched
from helpers.live_bytes import LiveBytes
from helpers.matrix import Case, difference, launched, plain_run, set_up, stacked_run, steps_of
from helpers.pretrained import saved as saved_weights
from helpers.pretrained import text, vit
from helpers.problems import CLASSES, Problem, make_model, make_samples, tokenizer_folder
from helpers.resumed import FewDigits, assert_same_weights, losses, recipe, resume, saved
from helpers.rounding import ROUNDING, rounding
from helpers.tiny import predict
from torch import nn
from torch.nn import functional

from trainer import Checkpoint, Data, Recipe, RecipeError
from trainer.api import evaluate, fit
from trainer.contract import Model
from trainer.engine import sync
from trainer.errors import RunError
from trainer.fakegpu.gpus import gpu_named, host_as_device
from trainer.fakegpu.target import Target
from trainer.memory.initialize import build_module
from trainer.memory.plan import decide_plan
from trainer.memory.stack import apply_stack, full_state_dict
from trainer.memory.tensor_parallel import SplitAttention, TensorParallelSync
from trainer.models import MLP, LoRA, TextClassifier
from trainer.planner.knobs import apply_settings, combinations
from trainer.planner.predict import prepare_recipe
from trainer.planner.search import search_for
from trainer.recipe import Memory, Optim, Run
from trainer.weights.streaming import WeightFiles

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 64}
DECODER = SMALL | {"num_key_value_heads": 2, "attention_dropout": 0.3}
SHARED = {"sequence_parallel": True}
CONFIGURED: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": SMALL | {"pad_token_id": 0},
    "electra": SMALL | {"embedding_size": 8},
    "llama": DECODER,
    "qwen3": DECODER | {"head_dim": 8},  # whose norms see the heads of one rank only
}


@dataclass(frozen=True)
class Split(Case):
    """Any model type, with all its dropouts, attention's among them."""

    @property
    def model(self) -> Model:
        if self.name == "mixing":
            return Mixing(plan=MIXING)
        if self.name in CONFIGURED:
            options: dict[str, Any] = {"tokenizer": tokenizer_folder(), "num_classes": CLASSES, "dropout": self.dropout}
            return TextClassifier(self.name, config=CONFIGURED[self.name], **options)
        model = replace(make_model(self.name), dropout=self.dropout)  # type: ignore[type-var]
        return replace(model, attention_dropout=0.3) if self.name == "vit" else model  # type: ignore[type-var]

    @property
    def samples(self) -> list[dict[str, torch.Tensor]]:
        name = "distilbert" if self.name in CONFIGURED else self.name
        return make_samples(Problem(name, self.size, self.batch_size, 1))


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


def case_of(name: str, ranks: int = 2, **knobs: Any) -> Split:
    memory = Memory(**{"precision": "64-true", "micro_batch_size": 3, "tensor_parallel": 2, **knobs})
    return Split(name, memory, ranks, dropout=0.2)


def assert_steps_of_one_rank(case: Case, ranks: Any) -> None:
    """Three steps of AdamW, clipped, with dropout."""
    assert max(difference(ranks(case.world_size).run(stacked_run, case)[0], plain_run(case)).values()) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        slow("vit", {}),
        ("vit", {"strategy": "fsdp", "activation_checkpointing": "full"}),
        slow("distilbert", {"activation_checkpointing": "selective"}),
        slow("bigbird", {"strategy": "fsdp", "reshard_after_forward": False}),
        slow("qwen3", {"strategy": "fsdp", "sync_every_micro_step": True}),
        ("mlp", {}),
        slow("vit", {**SHARED, "activation_checkpointing": "full"}),  # of 5 tokens
        ("distilbert", SHARED),  # whose texts are packed
        ("qwen3", {**SHARED, "strategy": "fsdp"}),
        ("mixing", SHARED),
    ],
)
def test_two_ranks_that_share_blocks_take_the_steps_of_one(name, knobs, ranks):
    assert_steps_of_one_rank(case_of(name, **knobs), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "knobs"), [("ddp", {}), ("fsdp", {}), ("fsdp", SHARED)])
@pytest.mark.parametrize("name", ["vit", *CONFIGURED])
def test_two_groups_of_two_ranks_take_the_steps_of_one(name, strategy, knobs, ranks):
    assert_steps_of_one_rank(case_of(name, 4, strategy=strategy, **knobs), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{}, SHARED, {**SHARED, "activation_checkpointing": "selective"}], ids=lambda knobs: "-".join(knobs)
)
def test_four_ranks_share_four_heads(knobs, ranks):
    assert_steps_of_one_rank(case_of("bert", 4, tensor_parallel=4, **knobs), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "bigbird", "llama"])
def test_two_ranks_share_the_tokens_of_any_known_model(name, ranks):
    assert_steps_of_one_rank(case_of(name, **SHARED), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_rounds_as_much_as_on_one_rank(precision, ranks):
    case = replace(case_of("vit", precision=precision), dropout=0.0)
    exact, dense = (replace(case, memory=Memory(precision=one, micro_batch_size=3)) for one in ("32-true", precision))
    ours, plain = ranks(2).run(stacked_run, case)[0], stacked_run(replace(dense, world_size=1))
    rounding = difference(plain, stacked_run(replace(exact, world_size=1)))
    assert difference(ours, plain)["parameters"] <= 2 * rounding["parameters"]


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2 × dp2": (4, {"tensor_parallel": 2}),
    "tp2 × fsdp2": (4, {"tensor_parallel": 2, "strategy": "fsdp"}),
    "fsdp2": (2, {"strategy": "fsdp"}),
    "sp2": (2, {"tensor_parallel": 2, **SHARED}),
}


def trained(world: str, ranks: Any, run_dir: Path, of: tuple[Path, int] | None = None) -> Path:
    """A run on ``world``, from its start, or from the checkpoint of another run after some steps."""
    size, knobs = WORLDS[world]
    memory = {"micro_batch_size": 4, "precision": "64-true", **knobs}
    data = FewDigits(test_fraction=0.97)
    changes = {"memory": memory, "data": data, "run": {"evaluate": True, "allow_change": ["memory"]}}
    call = partial(fit, recipe(run_dir, **changes)) if of is None else partial(resume, of[0], run_dir, of[1], **changes)
    call() if size == 1 else ranks(size).run(call)
    return run_dir


def assert_same_run(run_dir: Path, other: Path) -> None:
    """The losses, the weights and the evaluation, in which every sample counts once."""
    assert losses(run_dir) == pytest.approx(losses(other), rel=ROUNDING)
    assert_same_weights(run_dir, other, ROUNDING)
    reports = [(folder / "classification_report.txt").read_text() for folder in (run_dir, other)]
    assert reports[0] == reports[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_checkpoint_of_ranks_that_share_blocks_is_that_of_one_rank(ranks, tmp_path, capsys):
    one, two = trained("1", ranks, tmp_path / "one"), trained("tp2", ranks, tmp_path / "two")
    assert_same_run(two, one)
    assert_same_run(trained("1", ranks, tmp_path / "two-one", (two, 2)), one)
    assert_same_run(trained("tp2", ranks, tmp_path / "one-two", (one, 4)), one)
    trained("tp2", ranks, tmp_path / "again", (two, 4))
    assert saved(tmp_path / "again", 6) == saved(two, 6)  # bit for bit
    capsys.readouterr()
    memory = {"precision": "64-true", "tensor_parallel": 2}
    evaluate(recipe(two, data=FewDigits(test_fraction=0.97), memory=memory), two)
    out, err = capsys.readouterr()
    assert "memory.tensor_parallel=2 does not divide 1 rank(s): evaluated with 1" in err
    assert (two / "classification_report.txt").read_text().strip() in out


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_run_goes_on_with_and_without_shared_tokens(ranks, tmp_path):
    one, two, shared = (trained(world, ranks, tmp_path / world) for world in ("1", "tp2", "sp2"))
    assert_same_run(shared, one)
    assert_same_run(trained("sp2", ranks, tmp_path / "with", (two, 2)), one)
    assert_same_run(trained("tp2", ranks, tmp_path / "without", (shared, 4)), one)
    trained("sp2", ranks, tmp_path / "again", (shared, 4))
    assert saved(tmp_path / "again", 6) == saved(shared, 6)  # bit for bit


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_weights_that_are_streamed_in_train_on_shared_tokens(ranks, tmp_path):
    sizes = {"patch_size": 4, "layers": 2, "heads": 2, "width": 16, "mlp_width": 32, "image_size": 8, "num_classes": 10}
    model = vit(weights=saved_weights(tmp_path, "vit", **sizes), **sizes)
    options: dict[str, Any] = {"model": model, "max_steps": 3}
    for name, size, knobs in (("one", 1, {}), ("two", 2, {"tensor_parallel": 2, **SHARED, "init": "meta"})):
        call = partial(fit, recipe(tmp_path / name, memory={"precision": "64-true", **knobs}, **options))
        call() if size == 1 else ranks(size).run(call)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=ROUNDING)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_checkpoint_of_any_world_is_read_by_any_other(ranks, tmp_path):
    runs = {world: trained(world, ranks, tmp_path / world) for world in WORLDS}
    for source, target in permutations(WORLDS, 2):
        if {source, target} & {"tp2 × dp2", "tp2 × fsdp2"}:
            assert_same_run(trained(target, ranks, tmp_path / f"{source}-{target}", (runs[source], 4)), runs["1"])


def streamed(model: Model, strategy: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """The weights that ranks have streamed in, how many numbers this one has read, and how many it has."""
    memory = Memory(init="meta", tensor_parallel=2, strategy=strategy, micro_batch_size=1)
    plan = decide_plan(Recipe(model=model, data=Data(), batch_size=1, memory=memory), 2)
    read, numbers = WeightFiles.read, Counter[str]()

    def spy(files: Any, file: Any, key: str, index: Any = ()) -> Any:
        value = read(files, file, key, index)
        numbers[key] += value.numel()
        return value

    fabric = launched(plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "read", spy)
        stack = apply_stack(fabric, model, build_module(fabric, model, 0, plan), plan)
    state = {name: tensor.clone() for name, tensor in full_state_dict(stack).items()}
    return state, numbers.total(), sum(part.numel() for part in stack.masters.values())


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "strategy"), [("vit", "ddp"), ("text", "fsdp")])
def test_each_rank_reads_its_part_of_the_file(kind, strategy, ranks, tmp_path):
    config = {"n_layers": 3, "dim": 66, "hidden_dim": 132, "n_heads": 2, "max_position_embeddings": 64}
    make, sizes = (vit, {"mlp_width": 132}) if kind == "vit" else (text, {"config": config})
    model = make(weights=saved_weights(tmp_path, kind, **sizes), **sizes)
    (state, numbers, held), _ = ranks(2).run(streamed, model, strategy)
    whole = model.build().state_dict()
    assert state.keys() == whole.keys()
    assert [name for name, value in whole.items() if not torch.equal(state[name], value)] == []
    assert numbers == held < 0.7 * sum(value.numel() for value in whole.values())


def test_what_ranks_cannot_share_is_refused_with_the_fix():
    adapted = replace(make_model("distilbert"), lora=LoRA(rank=2))  # type: ignore[type-var]
    for changes, devices, text_of in (
        ({}, 1, "memory.tensor_parallel=2 does not divide 1 rank"),
        ({}, 3, "memory.tensor_parallel=2 does not divide 3 rank"),
        ({"memory": {"tensor_parallel": 1, **SHARED}}, 2, "memory.sequence_parallel=true has no effect"),
        ({"memory": {"cpu_offload": "optimizer"}}, 2, "memory.cpu_offload=optimizer: use none"),
        ({"memory": {"optimizer_state_bits": 8}}, 2, "memory.optimizer_state_bits=8: use 32"),
        ({"memory": {"compile": "blocks"}}, 2, "memory.compile=blocks: use none"),
        ({"memory": {"precision": "16-mixed"}}, 2, "memory.precision=16-mixed: use bf16-mixed"),
        ({"memory": {"replicas": 2, "strategy": "fsdp"}}, 4, "memory.replicas=2: use 1"),
        ({"optim": Optim("adafactor")}, 2, "optim.name=adafactor needs whole matrices"),
        ({"model": adapted}, 2, "cannot split the adapters of model.lora"),
        ({"run": Run(deterministic=True)}, 2, "run.deterministic=true excludes"),
    ):
        memory = Memory(**{"tensor_parallel": 2, "micro_batch_size": 2} | changes.pop("memory", {}))
        asked = Recipe(**{"model": make_model("vit"), "data": Data(), "batch_size": 8, "memory": memory} | changes)
        with pytest.raises(RecipeError, match=text_of):
            decide_plan(asked, devices)


@dataclass
class Undeclared(MLP):
    """Nobody has said how ranks share it."""

    plan: dict[str, str] | None = None

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        return self.plan or {}


class Layer(nn.Module):
    """An MLP with a residual, and a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 16), nn.Linear(16, 12), nn.LayerNorm(12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(tokens + functional.dropout(self.down(self.up(tokens).relu()), 0.3, self.training))
        return tokens * self.scale if self.scaled else tokens

    scaled = False


class Layers(nn.Module):
    """Between its blocks each of five tokens is told the mean of all, or a number."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Layer(), Layer()]), nn.Linear(12, CLASSES)
        self.at = at
        for layer in self.layers:
            layer.scaled = at == "scale"

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        tokens = pixels.flatten(2).unfold(2, 4, 4).transpose(1, 2).flatten(2)
        tokens = functional.pad(tokens, (0, 0, 1, 0))
        for layer in self.layers:
            told = tokens.mean(1, keepdim=True) if self.at == "mean" else torch.ones(12).to(tokens.dtype)
            tokens = layer(tokens + told)
        return self.head(tokens.mean(1))


MIXING = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.norm": "sequence_parallel"}


@dataclass
class Mixing(Undeclared):
    """Its code between blocks looks at all tokens, or is ``at`` fault, or its blocks are."""

    blocks = (Layer,)
    at: str = "mean"

    def build(self) -> nn.Module:
        return Layers(self.at)


def refusal(model: Model, **knobs: Any) -> tuple[str, bool]:
    """What a rank is refused with, and whether it leaves it to the other one to say so."""
    case = case_of("mlp", **knobs)
    plan = decide_plan(case.recipe.replace(model=model), 2)
    fabric = launched(plan)
    pixels = torch.ones(2, 3, 4, 4, dtype=torch.float64)
    with pytest.raises(RecipeError) as caught:
        apply_stack(fabric, model, build_module(fabric, model, 0, plan), plan).wrapped(pixels)
    return str(caught.value), getattr(caught.value, "is_reported", False)


def test_a_model_that_ranks_cannot_share_is_refused_by_name(ranks):
    sizes = {"hidden": [15, 16], "image_size": 4, "channels": 3, "num_classes": CLASSES}
    for model, said in (
        (Undeclared(**sizes), "Undeclared does not define how to split its layers: define tensor_parallel_plan"),
        (Undeclared(**sizes, plan={"9": "colwise"}), "names 9, which matches no module"),
        (Undeclared(**sizes, plan={"1": "columns"}), "has 'columns' for 1: use one of colwise, rowwise"),
        (Undeclared(**sizes, plan={"2": "colwise"}), "2 is a ReLU, but only an nn.Linear can be split"),
        (MLP(**sizes), "does not divide the 15 features of 1"),
        (replace(make_model("vit"), heads=1), "does not divide the 1 heads"),
        (replace(make_model("bigbird"), attention="block_sparse"), "model.attention=block_sparse: use"),
    ):
        (first, first_is_quiet), (second, second_is_quiet) = ranks(2).run(refusal, model)
        assert said in first == second
        assert (first_is_quiet, second_is_quiet) == (False, True)
    for model, said in (
        (MLP(**sizes | {"hidden": [16, 16]}), "does not declare that blocks work token by token"),
        (Mixing(plan=dict(list(MIXING.items())[:2])), "give their norms the style sequence_parallel"),
        (Mixing(plan=MIXING, at="scale"), "mul applies a weight that every rank has to split activations"),
        (Mixing(plan=MIXING, at="number"), "Mixing uses an operation that does not support shared tokens"),
    ):
        assert said in ranks(2).run(partial(refusal, **SHARED), model)[0][0]


def test_a_search_asks_about_nothing_that_tensor_parallelism_refuses(tmp_path):
    asked = recipe(tmp_path, memory={"tensor_parallel": 2, "micro_batch_size": "auto", "budget": "4GB", **SHARED})
    settings = combinations(asked, 4)
    assert len(settings) > 10
    plans = [decide_plan(apply_settings(asked, one), 4) for one in settings]
    assert all(plan.memory.sequence_parallel for plan in plans)
    (note,) = [note for note in search_for(asked, "a100-80gb", 4, 1).notes if "tensor_parallel" in note]
    assert "not tried" in note
    assert "cpu_offload" in note


def test_attention_of_its_own_is_torchs():
    whole = nn.MultiheadAttention(16, 4, batch_first=True).double()
    split, tokens = SplitAttention(whole, "it", ""), torch.randn(2, 5, 16, dtype=torch.float64)
    ours, theirs = split(tokens, tokens, tokens)[0], whole(tokens, tokens, tokens, need_weights=False)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding(16 + 4 + 5 + 16))  # numbers below 1
    assert ours.stride() == theirs.stride()  # else dropout after it would draw another mask


def live_peak(asked: Recipe) -> int:
    """The most bytes that tensors of this rank took at once in a run, until its model was saved."""
    peaks: list[int] = []
    with LiveBytes() as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "trainer.run.training.full_state_dict", lambda stack: peaks.append(live.peak) or full_state_dict(stack)
        )
        fit(asked)
    return peaks[0]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_memory_of_a_rank_is_predicted(ranks, tmp_path):
    found = {}
    for world in ("1", "tp2", "sp2"):
        size, knobs = WORLDS[world]
        model = replace(recipe(tmp_path).model, layers=4, heads=4, width=128, mlp_width=512, dropout=0.1)
        options: dict[str, Any] = {"memory": {"micro_batch_size": 8, **knobs}, "checkpoint": Checkpoint(every=None)}
        asked = recipe(tmp_path / world, model=model, run={"predict": False}, max_steps=2, **options)
        predicted = predict(prepare_recipe(asked), decide_plan(asked, size), Target(host_as_device())).allocated
        measured = live_peak(asked) if size == 1 else max(ranks(size).run(live_peak, asked))
        assert predicted == pytest.approx(measured, rel=0.05)
        found[world] = measured
    assert found["tp2"] < 0.6 * found["1"]
    assert found["sp2"] < found["tp2"]


@pytest.mark.slow
def test_sums_within_a_block_are_predicted(tmp_path):
    model = replace(recipe(tmp_path).model, dropout=0.0)
    asked = recipe(tmp_path, model=model, memory={"tensor_parallel": 2, "micro_batch_size": 24})
    predicted = predict(prepare_recipe(asked), decide_plan(asked, 4), Target(gpu_named("a100-80gb")))
    # A batch of 24 on two groups: 12 samples of 5 tokens of 16 features; of each of two blocks attention and MLP, once
    # in forward and once in backward.
    within = 2 * 2 * 2 * 12 * 5 * 16 * 4
    weights = sum(p.numel() for p in model_of(asked).parameters())
    assert within < predicted.traffic["all_reduce"] < within + 2 * 4 * weights
    assert predicted.cost.exposed_ms > 0


def model_of(asked: Recipe) -> nn.Module:
    return prepare_recipe(asked).model.build()


def noted_run(case: Case, overlaps: bool, bucket: int, fails: bool = False) -> tuple[list[list[str]], dict[str, Any]]:
    """What three steps reduce, step by step, and what they lead to. One that ``fails`` is taken again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "BUCKET", bucket)
        _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, case.world_size))
        assert stepper.sync.may_overlap
        stepper.sync.may_overlap = overlaps
        if fails:
            fail_once(stepper.sync)
        found, losses = [], []
        for epoch, step in steps_of(case):
            (window,) = windows.epoch(epoch, step, step + 1)
            with Noted() as noted, pytest.MonkeyPatch.context() as around:
                around.setattr(stepper.precision, "backward", watched(stepper, noted))
                try:
                    totals = stepper.accumulate(window)
                except RuntimeError:
                    stepper.abandon()
                    assert not stepper.sync.begun
                    noted.events.clear()
                    totals = stepper.accumulate(window)
            found.append(noted.events)
            losses.append(stepper.update(stepper.clip_gradients(), totals, window).loss)
        return found, {
            "state": {name: tensor.clone() for name, tensor in full_state_dict(stack).items()},
            "losses": losses,
        }


def fail_once(sync: TensorParallelSync) -> None:
    """In a backward, after two buckets of which nobody has waited for the result."""
    begin = sync._begin

    def failing(bucket: Any) -> None:
        begin(bucket)
        if len(sync.begun) == 2 and sync.overlaps_update and sync.arrived:
            sync._begin = begin  # type: ignore[method-assign]
            raise RuntimeError("planted")

    sync._begin = failing  # type: ignore[method-assign]


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["losses"] == theirs["losses"]
    assert all(torch.equal(tensor, theirs["state"][name]) for name, tensor in ours["state"].items())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "bucket"), [("ddp", 2048), slow("fsdp", 64)])
def test_gradients_are_reduced_while_the_last_backward_goes_on(strategy, bucket, ranks):
    case = case_of("vit", 4, strategy=strategy, precision="32-true")
    overlapping, waiting, failing = (
        ranks(4).run(noted_run, case, *how) for how in ((True, bucket), (False, bucket), (True, bucket, True))
    )
    for (events, result), (others, same), (_, again) in zip(overlapping, waiting, failing, strict=True):
        first, *later = map(reductions, events)
        asked, *buckets = first[1]  # which parameters each rank has reached
        assert first[0] == []
        assert len(buckets) > 2
        assert later == [(buckets, [])] * 2
        # Without: every step asks, but under FSDP, which gives all ranks the gradients of all.
        assert list(map(reductions, others)) == [([], [asked] * (strategy == "ddp") + buckets)] * 3
        # The same buckets, and sums that do not depend on when they are taken.
        assert_same_bits(result, same)
        assert_same_bits(result, again)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "collectives"), [("ddp", 2), slow("fsdp", 1)])
def test_gradients_share_collectives(strategy, collectives, ranks):
    """Those of split weights, unless FSDP reduces them, and those of all others; before there was one for each."""
    case = case_of("vit", 4, strategy=strategy, precision="32-true")
    for events, _ in ranks(4).run(noted_run, case, True, sync.BUCKET):
        assert [sum(map(len, reductions(one))) for one in events] == [collectives + 1, collectives, collectives]


def unreached(case: Case) -> str:
    """What a run says to a step that computes no gradient though the first one did."""
    _, stepper, _, _ = set_up(case, decide_plan(case.recipe, case.world_size))
    stepper.sync.enable_overlap()
    stepper.sync.before_forward(is_last=True)
    with pytest.raises(RunError) as caught:
        stepper.sync.after_last_backward()
    return str(caught.value)


def test_a_gradient_that_is_missing_is_named_before_anybody_waits_for_it(ranks):
    for said in ranks(2).run(unreached, case_of("vit")):
        assert "no gradient" in said
        assert "conditional = True" in said
