"""A plain loop, correct or with one planted defect, which shows that the suite finds each kind of defect."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_

from conformance.cases import IGNORED, LEARNING_RATE, Sample, collate, loss_of, weight_of_labels
from conformance.job import Job
from conformance.verdict import DECAY

TITLE, DOCS, VERSION_OF = "Plain loop", "https://pytorch.org/docs/stable/notes/ddp.html", "torch"
FEATURES = {"ranks", "clip", "momentum", "schedule"}

DEFECTS: dict[str, tuple[str, str]] = {  # name: a case that shows it, and the verdict there
    "mean-of-means": ("ragged", "ragged"),
    "mean-per-sample": ("padded", "ragged"),
    "sum-without-division": ("even", "factor"),
    "no-division-by-micro-batches": ("classifier", "factor"),
    "divided-twice": ("even", "factor"),
    "divided-by-full-window": ("short-window", "factor"),
    "padding-counted": ("padded", "factor"),
    "first-tokens-counted": ("gpt2", "factor"),
    "class-weights-counted-as-samples": ("class-weights", "factor"),
    "last-micro-batch-without-backward": ("even", "ragged"),
    "short-window-dropped": ("short-window", "samples"),
    "short-window-carried-over": ("short-window-2-epochs", "samples"),
    "sample-lost": ("even", "samples"),
    "sample-twice": ("even", "samples"),
    "micro-batch-twice": ("even", "samples"),
    "shuffled": ("short-window", "samples"),
    "gradient-not-cleared": ("short-window", "other"),
    "step-per-micro-batch": ("even", "samples"),
    "ranks-not-divided": ("2-ranks", "factor"),
    "ranks-not-reduced": ("2-ranks", "ragged"),
    "mean-over-ranks": ("2-ranks-padded", "ragged"),
    "rank-repeats-samples": ("2-ranks-uneven", "samples"),
    "clipped-per-micro-batch": ("clip", "ragged"),
    "clipped-before-division": ("clip", "factor"),
    "schedule-per-micro-batch": ("schedule", "rate"),
    "decay-twice": ("momentum", "update"),
    "momentum-reset": ("momentum", "update"),
    "half-precision-sum": ("even", "other"),
    "stale-weights": ("momentum", "other"),
}


def train(job: Job, defect: str = "") -> None:
    """Train on the windows of a case; with ``defect``, in that wrong way."""
    module, optimizer = job.module, job.optimizer()
    schedule = job.linear(optimizer) if job.needs("schedule") else None
    parameters = [one for one in module.parameters() if one.requires_grad]
    before = [one.detach().clone() for one in parameters]
    for window in windows(job, defect):
        total = window_weight(job, window, defect)
        if defect == "stale-weights":
            now = [one.detach().clone() for one in parameters]
            _assign(parameters, before)
        for number, micro in enumerate(window):
            loss, weight = micro_loss(job, micro, len(window), defect)
            if not loss.requires_grad or (defect == "last-micro-batch-without-backward" and number + 1 == len(window)):
                continue
            loss = loss / divisor(job, micro, weight, len(window), total, defect)
            loss.backward()
            if defect == "clipped-per-micro-batch":
                clip_grad_norm_(parameters, job.clip_norm or 1.0)
            if defect == "half-precision-sum":
                _assign([one.grad for one in parameters], [one.grad.bfloat16().double() for one in parameters])
            if defect == "schedule-per-micro-batch" and schedule:
                schedule.step()
            if defect == "step-per-micro-batch":
                optimizer.step()
                optimizer.zero_grad()
        if defect == "stale-weights":
            before = now
            _assign(parameters, now)
        reduce_over_ranks(job, parameters, defect)
        if job.clip_norm:
            clip_grad_norm_(parameters, job.clip_norm)
        if defect == "clipped-before-division":
            _assign([one.grad for one in parameters], [one.grad / len(window) for one in parameters])
        if defect == "momentum-reset":
            optimizer.state.clear()
        if defect != "step-per-micro-batch":
            optimizer.step()
        if defect == "decay-twice":
            _assign(parameters, [one * (1 - LEARNING_RATE * DECAY) for one in parameters])
        if defect != "gradient-not-cleared":
            optimizer.zero_grad()
        if schedule and defect != "schedule-per-micro-batch":
            schedule.step()


def micro_loss(job: Job, micro: list[Sample], micros: int, defect: str) -> tuple[Tensor, float]:
    """Return the sum of the losses of a micro-batch, and its weight."""
    if defect != "mean-per-sample":
        return loss_of(job.case, job.module, micro)
    found = [loss_of(job.case, job.module, [sample]) for sample in micro]
    return sum(loss / weight for loss, weight in found) / len(micro) / micros, 1.0  # type: ignore[return-value]


def windows(job: Job, defect: str) -> Iterator[list[list[Sample]]]:
    """Yield this rank's micro-batches of each optimizer step."""
    case, size = job.case, job.case.micro_batch_size
    numbers = list(range(case.samples))
    carried: list[list[int]] = []
    for _ in range(case.epochs):
        if defect == "shuffled":
            random.Random(0).shuffle(numbers)
        micros = [numbers[start : start + size] for start in range(0, case.samples, size)]
        if defect == "rank-repeats-samples":
            micros = [micro if len(micro) == size else (micro + numbers)[:size] for micro in micros]
            micros += micros[:1] * (len(micros) % case.ranks)
        whole, micros = case.accumulation * case.ranks, carried + micros
        for start in range(0, len(micros), whole):
            window = micros[start : start + whole]
            if len(window) < whole and defect == "short-window-dropped":
                continue
            if len(window) < whole and defect == "short-window-carried-over":
                carried = window
                break
            if defect == "sample-lost":
                window[0] = window[0][1:]
            if defect == "sample-twice":
                window[0] = [*window[0][:-1], window[0][0]]
            if defect == "micro-batch-twice":
                window[-1] = window[0]
            yield [[job.dataset[number] for number in micro] for micro in window[job.rank :: case.ranks]]


