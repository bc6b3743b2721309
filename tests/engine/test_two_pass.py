"""In-batch negatives in two passes: the same weights as a plain loop with one pass over each whole batch."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from helpers.matrix import ADAMW, Case, difference, perturbed, stacked_run, steps_of
from helpers.problems import tokenizer_folder
from helpers.rounding import ROUNDING
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, log_softmax
from transformers import AutoModel

from trainer.contract import Packable, WholeBatch, capability
from trainer.engine import two_pass
from trainer.engine.cut import cut_at, cut_batch
from trainer.engine.order import batch_indices, derive_seed
from trainer.errors import RecipeError
from trainer.models import LoRA, SentenceEmbedder
from trainer.recipe import Memory
from trainer.values import Loss

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LENGTH = 12


@dataclasses.dataclass(frozen=True)
class Pairs(Case):
    """Three optimizer steps on triples of texts: an anchor, a positive, a hard negative."""

    pooling: str = "mean"
    padding_free: bool | None = None
    lora: int = 0
    texts: int = 3

    @property
    def model(self) -> SentenceEmbedder:
        settings = {"pooling": self.pooling, "padding_free": self.padding_free, "dropout": self.dropout}
        sizes = SIZES | {"max_position_embeddings": 2 * LENGTH}
        if self.name == "distilbert":
            sizes = {"n_layers": 2, "dim": 16, "hidden_dim": 32, "n_heads": 2, "max_position_embeddings": LENGTH}
        tokenizer = tokenizer_folder()
        return SentenceEmbedder(self.name, tokenizer=tokenizer, config=sizes, lora=LoRA(self.lora), **settings)

    @property
    def samples(self) -> list[Any]:
        generator = torch.Generator().manual_seed(5)

        def text() -> Tensor:
            length = int(torch.randint(2, LENGTH + 1, (), generator=generator))
            return torch.randint(2, 100, (length,), generator=generator)

        return [[text() for _ in range(self.texts)] for _ in range(self.size)]

    @property
    def lengths(self) -> list[int]:
        return [sum(map(len, sample)) for sample in self.samples]

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        texts = [text for sample in samples for text in sample]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(len(samples), dtype=torch.long)}


def textbook_loss(anchors: Tensor, positives: Tensor, negatives: list[Tensor], scale: float = 20.0) -> Tensor:
    """Sum over the anchors: minus the log-probability of the own positive among all positives and negatives."""
    candidates = torch.cat([positives, *negatives])
    total = anchors.new_zeros(())
    for number, anchor in enumerate(anchors):
        total = total - log_softmax(scale * cosine_similarity(anchor[None], candidates), -1)[number]
    return total


def textbook_embeddings(module: nn.Module, batch: dict[str, Tensor], pooling: str) -> Tensor:
    hidden = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    if pooling == "cls":
        return hidden[:, 0]
    return torch.stack([row[kept.bool()].mean(0) for row, kept in zip(hidden, batch["attention_mask"], strict=True)])


def plain_pairs(case: Pairs) -> dict[str, Any]:
    """Plain PyTorch: one graph and one backward over each whole batch, in one process. With dropout, the forward is
    that of the model, one micro-batch after another, because masks depend on the cut."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    ours = perturbed(case.model.build()).train()
    torch.set_default_dtype(torch.float32)
    module = ours
    if not case.lora and not case.dropout:  # a module of transformers that nothing of ours has touched
        module = AutoModel.from_config(ours.config).double().train()
        module.load_state_dict(ours.state_dict())
        for (_, mine), (_, theirs) in zip(ours.named_parameters(), module.named_parameters(), strict=True):
            theirs.requires_grad_(mine.requires_grad)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": case.optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=case.optim.lr, eps=case.optim.eps)
    samples, losses = case.samples, []
    for epoch, step in steps_of(case):
        indices = batch_indices(0, epoch, step, case.size, case.batch_size)
        pieces = [indices]
        if case.dropout:
            pieces = cut_batch(indices, cut_at(case.recipe, case.world_size, epoch), case.world_size, case.lengths)
        parts = []
        for number, piece in enumerate(pieces):
            if not piece:
                continue
            torch.manual_seed(derive_seed(0, epoch, step, number))
            batch = case.collate([samples[index] for index in piece])
            if case.dropout or case.lora:
                found = case.model.embed(module, capability(case.model, Packable).packed(batch))
            else:
                found = textbook_embeddings(module, batch, case.pooling).unflatten(0, (len(piece), -1))
            parts.append(found)
        anchors, positives, *negatives = torch.cat(parts).unbind(1)
        loss = textbook_loss(anchors, positives, negatives) / len(indices)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), case.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"state": module.state_dict(), "losses": losses}


