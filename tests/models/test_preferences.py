"""Losses of preferences however they are trained: those of a plain loop over whole logits, with TRL's formulas."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import matrix
from helpers.combinations import covering
from helpers.language import WORDS, language_model, plant_leaking_attention, precise
from helpers.matrix import Case, difference, exact_memory, name_of, perturbed, stacked_run, steps_of
from helpers.rounding import ROUNDING
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

import trainer
from trainer.contract import Model
from trainer.engine.order import batch_indices
from trainer.errors import RecipeError
from trainer.models import CausalLM, LoRA, chunked_loss, preference
from trainer.models.byte_tokenizer import byte_tokenizer
from trainer.recipe import Memory, Optim, Recipe, Run
from trainer.run import reference

LOSSES = ("dpo", "ipo", "orpo", "simpo")
BETAS = {"dpo": 0.3, "ipo": 0.2, "orpo": 0.4, "simpo": 1.5}
LENGTH = 24
AXES: dict[str, tuple[Any, ...]] = {
    "loss": LOSSES,
    "family": ("gpt2", "llama", "qwen3", "gemma3"),
    "cut": ((1, None), (3, None), (8, None), (8, 96)),
    "place": (("auto", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)),
    "checkpointing": ("none", "full"),
    "chunk": (None, 0, 5),
    "free": (None, False),
}
COVERING = covering([dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())], 2, AXES)


def pairs(size: int) -> list[dict[str, Tensor]]:
    """Ragged pairs: both texts begin with the prompt, and are padded to the same length."""
    draw, found = np.random.default_rng(0), []
    for _ in range(size):
        prompt = draw.integers(1, WORDS, draw.integers(1, 8))
        rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for _ in range(2):
            answer = draw.integers(1, WORDS, draw.integers(1, 12))
            ids = np.concatenate([prompt, answer])
            gap = (0, LENGTH - len(ids))
            rows["input_ids"].append(np.pad(ids, gap))
            rows["attention_mask"].append(np.pad(np.ones_like(ids), gap))
            labels = np.concatenate([np.full_like(prompt, -100), answer])
            rows["labels"].append(np.pad(labels, gap, constant_values=-100))
        sample = {name: torch.from_numpy(np.stack(row)) for name, row in rows.items()}
        found.append({**sample, "reference": torch.from_numpy(draw.normal(-30, 3, 2))})
    return found


@dataclass(frozen=True)
class Preferred(Case):
    """A language model on 19 ragged pairs, in batches of 8, 8 and 3."""

    loss: str = "dpo"
    chunk: int | None = None
    free: bool | None = None

    @property
    def model(self) -> Model:
        options = {"loss_chunk": self.chunk, "padding_free": self.free}
        return language_model(self.name, loss=self.loss, beta=BETAS[self.loss], **options)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        return pairs(self.size)

    @property
    def lengths(self) -> list[int]:
        return [int(sample["attention_mask"].sum()) for sample in self.samples]


@pytest.fixture(autouse=True)
def _stacked(monkeypatch):
    monkeypatch.setattr(matrix, "collate", stacked)


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def run(case: Preferred) -> dict[str, Any]:
    """As ``stacked_run``, on any rank."""
    matrix.collate = stacked
    return stacked_run(case)


def case_of(
    loss: str,
    family: str = "llama",
    cut: Any = (3, None),
    place: Any = ("auto", 1),
    checkpointing: str = "none",
    chunk: int | None = None,
    free: bool | None = None,
) -> Preferred:
    memory = exact_memory(cut, place, checkpointing)
    return Preferred(family, memory, place[1], loss=loss, chunk=chunk, free=free, optim=Optim("sgd", lr=0.02))


def trl_loss(loss: str, logps: Tensor, reference: Tensor, lengths: Tensor, nll: Tensor) -> Tensor:
    """The loss of pairs from log-probabilities (n, 2), as TRL 1.16.0 defines it.

    Sources: trl/trainer/dpo_trainer.py (``sigmoid`` and ``ipo``), trl/experimental/orpo/orpo_trainer.py and
    trl/experimental/cpo/cpo_trainer.py (``simpo``). ``nll`` is the mean loss of all tokens of each chosen text.
    """
    beta, gamma = BETAS[loss], 0.5
    scores = logps - reference
    if loss == "dpo":
        return -logsigmoid(beta * (scores[:, 0] - scores[:, 1]))
    if loss == "ipo":
        chosen_avg_score, rejected_avg_score = (scores / lengths).T
        return (chosen_avg_score - rejected_avg_score - 1 / (2 * beta)) ** 2
    chosen, rejected = (logps / lengths).T
    if loss == "simpo":
        return -logsigmoid(beta * (chosen - rejected - gamma / beta))
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return nll - beta * logsigmoid(log_odds)


def plain_pair(module: nn.Module, sample: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and lengths of both answers, and the mean loss of the chosen text, one text at a time."""
    logps, lengths, nll = [], [], []
    for ids, mask, labels in zip(sample["input_ids"], sample["attention_mask"], sample["labels"], strict=True):
        size = int(mask.sum())
        logits = module(input_ids=ids[None, :size]).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, ids[1:size, None])[:, 0]
        answer = labels[1:size] != -100
        logps.append(own[answer].sum())
        lengths.append(answer.sum())
        nll.append(-own.mean())
    return torch.stack(logps), torch.stack(lengths), nll[0]


