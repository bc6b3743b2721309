"""Checks of the dataset: loading, labels, empty texts, image modes, and samples in both train and test."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trainer.contract import Preparable, Samples, capability, splits_of
from trainer.data.cache import evenly_spaced
from trainer.data.fingerprint import ContentHasher
from trainer.data.loader import out_of_range_labels
from trainer.doctor.context import CheckContext, Finding, Status, fail, ok, skipped, warning
from trainer.errors import format_list
from trainer.planner.predict import prepare_recipe
from trainer.system.error_reports import describe_error
from trainer.system.files import open_regular
from trainer.weights.nf4 import count_weights

SAMPLES_PER_SPLIT = 200  # samples of each split that are loaded
MAX_COMPARED = 100_000  # maximum number of samples of a split that are compared with another split
LOSSLESS_MODES = ("RGB", "L", "1")  # image modes that convert to RGB or grey without loss
MAX_SHOWN = 3
BAD_FIX = "replace or remove it, or data.max_bad_samples"
Problem = tuple[str, str, str]  # sample, description, fix


def samples(subject: CheckContext) -> Iterator[Finding]:
    """Load evenly spaced samples of each split, and check labels, tokens and pixels."""
    model, data = subject.recipe.model, subject.recipe.data
    classes = data.num_classes if model.num_classes is None else model.num_classes
    classes = None if model.task == "regression" else classes
    for name, split in splits_of(data).items():
        check, positions = f"{name} samples", evenly_spaced(len(split), SAMPLES_PER_SPLIT)
        unloadable: list[Problem] = []
        problems: list[Problem] = []
        for position in positions:
            place = _describe(name, split, position)
            try:
                sample = split[position]
            except (Exception, SystemExit) as error:
                unloadable.append((f"{place} cannot be loaded", describe_error(error), BAD_FIX))
            else:
                problems += [(place, *problem) for problem in _problems(subject, sample, classes)]
        yield from _to_finding(check, unloadable, "warning" if len(unloadable) <= data.max_bad_samples else "FAIL")
        yield from _to_finding(check, problems, "FAIL")
        if not (problems or unloadable):
            yield ok(f"{len(positions):,} of {len(split):,} loaded, all labels valid", check=check)
        yield from _image_modes(check, split, positions)


def _to_finding(check: str, problems: Sequence[Problem], status: Status) -> Iterator[Finding]:
    for place, what, fix in problems[:MAX_SHOWN]:
        yield Finding(status, f"{place}: {what}", fix, check)
    if len(problems) > MAX_SHOWN:
        yield Finding(status, f"{len(problems) - MAX_SHOWN} more of the loaded samples", "as above", check)


def _problems(subject: CheckContext, sample: Any, classes: int | None) -> Iterator[tuple[str, str]]:
    if not isinstance(sample, dict):
        return
    label = sample.get("labels")
    if classes is not None and label is not None:
        for stray, _ in out_of_range_labels({"labels": torch.as_tensor(label)}, classes):
            yield f"label {stray} is not one of the classes 0 to {classes - 1}", "fix it, or model.num_classes"
    ids = sample.get("input_ids")
    tokenizer = capability(subject.recipe.model, Preparable).tokenizer_or_none() if ids is not None else None
    texts = map(torch.as_tensor, ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids])
    if tokenizer is not None and any({*one.flatten().tolist()} <= {*tokenizer.all_special_ids} for one in texts):
        yield "the text is empty, or the tokenizer knows none of it", "remove it, or use another model.tokenizer"
    pixels = sample.get("pixel_values")
    if isinstance(pixels, Tensor) and not bool(pixels.isfinite().all()):
        yield "pixels are not finite", "fix the image, or data.normalize"


def _describe(name: str, split: Samples, position: int) -> str:
    described = split.describe(position)
    is_default = described == f"sample {position} of {type(split.original).__name__}"
    return f"{name} sample {position}" if is_default else described


def _image_modes(check: str, split: Samples, positions: Sequence[int]) -> Iterator[Finding]:
    files = split.samples
    if not isinstance(files, Sequence) or not files or not isinstance(files[0], tuple):
        return
    found: defaultdict[str, list[str]] = defaultdict(list)
    for position in positions:
        path = str(files[position][0])
        with suppress(Exception), open_regular(path) as file, Image.open(file) as image:  # reported by samples()
            found[image.mode].append(path)
    lossy = {mode: paths for mode, paths in found.items() if mode not in LOSSLESS_MODES}
    odd = [f"{len(paths)} of mode {mode} (such as {paths[0]})" for mode, paths in lossy.items()]
    if odd:
        fix = "convert them to RGB yourself if transparency, 16 bits or CMYK matter"
        count = sum(map(len, found.values()))
        yield warning(f"{', '.join(odd)} of {count} images are converted when they are loaded", fix, check)


def duplicates(subject: CheckContext) -> Iterator[Finding]:
    """Check that no training sample is also in the validation or test set."""
    splits = splits_of(subject.recipe.data)
    train = splits.pop("train")
    known = {key: position for position, key in reversed(list(content_hashes(train).items()))}
    if not splits:
        yield skipped("no validation set and no test set")
    for name, split in splits.items():
        of_split = content_hashes(split)
        found = [position for position, key in of_split.items() if key in known]
        if not found:
            yield ok(f"no {name} sample is in the training set")
            continue
        twin = _describe("train", train, known[of_split[found[0]]])
        text = f"{len(found)} of the {name} samples ({format_list(found)}) are also in the training set: "
        text += f"{_describe(name, split, found[0])} equals {twin}"
        yield warning(text, "remove them from one of the two, otherwise the metrics are too good")


def content_hashes(split: Samples) -> dict[int, bytes]:
    """Return a hash of each sample's content without its label, by position.

    Covers ``MAX_COMPARED`` samples of files, arrays and texts, and ``SAMPLES_PER_SPLIT`` of other splits."""
    if split.digests is not None:
        return dict(enumerate(split.digests[:MAX_COMPARED]))
    if isinstance(split.images, Tensor):
        images = split.images[:MAX_COMPARED].contiguous()
        return {position: hashlib.sha256(image.numpy()).digest() for position, image in enumerate(images)}
    if split.table is not None and split.chosen is not None:
        tokens = split.table.select(list(split.chosen)[:MAX_COMPARED])["input_ids"]
        return {position: hashlib.sha256(repr(list(ids)).encode()).digest() for position, ids in enumerate(tokens)}
    if split.augmented:
        return {}
    found = {}
    for position in evenly_spaced(len(split), SAMPLES_PER_SPLIT):
        try:
            sample = split[position]
        except (Exception, SystemExit):  # reported by samples()
            continue
        content = {k: v for k, v in sample.items() if k != "labels"} if isinstance(sample, dict) else sample
        found[position] = ContentHasher(content).hexdigest().encode()
    return found


def vocabulary(subject: CheckContext) -> Iterator[Finding]:
    """Check that the model has an embedding row for every token of the tokenizer."""
    tokenizer = capability(subject.recipe.model, Preparable).tokenizer_or_none()
    if tokenizer is None:
        return
    embed = getattr(subject.module, "get_input_embeddings", None)
    if embed is None:
        yield skipped(f"{type(subject.module).__name__} has no get_input_embeddings")
        return
    rows, tokens = embed().num_embeddings, len(tokenizer)
    text = f"{tokens:,} tokens, {rows:,} embedding rows"
    fix = "the tokenizer of this model (model.tokenizer), or model.config.vocab_size"
    yield fail(text, fix) if tokens > rows else ok(text)


def model_and_data(subject: CheckContext) -> Finding:
    """Prepare model and data, which checks files, columns, classes and the configuration of the weights."""
    subject.recipe = prepare_recipe(subject.recipe)
    subject.ready = True
    sizes = ", ".join(f"{len(split):,} {name}" for name, split in splits_of(subject.recipe.data).items())
    return ok(f"{type(subject.recipe.model).__name__}, {count_weights(subject.module)}; {sizes}")


def plan_of(subject: CheckContext) -> Finding:
    """Describe the plan; an invalid one is rejected as it would be by the run."""
    if subject.plan is None:
        return skipped("the planner decides when the run starts")
    return ok(subject.plan.describe())