@cache
def plain(case: Pairs) -> dict[str, Any]:
    return plain_pairs(case)


def error(case: Pairs, ranks: Any = None) -> float:
    """The largest relative difference from the plain loop, of losses and of weights."""
    ours = stacked_run(case) if case.world_size == 1 else ranks(case.world_size).run(stacked_run, case)[0]
    whole = case
    if not case.dropout:  # the reference is the same for every cut, number of ranks and technique
        whole = dataclasses.replace(case, memory=Memory(), world_size=1, padding_free=None)
    return max(difference(ours, plain(whole)).values())


def pairs(world_size: int = 1, size: int = 2, **more: Any) -> Pairs:
    more["size"] = more.pop("samples_in_set", 19)
    settings = {key: more.pop(key) for key in [*more] if key in Memory.__dataclass_fields__}
    memory = Memory(precision="64-true", micro_batch_size=size, **settings)
    return Pairs(more.pop("name", "bert"), memory, world_size, optim=ADAMW, **more)


CASES = {
    "one micro-batch": pairs(size=8),
    "ragged": pairs(size=3),
    "at most 64 tokens": pairs(size=8, micro_batch_tokens=64),
    "single samples, padded": pairs(size=1, padding_free=False),
    "first token": pairs(size=3, pooling="cls", name="distilbert"),
    "dropout": pairs(size=3, dropout=0.3, padding_free=False),
    "dropout, packed": pairs(size=3, dropout=0.3),
    "checkpointing": pairs(size=3, activation_checkpointing="full", dropout=0.3),
    "adapters": pairs(size=3, lora=2),
    "offloaded": pairs(size=3, cpu_offload="optimizer"),
    "two ranks": pairs(2, size=3, strategy="ddp"),
    "two ranks, dropout": pairs(2, size=2, strategy="ddp", dropout=0.3),
    "two sharded ranks": pairs(2, size=2, strategy="fsdp", activation_checkpointing="full", dropout=0.3),
    "sharded adapters": pairs(2, size=2, strategy="fsdp", lora=2, samples_in_set=17),
    "ranks without samples": pairs(3, size=1, strategy="ddp", samples_in_set=17),
    "sharded ranks without samples": pairs(3, size=1, strategy="fsdp", samples_in_set=17),
}


@pytest.mark.first(12)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_equal_one_pass_over_each_whole_batch(case, ranks):
    assert error(case, ranks) < 10 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["distilbert", "bert", "roberta", "modernbert"])
def test_any_cut_equals_one_pass(name, world_size, size, ranks):
    # ModernBERT rotates queries and keys in fp32. Backward rounds their gradients to fp32, unlike the plain loop after
    # a factor of three ranks. Adam moves a weight by a share of lr in each of three steps.
    tolerance = 3 * ADAMW.lr * 2**-24 if (name, world_size) == ("modernbert", 3) else 10 * ROUNDING
    for strategy in ("ddp", "fsdp") if world_size > 1 else ("single",):
        for checkpointing in ("none", "full"):
            case = pairs(world_size, size, name=name, strategy=strategy, activation_checkpointing=checkpointing)
            assert error(case, ranks) < tolerance