def window_weight(job: Job, window: list[list[Sample]], defect: str) -> float:
    """Return the weight of a window over all ranks."""
    labels = [collate(micro)["labels"] for micro in window]
    if defect == "padding-counted":
        own = float(sum(one.numel() for one in labels))
    elif defect == "first-tokens-counted":
        own = float(sum((one != IGNORED).sum() for one in labels))
    elif defect == "class-weights-counted-as-samples":
        own = float(sum(len(micro) for micro in window))
    else:
        own = sum(weight_of_labels(job.case, one) for one in labels)
    if job.case.ranks == 1 or defect == "mean-over-ranks":
        return own * (job.case.ranks if defect == "mean-over-ranks" else 1)
    total = torch.tensor(own, dtype=torch.float64)
    distributed.all_reduce(total)
    return float(total)


def divisor(job: Job, micro: list[Sample], weight: float, micros: int, total: float, defect: str) -> float:
    """Return what the sum of the losses of a micro-batch is divided by."""
    return {
        "mean-of-means": weight * micros,
        "sum-without-division": 1.0,
        "no-division-by-micro-batches": weight,
        "divided-twice": total * micros,
        "mean-per-sample": 1.0,
        "divided-by-full-window": total * job.case.accumulation / micros,
        "clipped-per-micro-batch": weight * micros,
    }.get(defect, total) or 1.0


def reduce_over_ranks(job: Job, parameters: list[nn.Parameter], defect: str) -> None:
    """Sum the gradients over the ranks."""
    if job.case.ranks == 1 or defect == "ranks-not-reduced":
        return
    for one in parameters:
        one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        distributed.all_reduce(one.grad)
        if defect == "ranks-not-divided":
            one.grad *= job.case.ranks


def _assign(targets: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
