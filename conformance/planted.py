"""A plain loop, correct or with one planted defect, which shows that the suite finds each kind of defect."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_

from conformance.cases import IGNORED, LEARNING_RATE, PAIRS, Sample, collate, loss_of, weight_of_labels
from conformance.job import Job
from conformance.verdict import DECAY, DECAY_OF_AVERAGE

TITLE, DOCS, VERSION_OF = "Plain loop", "https://pytorch.org/docs/stable/notes/ddp.html", "torch"
FEATURES = {"ranks", "clip", "momentum", "schedule", "skip", "ema", "resume", "evaluate", "preference", "reward"}

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
    "clipped-before-scaling": ("clip-boundary", "factor"),
    "micro-batch-skipped": ("overflow", "samples"),
    "not-skipped": ("overflow", "samples"),
    "average-per-micro-batch": ("ema", "update"),
    "same-dropout-on-ranks": ("2-ranks-dropout", "seeds"),
    "resumed-without-momentum": ("resume", "update"),
    "resumed-at-the-epoch": ("resume", "samples"),
    "mean-of-batch-means": ("evaluate", "average"),
    "bfloat16-sum": ("bf16", "precision"),
}


def train(job: Job, defect: str = "") -> None:
    """Train on the windows of a case; with ``defect``, in that wrong way."""
    if job.needs("resume"):
        saved = train_steps(job, defect, stop=job.case.stop)
        job.restart()
        train_steps(job, defect, saved=saved)
        return
    train_steps(job, defect)
    if job.needs("evaluate"):
        job.evaluation_loss = evaluate(job, defect)


def train_steps(job: Job, defect: str, stop: int = 0, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Take the steps of a case, up to step ``stop`` or from those of ``saved``, and return what resuming needs."""
    module, optimizer = job.module, job.optimizer()
    schedule = job.linear(optimizer) if job.needs("schedule") else None
    parameters = [one for one in module.parameters() if one.requires_grad]
    first = 0
    if saved:
        module.load_state_dict(saved["module"])
        if defect != "resumed-without-momentum":
            optimizer.load_state_dict(saved["optimizer"])
        first = 0 if defect == "resumed-at-the-epoch" else job.case.stop
    if job.needs("ema"):
        job.average = {name: one.detach().clone() for name, one in module.named_parameters()}
    before = [one.detach().clone() for one in parameters]
    for window in islice(windows(job, defect), first, stop or None):
        if defect == "stale-weights":
            now = [one.detach().clone() for one in parameters]
            _assign(parameters, before)
        add_gradients(job, window, parameters, optimizer, schedule, defect)
        if defect == "stale-weights":
            before = now
            _assign(parameters, now)
        reduce_over_ranks(job, parameters, defect)
        if defect == "clipped-before-scaling":
            _assign([one.grad for one in parameters], [one.grad * len(window) for one in parameters])
        if job.clip_norm:
            clip_grad_norm_(parameters, job.clip_norm)
        if defect in ("clipped-before-division", "clipped-before-scaling"):
            _assign([one.grad for one in parameters], [one.grad / len(window) for one in parameters])
        update(job, optimizer, parameters, defect)
        if job.needs("ema"):
            average_weights(job)
        if schedule and defect != "schedule-per-micro-batch":
            schedule.step()
    return copy.deepcopy({"module": module.state_dict(), "optimizer": optimizer.state_dict()})


def add_gradients(
    job: Job, window: list[list[Sample]], parameters: list[nn.Parameter], optimizer: Any, schedule: Any, defect: str
) -> None:
    """Run forward and backward of the micro-batches of a step."""
    total = window_weight(job, window, defect)
    sums = [torch.zeros_like(one, dtype=torch.float64) for one in parameters]
    for number, micro in enumerate(window):
        if defect == "same-dropout-on-ranks":
            torch.manual_seed(number)
        loss, weight = micro_loss(job, micro, len(window), defect)
        if not loss.requires_grad or (defect == "last-micro-batch-without-backward" and number + 1 == len(window)):
            continue
        if defect == "micro-batch-skipped" and not loss.isfinite():
            continue
        loss = loss / divisor(job, micro, weight, len(window), total, defect)
        loss.backward()
        if defect == "clipped-per-micro-batch":
            clip_grad_norm_(parameters, job.clip_norm or 1.0)
        if defect == "half-precision-sum":
            _assign([one.grad for one in parameters], [one.grad.bfloat16().double() for one in parameters])
        if job.case.dtype == torch.bfloat16 and defect != "bfloat16-sum":
            for one, own in zip(parameters, sums, strict=True):
                own += one.grad
                one.grad = own.to(one.dtype) if number + 1 == len(window) else None
        if defect == "schedule-per-micro-batch" and schedule:
            schedule.step()
        if defect == "average-per-micro-batch":
            average_weights(job)
        if defect == "step-per-micro-batch":
            optimizer.step()
            optimizer.zero_grad()


def update(job: Job, optimizer: Any, parameters: list[nn.Parameter], defect: str) -> None:
    """Take the optimizer step, except if the gradient is not finite, and clear the gradients."""
    if defect == "momentum-reset":
        optimizer.state.clear()
    is_finite = all(one.grad.isfinite().all() for one in parameters if one.grad is not None)
    if defect != "step-per-micro-batch" and (is_finite or defect == "not-skipped"):
        optimizer.step()
    if defect == "decay-twice":
        _assign(parameters, [one * (1 - LEARNING_RATE * DECAY) for one in parameters])
    if defect != "gradient-not-cleared":
        optimizer.zero_grad()


def average_weights(job: Job) -> None:
    """Update the average of the weights."""
    for name, one in job.module.named_parameters():
        job.average[name].lerp_(one.detach(), 1 - DECAY_OF_AVERAGE)  # type: ignore[index]


def evaluate(job: Job, defect: str) -> float:
    """Return the mean loss of the samples to evaluate on."""
    job.module.eval()
    samples, size = job.evaluation_set, job.case.micro_batch_size
    micros = [samples[start : start + size] for start in range(0, len(samples), size)]
    with torch.no_grad():
        found = [loss_of(job.case, job.module, micro) for micro in micros]
    if defect == "mean-of-batch-means":
        return sum(float(total) / weight for total, weight in found) / len(found)
    return sum(float(total) for total, _ in found) / sum(weight for _, weight in found)


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
    if job.case.task in PAIRS:
        return float(sum(map(len, window)))
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
