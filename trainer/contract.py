"""What a model and a dataset are: the contract between the engine and whatever is trained. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from trainer.errors import RecipeError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PADDING_MULTIPLE = 8
"""Texts are padded to a multiple of this many tokens: tensor cores want it."""

IGNORED_LABEL = -100
"""The label that carries no weight: the convention of torch's cross entropy and of transformers."""


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

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the trained model to ``folder``, for a model with ``own_format``.

        Args:
            module: what ``build`` made; its own weights may be sharded.
            folder: an empty folder.
            state: all weights and persistent buffers by name, whole.
        """
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define save(module, folder, state)")

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
