"""What is trained: tiny models, their data, how a batch is split, and the loss that defines the right gradient.

A sample is a row of tokens that starts with its own number, so a hook on the model sees which samples it is given.
Everything is in float64 and without dropout, so a difference is an error of the arithmetic and not rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, mse_loss
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 131
FIRST_WORD = 70
"""Tokens 1 to 69 are the numbers of samples, 0 is padding, and the others are words."""

CLASSES = 5
IGNORED = -100
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0, 0.5, 2.0], dtype=torch.float64)
LEARNING_RATE = 0.05
END = VOCABULARY - 1
"""The last token of both texts of a pair."""
OVERFLOWING = 12
"""The sample without a finite loss in the case ``overflow``."""

Sample = dict[str, Tensor]
Batch = dict[str, Tensor]


class Bag(nn.Module):
    """A custom classifier: the mean of word vectors, and the mean loss that people write."""

    def __init__(self, weights: Tensor | None = None, smoothing: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))
        self.weights, self.smoothing = weights, smoothing

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Batch:
        mask = attention_mask.unsqueeze(-1).to(self.embed.weight.dtype)
        logits = self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
        if labels is None:
            return {"logits": logits}
        weights = None if self.weights is None else self.weights.to(logits)
        return {"loss": cross_entropy(logits, labels, weights, label_smoothing=self.smoothing), "logits": logits}


class TwoLosses(Bag):
    """The same with a second term: the mean square of the logits."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Batch:
        logits = super().forward(input_ids, attention_mask)["logits"]
        if labels is None:
            return {"logits": logits}
        loss = cross_entropy(logits, labels) + 0.1 * logits.square().sum(-1).mean()
        return {"loss": loss, "logits": logits}


class Normalized(Bag):
    """The same with batch normalization, so the samples of a micro-batch depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head.insert(1, nn.BatchNorm1d(8))


class Overflowing(Bag):
    """The same with a loss that is not a number for one sample, as after an overflow."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Batch:
        outputs = super().forward(input_ids, attention_mask, labels)
        if (input_ids[:, 0] == OVERFLOWING).any():
            outputs = {name: value * float("nan") for name, value in outputs.items()}
        return outputs


def encoder(name: str, **settings: Any) -> nn.Module:
    """Return a DistilBERT of one layer with the head ``name``."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 16}
    off = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    given = {"num_labels": CLASSES, "max_position_embeddings": 64}
    config = transformers.DistilBertConfig(**given | sizes | off | settings)
    return getattr(transformers, f"DistilBertFor{name}")(config)


def llama(**settings: Any) -> nn.Module:
    """Return a Llama of one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes | given | settings))


def reward() -> nn.Module:
    """Return a Llama of one layer that gives a text a score."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(**sizes | given, num_labels=1))


def gpt2() -> nn.Module:
    """Return a GPT-2 of one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**off | sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def mixtral() -> nn.Module:
    """Return a mixture of two experts of one layer, with the loss that balances its router."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    router = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    given = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    return MixtralForCausalLM(MixtralConfig(**sizes | router | given, experts_implementation="eager"))


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model whose embedding is frozen."""
    module = build()
    module.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return module


