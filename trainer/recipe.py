"""What a run is: typed, validated, printable dataclasses. Importing this module never imports torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

Precision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
Strategy = Literal["auto", "single", "ddp", "fsdp"]
Schedule = Literal["constant", "cosine", "linear"]
OptimizerName = Literal["adamw", "adam", "sgd", "adafactor", "adagrad", "rmsprop"]
ScaleLR = Literal["none", "linear", "sqrt"]
Accelerator = Literal["auto", "cpu", "cuda"]
LoggerName = Literal["csv", "tensorboard", "wandb"]

PADDING_MULTIPLE = 8
"""Texts are padded to a multiple of this many tokens: tensor cores want it."""

IGNORED_LABEL = -100
"""The label that carries no weight: the convention of torch's cross entropy and of transformers."""


class RecipeError(ValueError):
    """A setting that cannot work. The message names the key, the value and the fix."""


class RunError(RuntimeError):
    """A run that could not go on. The message says where it was and what to do."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`RecipeError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RecipeError(message)


def require_choice(key: str, value: Any, choices: Any) -> None:
    """Refuse a ``value`` that is not one of the ``Literal`` type ``choices``; for recipes written in Python."""
    require(value in get_args(choices), f"{key}={value!r} is not one of {', '.join(map(str, get_args(choices)))}")


def require_positive(key: str, value: Any) -> None:
    """Refuse a ``value`` that is not an integer of at least 1."""
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        f"{key}={value!r} must be an integer of at least 1",
    )


# ----------------------------------------------------------------------------------------------------------------------
# What a model and a dataset are


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a pair that can be added up exactly, however a batch is cut: never a mean.

    Args:
        total: sum of the loss over the micro-batch's weighted items (samples or tokens); a scalar tensor.
        weight: how many items that sum runs over; must be what the model's ``weigh`` said for this micro-batch.
            ``None`` means the number of ``targets`` that are not ``-100``, counted only when somebody asks.
        name: which of the model's ``loss_names`` this is.
        logits: detached predictions, shape ``(items, classes)``, for metrics during evaluation (optional).
        targets: the class of each item, shape ``(items,)``; ``-100`` is ignored (optional).
    """

    total: Tensor
    weight: Tensor | float | None = None
    name: str = "loss"
    logits: Tensor | None = None
    targets: Tensor | None = None

    def counted(self) -> Tensor | float:
        """The weight, or the number of targets where it was left at ``None``."""
        if self.weight is not None:
            return self.weight
        if self.targets is None:
            raise RecipeError(f"loss {self.name!r} has neither a weight nor targets to count: give it a weight")
        return (self.targets != IGNORED_LABEL).count_nonzero()


class Request(NamedTuple):
    """One micro-batch to fetch: its samples, and the seed of each one's augmentation if there is any."""

    indices: list[int]
    seeds: list[int] | None = None


class Model:
    """What is trained. A model of one's own is a dataclass that subclasses this and defines ``build`` and ``losses``.

    Fields that the dataset knows better (``num_classes``, ``image_size``, ``class_names``) may be left at ``None``:
    they are filled from the dataset's attributes of the same names before ``build`` is called.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the losses that ``losses`` yields for every micro-batch, in order."""

    conditional: ClassVar[bool] = False
    """Whether some micro-batches leave some parameters without a gradient (a branch not taken, say). Under DDP
    gradients are then reduced after the last backward instead of during it: exact, but not overlapped."""

    blocks: Sequence[type] = ()
    """Classes of the repeated modules (encoder layers): the unit of sharding, checkpointing and offload."""

    def prepare(self) -> None:
        """Fetch what ``build`` reads (weights, configuration); called once a node before any rank builds."""

    def build(self) -> nn.Module:
        """Create the module on the current default device and in the current default dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define build() -> nn.Module")

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield one :class:`Loss` per name in ``loss_names``; each graph is freed before the next is asked for."""
        raise NotImplementedError(f"{type(self).__name__} must define losses(module, batch) -> Iterator[Loss]")

    def weigh(self, batch: Any) -> dict[str, float]:
        """The weight of every loss of a micro-batch, from its host copy, before any forward.

        The default counts the entries of ``batch["labels"]`` that are not ``-100``: samples for a classifier, tokens
        for a tagger or a language model.
        """
        labels = batch["labels"]
        if labels.numel() <= 64:  # a sample each, usually: a list is several times faster than tensor operations
            ignored = labels.flatten().tolist().count(IGNORED_LABEL)
        else:
            ignored = int((labels == IGNORED_LABEL).count_nonzero())
        count = float(labels.numel() - ignored)
        return dict.fromkeys(self.loss_names, count)

    def tokenizer_or_none(self) -> Any:
        """The tokenizer that the dataset must use, for text models."""
        return None

    own_format: ClassVar[bool] = False
    """Whether ``save`` and ``saved_in`` keep a trained model in a format of its own (a Hugging Face folder, say);
    by default it is kept as ``model.safetensors`` and ``config.json``."""

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write the trained ``module`` to ``folder``, for a model with ``own_format``."""
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define save(module, folder)")

    def saved_in(self, folder: Path) -> Model:
        """This model with everything that ``build`` reads taken from ``folder``, for a model with ``own_format``."""
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define saved_in(folder)")


class Data:
    """Where samples come from. A dataset of one's own is a dataclass that subclasses this.

    After ``prepare``, ``train``, ``val`` and ``test`` are map-style datasets (``len`` and ``[i]``) or ``None``.
    Such a dataset may also have ``lengths`` (tokens of each sample, for cutting a batch by length), ``augmented``
    (``True`` when ``[i]`` draws random numbers; they are then seeded per sample), ``__getitems__(indices)`` that
    returns a collated batch at once, and ``describe(i)``, the file or row of a sample for error messages.
    """

    train: Any = None
    val: Any = None
    test: Any = None
    workers: int = 0

    def prepare(self, tokenizer: Any = None) -> None:
        """Find, download, check and tokenise; called on every rank, the first rank of a node first."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(tokenizer)")

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a micro-batch (any nest of tensors; the built-in models read a dict with ``labels``) of samples."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))