def faulty_run(case: Pairs, fault: str) -> dict[str, Any]:
    """The engine's answer with a planted fault."""
    gather = two_pass.gather_embeddings
    embed = two_pass.embeddings_of

    def gather_own(parts: Any, sizes: Any, rank: int, ranks: int) -> Tensor:
        own = gather(parts, sizes, rank, ranks)
        kept = torch.zeros(len(own), dtype=torch.bool)
        for rows in two_pass.own_rows(parts, sizes, rank, ranks):
            kept[rows] = True
        return own * kept.view(-1, *[1] * (own.ndim - 1))

    def other_masks(stepper: Any, batch: Any, packed: Any) -> Tensor:
        torch.rand(3 if torch.is_grad_enabled() else 1)
        return embed(stepper, batch, packed)

    def own_micro_batch(parts: Any, sizes: Any, rank: int, ranks: int) -> list[slice]:
        return [slice(0, len(part)) for part in parts]

    patches = {
        "negatives of the own rank": ("gather_embeddings", gather_own),
        "other dropout in the second pass": ("embeddings_of", other_masks),
        "gradients of other samples": ("own_rows", own_micro_batch),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_pass, *patches[fault])
        return stacked_run(case)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("negatives of the own rank", CASES["two ranks"]),
        ("other dropout in the second pass", CASES["dropout"]),
        ("gradients of other samples", CASES["ragged"]),
    ],
)
def test_a_planted_fault_changes_the_weights(fault, case, ranks):
    ours = faulty_run(case, fault) if case.world_size == 1 else ranks(case.world_size).run(faulty_run, case, fault)[0]
    whole = case if case.dropout else dataclasses.replace(case, memory=Memory(), world_size=1, padding_free=None)
    assert difference(ours, plain(whole))["parameters"] > 1e-6


class Noisy(SentenceEmbedder):
    """Draws random numbers in its loss."""

    def loss_of_all(self, embeddings: Tensor) -> Any:
        return super().loss_of_all(embeddings + 0.1 * torch.rand_like(embeddings))


class OneRow(SentenceEmbedder):
    """Returns one embedding per micro-batch."""

    def embed(self, module: nn.Module, batch: Any) -> Tensor:
        return super().embed(module, batch)[:1]


@dataclasses.dataclass(frozen=True)
class Custom(Pairs):
    kind: type = Noisy

    @property
    def model(self) -> SentenceEmbedder:
        found = super().model
        return self.kind(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})


def custom(kind: type, world_size: int = 1, size: int = 3, **more: Any) -> Custom:
    case = pairs(world_size, size, **more)
    return Custom(**{field.name: getattr(case, field.name) for field in dataclasses.fields(case)}, kind=kind)


def test_random_numbers_in_the_loss_depend_on_neither_ranks_nor_micro_batches(ranks):
    ours = ranks(2).run(stacked_run, custom(Noisy, 2, strategy="ddp"))[0]
    assert max(difference(ours, stacked_run(custom(Noisy, size=8))).values()) < 10 * ROUNDING


def test_a_missing_embedding_is_rejected():
    with pytest.raises(
        RecipeError, match=r"OneRow: embed\(\) returns \[1, 1, 1\] rows for micro-batches of \[3, 3, 2\]"
    ):
        stacked_run(custom(OneRow))


@dataclasses.dataclass
class Towers(WholeBatch):
    """Vectors in pairs; with ``centers``, embeddings depend on the other samples of a micro-batch."""

    centers: bool = False

    def build(self) -> nn.Module:
        return nn.Linear(6, 4)

    def embed(self, module: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.normalize(module(batch["pairs"]), dim=-1)
        return found - found.mean(0) if self.centers else found

    def loss_of_all(self, embeddings: Tensor) -> Any:
        anchors, positives = embeddings.unbind(1)
        return Loss(textbook_loss(anchors, positives, []), float(len(anchors)))


@dataclasses.dataclass(frozen=True)
class Vectors(Case):
    centers: bool = False

    @property
    def model(self) -> Towers:
        return Towers(self.centers)

    @property
    def samples(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [{"pair": torch.randn(2, 6, generator=generator, dtype=torch.float64)} for _ in range(self.size)]

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        pairs = torch.stack([sample["pair"] for sample in samples])
        return {"pairs": pairs, "labels": torch.zeros(len(samples), dtype=torch.long)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_embeddings_that_depend_on_other_samples_are_rejected(world_size, ranks):
    def run(case: Vectors) -> dict[str, Any]:
        return stacked_run(case) if world_size == 1 else ranks(world_size).run(stacked_run, case)[0]

    memory = Memory(precision="64-true", micro_batch_size=3, strategy="ddp" if world_size > 1 else "single")
    case = Vectors("towers", memory, world_size)
    whole = Vectors("towers", Memory(precision="64-true", micro_batch_size=8))
    assert max(difference(run(case), stacked_run(whole)).values()) < 10 * ROUNDING
    cause = r"Towers: embed\(\) returns other embeddings for a few samples than for their two halves"
    with pytest.raises((RecipeError, AssertionError), match=cause):  # a rank's error has its text
        run(dataclasses.replace(case, centers=True))
