"""Predictions of a trained model for texts, images, folders and tables, streamed to the output; without Fabric."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainer.after.generate import DEFAULT_MAX_NEW_TOKENS, generate_texts, require_free_positions
from trainer.checkpoint.export import load_model, restore_open_fields
from trainer.checkpoint.manifest import verify_folder, verify_text_file
from trainer.contract import Packable, Preparable, capability
from trainer.errors import RecipeError, require, require_choice, require_positive
from trainer.recipe import DecidedPrecision, Recipe
from trainer.report.progress import Progress, warn
from trainer.system.environment import is_local_rank_zero
from trainer.system.files import open_regular, read_regular, room_in, staged_file
from trainer.system.names import did_you_mean
from trainer.system.status_line import show_status
from trainer.system.streams import flush_stdout
from trainer.system.text import escaped
from trainer.values import IGNORED_LABEL, Task

CUT_OFF = "_"  # tag of a word beyond the maximum length of the model
THRESHOLD = 0.5  # minimum probability of a predicted label
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")  # suffixes of tables, for input and output
STDIN = "standard input"
EMPTY = f"{STDIN} is empty: pipe a text into the command, as in echo TEXT | trainer predict RUN_DIR -"
OURS = "_predicted"  # suffix of a column of predictions whose name the table has already
MAX_TEXT_BYTES = 32_000_000  # maximum bytes of a text file, or of a line of one
MAX_WARNINGS = 5  # maximum number of warnings about unreadable inputs; an output file lists all of them, with reasons
ROWS_A_GROUP, BYTES_A_GROUP = 10_000, 16_000_000  # maximum rows and bytes of a Parquet row group, which are in memory


def predict(
    recipe: Recipe,
    run_dir: str | Path,
    texts: Sequence[str] | str = (),
    images: Sequence[str] | str = (),
    paths: Sequence[str] | str = (),
    **how: Any,
) -> list[Any]:
    """Predict with the model of ``run_dir`` on ``texts``, on ``images``, or on ``paths``.

    ``paths`` are files, folders, patterns, tables and ``"-"`` (standard input); ``how`` has the fields of
    :class:`PredictOptions`. Answers are printed, or written to a file. A string is one text, one image or one path.

    Returns:
        For each input the most probable class and its probability, or the result of :func:`run_predict_command` for the
        model's task; for a language model the generated text. Empty if a file was written.

    Raises:
        RecipeError: at the end, if some inputs could not be read; it names them.
    """
    return Predictor(recipe, run_dir).predict(texts, images, paths, **how)


class Predictor:
    """The model of ``run_dir``, whose weights stay loaded between predictions on one device in one precision."""

    def __init__(self, recipe: Recipe, run_dir: str | Path) -> None:
        self.recipe, self.run_dir = recipe, run_dir
        self.loaded: tuple[object, Any, nn.Module] | None = None  # device and dtype, model, module

    def predict(self, *inputs: Sequence[str] | str, **how: Any) -> list[Any]:
        """Predict like :func:`predict`; ``inputs`` are its texts, images and paths."""
        texts, images, paths = ([given] if isinstance(given, str) else given or () for given in inputs)
        asked = PredictOptions(**how)
        asked.check()
        asked.check_task(prediction_task(self.recipe.model))
        if asked.temperature and asked.seed is None:
            asked = replace(asked, seed=self.recipe.seed)
        place = (asked.resolve_device(), asked.dtype)
        if self.loaded is None or self.loaded[0] != place:
            self.loaded = place, *self._load(texts, images)
        _, model, module = self.loaded
        reader = InputReader(model, self.recipe.data, texts, images)
        return run_predict_command(model, module, reader, asked, paths, texts or images)

    def _load(self, texts: Sequence[str], images: Sequence[str]) -> tuple[Any, nn.Module]:
        folder = verified_model_folder(self.run_dir)
        model: Any = restore_open_fields(self.recipe.model, folder)
        self.recipe.data.use_model(model)
        InputReader(model, self.recipe.data, texts, images)  # reject what the model cannot read before it is loaded
        show_status("loading the model")
        return model, load_model(model, folder)


def verified_model_folder(run_dir: str | Path) -> Path:
    """Return the folder of the trained model of ``run_dir``; a changed file is a CorruptCheckpointError."""
    recipe, model = Path(run_dir) / "recipe.yaml", Path(run_dir) / "model"
    if is_local_rank_zero():  # only one rank of a machine checks, before any collective
        found = verify_text_file(recipe) if recipe.exists() else None, verify_folder(model)
        for problem in filter(None, found):
            warn(problem)
    return model


class Input(NamedTuple):
    """One sample to classify: its name, its row or line if its file has several, and a function that reads it."""

    name: str
    source: str
    read: Callable[[], Any]  # returns a text, or an image as a tensor; raises a RecipeError
    row: Mapping[str, Any] = MappingProxyType({})  # the cells of its table


@dataclass(frozen=True)
class Inputs:
    """Inputs in order: their number, ``None`` if unknown; and of tables the columns, each with its Arrow type."""

    count: int | None
    each: Iterable[Input]
    sources: bool = False  # whether some are rows or lines
    columns: Mapping[str, Any] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Inputs]) -> Inputs:
        """Return all inputs of ``parts``. If all are tables, they have the columns of all."""
        counts, each = [part.count for part in parts], chain.from_iterable(part.each for part in parts)
        count = None if None in counts else sum(filter(None, counts))
        columns = dict[str, Any]()
        for part in parts:
            own = part.columns or {}
            columns |= {name: kind if columns.get(name, kind) == kind else str for name, kind in own.items()}
        tables = all(part.columns is not None for part in parts)
        sources = any(part.sources for part in parts) and (not tables or len(parts) > 1)
        return cls(count, each, sources, columns if tables else None)


DTYPES = {"64": torch.float64, "32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of a prediction."""

    output: str | None = None  # a .csv, .tsv, .jsonl or .parquet file for the predictions; ``None`` prints them
    lines: bool = False  # every line of standard input and of text files is one text
    top_k: int = 1
    """Number of most probable classes to report per input; for single_label only. With more than one, the answer is a
    list of pairs."""
    probabilities: bool = False  # also report the probabilities of all classes or labels
    max_new_tokens: int | None = None  # max tokens that a language model generates per text; ``None`` is 128
    temperature: float | None = None  # divides the scores before sampling; ``None`` or 0: the most probable token
    top_p: float | None = None  # sample from the most probable tokens with this total probability; ``None``: from all
    seed: int | None = None  # seed of the sampling; ``None`` is the seed of the recipe
    column: str | None = None  # column of tables with the texts or the paths of the images
    batch_size: int = 32  # inputs per forward pass
    device: str = "auto"  # auto (a GPU if available), cpu, cuda or cuda:1
    precision: str = "32-true"  # a value of memory.precision other than auto; independent of the precision of training
    quiet: bool = False  # do not print answers
    collect: bool = True  # return the answers; otherwise memory does not grow with their number

    def check(self) -> None:
        """Reject invalid options before anything is loaded."""
        require_positive("--top-k", self.top_k)
        require_positive("--batch-size", self.batch_size)
        require_choice("--precision", self.precision, DecidedPrecision)
        if self.max_new_tokens is not None:
            require_positive("--max-new-tokens", self.max_new_tokens)
        for flag, value, most in (("temperature", self.temperature, 100.0), ("top-p", self.top_p, 1.0)):
            if value is not None and not (type(value) in (int, float) and 0 <= value <= most):
                raise RecipeError(f"--{flag}={value!r} must be a number from 0 to {most:g}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**31):
            raise RecipeError(f"--seed={self.seed!r} must be an integer from 0 to {2**31 - 1:,}")
        if self.output is not None:
            path = Path(self.output)
            require(path.suffix.lower() in TABLES, f"--output={path} must end in one of {', '.join(TABLES)}")
            require(not path.exists(), f"--output={path} exists: remove it or give another file")

    def check_task(self, task: str) -> None:
        """Reject options that do not apply to a model of ``task``."""
        fix = "fine-tune it, as with trainer fit text_files --model.name RUN, and predict with that run"
        require(task != "masked_language", f"a masked language model fills in masked tokens, not texts: {fix}")
        require(task != "pairs", "trainer predict is not for embeddings: use the folder model/ (docs/embeddings.md)")
        flags = {"max-new-tokens": self.max_new_tokens, "temperature": self.temperature}
        flags |= {"top-p": self.top_p, "seed": self.seed}
        what = f"this model's task is {task}: leave it out"
        for flag, value in flags.items():
            if value is None:
                continue
            require(task == "language", f"--{flag}={value} is for language models, and {what}")
            if flag in ("top-p", "seed") and not self.temperature:
                raise RecipeError(f"--{flag}={value} needs sampling: also give a temperature, as in --temperature 0.8")
        if self.top_k != 1 and task != "single_label":
            raise RecipeError(f"--top-k={self.top_k} is for model.task=single_label, and {what}")
        if self.probabilities and task not in ("single_label", "multi_label"):
            raise RecipeError(f"--probabilities is for classes and labels, and {what}")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to convert weights and inputs to; ``None`` for no conversion."""
        return None if self.precision.endswith("-mixed") else DTYPES[self.precision.partition("-")[0]]

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        kind = DTYPES[self.precision.partition("-")[0]]
        return torch.autocast(device.type, kind) if self.dtype is None else nullcontext()

    def resolve_device(self) -> torch.device:
        """Return the device, after checking that it exists."""
        text = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            device = torch.device(text)
        except RuntimeError:
            raise RecipeError(f"--device={text!r} is unknown: use auto, cpu, cuda or cuda:1") from None
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        require(device.type in ("cpu", "cuda"), f"--device={text!r} is not supported: use auto, cpu or cuda")
        if (device.index or 0) >= count:
            has = f"{count} GPU{'s' * (count > 1)}, starting at cuda:0" if count else "no GPU that torch can use"
            raise RecipeError(f"--device={text!r}: this machine has {has}: use auto or cpu")
        return device


class InputReader:
    """Reads texts or image files as samples of a run's data and model."""

    def __init__(self, model: Any, data: Any, texts: Sequence[str], images: Sequence[str]) -> None:
        self.data, self.tokenizer = data, capability(model, Preparable).tokenizer_or_none()
        name, source = type(model).__name__, type(data).__name__
        reads_texts, reads_images = self.tokenizer is not None and data.encode is not None, data.load_image is not None
        no_text = f"{name} has no tokenizer" if self.tokenizer is None else f"{source} has no encode(texts, tokenizer)"
        no_image = f"{source} has no load_image(path)"
        instead = "; it reads images: use --image" if reads_images else ""
        require(not texts or reads_texts, f"--text needs a text model: {no_text}{instead}")
        instead = "; it reads texts: use --text" if reads_texts else ""
        require(not images or reads_images, f"--image needs an image model: {no_image}{instead}")
        if not reads_texts and not reads_images:
            raise RecipeError(f"cannot read any input: {no_text}, and {no_image}: define one (docs/after-training.md)")
        self.of_images, self.answers = bool(images) or not reads_texts, data.answers
        self.kind = "images" if self.of_images else "texts"

    def inputs(self, paths: Sequence[str], given: Sequence[str], column: str | None, lines: bool) -> Inputs:
        """Return the texts or images of ``given``, then those of ``paths``: files, folders, patterns and ``-``."""
        texts = "is read as text, and this model reads images: give files, folders or tables"
        require(not self.of_images or "-" not in paths, f"-: {STDIN} {texts}")
        require(not self.of_images or not lines, f"--lines: every line {texts}")
        own = [self._image(text) if self.of_images else Input(text, "", partial(str, text)) for text in given]
        parts = [Inputs(len(own), own)] if own else []
        for path in chain.from_iterable([None] if text == "-" else self._files(text) for text in paths):
            if path is not None and path.suffix.lower() in TABLES:
                parts.append(self._table(path, column))
            elif lines:
                parts.append(Inputs(None, _lines(path), True))
            else:
                read = self._image if self.of_images else _text_file
                parts.append(Inputs(1, [_text_file(None) if path is None else read(path)]))
        if lines and all(part.count is not None for part in parts):
            raise RecipeError("--lines is for text files and standard input: give one, or leave --lines out")
        return Inputs.joined(parts)

    def batch(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return a micro-batch without labels, from samples that were read."""
        if self.of_images:
            return {"pixel_values": torch.stack(list(samples))}
        return dict(self.data.encode(samples, self.tokenizer))

    def _files(self, text: str) -> list[Path]:
        path = Path(text)
        if os.path.isfile(text):  # unlike Path.is_file, also for an invalid name
            return [path]
        if os.path.isdir(text):
            from torchvision.datasets.folder import IMG_EXTENSIONS

            wanted = IMG_EXTENSIONS if self.of_images else (".txt",)
            inside = (file for file in path.rglob("*") if file.suffix.lower() in wanted and file.is_file())
            found = sorted(file for file in inside if not any(part[0] == "." for part in file.relative_to(path).parts))
            require(bool(found), f"{text}: the folder has no {self.kind} ({', '.join(wanted)})")
            return found
        require(text.count("**") <= 8, f"{text[:200]!r}: ** matches any number of folders: use it at most 8 times")
        found = sorted(file for file in map(Path, glob(text, recursive=True)) if file.is_file())
        require(bool(found), f"{text[:200]!r}: no such file or folder, and no file matches it as a pattern")
        return found

    def _image(self, path: str | Path) -> Input:
        return Input(str(path), "", partial(self.data.load_image, str(path)))

    def _table(self, path: Path, column: str | None) -> Inputs:
        from trainer.data.rows import KINDS
        from trainer.data.tables import stream_table

        count, columns, rows = stream_table(path)
        name, has = column or self.data.text_column, ", ".join(map(repr, columns))
        missing = f"--column is missing: name the column of {path} with the {self.kind}"
        require(name is not None, f"{missing}; it has {has}")
        hint = did_you_mean(str(name), columns)
        require(name in columns, f"--column={name!r}: no such column in {path}; it has {has}{hint}")
        if self.of_images:
            _require_paths(path, str(name), [row.get(name) for row in islice(rows(), MAX_WARNINGS)])

        def each() -> Iterator[Input]:
            read: Callable[[], Any]
            for number, row in enumerate(rows(), KINDS[path.suffix.lower()][1]):
                cell = row.get(name)
                if self.of_images:
                    read = partial(_cell_image, self.data, path.parent, cell)
                elif self.answers and isinstance(cell, list):  # messages
                    read = partial(list, cell)
                else:
                    cell = " ".join(map(str, cell)) if isinstance(cell, list) else cell  # words
                    read = partial(_cell_text, cell)
                yield Input(str("" if cell is None else cell), f"{path} row {number}", read, row)

        return Inputs(count, each(), True, columns)


def _require_paths(path: Path, column: str, first: Sequence[Any]) -> None:
    """Reject a column without paths of images, from its first cells: otherwise each row would be a warning."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    cells = [str(cell) for cell in first if cell]
    fits = any(cell.lower().endswith(IMG_EXTENSIONS) or os.path.isfile(path.parent / cell) for cell in cells)
    if cells and not fits:
        why = f"--column={column!r} of {path} has no paths of images (the first cell is {cells[0][:40]!r})"
        raise RecipeError(f"{why}, and this model reads images: name the column with the paths")


def _text_file(path: Path | None) -> Input:
    """Return the text of a file or, without ``path``, of standard input."""

    def read() -> str:
        try:
            content = _stdin().read(MAX_TEXT_BYTES + 1) if path is None else read_regular(path, MAX_TEXT_BYTES)
        except OSError as error:
            raise RecipeError(f"it cannot be read: {error.strerror}") from error
        require(path is not None or bool(content.strip()), EMPTY)
        return _decoded(content)

    return Input(str(path or STDIN), "", read)


def _decoded(content: bytes) -> str:
    if len(content) > MAX_TEXT_BYTES:
        raise RecipeError(f"it has more than {MAX_TEXT_BYTES / 1e6:g} MB, the max for a text: split it or leave it out")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise RecipeError("it is not UTF-8 text: save it as UTF-8 or leave it out") from None


def _stdin() -> Any:
    """Return standard input as bytes; a notebook or a test may have replaced it."""
    return getattr(sys.stdin, "buffer", sys.stdin)


def _lines(path: Path | None) -> Iterator[Input]:
    """Yield an input per line of a file or, without ``path``, of standard input, as soon as the line has arrived."""
    name, fault = str(path or STDIN), EMPTY if path is None else "the file is empty"
    try:
        with nullcontext(_stdin()) if path is None else open_regular(path) as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_TEXT_BYTES + 2), b""), 1):
                rest, fault = line, ""
                while rest and not rest.endswith(b"\n"):  # the rest of a line that is too long
                    rest = file.readline(MAX_TEXT_BYTES)
                text = line.removesuffix(b"\n").removesuffix(b"\r")
                yield Input(text.decode(errors="replace"), f"{name} line {number}", partial(_decoded, text))
    except OSError as error:
        fault = f"it cannot be read: {error.strerror}"
    if fault:
        yield Input("", name, partial(require, False, fault))