# ----------------------------------------------------------------------------------------------------------------------
# The settings


@dataclass(frozen=True)
class Optim:
    """How the weights are updated.

    Args:
        name: the optimizer: adamw, adam, sgd, adafactor, adagrad or rmsprop (torch.optim's).
        lr: learning rate at the reference batch size.
        weight_decay: decay of matrices; biases and norm weights (tensors of fewer than 2 dimensions) never decay.
        momentum: momentum of sgd and rmsprop.
        schedule: constant, cosine or linear decay over all steps, to 0 once the last step is taken.
        warmup_steps: steps over which the learning rate rises linearly from 0.
        clip_norm: largest global gradient norm; null for no clipping.
        scale_lr: scale lr with batch_size / reference_batch_size: none, linear or sqrt.
        reference_batch_size: the batch size that lr was chosen for; needed by scale_lr.
    """

    name: OptimizerName = "adamw"
    _: KW_ONLY
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    clip_norm: float | None = None
    scale_lr: ScaleLR = "none"
    reference_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_choice("optim.name", self.name, OptimizerName)
        require_choice("optim.schedule", self.schedule, Schedule)
        require_choice("optim.scale_lr", self.scale_lr, ScaleLR)
        require(0 < self.lr < math.inf, f"optim.lr={self.lr} must be greater than 0, and finite")
        require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay} must not be negative")
        require(0 <= self.momentum < 1, f"optim.momentum={self.momentum} must be in [0, 1)")
        require(
            not self.momentum or self.name in ("sgd", "rmsprop"),
            f"optim.momentum={self.momentum} has no meaning for {self.name}: use optim.name sgd or rmsprop",
        )
        require(self.warmup_steps >= 0, f"optim.warmup_steps={self.warmup_steps} must not be negative")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"optim.clip_norm={self.clip_norm} must be greater than 0; null turns clipping off",
        )
        if self.reference_batch_size is not None:
            require_positive("optim.reference_batch_size", self.reference_batch_size)
        require(
            self.scale_lr == "none" or self.reference_batch_size is not None,
            f"optim.scale_lr={self.scale_lr} needs optim.reference_batch_size, the batch size that optim.lr was chosen "
            "for",
        )


@dataclass(frozen=True)
class Memory:
    """The wishes about memory; what is decided from them is the plan.

    Args:
        budget: memory a device may use, such as 2GB, 1.5GiB or 90%; read by the planner, which is not built yet.
        micro_batch_size: samples that go through forward and backward at once; auto is the largest that the batch,
            the ranks and accumulate ask for.
        micro_batch_tokens: most tokens (padding included) of a micro-batch of text; micro_batch_size still bounds it.
        precision: 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true or 16-true.
        strategy: auto, single, ddp or fsdp; auto is single on one rank and ddp on several.
        correct_batchnorm: rescale BatchNorm's momentum to m' = 1 - (1 - m)^(1/k) for k micro-steps a step, because
            running statistics move once a micro-step: uncorrected, they would forget k times faster than in the
            whole-batch run.
    """

    _: KW_ONLY
    budget: str | None = None
    micro_batch_size: int | Literal["auto"] = "auto"
    micro_batch_tokens: int | None = None
    precision: Precision = "32-true"
    strategy: Strategy = "auto"
    correct_batchnorm: bool = True

    def __post_init__(self) -> None:
        require_choice("memory.precision", self.precision, Precision)
        require_choice("memory.strategy", self.strategy, Strategy)
        if self.micro_batch_size != "auto":
            require_positive("memory.micro_batch_size", self.micro_batch_size)
        if self.micro_batch_tokens is not None:
            require_positive("memory.micro_batch_tokens", self.micro_batch_tokens)
        if self.budget is not None:
            parse_budget(self.budget)