def adapters(build: Callable[[], nn.Module], dropout: float = 0.0) -> nn.Module:
    """Return a model with LoRA adapters, of which the second matrix is not zero."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(build(), LoraConfig(lora_dropout=dropout, **settings))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bag": Bag,
    "weighted": partial(Bag, weights=CLASS_WEIGHTS),
    "smoothed": partial(Bag, smoothing=0.1),
    "two losses": TwoLosses,
    "batch norm": Normalized,
    "dropout": partial(Bag, dropout=0.5),
    "overflow": Overflowing,
    "classifier": partial(encoder, "SequenceClassification"),
    "regression": partial(encoder, "SequenceClassification", num_labels=1, problem_type="regression"),
    "multi-label": partial(encoder, "SequenceClassification", problem_type="multi_label_classification"),
    "tokens": partial(encoder, "TokenClassification"),
    "llama": llama,
    "tied llama": partial(llama, tie_word_embeddings=True),
    "frozen llama": partial(frozen, llama),
    "lora llama": partial(adapters, llama),
    "lora dropout": partial(adapters, llama, dropout=0.5),
    "preference": llama,
    "reward": reward,
    "gpt2": gpt2,
    "mixtral": mixtral,
}
CAUSAL = ("llama", "tied llama", "frozen llama", "lora llama", "lora dropout", "gpt2", "mixtral")
CUSTOM = ("bag", "weighted", "smoothed", "two losses", "batch norm", "dropout", "overflow")
PAIRS = ("preference", "reward")
BETA = 0.1
"""Scale of the log-ratios of direct preference optimization."""


@dataclass(frozen=True)
class Case:
    """A run of a few optimizer steps, and how its batches are split.

    Args:
        name: for commands.
        title: for the page.
        model: a key of ``MODELS``.
        samples: in the dataset; they are trained on in its order.
        micro_batch_size: samples of a micro-batch.
        accumulation: micro-batches per step on each rank.
        ranks: processes.
        epochs: passes over the dataset.
        needs: what else a trainer must be able to do: names of ``FEATURES``.
        masked: whether labels are ignored: ``some`` in each sample, or ``all`` of the first micro-batch.
        equal: whether all samples have the same number of tokens, so that micro-batches of texts weigh the same.
        clip: ``below`` the norms of all gradients, or ``above`` that of the first by one percent.
        spike: whether a sample's label makes its loss a million times larger.
        stop: the optimizer step after which the run is interrupted and resumed by a new trainer.
        dtype: of the model.
    """

    name: str
    title: str
    model: str = "llama"
    samples: int = 16
    micro_batch_size: int = 2
    accumulation: int = 4
    ranks: int = 1
    epochs: int = 1
    needs: frozenset[str] = field(default_factory=frozenset)
    masked: str = ""
    equal: bool = False
    clip: str = "below"
    spike: bool = False
    stop: int = 0
    dtype: torch.dtype = torch.float64

    @property
    def task(self) -> str:
        """What the labels are: ``causal_lm``, ``tokens``, ``classifier``, ``multi_label``, ``regression``, or a pair of
        texts: ``preference``, ``reward``."""
        if self.model in CAUSAL:
            return "causal_lm"
        if self.model in PAIRS:
            return self.model
        return {"tokens": "tokens", "multi-label": "multi_label", "regression": "regression"}.get(
            self.model, "classifier"
        )

    @property
    def is_custom(self) -> bool:
        """Whether the model is a custom module and not one of transformers."""
        return self.model in CUSTOM

    def build(self, seed: int = 1) -> nn.Module:
        """Return the model in the dtype of the case, with the weights that everybody starts from."""
        torch.manual_seed(seed)
        return MODELS[self.model]().to(self.dtype).train()

    @cached_property
    def clip_norm(self) -> float:
        """The norm to which gradients are clipped."""
        if self.clip == "below":
            return 0.05
        module, samples = self.build(), self.dataset()
        total, weight = loss_of(self, module, [samples[number - 1] for number in self.windows()[0]])
        (total / weight).backward()
        return 1.01 * float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))

    def dataset(self) -> list[Sample]:
        """Return the samples: 3 to 14 tokens, of which the first is the number of the sample, from 1."""
        generator = torch.Generator().manual_seed(2)
        samples = []
        for number in range(self.samples):
            length = 6 if self.equal else int(torch.randint(2, 14, (), generator=generator))
            words = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
            tokens = torch.cat([torch.tensor([number + 1]), words])
            if self.task in PAIRS:
                other = torch.randint(FIRST_WORD, VOCABULARY, (length + 1,), generator=generator)
                chosen, rejected = (torch.cat([one, torch.tensor([END])]) for one in (words, other))
                samples.append({"prompt": tokens[:1], "chosen": chosen, "rejected": rejected})
            else:
                samples.append({"input_ids": tokens, "labels": self._labels(number, tokens, generator)})
        return samples

    def evaluation_set(self) -> list[Sample]:
        """Return 13 samples of different lengths, whose last micro-batch is not full."""
        return replace(self, samples=13, equal=False).dataset()

    def _labels(self, number: int, tokens: Tensor, generator: torch.Generator) -> Tensor:
        if self.task == "classifier":
            return torch.randint(0, CLASSES, (), generator=generator)
        if self.task == "regression":
            label = torch.randn((), generator=generator, dtype=torch.float64)
            return label * 1e6 if self.spike and number == 4 else label
        if self.task == "multi_label":
            return torch.randint(0, 2, (CLASSES,), generator=generator).to(torch.float64)
        labels = tokens if self.task == "causal_lm" else torch.randint(0, CLASSES, tokens.shape, generator=generator)
        if self.masked == "all" and number < self.micro_batch_size:
            return torch.full_like(labels, IGNORED)
        if self.masked:
            ignored = torch.rand(len(tokens), generator=generator) < (number % 4 + 1) / 6
            ignored[-1] = False  # a sample without any label would have no loss
            return labels.masked_fill(ignored, IGNORED)
        return labels

    def windows(self) -> list[set[int]]:
        """Return the numbers of the samples of each optimizer step."""
        size = self.micro_batch_size * self.accumulation * self.ranks
        starts = range(0, self.samples, size)
        return [set(range(start + 1, min(start + size, self.samples) + 1)) for start in starts] * self.epochs


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad tokens to the longest, and labels of tokens with -100. Pairs become the chosen texts, then the rejected."""
    if "chosen" in samples[0]:
        texts = [torch.cat([one["prompt"], one[side]]) for side in ("chosen", "rejected") for one in samples]
        masks = [torch.ones_like(text) for text in texts]
        return {"input_ids": pad_sequence(texts, True), "attention_mask": pad_sequence(masks, True)}
    tokens, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
    is_per_token = labels[0].ndim == 1 and all(len(one) == len(own) for one, own in zip(tokens, labels, strict=True))
    is_per_token = is_per_token and not labels[0].is_floating_point()
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True),
        "labels": pad_sequence(labels, True, IGNORED) if is_per_token else torch.stack(labels),
    }