def _cell_text(cell: Any) -> str:
    require(isinstance(cell, str), "the cell is not a text")
    return cell


def _cell_image(data: Any, folder: Path, cell: Any) -> Tensor:
    require(bool(_cell_text(cell)), "the cell is empty")
    return data.load_image(str(folder / cell))


class PredictionRow(NamedTuple):
    """The prediction for one input, or an error.

    By the task: the most probable classes or the predicted labels, most probable first; the predicted numbers; the
    class of each word, ``None`` if the word is cut off; or the generated text."""

    input: Input
    classes: Sequence[int | None]
    values: Sequence[float]  # a probability per class, or the predicted numbers
    probabilities: Sequence[float] = ()  # probabilities of all classes or labels in order, if requested
    words: Sequence[str] = ()  # the classified words
    error: str = ""
    generated: str = ""  # generated by a language model
    prompt: str = ""  # the text that it continues


def prediction_task(model: Any) -> Task:
    """Return the kind of predictions of ``model``: one that was trained on preferences generates text."""
    return "language" if model.task == "preference" else model.task or "single_label"


def answers(
    model: Any, module: nn.Module, reader: InputReader, inputs: Iterable[Input], options: PredictOptions
) -> Iterator[list[PredictionRow]]:
    """Yield the answers to ``inputs`` in order, batch by batch."""
    waiting, done, writes = iter(inputs), 0, prediction_task(model) == "language"

    def batch_of(samples: Sequence[Any]) -> dict[str, Any]:
        batch = reader.batch(samples)
        if writes:
            require_free_positions(batch, module)
        return batch

    while chunk := list(islice(waiting, options.batch_size)):
        read = [_tried(given.read) for given in chunk]
        batch, refusal = _tried(partial(_batch, batch_of, read))
        if refusal:  # one or more samples are bad: try each alone
            read = [(sample, error or _tried(partial(batch_of, [sample]))[1]) for sample, error in read]
            batch = _batch(batch_of, read)
        rows: Iterator[Any] = iter(())
        if batch is not None and writes:
            places = [done + at for at, (_, error) in enumerate(read) if not error]
            rows = iter(_written(model, module, batch, places, options))
        elif batch is not None:
            rows = iter(_predict_batch(model, module, batch, options))
        done += len(chunk)
        yield [
            PredictionRow(given, [], [], error=error) if error else _answer(model, reader, given, next(rows), sample)
            for given, (sample, error) in zip(chunk, read, strict=True)
        ]


