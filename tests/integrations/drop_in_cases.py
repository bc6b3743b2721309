"""Models and data for the drop-ins, and the plain float64 loop over whole batches that they are compared with.

Run under torchrun, this file trains on several ranks and prints the largest relative difference for each case.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from trainer.integrations.transformers import ExactTrainer

WORDS, CLASSES, EPOCHS, RATE = 29, 3, 2, 0.1
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def bert(kind: Any = DistilBertForSequenceClassification, **settings: Any) -> nn.Module:
    off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    sizes = {"vocab_size": WORDS, "n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 8, "max_position_embeddings": 16}
    return kind(DistilBertConfig(**{"num_labels": CLASSES, **off, **sizes, **settings}))


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2, **off))


@dataclass(frozen=True)
class Case:
    """A model with the labels that it needs.

    Args:
        build: makes the model.
        labels: "class" of a sample, "token" (with -100 for some), "next" token, "number", or "many" classes.
        smoothing: of labels.
        class_weights: whether the classes are weighted.
    """

    build: Any
    labels: str = "class"
    smoothing: float = 0.0
    class_weights: bool = False
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    "classes": Case(bert),
    "tokens": Case(lambda: bert(DistilBertForTokenClassification), "token"),
    "next tokens": Case(gpt2, "next"),
    "class weights": Case(bert, class_weights=True),
    "label smoothing": Case(bert, smoothing=0.1),
    "label smoothing of next tokens": Case(gpt2, "next", smoothing=0.1),
    "label smoothing of weighted tokens": Case(
        lambda: bert(DistilBertForTokenClassification), "token", smoothing=0.2, class_weights=True
    ),
    "regression": Case(lambda: bert(num_labels=1), "number"),
    "many classes": Case(lambda: bert(problem_type="multi_label_classification"), "many"),
}


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().double()


def samples_of(case: Case, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        words = torch.randint(1, WORDS, (5,), generator=generator)
        labels = {
            "class": torch.tensor(number * number % CLASSES),
            "number": torch.rand((), generator=generator, dtype=torch.float64),
            "many": (torch.rand(CLASSES, generator=generator, dtype=torch.float64) > 0.5).double(),
            "token": words % CLASSES,
            "next": words.clone(),
        }[case.labels]
        if case.labels in ("token", "next"):
            labels = labels.masked_fill(torch.rand(5, generator=generator) < number % 4 / 4, -100)
        samples.append({"input_ids": words, "labels": labels})
    return samples


def mean_loss(case: Case, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if case.labels == "number":
        return mse_loss(logits.squeeze(-1), labels)
    if case.labels == "many":
        return binary_cross_entropy_with_logits(logits, labels)
    if case.labels == "next":
        logits, labels = logits[:, :-1], labels[:, 1:]
    weights = CLASS_WEIGHTS if case.class_weights else None
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), weights, label_smoothing=case.smoothing)


def whole_batches(case: Case, samples: list[Any], batch_size: int, clip_norm: float = 0.0) -> torch.Tensor:
    """The change of the weights by a step of plain torch for each whole batch; an epoch's last batch is smaller."""
    model = model_of(case)
    before = vector(model)
    for start in [*range(0, len(samples), batch_size)] * EPOCHS:
        batch = torch.utils.data.default_collate(samples[start : start + batch_size])
        loss = mean_loss(case, model(input_ids=batch["input_ids"]).logits, batch["labels"])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        factor = min(1.0, clip_norm / (float(norm) + 1e-6)) if clip_norm else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= RATE * factor * gradient
    return vector(model) - before


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def drop_in(model: nn.Module, samples: Any, folder: str, kind: Any = ExactTrainer, **given: Any) -> Any:
    """A trainer of ``kind`` in micro-batches of 2; ``given`` are its arguments, or those of TrainingArguments."""
    own = {name: given.pop(name) for name in ("class_weights", "compute_loss_func", "data_collator") if name in given}
    settings = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": 4, "max_grad_norm": 0.0} | given
    fixed = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "use_cpu": True}
    silent = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(folder, **{**fixed, **silent, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return kind(model=model, args=arguments, train_dataset=samples, optimizers=(optimizer, constant), **own)


def trained(case: Case, samples: Any, **given: Any) -> torch.Tensor:
    """The change of the weights by training with the drop-in."""
    model = model_of(case)
    before = vector(model)
    if case.class_weights:
        given["class_weights"] = CLASS_WEIGHTS
    with tempfile.TemporaryDirectory() as folder:
        drop_in(model, samples, folder, label_smoothing_factor=case.smoothing, **given).train()
    return vector(model) - before


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    for name, case in CASES.items():
        # 17 samples are 5 and 4 micro-batches, so the second rank has none in the last window; 13 are 4 and 3.
        for count, steps in ((17, 4), (13, 4), (13, 2), (16, 2)):
            samples = samples_of(case, count)
            found = trained(case, samples, gradient_accumulation_steps=steps, max_grad_norm=0.5)
            error = torch.tensor(difference(found, whole_batches(case, samples, 4 * steps, clip_norm=0.5)))
            torch.distributed.all_reduce(error, torch.distributed.ReduceOp.MAX)
            if torch.distributed.get_rank() == 0:
                print(f"|{name}, {count} samples, {steps} steps|{float(error)}|", flush=True)
    torch.distributed.barrier()
    os._exit(0)