def plain_batch(module: nn.Module, loss: str, samples: list[dict[str, Tensor]]) -> Tensor:
    logps, lengths, nll = zip(*(plain_pair(module, sample) for sample in samples), strict=True)
    reference = torch.stack([sample["reference"] for sample in samples])
    return trl_loss(loss, torch.stack(logps), reference, torch.stack(lengths), torch.stack(nll))


@lru_cache
def plain_loop(family: str, loss: str) -> dict[str, Any]:
    """Plain transformers and torch: one text at a time, whole logits, the mean loss of the pairs of a batch."""
    case = case_of(loss, family)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    ours = perturbed(case.model.build())
    module = precise(AutoModelForCausalLM.from_config(ours.config, attn_implementation="sdpa")).train()
    torch.set_default_dtype(torch.float32)
    module.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=case.optim.lr)
    samples, losses = case.samples, []
    for epoch, step in steps_of(case):
        own = [samples[index] for index in batch_indices(0, epoch, step, case.size, case.batch_size)]
        total = plain_batch(module, loss, own).mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return {"state": module.state_dict(), "losses": losses}


def error(case: Preferred, ranks: Any = None) -> float:
    ours = run(case) if case.world_size == 1 else ranks(case.world_size).run(run, case)[0]
    return max(difference(ours, plain_loop(case.name, case.loss)).values())


@pytest.mark.slow
@pytest.mark.parametrize("values", COVERING, ids=name_of)
def test_steps_are_those_of_a_plain_loop(values, ranks):
    assert error(case_of(**values), ranks) <= ROUNDING


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cut", [(3, None), (8, 96)])
def test_steps_on_one_rank_are_those_of_a_plain_loop(loss, cut):
    assert error(case_of(loss, cut=cut, chunk=5)) <= ROUNDING


@pytest.mark.parametrize(("loss", "strategy"), [("dpo", "ddp"), ("orpo", "fsdp")])
def test_steps_on_two_ranks_are_those_of_a_plain_loop(loss, strategy, ranks):
    case = case_of(loss, "qwen3", place=(strategy, 2), checkpointing="full")
    assert error(case, ranks) <= ROUNDING


def plant_one_gradient(monkeypatch):
    """All tokens get the gradient of the first."""
    backward = chunked_loss._ChunkedLosses.backward

    def first(ctx, gradient):
        return backward(ctx, gradient[:1].expand_as(gradient).contiguous())

    monkeypatch.setattr(chunked_loss._ChunkedLosses, "backward", staticmethod(first))


def plant_swapped_reference(monkeypatch):
    """The reference of the rejected answer is subtracted from the chosen one."""
    pack = preference.packed_pairs

    def swapped(batch, packs, with_prompts):
        return pack({**batch, "reference": batch["reference"].flip(1)}, packs, with_prompts)

    monkeypatch.setattr(preference, "packed_pairs", swapped)