def _answer(model: Any, reader: InputReader, given: Input, said: BatchPrediction | str, sample: Any) -> PredictionRow:
    if isinstance(said, str):
        return PredictionRow(given, [], [], generated=said, prompt="" if reader.answers else sample)
    words = sample.split() if model.task == "token" else []
    classes, values, all_of = said
    cut_off = max(0, len(words) - len(classes))
    return PredictionRow(given, [*classes, *[None] * cut_off], [*values, *[0.0] * cut_off], all_of, words)


def _tried(make: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return make(), ""
    except RecipeError as error:
        return None, str(error)


def _batch(make: Callable[[Sequence[Any]], Any], read: Sequence[tuple[Any, str]]) -> dict[str, Any] | None:
    samples = [sample for sample, error in read if not error]
    return make(samples) if samples else None


BatchPrediction = tuple[list[int | None], list[float], list[float]]
"""``classes``, ``values`` and ``probabilities`` of an :class:`PredictionRow`."""
BatchPredictions = list[BatchPrediction]


@torch.no_grad()
def _predict_batch(model: Any, module: nn.Module, batch: dict[str, Any], asked: PredictOptions) -> BatchPredictions:
    """Return the predictions for each sample; labels are dummies, because ``losses()`` needs some."""
    task, device = model.task or "single_label", next(chain(module.parameters(), module.buffers())).device
    words, count = batch.pop("words", None), len(next(iter(batch.values())))
    like = {"token": words, "multi_label": torch.zeros(count, model.num_classes) if task == "multi_label" else None}
    like["regression"] = torch.zeros(count, model.num_classes) if task == "regression" else None
    labels = torch.zeros_like(like[task]) if like.get(task) is not None else torch.zeros(count, dtype=torch.long)
    packed = capability(model, Packable).packed({**batch, "labels": labels})
    packed = tree_map_only(Tensor, lambda one: one.to(device, asked.dtype if one.is_floating_point() else None), packed)
    with asked.context(device):
        logits = next(iter(model.losses(module, packed))).logits
    name = type(model).__name__
    require(logits is not None, f"{name}.losses yields no logits to predict with: yield Loss(..., logits=...)")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()
    if task == "token":
        return _of_words(logits.reshape(count, -1, logits.shape[-1]).softmax(-1), words)
    if logits.ndim != 2 or len(logits) != count:
        shape = tuple(logits.shape)
        raise RecipeError(f"{name}.losses yields logits of shape {shape} for {count} inputs: yield ({count}, classes)")
    if task == "regression":
        return [(list(range(len(row))), row, []) for row in logits.tolist()]
    shares = logits.sigmoid() if task == "multi_label" else logits.softmax(-1)
    everything = shares.tolist() if asked.probabilities else [[]] * count
    best = shares.topk(shares.shape[-1] if task == "multi_label" else min(asked.top_k, shares.shape[-1]))
    found = []
    for values, classes, all_of in zip(best.values.tolist(), best.indices.tolist(), everything, strict=True):
        kept = sum(value > THRESHOLD for value in values) if task == "multi_label" else len(values)
        found.append((classes[:kept], values[:kept], all_of))
    return found


def _written(
    model: Any, module: nn.Module, batch: dict[str, Any], places: Sequence[int], asked: PredictOptions
) -> list[str]:
    device = next(module.parameters()).device
    new, tokenizer = asked.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, capability(model, Preparable).tokenizer_or_none()
    how = (asked.temperature or 0.0, asked.top_p, asked.seed or 0)
    with asked.context(device):
        return generate_texts(module, tokenizer, batch, places, new, *how)


def _of_words(shares: Tensor, words: Tensor) -> list[BatchPrediction]:
    values, classes = (part.tolist() for part in shares.max(-1))
    found = list[BatchPrediction]()
    for row, numbers in enumerate(words.tolist()):
        at = {number: place for place, number in enumerate(numbers) if number != IGNORED_LABEL}
        places = [at.get(number) for number in range(max(at, default=-1) + 1)]
        tags = [None if place is None else classes[row][place] for place in places]
        found.append((tags, [0.0 if place is None else values[row][place] for place in places], []))
    return found


def run_predict_command(
    model: Any,
    module: nn.Module,
    reader: InputReader,
    options: PredictOptions,
    paths: Sequence[str],
    samples: Sequence[str],
) -> list[Any]:
    """Predict on ``samples`` (texts or images) and on ``paths``; print the answers, or write them to a file.

    Returns:
        For each input that could be read, by the task: its most probable class and probability; a list of such pairs,
        one per class with ``top_k``, per predicted label or per word; a list of numbers; or the generated text. Empty
        if a file was written.

    Raises:
        RecipeError: at the end, if some inputs could not be read; it names the first ones.
    """
    module.to(options.resolve_device(), options.dtype).eval()
    names = list(model.class_names or [])
    classes = model.num_classes or len(names)
    possible = not classes or options.top_k <= classes
    require(possible, f"--top-k={options.top_k} is more than the {classes} classes of the model")
    task = prediction_task(model)
    found, bad, faults, done, begun = list[Any](), 0, list[str](), 0, time.monotonic()

    def name_of(number: int | None) -> str:
        if number is None:
            return CUT_OFF
        return names[number] if number < len(names) else str(number)

    inputs = reader.inputs(paths, samples, options.column, options.lines)
    folder = Path(options.output or ".").absolute().parent
    with room_in(folder, "give another file with --output"), ExitStack() as closing:
        write = closing.enter_context(_writer(options, task, inputs, list(map(name_of, range(classes)))))
        progress = Progress(enabled=options.output is not None or (inputs.count or 0) > options.batch_size)
        closing.callback(progress.close)
        progress.start(inputs.count or 0)
        for chunk in answers(model, module, reader, inputs.each, options):
            for answer in chunk:
                labels = list(map(name_of, answer.classes))
                if answer.error:
                    bad += 1
                    if bad <= MAX_WARNINGS:
                        faults.append(_fault(answer))
                        if inputs.count != 1:
                            warn(f"left out: {faults[-1]}")
                elif options.output is None and options.collect:
                    pairs: Any = list(zip(labels, answer.values, strict=True))
                    result = {"regression": answer.values, "language": answer.generated}.get(task, pairs)
                    found.append(pairs[0] if task == "single_label" and options.top_k == 1 else result)
                write(answer, labels)
            done += len(chunk)
            progress.count(done, inputs.count, f"{done / max(1e-9, time.monotonic() - begun):,.1f} inputs/s")
            if options.output is None and not options.quiet and not flush_stdout():
                return found  # as in | head
    if options.output is not None:
        print(f"{done - bad:,} predictions: {escaped(options.output)}")
    if bad:
        several = f"{bad} of {done} inputs could not be read, the other {done - bad} were predicted: "
        raise RecipeError(f"{several if done > 1 else ''}{'; '.join(faults)}")
    return found


def _fault(answer: PredictionRow) -> str:
    name = answer.input.source or answer.input.name
    place = name if len(name) <= 100 else f"{name[:100]}…"
    return answer.error if name in answer.error and name else f"{place or 'an empty text'}: {answer.error}"


Write = Callable[[PredictionRow, Sequence[str]], None]
"""Writes an answer with the names of its classes."""


def _writer(asked: PredictOptions, task: Task, inputs: Inputs, names: Sequence[str]) -> AbstractContextManager[Write]:
    if asked.output is None:
        return nullcontext((lambda answer, labels: None) if asked.quiet else partial(_print, task))
    return _file(Path(asked.output), asked, task, inputs, names)


def _print(task: Task, answer: PredictionRow, labels: Sequence[str]) -> None:
    """Print a line per input; or a line per word, or the generated text, followed by an empty line."""
    if answer.error:
        return
    if task == "language":
        print(escaped(answer.prompt + answer.generated, keep="\n\t"), end="\n\n")
        return
    cells = [f"{escaped(name)}\t{share:.4f}" for name, share in zip(labels, answer.values, strict=True)]
    if task == "token":
        print("\n".join(f"{tag}\t{escaped(word)}" for tag, word in zip(cells, answer.words, strict=True)), end="\n\n")
        return
    cells = [f"{value:.6g}" for value in answer.values] if task == "regression" else cells or ["no label"]
    print("\t".join([*cells, escaped(answer.input.name)]))


@contextmanager
def _file(path: Path, asked: PredictOptions, task: Task, inputs: Inputs, names: Sequence[str]) -> Iterator[Write]:
    """Write rows to ``path``, which appears only when it is complete. Those of tables keep their columns."""
    theirs = inputs.columns or {}
    texts = [*(["input"] if inputs.columns is None else []), *(["source"] if inputs.sources else [])]
    best = [("label", "probability"), *((f"label_{k}", f"probability_{k}") for k in range(2, asked.top_k + 1))]
    all_of = [f"p_{name}" for name in names] if asked.probabilities else []
    columns: dict[str, type] = dict.fromkeys(texts, str)
    joined = {"multi_label": ("labels", "|"), "token": ("tags", " ")}  # the format that TextFiles reads
    if task == "language":
        columns["generated_text"] = str
    elif task == "regression":
        columns |= {f"predicted_{name}": float for name in names}
    elif task in joined:
        columns[joined[task][0]] = str
    else:
        columns |= {name: kind for pair in best for name, kind in zip(pair, (str, float), strict=True)}
    columns |= dict.fromkeys(all_of, float) | {"error": str}
    ours, suffix = {name: name for name in columns}, ""
    while len({*theirs, *ours.values()}) < len(theirs) + len(ours):
        suffix += OURS
        ours = {name: name + suffix if name in theirs else name for name in columns}

    def row(answer: PredictionRow, labels: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {"input": _printable(answer.input.name), "source": _printable(answer.input.source)}
        for pair, label, probability in zip(best, labels, answer.values, strict=False):
            values |= zip(pair, (label, probability), strict=True)
        if task in joined and not answer.error:
            name, separator = joined[task]
            values[name] = separator.join(labels)
        values |= {f"predicted_{label}": value for label, value in zip(labels, answer.values, strict=True)}
        values |= zip(all_of, answer.probabilities, strict=False)
        values["generated_text"] = None if answer.error else _printable(answer.generated)
        values["error"] = _printable(answer.error) or None
        return {**(answer.input.row if theirs else {}), **{name: values.get(key) for key, name in ours.items()}}

    types = {**theirs, **{ours[key]: kind for key, kind in columns.items()}}
    with staged_file(path) as part, ExitStack() as closing:
        if (kind := path.suffix.lower()) == ".parquet":
            write = closing.enter_context(_parquet(part, types))
        else:
            # backslashreplace writes a lone surrogate as JSON escapes it.
            file = closing.enter_context(open(part, "w", newline="", encoding="utf-8", errors="backslashreplace"))
            write = _jsonl(file) if kind == ".jsonl" else _csv(file, list(types), "\t" if kind == ".tsv" else ",")
        yield lambda answer, labels: write(row(answer, labels))


WriteRow = Callable[[Mapping[str, Any]], None]


def _jsonl(file: TextIO) -> WriteRow:
    def write(values: Mapping[str, Any]) -> None:
        file.write(json.dumps(values, ensure_ascii=False, default=_plain) + "\n")

    return write


def _csv(file: TextIO, columns: Sequence[str], separator: str) -> WriteRow:
    # csv quotes a cell with a carriage return only if the line terminator has one.
    ended: Any = SimpleNamespace(write=lambda line: file.write(f"{line[:-2]}\n"))
    table = csv.writer(ended, delimiter=separator, lineterminator="\r\n")

    def write(values: Mapping[str, Any]) -> None:
        table.writerow([_as_text(values.get(name)) for name in columns])

    table.writerow(columns)
    return write


def _plain(cell: Any) -> str:
    """Return a cell that JSON has no type for as text, such as a date; bytes in Base64."""
    return b64encode(cell).decode() if isinstance(cell, bytes) else str(cell)


def _as_text(cell: Any) -> str | None:
    """Return a cell as text: a number, a list or an object as JSON."""
    if cell is None or isinstance(cell, str):
        return cell
    is_json = isinstance(cell, (bool, int, float, list, dict))
    return json.dumps(cell, ensure_ascii=False, default=_plain) if is_json else _plain(cell)


@contextmanager
def _parquet(path: Path, columns: Mapping[str, Any]) -> Iterator[WriteRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {str: pa.string(), float: pa.float64()}
    schema = pa.schema([(name, kinds.get(kind, kind)) for name, kind in columns.items()])
    texts = [field.name for field in schema if field.type == pa.string()]
    waiting, size = list[Mapping[str, Any]](), 0
    with pq.ParquetWriter(path, schema) as file:

        def flush() -> None:
            nonlocal size
            file.write_table(pa.Table.from_pylist(waiting, schema))
            waiting.clear()
            size = 0

        def write(values: Mapping[str, Any]) -> None:
            nonlocal size
            waiting.append({**values, **{name: _printable(_as_text(values.get(name))) for name in texts}})
            size += sum(len(cell) for cell in waiting[-1].values() if isinstance(cell, str | bytes))
            if len(waiting) == ROWS_A_GROUP or size > BYTES_A_GROUP:
                flush()

        yield write
        flush()


def _printable(name: Any) -> Any:
    """Escape what UTF-8 cannot encode, such as bytes in the name of a file; keep ``None``."""
    return name.encode(errors="backslashreplace").decode() if name else name