@dataclass(frozen=True)
class Run:
    """Where and how the run takes place.

    Args:
        dir: the run directory; by default runs/RECIPE/DATE-TIME.
        devices: devices on this machine, an integer or auto (all GPUs, or one CPU process).
        accelerator: auto, cpu or cuda.
        logger: where metrics go besides metrics.csv: any of csv, tensorboard, wandb.
        progress: show a progress bar on a terminal and plain lines elsewhere.
        max_skipped_steps: stop after this many steps in a row with a non-finite loss or gradient; fp16 needs up to 16
            at its start to find the loss scale.
    """

    _: KW_ONLY
    dir: str | None = None
    devices: int | Literal["auto"] = "auto"
    accelerator: Accelerator = "auto"
    logger: list[LoggerName] = field(default_factory=lambda: ["csv"])
    progress: bool = True
    max_skipped_steps: int = 20

    def __post_init__(self) -> None:
        require_choice("run.accelerator", self.accelerator, Accelerator)
        for name in self.logger:
            require_choice("run.logger", name, LoggerName)
        if self.devices != "auto":
            require_positive("run.devices", self.devices)
        require_positive("run.max_skipped_steps", self.max_skipped_steps)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a run.

    Args:
        model: what is trained.
        data: where the samples come from.
        optim: how the weights are updated.
        batch_size: samples per optimizer step over all ranks; null when accumulate and memory.micro_batch_size say it.
        accumulate: micro-batches per step and rank: an integer, or a schedule by epoch such as {0: 8, 4: 2}.
        epochs: passes over the training set.
        max_steps: stop after this many steps, if earlier than epochs.
        seed: of the initial weights, the sample order, dropout and augmentation.
        eval_every: evaluate every this many steps, besides at the end of every epoch.
        memory: the wishes about memory.
        run: where and how the run takes place.
    """

    model: Model
    data: Data
    optim: Optim = field(default_factory=Optim)
    batch_size: int | None = None
    accumulate: int | dict[int, int] | None = None
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    eval_every: int | None = None
    memory: Memory = field(default_factory=Memory)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        require(
            isinstance(self.model, Model),
            f"model={self.model!r} must be a trainer.Model: subclass it and define build() and losses()",
        )
        require(
            isinstance(self.data, Data), f"data={self.data!r} must be a trainer.Data: subclass it and define prepare()"
        )
        for key in ("batch_size", "max_steps", "eval_every"):
            if getattr(self, key) is not None:
                require_positive(key, getattr(self, key))
        require_positive("epochs", self.epochs)
        require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**63, f"seed={self.seed!r} must be an integer in [0, 2^63)"
        )
        self._check_accumulate()

    def _check_accumulate(self) -> None:
        if isinstance(self.accumulate, Mapping):
            require(
                0 in self.accumulate,
                f"accumulate={self.accumulate} must say what holds from epoch 0 on, as in {{0: 8, 4: 2}}",
            )
            for epoch, count in self.accumulate.items():
                require(
                    isinstance(epoch, int) and epoch >= 0,
                    f"accumulate={self.accumulate}: epoch {epoch!r} must be an integer of at least 0",
                )
                require_positive(f"accumulate[{epoch}]", count)
        elif self.accumulate is not None:
            require_positive("accumulate", self.accumulate)
        micro = self.memory.micro_batch_size
        require(
            self.batch_size is not None or (self.accumulate is not None and micro != "auto"),
            "batch_size is missing: give it, or give accumulate and memory.micro_batch_size "
            "(batch_size = micro_batch_size × accumulate × ranks)",
        )

    def replace(self, **changes: Any) -> Recipe:
        """A copy with ``changes`` applied and checked."""
        return dataclasses.replace(self, **changes)


_BUDGET = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B)\s*$", re.IGNORECASE)


def parse_budget(text: str) -> tuple[float, bool]:
    """Read a memory budget: ``(bytes, False)`` for ``2GB`` (1e9) or ``2GiB`` (2^30), ``(fraction, True)`` for ``90%``.

    Raises:
        RecipeError: when it is none of these, or zero, or more than 100 %.
    """
    match = _BUDGET.match(str(text))
    require(match is not None, f"memory.budget={text!r} is not a memory size: write it as 2GB, 1.5GiB or 90%")
    assert match is not None
    number, unit = float(match[1]), match[2].lower()
    require(number > 0, f"memory.budget={text!r} must be greater than 0")
    if unit == "%":
        require(number <= 100, f"memory.budget={text!r} is more than the whole device")
        return number / 100, True
    exponent = " kmgt".index(unit[0]) if unit[0] != "b" else 0
    return number * (1024 if "i" in unit else 1000) ** exponent, False