def plant_too_many_shared_tokens(monkeypatch):
    """The last token of a prompt is also taken from the chosen text, where it predicts another answer."""
    share = preference.share_tokens
    monkeypatch.setattr(preference, "share_tokens", lambda row, shared: share(row, shared + 1))


def plant_attention_of_a_neighbour(monkeypatch):
    """Each token gets what attention computed for the token before it."""
    share = preference.share_tokens

    def moved(row, shared):
        found = share(row, shared)
        return {**found, "kept": found["kept"].roll(1)}

    monkeypatch.setattr(preference, "share_tokens", moved)


PLANTS = [plant_one_gradient, plant_leaking_attention, plant_swapped_reference]
PLANTS += [plant_too_many_shared_tokens, plant_attention_of_a_neighbour]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant, monkeypatch):
    monkeypatch.setattr("trainer.engine.step.LossCheck", lambda model: None)
    plant(monkeypatch)
    assert error(case_of("dpo", cut=(8, 96))) > 1e-6


def test_a_shared_prompt_is_computed_once():
    samples = pairs(3)
    packed = preference.packed_pairs(stacked(samples), packs=True, with_prompts=False)
    tokens = int(sum(sample["attention_mask"].sum() for sample in samples))
    prompts = [int((sample["labels"][0] == -100).long().cumprod(0).sum()) for sample in samples]
    assert min(prompts) > 0
    assert packed["lengths"].tokens == [int(n) for sample in samples for n in sample["attention_mask"].sum(1)]
    assert packed["input_ids"].shape == (1, tokens - sum(prompts) + len(prompts))  # its last token predicts two answers


@pytest.mark.parametrize("free", [None, False])
def test_long_answers_lose_no_digits_in_fp32(free):
    """Log-probabilities of answers are sums of thousands of terms, of which a loss subtracts one from another."""
    model = language_model("llama", loss="dpo", beta=0.1, padding_free=free)
    torch.manual_seed(0)
    module = perturbed(model.build()).eval()
    ids = torch.randint(1, WORDS, (4, 2, 2000), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    found = []
    for dtype in (torch.float32, torch.float64):
        packed = preference.packed_pairs({**batch, "reference": torch.zeros(4, 2).double()}, model.packs(), False)
        with torch.no_grad():
            found.append(preference.pair_loss(model, module.to(dtype), packed).logits.double())
    assert (found[0] - found[1]).abs().max() < 1e-5  # of about 1,000; adding tokens in fp32 errs by more than 1e-4


@pytest.mark.parametrize("near", [-1e-9, -1e-4, -0.5, -0.7, -20.0])
def test_the_odds_have_no_cancellation(near):
    x = torch.tensor([near], dtype=torch.float64, requires_grad=True)
    found = preference._log1mexp(x)
    found.backward()
    assert found.item() == pytest.approx(np.log(-np.expm1(near)), rel=1e-14)
    assert x.grad.item() == pytest.approx(np.exp(near) / np.expm1(near), rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss": "kto"}, "not a sum over samples"),
        ({"loss": "rlhf"}, "model.loss"),
        ({"beta": 0.1}, "model.beta=0.1 has no effect"),
        ({"loss": "dpo", "gamma": 1.0}, "model.gamma=1.0 has no effect"),
        ({"loss": "dpo", "beta": 0.0}, "model.beta=0.0 must be greater than 0"),
    ],
)
def test_wrong_settings_are_rejected(settings, reason):
    with pytest.raises(RecipeError, match=reason):
        CausalLM("llama", tokenizer="bytes", **settings)


ROWS = [
    {"prompt": f"question {i} " * (1 + i % 3), "chosen": "good " * (1 + i % 4), "rejected": "bad " * (1 + i * 7 % 5)}
    for i in range(20)
]


def recipe_of(folder: Any, **changes: Any) -> Recipe:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1}
    data = {"train_files": str(path), "val_fraction": 0.2, "chat_template": "plain", "max_length": 96}
    settings = {
        "model": CausalLM("llama", tokenizer="bytes", config=config, loss="dpo"),
        "data": trainer.data.Preferences(**data, cache_dir=str(folder / "cache")),
        "optim": Optim("adamw", lr=1e-3),
        "batch_size": 8,
        "max_steps": 2,
        "memory": Memory(micro_batch_size=3, precision="64-true"),
        "run": Run(dir=str(folder / "run"), progress=False, accelerator="cpu", devices=1),
    }
    return Recipe(**settings | changes)