def loss_of(case: Case, module: nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, float]:
    """Return the sum of the losses of the items of ``samples``, and their number or the sum of their weights."""
    batch = collate(samples)
    logits = module(**batch)["logits"]
    if case.task in PAIRS:
        scores = logits.squeeze(-1) if case.task == "reward" else log_ratios(case, logits, batch)
        chosen, rejected = scores.chunk(2)
        return -logsigmoid(chosen - rejected).sum(), float(len(samples))
    return loss_from_logits(case, logits, batch["labels"])


def log_ratios(case: Case, logits: Tensor, batch: Batch) -> Tensor:
    """Return β log(π / π₀) of each completion, where π₀ is the model that training starts from. Shape (texts,).

    Direct preference optimization, https://arxiv.org/abs/2305.18290.
    """
    with torch.no_grad():
        first = case.build().to(logits.dtype)(**batch)["logits"]
    wanted, kept = batch["input_ids"][:, 1:, None], batch["attention_mask"][:, 1:]
    found = [one[:, :-1].log_softmax(-1).gather(2, wanted).squeeze(2) for one in (logits, first)]
    return BETA * ((found[0] - found[1]) * kept).sum(1)


def loss_from_logits(case: Case, logits: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return the sum of the losses of the items of a micro-batch, and their weight."""
    weight = weight_of_labels(case, labels)
    if case.task == "regression":
        return mse_loss(logits.flatten(), labels, reduction="sum"), weight
    if case.task == "multi_label":
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum"), weight
    if case.task == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    weights = CLASS_WEIGHTS.to(logits) if case.model == "weighted" else None
    smoothing = 0.1 if case.model == "smoothed" else 0.0
    flat, wanted = logits.flatten(0, -2), labels.flatten()
    total = cross_entropy(flat, wanted, weights, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    return (total + 0.1 * logits.square().sum() if case.model == "two losses" else total), weight


def weight_of_labels(case: Case, labels: Tensor) -> float:
    """Return the number of items of a micro-batch, or the sum of the weights of their classes."""
    if case.task in ("regression", "multi_label"):
        return float(labels.numel())
    wanted = labels[:, 1:] if case.task == "causal_lm" else labels
    kept = wanted[wanted != IGNORED]
    return float(kept.numel() if case.model != "weighted" else CLASS_WEIGHTS[kept].sum())


def _case(name: str, title: str, *needs: str, **settings: Any) -> Case:
    """Return a case; ``needs`` are names of ``FEATURES``."""
    more = {"ranks"} if settings.get("ranks", 1) > 1 else set()
    return Case(name, title, needs=frozenset({*needs, *more}), **settings)


FEATURES = {
    "ranks": "several ranks",
    "clip": "clipping of the gradient's norm",
    "momentum": "an optimizer with momentum",
    "schedule": "a schedule of the learning rate",
    "checkpointing": "activation checkpointing",
    "packing": "packing",
    "fsdp2": "FSDP2",
    "skip": "skipping of steps without a finite gradient",
    "ema": "an average of the weights",
    "resume": "resuming in the middle of an epoch",
    "evaluate": "evaluation",
    "preference": "direct preference optimization",
    "reward": "training of a reward model",
    "router": "the loss that a model computes itself",
}
"""What a trainer may be asked for besides the plain loop. The adapter names those that it uses."""

CASES = {
    one.name: one
    for one in (
        _case("even", "Even micro-batches", model="bag"),
        _case("ragged", "Ragged window: 13 samples as 4+4+4+1", model="bag", samples=13, micro_batch_size=4),
        _case("short-window", "Short window: 1 of 4 micro-batches at the end", samples=10, equal=True),
        _case("short-window-2-epochs", "The same over two epochs", samples=10, epochs=2, equal=True),
        _case("texts", "Texts of different lengths"),
        _case("ragged-texts", "Ragged window of texts: 11 as 2+2+2+2+2+1", samples=11, accumulation=6, equal=True),
        _case("padded", "Labels of -100 in different numbers", masked="some"),
        _case("masked", "A micro-batch without any label", masked="all"),
        _case("gpt2", "GPT-2: first tokens have labels", model="gpt2", masked="some"),
        _case("packed", "Packed documents", "packing", samples=11, accumulation=6),
        _case("classifier", "Sequence classifier of transformers", model="classifier"),
        _case("classifier-short", "The same, with a window of 3 of 4 micro-batches", model="classifier", samples=14),
        _case("tokens", "Token classifier", model="tokens", masked="some"),
        _case("regression", "Regression, ragged", model="regression", samples=13),
        _case("multi-label", "Several labels per sample, ragged", model="multi-label", samples=13),
        _case("class-weights", "Class weights", model="weighted", samples=16),
        _case("label-smoothing", "Label smoothing, ragged", model="smoothed", samples=13, micro_batch_size=4),
        _case("two-losses", "Two losses, ragged", model="two losses", samples=13, micro_batch_size=4),
        _case("moe", "Router's balance loss", "router", model="mixtral", equal=True),
        _case("batch-norm", "Batch normalization", model="batch norm"),
        _case("tied", "Tied weights", model="tied llama", equal=True),
        _case("frozen", "A frozen embedding", model="frozen llama", equal=True),
        _case("lora", "LoRA adapters", model="lora llama", equal=True),
        _case("checkpointing", "Activation checkpointing", "checkpointing", equal=True),
        _case("clip", "Clipping", "clip", equal=True),
        _case("clip-boundary", "Clipping, with a norm just below the limit", "clip", clip="above", equal=True),
        _case("spike", "Clipping of a spike", "clip", model="regression", spike=True),
        _case("momentum", "Momentum and weight decay", "momentum", samples=24, equal=True),
        _case("schedule", "Linear schedule", "schedule", samples=24, equal=True),
        _case("schedule-short", "Linear schedule with a short window", "schedule", samples=26, equal=True),
        _case("overflow", "A loss that is not finite", "skip", "momentum", model="overflow", samples=24),
        _case("ema", "Average of the weights", "ema", model="bag", samples=32),
        _case("lora-dropout", "LoRA with dropout", model="lora dropout", equal=True),
        _case(
            "resume",
            "Resumed in the middle of an epoch",
            "resume",
            "momentum",
            samples=24,
            epochs=2,
            stop=2,
            equal=True,
        ),
        _case("evaluate", "Evaluation loss of a classifier, ragged", "evaluate", model="bag", micro_batch_size=4),
        _case("evaluate-texts", "Evaluation loss of texts", "evaluate", equal=True),
        _case(
            "bf16",
            "64 micro-batches of a bfloat16 model",
            model="bag",
            dtype=torch.bfloat16,
            samples=64,
            micro_batch_size=1,
            accumulation=64,
        ),
        _case("dpo", "DPO, ragged", "preference", model="preference", samples=13, micro_batch_size=4),
        _case("reward", "Reward model, ragged", "reward", model="reward", samples=13, micro_batch_size=4),
        _case("2-ranks", "2 ranks, even", ranks=2, model="bag"),
        _case("2-ranks-texts", "2 ranks, texts of different lengths", ranks=2),
        _case("2-ranks-padded", "2 ranks, labels of -100", masked="some", ranks=2),
        _case("2-ranks-uneven", "2 ranks, 13 samples", samples=13, ranks=2, equal=True),
        _case("2-ranks-short", "2 ranks, a short window", samples=20, ranks=2, equal=True),
        _case("2-ranks-classifier", "2 ranks, sequence classifier", model="classifier", ranks=2),
        _case("2-ranks-weights", "2 ranks, class weights", model="weighted", ranks=2),
        _case("2-ranks-clip", "2 ranks, clipping", "clip", ranks=2, equal=True),
        _case("2-ranks-dropout", "2 ranks, dropout", model="dropout", ranks=2),
        _case("2-ranks-fsdp2", "2 ranks, FSDP2", "fsdp2", ranks=2, masked="some"),
    )
}
