"""The dataset: samples as they come out of it, labels, empty texts, image modes, and what is in both train and test."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from trainer.data.fingerprint import Content, spread
from trainer.data.loader import stray_labels
from trainer.doctor.finding import Finding, Status, fail, ok, skipped, warning
from trainer.doctor.subject import Subject
from trainer.errors import RecipeError, listed
from trainer.recipe import Recipe
from trainer.system.files import open_regular
from trainer.system.reports import cause

LOOKED_AT = 200
"""Samples of each split."""

COMPARED = 100_000
"""Samples of each split that are looked for in another."""

PLAIN_MODES = ("RGB", "L", "1")
"""Of images: those that nothing is lost of when they are made RGB or grey."""

MOST_TOLD = 3
BAD_FIX = "replace or remove it, or data.max_bad_samples"
Problem = tuple[str, str, str]
"""Where it is, what it is, and the fix."""

SPLITS = ("train", "val", "test")


def samples(subject: Subject) -> Iterator[Finding]:
    """Load an evenly spread part of each split, and look at labels, tokens and pixels."""
    data = subject.recipe.data
    classes = getattr(subject.recipe.model, "num_classes", None)
    classes = getattr(data, "num_classes", None) if classes is None else classes
    for name in SPLITS:
        split = getattr(data, name)
        if split is not None:
            yield from _of_split(subject, name, split, classes)


def _of_split(subject: Subject, name: str, split: Any, classes: int | None) -> Iterator[Finding]:
    check, positions = f"{name} samples", spread(len(split), LOOKED_AT)
    unloadable: list[Problem] = []
    problems: list[Problem] = []
    for position in positions:
        place = _describe(name, split, position)
        try:
            sample = split[position]
        except (Exception, SystemExit) as error:
            unloadable.append((f"{place} cannot be loaded", cause(error), BAD_FIX))
            continue
        problems += [(place, *problem) for problem in _problems(subject, sample, classes)]
    allowed = subject.recipe.data.max_bad_samples
    yield from _told(check, unloadable, "warning" if len(unloadable) <= allowed else "FAIL")
    yield from _told(check, problems, "FAIL")
    if not (problems or unloadable):
        yield ok(check, f"{len(positions):,} of {len(split):,} load, with labels that the model has")
    yield from _image_modes(check, split, positions)


def _told(check: str, problems: Sequence[Problem], status: Status) -> Iterator[Finding]:
    """The first few problems, and how many more there are."""
    for place, what, fix in problems[:MOST_TOLD]:
        yield Finding(check, status, f"{place}: {what}", fix)
    if len(problems) > MOST_TOLD:
        yield Finding(check, status, f"{len(problems) - MOST_TOLD} more of the samples that were looked at", "as above")


def _problems(subject: Subject, sample: Any, classes: int | None) -> Iterator[tuple[str, str]]:
    """What is wrong with a sample, and the fix."""
    if not isinstance(sample, dict):
        return
    label = sample.get("labels")
    if classes is not None and label is not None:
        labels = [sample] if isinstance(label, Tensor) else [{"labels": _tensor([label])}]
        for found in labels:
            for stray, _ in stray_labels(found, classes):
                yield (
                    f"label {stray} is none of the {classes} classes 0 to {classes - 1}",
                    "mend it, or model.num_classes",
                )
    ids = sample.get("input_ids")
    tokenizer = subject.recipe.model.tokenizer_or_none() if ids is not None else None
    if ids is not None and tokenizer is not None:
        words = set(_numbers(ids)) - set(tokenizer.all_special_ids)
        if not words:
            yield "the text is empty, or all of it is unknown to the tokenizer", "remove it, or another model.tokenizer"
    pixels = sample.get("pixel_values")
    if isinstance(pixels, Tensor) and not bool(pixels.isfinite().all()):
        yield "pixels are not finite", "mend the image, or data.normalize"


def _tensor(values: list[Any]) -> Tensor:
    import torch

    return torch.as_tensor(values)


def _numbers(ids: Any) -> list[int]:
    return ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)


def _describe(name: str, split: Any, position: int) -> str:
    return split.describe(position) if hasattr(split, "describe") else f"{name} sample {position}"


def _image_modes(check: str, split: Any, positions: Sequence[int]) -> Iterator[Finding]:
    """Files whose mode loses something: transparency, sixteen bits, a palette, CMYK."""
    files = getattr(split, "samples", None)
    if not isinstance(files, Sequence) or not files or not isinstance(files[0], tuple):
        return
    modes: Counter[str] = Counter()
    first: dict[str, str] = {}
    for position in positions:
        path = str(files[position][0])
        try:
            with open_regular(path) as file, Image.open(file) as image:
                mode = image.mode
        except Exception:  # said already, as a sample that cannot be loaded
            continue
        modes[mode] += 1
        first.setdefault(mode, path)
    odd = {mode: count for mode, count in modes.items() if mode not in PLAIN_MODES}
    if odd:
        text = ", ".join(f"{count} of mode {mode} (such as {first[mode]})" for mode, count in odd.items())
        fix = "convert them to RGB as you want them, if transparency, 16 bits or CMYK matter"
        yield warning(check, f"{text} of {sum(modes.values())} images are converted when they are read", fix)


def duplicates(subject: Subject) -> Iterator[Finding]:
    """Whether samples that are trained on are in the validation or test set, too."""
    check, data = "duplicates", subject.recipe.data
    train = keys(data.train)
    compared = [name for name in ("val", "test") if getattr(data, name) is not None]
    if not compared:
        yield skipped(check, "there is neither a validation nor a test set")
        return
    known = {key: position for position, key in reversed(list(train.items()))}
    for name in compared:
        found = [(position, known[key]) for position, key in keys(getattr(data, name)).items() if key in known]
        if found:
            at, twin = found[0]
            split = getattr(data, name)
            text = (
                f"{len(found)} of the {name} samples ({listed([position for position, _ in found])}) are in the "
                f"training set, too: {_describe(name, split, at)} is {_describe('train', data.train, twin)}"
            )
            yield warning(check, text, "remove them from one of the two, or the figures will be too good")
        else:
            yield ok(check, f"no {name} sample is in the training set")


def keys(split: Any) -> dict[int, bytes]:
    """A hash of the content of each sample, without its label, by its position.

    Of all samples of files, arrays and texts, up to ``COMPARED``; of another split, of those that are looked at.
    """
    if hasattr(split, "digests"):
        return dict(enumerate(split.digests[:COMPARED]))
    if isinstance(getattr(split, "images", None), Tensor):
        images = split.images[:COMPARED].contiguous()
        return {position: hashlib.sha256(image.numpy()).digest() for position, image in enumerate(images)}
    if hasattr(split, "table") and hasattr(split, "chosen"):
        tokens = split.table.select(list(split.chosen)[:COMPARED])["input_ids"]
        return {position: hashlib.sha256(repr(list(ids)).encode()).digest() for position, ids in enumerate(tokens)}
    if getattr(split, "augmented", False):
        return {}
    return {position: _key(split, position) for position in spread(len(split), LOOKED_AT)}


def _key(split: Any, position: int) -> bytes:
    try:
        sample = split[position]
    except (Exception, SystemExit):
        return f"cannot be loaded {id(split)} {position}".encode()
    content = {key: value for key, value in sample.items() if key != "labels"} if isinstance(sample, dict) else sample
    return Content(content).hexdigest().encode()


# The model and its data: whether they can be prepared, and fit each other.


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Whether the model has a row for every token that the tokenizer makes."""
    tokenizer = subject.recipe.model.tokenizer_or_none()
    if tokenizer is None:
        return
    check = "vocabulary"
    embed = getattr(subject.module, "get_input_embeddings", None)
    if embed is None:
        yield skipped(check, f"{type(subject.module).__name__} does not say which its embeddings are")
        return
    rows, tokens = embed().num_embeddings, len(tokenizer)
    text = f"{tokens:,} tokens, {rows:,} rows of embeddings"
    if tokens > rows:
        yield fail(check, text, "the tokenizer of this model (model.tokenizer), or model.config.vocab_size")
    else:
        yield ok(check, text)


def model_and_data(subject: Subject, prepare: Callable[[Recipe], Recipe]) -> Iterator[Finding]:
    """Prepare them: files, columns, classes and weights' configuration are checked on the way."""
    try:
        subject.recipe = prepare(subject.recipe)
    except RecipeError as error:
        yield fail("model and data", cause(error))
        return
    subject.ready = True
    data = subject.recipe.data
    sizes = ", ".join(f"{len(getattr(data, name)):,} {name}" for name in SPLITS if getattr(data, name) is not None)
    parameters = sum(parameter.numel() for parameter in subject.module.parameters())
    yield ok("model and data", f"{type(subject.recipe.model).__name__} of {parameters:,} parameters; {sizes}")


def plan_of(subject: Subject) -> Iterator[Finding]:
    """How the batch is cut, and which techniques are used: refused here as they would be by the run."""
    if subject.plan is None:
        yield skipped("plan", "the planner decides when the run starts")
    else:
        yield ok("plan", subject.plan.describe())