def test_a_row_whose_answers_are_both_truncated_is_named_once(tmp_path, capfd):
    data = replace(recipe_of(tmp_path).data, max_length=20)
    rows = [{"prompt": str(number), "chosen": "b" * 30, "rejected": "c" * 30} for number in range(9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data.prepare(byte_tokenizer(), language_model("llama", loss="dpo"))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "18 of 18 answers are truncated" in line]
    assert re.findall(r"jsonl row (\d)", line) == ["1", "2", "3", "4", "5"]
    assert line.endswith(", …)")


def losses_of(folder: Any) -> list[str]:
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    return [row[rows[0].index("loss")] for row in rows[1:] if row[rows[0].index("loss")]]


def test_the_reference_is_cached_and_equals_the_model_before_training(tmp_path, capsys):
    """The first loss of DPO is log 2, because the model is its own reference; a second run reads the cache."""
    recipe = recipe_of(tmp_path)
    found = trainer.fit(recipe)
    first = losses_of(tmp_path / "run")
    assert float(first[0]) == pytest.approx(np.log(2), rel=1e-12)
    assert {"reward_accuracy", "reward_margin"} <= json.loads((tmp_path / "run" / "summary.json").read_text())[
        "metrics"
    ]["val"].keys()
    notes = sorted((tmp_path / "cache").rglob("reference/*/*.json"))
    assert len(notes) == 2  # of train and val
    before = [note.read_bytes() for note in notes]
    again = trainer.fit(recipe.replace(run=replace(recipe.run, dir=str(tmp_path / "again"))))
    assert losses_of(again.dir) == losses_of(found.dir) == first
    assert [note.read_bytes() for note in notes] == before
    other = recipe.replace(seed=1, run=replace(recipe.run, dir=str(tmp_path / "other")))
    assert float(losses_of(trainer.fit(other).dir)[0]) == pytest.approx(np.log(2), rel=1e-12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_the_reference_is_not_rounded_to_half_precision(precision, tmp_path):
    """The first loss is log 2 in any precision: the same arithmetic has computed the reference."""
    recipe = recipe_of(tmp_path, max_steps=1, memory=Memory(micro_batch_size=3, precision=precision))
    assert float(losses_of(trainer.fit(recipe).dir)[0]) == pytest.approx(np.log(2), abs=1e-6)


def test_a_resumed_run_keeps_the_reference_of_the_weights_before_training(tmp_path):
    recipe = recipe_of(tmp_path, max_steps=4)
    whole = losses_of(trainer.fit(recipe).dir)
    stopped = recipe.replace(max_steps=2, run=replace(recipe.run, dir=str(tmp_path / "part")))
    trainer.fit(stopped)
    for note in (tmp_path / "cache").rglob("reference/*/*.json"):
        note.unlink()
    resumed = stopped.replace(max_steps=4, run=replace(stopped.run, resume="auto", allow_change=["max_steps"]))
    assert losses_of(trainer.fit(resumed).dir) == whole


def test_an_interrupted_reference_continues_after_its_last_block(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "BLOCK", 4)
    recipe = recipe_of(tmp_path)  # 16 training pairs
    compute, blocks = reference._compute, []

    def ends_in_the_third(*args):
        blocks.append(args[-1])
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(reference, "_compute", ends_in_the_third)
    with pytest.raises(BaseException):  # noqa: B017
        trainer.fit(recipe)
    notes = sorted((tmp_path / "cache").rglob("reference/*/*.json"))
    assert [note.name for note in notes] == ["0.json", "4.json"]
    notes[1].write_text("{")  # a damaged block is computed again
    monkeypatch.setattr(reference, "_compute", compute)
    again = recipe.replace(run=replace(recipe.run, dir=str(tmp_path / "again")))
    found = losses_of(trainer.fit(again).dir)
    assert "16 train pairs, 4 of them from the cache" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "cache")
    assert found == losses_of(trainer.fit(recipe.replace(run=replace(recipe.run, dir=str(tmp_path / "whole")))).dir)


@dataclass
class RoomForEight(CausalLM):
    """A language model with memory for 8 pairs."""

    def losses(self, module: nn.Module, batch: Any) -> Any:
        if len(batch["reference"]) > 8:
            raise torch.OutOfMemoryError("no memory for these activations")
        return super().losses(module, batch)


def test_the_reference_is_computed_where_a_whole_batch_does_not_fit_and_micro_batches_are_auto(tmp_path):
    recipe = recipe_of(tmp_path, batch_size=16, memory=Memory(precision="64-true"))
    run = replace(recipe.run, evaluate=False)
    whole = losses_of(trainer.fit(recipe.replace(run=replace(run, dir=str(tmp_path / "whole")))).dir)
    shutil.rmtree(tmp_path / "cache")
    model = RoomForEight(**{field.name: getattr(recipe.model, field.name) for field in fields(recipe.model)})
    found = losses_of(trainer.fit(recipe.replace(model=model, run=run)).dir)
    assert [*map(float, found)] == pytest.approx([*map(float, whole)], rel=1e-8)


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_adapters_train_on_a_frozen_base(base, tmp_path):
    recipe = recipe_of(tmp_path)
    trainer.fit(recipe)  # writes weights
    weights = str(tmp_path / "run" / "model")
    model = CausalLM(weights, weights=weights, lora=LoRA(rank=2, base=base), loss="dpo")
    tuned = recipe.replace(model=model, run=replace(recipe.run, dir=str(tmp_path / "lora")))
    losses = losses_of(trainer.fit(tuned.replace(memory=Memory(micro_batch_size=3, precision="32-true"))).dir)
    assert float(losses[0]) == pytest.approx(np.log(2), rel=1e-6)
    assert float(losses[1]) != float(losses[0])


def test_evaluate_rejects_a_loss_that_needs_the_model_before_training(tmp_path):
    recipe = recipe_of(tmp_path)
    found = trainer.fit(recipe)
    with pytest.raises(RecipeError, match="compare with the model before training"):
        found.evaluate()


SAY = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Is it?", "chosen": "Yes.", "rejected": "No."},
        {"question": "Is it?", "chosen": "Yes.", "rejected": "No."},
        {"instruction": "Is it?", "chosen_response": "Yes.", "rejected_response": "No."},
        {"prompt": [SAY[0]], "chosen": [SAY[1]], "rejected": [NO]},
        {"chosen": [*SAY], "rejected": [SAY[0], NO]},
        {"prompt": "Is it?", "chosen": [*SAY], "rejected": [SAY[0], NO]},
    ],
)
def test_the_usual_formats_give_the_same_tokens(row):
    from trainer.data.language_samples import PreferenceReader
    from trainer.models.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    reader = PreferenceReader(tokenizer, 96, dict.fromkeys(("prompt", "chosen", "rejected")), "chatml")
    columns = reader.columns("rows", list(row))
    ((chosen, rejected),) = reader([{name: row[name] for name in columns}])
    for sample, answer in ((chosen, "Yes."), (rejected, "No.")):
        learned = sample.labels[sample.labels != -100].tolist()
        assert tokenizer.decode(learned) == f"{answer}<|im_end|>"
        assert tokenizer.decode(sample.ids.tolist()).startswith("<|im_start|>user\nIs it?")


def test_earlier_answers_of_a_conversation_are_not_predicted():
    from trainer.data.language_samples import PreferenceReader
    from trainer.models.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    reader = PreferenceReader(tokenizer, 200, {}, "chatml")
    ((chosen, _),) = reader([{"chosen": [*SAY, *SAY], "rejected": [*SAY, SAY[0], NO]}])
    assert tokenizer.decode(chosen.labels[chosen.labels != -100].tolist()) == "Yes.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal chosen and rejected"),
        ({"chosen": "b", "rejected": "c"}, "has no prompt"),
        ({"prompt": "a" * 99, "chosen": "b", "rejected": "c"}, "chosen answer"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "empty chosen"),
    ],
)
def test_rows_without_a_pair_are_named(row, reason, tmp_path):
    recipe = recipe_of(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RecipeError, match=f"row 1.*{reason}"):
        trainer.fit(recipe)
