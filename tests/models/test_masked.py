"""Masked language models: masks, their statistics, and the steps of a plain loop over whole logits."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LONG
from helpers.combinations import covering
from helpers.matrix import (
    OPTIM,
    Case,
    difference,
    exact_memory,
    name_of,
    perturbed,
    plain_optimizer,
    stacked_run,
    steps_of,
)
from helpers.problems import collate
from helpers.ranks import free_port, torchrun_variables
from helpers.resumed import assert_same_weights, losses, recipe, saved
from helpers.rounding import ROUNDING
from helpers.tokenizers import byte_pairs
from helpers.warm import forks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

from trainer import Checkpoint
from trainer.api import fit
from trainer.cli import run
from trainer.contract import Model
from trainer.data import Documents
from trainer.engine.events import Listener
from trainer.engine.order import batch_indices, derive_seed
from trainer.errors import RecipeError
from trainer.models import LoRA, MaskedLM, masked
from trainer.models.byte_tokenizer import byte_tokenizer
from trainer.models.masked import TokenMasking, make_masking

WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE |= {"max_position_embeddings": 512}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", WIDE),
    "roberta": ("roberta", WIDE),
    "distilbert": ("distilbert", {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "modernbert": (
        "modernbert",
        {**WIDE, "local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "bigbird": ("big_bird", WIDE),
}
"""The model type and the configuration of each; their vocabulary is that of bytes."""

AXES: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "cut": ((1, None), (3, None), (8, None), (8, 48)),  # most samples of a micro-batch, and most tokens
    "place": (("auto", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3)),
    "checkpointing": ("none", "full"),
    "offload": ("none", "optimizer"),
    "chunk": (None, 0, 1, 7),
    "free": (None, False),  # of padding
    "masking": ("tokens", "whole_words"),
    "optim": ("sgd", "adamw"),
}
COVERING = covering([dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())], 2, AXES)
"""Every pair of settings of two axes."""
BYTES = byte_tokenizer(masks=True)
MASK, CLS, END = BYTES.mask_token_id, BYTES.cls_token_id, BYTES.eos_token_id


def masked_model(family: str, **options: Any) -> MaskedLM:
    name, config = FAMILIES[family]
    return MaskedLM(name, **{"tokenizer": "bytes", "config": config, "dropout": 0.0, "mask_rate": 0.3, **options})


def masked_samples(size: int) -> list[dict[str, Tensor]]:
    """Texts of 2 to 40 tokens in a few letters and blanks; the second half of every third one may not be masked."""
    generator = torch.Generator().manual_seed(1)
    letters = torch.tensor([32, 97, 98, 99, 100])
    samples = []
    for number, length in enumerate(torch.randint(0, 39, (size,), generator=generator).tolist()):
        words = letters[torch.randint(0, len(letters), (length,), generator=generator)]
        ids = torch.cat([torch.tensor([CLS]), words, torch.tensor([END])])
        labels = ids.clone()
        if number % 3 == 0:
            labels[length // 2 :] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


@dataclass(frozen=True)
class Masked(Case):
    """A masked language model on 17 ragged samples, in batches of 8, 8 and 1."""

    size: int = 17
    chunk: int | None = 0
    free: bool | None = None
    masking: str = "tokens"

    @property
    def model(self) -> Model:
        return masked_model(self.name, loss_chunk=self.chunk, padding_free=self.free, masking=self.masking)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        return masked_samples(self.size)


def case_of(
    family: str,
    cut: Any = (3, None),
    place: Any = ("auto", 1),
    checkpointing: str = "none",
    offload: str = "none",
    chunk: int | None = None,
    free: bool | None = None,
    masking: str = "tokens",
    optim: str = "sgd",
) -> Masked:
    memory = exact_memory(cut, place, checkpointing, offload)
    return Masked(family, memory, place[1], chunk=chunk, free=free, masking=masking, optim=OPTIM[optim])


# ----------------------------------------------------------------------------------------------------------------------
# The reference: masks token by token in Python's integers, and a plain loop.


def splitmix(seed: int, counter: int) -> float:
    """Output ``counter`` of SplitMix64 in [0, 1), as its authors write it."""
    state = (seed + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return ((state ^ (state >> 31)) >> 11) / 2**53


def plainly_masked(sample: dict[str, Tensor], seed: int, rate: float, masking: str) -> dict[str, Tensor]:
    """The sample with replaced tokens and the labels of those that are to be predicted."""
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    is_open = [label != -100 and token < 256 for token, label in zip(ids, labels, strict=True)]
    made, kept, start = list(ids), [-100] * len(ids), 0
    for place, token in enumerate(ids):
        begins = token == 32 or not is_open[place] or place == 0 or not is_open[place - 1]
        start = place if begins or masking == "tokens" else start
        if not is_open[place] or splitmix(seed, 3 * start) >= rate:
            continue
        kept[place], kind = token, splitmix(seed, 3 * place + 1)
        made[place] = MASK if kind < 0.8 else int(splitmix(seed, 3 * place + 2) * len(BYTES)) if kind < 0.9 else token
    return {"input_ids": torch.tensor(made), "labels": torch.tensor(kept)}


@lru_cache
def plain_loop(family: str, optim: str, masking: str) -> dict[str, Any]:
    """Plain transformers and torch: whole batches, padded, whole logits, their mean cross entropy."""
    case = case_of(family, optim=optim, masking=masking)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    ours = perturbed(case.model.build())
    attention = "eager" if family == "bigbird" else "sdpa"  # transformers has only eager attention for BigBird
    module = AutoModelForMaskedLM.from_config(ours.config, attn_implementation=attention).train()
    torch.set_default_dtype(torch.float32)
    assert type(module) is not type(ours)
    module.load_state_dict(ours.state_dict())
    optimizer = plain_optimizer(module, case)
    samples, losses = case.samples, []
    for epoch, step in steps_of(case):
        indices = batch_indices(0, epoch, step, case.size, case.batch_size)
        seeds = [derive_seed(0, epoch, index) for index in indices]
        chosen = zip(indices, seeds, strict=True)
        batch = collate([plainly_masked(samples[index], seed, 0.3, masking) for index, seed in chosen])
        if family == "roberta":  # its positions skip the padding token
            batch["input_ids"][batch["attention_mask"] == 0] = module.config.pad_token_id
        logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = total / (batch["labels"] != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), case.optim.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"state": module.state_dict(), "losses": losses}


def error(case: Masked, ranks: Any = None) -> float:
    """The largest relative difference from the plain loop, of losses and of weights."""
    ours = stacked_run(case) if case.world_size == 1 else ranks(case.world_size).run(stacked_run, case)[0]
    optim = next(name for name, one in OPTIM.items() if one == case.optim)
    return max(difference(ours, plain_loop(case.name, optim, case.masking)).values())


@pytest.mark.slow
@pytest.mark.parametrize("values", COVERING, ids=name_of)
def test_the_steps_are_those_of_a_plain_loop_over_whole_logits(values, ranks):
    assert error(case_of(**values), ranks) <= ROUNDING


USUAL = (
    {"family": "bert", "cut": (8, 48), "chunk": 7},
    {"family": "roberta", "cut": (3, None), "free": False},
    {"family": "distilbert", "cut": (3, None), "checkpointing": "full", "masking": "whole_words"},
    {"family": "modernbert", "cut": (8, 48), "optim": "adamw"},
    {"family": "bigbird", "cut": (1, None), "chunk": 1},
)


@pytest.mark.parametrize("values", USUAL, ids=name_of)
def test_usual_steps_are_those_of_a_plain_loop_over_whole_logits(values):
    assert error(case_of(**values)) <= ROUNDING


@pytest.mark.parametrize("place", [("ddp", 2), ("fsdp", 2)])
def test_steps_of_two_ranks_are_those_of_a_plain_loop(place, ranks):
    assert error(case_of("bert", cut=(3, None), place=place), ranks) <= ROUNDING


# ----------------------------------------------------------------------------------------------------------------------
# Checks of the checks: a planted fault must be found.


def plant_masks_of_the_tokens(monkeypatch):
    """The masks of training are those of evaluation, equal in every epoch."""
    choose = TokenMasking.choose
    unseeded = lambda self, batch: choose(self, {k: v for k, v in batch.items() if k != "seeds"})  # noqa: E731
    monkeypatch.setattr(TokenMasking, "choose", unseeded)


def plant_weight_of_all_tokens(monkeypatch):
    """Divides by all tokens instead of the masked ones."""
    monkeypatch.setattr(MaskedLM, "weigh", lambda self, batch: {"loss": float((batch["labels"] != -100).sum())})


def plant_mean_of_micro_batches(monkeypatch):
    """Each micro-batch counts alike, however many of its tokens are masked."""
    losses = MaskedLM.losses

    def averaged(self, module, batch):
        for loss in losses(self, module, batch):
            yield replace(loss, total=loss.total / max(len(batch["targets"]), 1))

    monkeypatch.setattr(MaskedLM, "losses", averaged)


def plant_missing_transform(monkeypatch):
    """The head without its transform layer."""
    monkeypatch.setitem(masked.HEADS, "bert", lambda module, hidden: hidden)


def plant_missing_bias(monkeypatch):
    """The head without its bias."""
    from trainer.models import chunked_loss

    head_logits = chunked_loss._head_logits
    monkeypatch.setattr(chunked_loss, "_head_logits", lambda states, weights, bias: head_logits(states, weights, None))


def plant_first_token_only(monkeypatch):
    """The last block computes its output from the first token of each text, as for classifiers."""
    from trainer.models import padding_free

    block = padding_free._bert_block

    def shifted(module, rows, hidden, lengths, ends):
        starts = ends[:-1].long().repeat_interleave(ends.diff())
        return block(module, rows[starts], hidden, lengths, ends)

    monkeypatch.setitem(padding_free.BLOCK_FORWARDS, "bert.modeling_bert.BertLayer", shifted)
    padding_free._unpadded.cache_clear()
    masked._make_loss_class.cache_clear()


CHECKED = {plant_weight_of_all_tokens: "weigh", plant_mean_of_micro_batches: "not a mean"}
"""What the check of the losses in the first step finds, and a part of its message."""
PLANTED = [value for name, value in list(globals().items()) if name.startswith("plant_") and value not in CHECKED]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant, monkeypatch):
    plain_loop("bert", "sgd", "tokens")
    plant(monkeypatch)
    assert error(case_of("bert")) > 1e-6


@pytest.mark.parametrize("plant", CHECKED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_in_the_first_step(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(RecipeError, match=CHECKED[plant]):
        error(case_of("bert"))


@pytest.fixture(autouse=True)
def _fresh_classes():
    yield
    from trainer.models import padding_free

    padding_free._unpadded.cache_clear()


# ----------------------------------------------------------------------------------------------------------------------
# Masks.


def batch_of(samples: list[dict[str, Tensor]], seeds: list[int] | None = None) -> dict[str, Tensor]:
    batch = collate(samples)
    return batch if seeds is None else {**batch, "seeds": torch.tensor(seeds)}


@pytest.mark.parametrize("masking", ["tokens", "whole_words"])
@pytest.mark.parametrize("seeds", [list(range(17)), None], ids=["training", "evaluation"])
def test_masks_depend_on_the_sample_alone(masking, seeds):
    chooser = make_masking(BYTES, 0.3, masking == "whole_words")
    samples = masked_samples(17)
    ids, labels = chooser.replace(batch_of(samples, seeds))
    for row, sample in enumerate(samples):
        alone, own = chooser.replace(batch_of([sample], None if seeds is None else [seeds[row]]))
        length = len(sample["input_ids"])
        assert torch.equal(ids[row, :length], alone[0])
        assert torch.equal(labels[row, :length], own[0])
        if seeds is not None:
            plain = plainly_masked(sample, seeds[row], 0.3, masking)
            assert torch.equal(alone[0], plain["input_ids"])
            assert torch.equal(own[0], plain["labels"])
    again = [seed + 1 for seed in seeds] if seeds else None
    assert torch.equal(labels, chooser.replace(batch_of(samples, again))[1]) == (seeds is None)


def rates(ids: Tensor, made: Tensor, labels: Tensor, allowed: Tensor) -> dict[str, tuple[float, int]]:
    """Shares with the number of draws: of masked tokens, and among them of mask tokens, and of unchanged tokens."""
    chosen = labels != -100
    assert not chosen[~allowed].any()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(made[~chosen], ids[~chosen])
    count = int(chosen.sum())
    shares = {"masked": (float(chosen[allowed].double().mean()), int(allowed.sum()))}
    shares["mask token"] = (float((made[chosen] == MASK).double().mean()), count)
    return shares | {"unchanged": (float((made[chosen] == ids[chosen]).double().mean()), count)}


def test_masks_have_the_statistics_of_transformers():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (400, 500), generator=generator)
    ids[:, 0], ids[:, -1] = CLS, END
    allowed = ids < 256
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    ours = make_masking(BYTES, 0.15, False).replace({**batch, "seeds": torch.arange(400)})
    made, labels = DataCollatorForLanguageModeling(BYTES, mlm_probability=0.15, seed=0)(list(ids)).values()
    vocabulary = len(BYTES)
    expected = {"masked": 0.15, "mask token": 0.8 + 0.1 / vocabulary, "unchanged": 0.1 + 0.1 / vocabulary}
    for found in (rates(ids, *ours, allowed), rates(ids, made, labels, allowed)):
        for name, (share, count) in found.items():
            bound = 5 * sqrt(expected[name] * (1 - expected[name]) / count)  # exceeded once in 1.7 million draws
            assert abs(share - expected[name]) <= bound, (name, share)
    chosen = ours[1] != -100
    replaced = ours[0][chosen & (ours[0] != ids) & (ours[0] != MASK)]
    counts = np.bincount(replaced.numpy(), minlength=vocabulary)
    mean = len(replaced) / vocabulary
    assert abs(counts - mean).max() < 6 * sqrt(mean)  # every token is drawn, also special ones


def test_whole_words_are_masked_or_left_as_a_whole():
    text = "the naïve answer is forty two, " * 200
    ids = torch.tensor([BYTES(text)["input_ids"]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    labels = make_masking(BYTES, 0.3, True).replace({**batch, "seeds": torch.tensor([3])})[1][0] != -100
    words = (ids[0] == 32).cumsum(0)[1:-1]
    shares = [labels[1:-1][words == word].double().mean().item() for word in words.unique()]
    assert set(shares) == {0.0, 1.0}
    assert abs(np.mean(shares) - 0.3) <= 5 * sqrt(0.21 / len(shares))


def test_what_cannot_be_masked_is_rejected():
    with pytest.raises(RecipeError, match="no mask token: use that of a masked language model"):
        make_masking(byte_pairs(), 0.15, False)
    tokenizer = byte_tokenizer(masks=True)
    tokenizer.convert_ids_to_tokens = lambda ids: [str(one) for one in ids]
    with pytest.raises(RecipeError, match="do not show where a word begins"):
        make_masking(tokenizer, 0.15, True)
    with pytest.raises(RecipeError, match="mask_rate=0 must be more than 0"):
        masked_model("bert", mask_rate=0)
    with pytest.raises(RecipeError, match="is a electra, and MaskedLM supports bert"):
        MaskedLM("electra", tokenizer="bytes").build()
    with pytest.raises(RecipeError, match="is_decoder=true hides later tokens"):
        masked_model("bert", config={**WIDE, "is_decoder": True}).build()
    with pytest.raises(RecipeError, match="attention_type='block_sparse' depends on the length"):
        masked_model("bigbird", config={**WIDE, "attention_type": "block_sparse"}).build()


def test_adapters_train_alone():
    model = masked_model("roberta", lora=LoRA(rank=2))
    module = model.build()
    (loss,) = model.losses(module, batch_of(masked_samples(8), list(range(8))))
    loss.total.backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in module.named_parameters() if ".lora_" in name} != set()


def test_a_trained_model_is_fine_tuned_as_a_classifier(tmp_path, capsys, no_pictures):
    small = [f"--model.config={WIDE}", "--data.max_length=64", f"--data.cache_dir={tmp_path}", "--max_steps=2"]
    source = str(Path(masked.__file__).parent)
    files = [f"--data.train_files={source}/l*.py", f"--data.val_files={source}/b*.py"]
    masked_run, classified = tmp_path / "masked", tmp_path / "classified"
    assert run(["fit", "masked_lm", *small, *files, "--run.dir", str(masked_run)]) == 0
    (tmp_path / "a.csv").write_text("text,label\n" + "x = 1,code\na book,prose\n" * 4)
    words = [
        "--data.train_file",
        str(tmp_path / "a.csv"),
        "--max_steps=1",
        "--optim.lr=1e-12",
        "--run.dir",
        str(classified),
    ]
    assert run(["fit", "text_files", "--model.name", str(masked_run), *words]) == 0
    capsys.readouterr()
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (masked_run, classified))
    kept = [name for name in after if "classifier" not in name]
    assert len(kept) > 10
    # The encoder and the head's transform: one step at this rate moves no weight by more than that.
    assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-9) for name in kept)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "bigbird"])
def test_steps_with_tensor_parallelism_are_those_of_a_plain_loop(family, ranks):
    case = case_of(family)
    case = replace(case, memory=replace(case.memory, tensor_parallel=2), world_size=2)
    assert error(case, ranks) <= ROUNDING


class Killed(Listener):
    """Kills its process in the middle of the second epoch."""

    def on_step(self, counters: Any, result: Any) -> None:
        if counters.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: Path, strategy: str, dropout: float, environment: dict[str, str] | None = None) -> None:
    """Two epochs of three steps, or their rest; on a rank with this ``environment``, until it is killed."""
    os.environ.update(environment or {})
    data = Documents(f"{run_dir.parent}/*.txt", max_length=32, cache_dir=str(run_dir.parent / "cache"))
    memory = {"strategy": strategy, "precision": "64-true", "micro_batch_size": 3}
    settings: dict[str, Any] = {"model": masked_model("bert", dropout=dropout), "data": data, "memory": memory}
    settings |= {"checkpoint": Checkpoint(every=2, keep_last=9, asynchronous=False), "batch_size": 12}
    run = {"resume": "auto", "allow_change": ["memory"], "predict": False}
    fit(recipe(run_dir, run=run, listeners=[Killed()] if environment else [], **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(("single", 1), ("single", 1)), (("fsdp", 2), ("fsdp", 2)), (("ddp", 2), ("single", 1))]
)
def test_a_killed_run_goes_on_with_the_masks_of_the_undisturbed_one(before, after, ranks, tmp_path, no_pictures):
    (tmp_path / "a.txt").write_text("green bottles hang on the wall\n" * 34)
    (strategy, size), dropout, port = before, 0.2 if before == after else 0.0, free_port()
    ranks(size).run(train, tmp_path / "whole", strategy, dropout)
    environments = [torchrun_variables(rank, size, port) for rank in range(size)]
    started = [forks.Process(target=train, args=(tmp_path / "r", strategy, dropout, one)) for one in environments]
    for process in started:
        process.start()
    for process in started:
        process.join(LONG)
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * size
    assert sorted(path.name for path in (tmp_path / "r/checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    ranks(after[1]).run(train, tmp_path / "r", after[0], dropout)
    assert len(losses(tmp_path / "whole")) == 6
    if before == after:
        assert losses(tmp_path / "r") == losses(tmp_path / "whole")
        assert saved(tmp_path / "r", 6) == saved(tmp_path / "whole", 6)
    assert losses(tmp_path / "r") == pytest.approx(losses(tmp_path / "whole"), rel=ROUNDING)
    assert_same_weights(tmp_path / "r", tmp_path / "whole", ROUNDING)
