"""What a model and a dataset are: the contract between the engine and whatever is trained. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.errors import RecipeError
from trainer.values import IGNORED_LABEL, ImageInput, Loss, Mixing, Outline, Pretrained, Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PADDING_MULTIPLE = 8
"""Texts are padded to a multiple of this many tokens: tensor cores want it."""


class Model:
    """What is trained. A model of one's own is a dataclass that subclasses this and defines ``build`` and ``losses``.

    To start on meta as well (``memory.init=meta``), it defines ``skeleton`` and ``pretrained``, of which ``build`` is
    then made. Fields that the dataset knows better (``num_classes``, ``image_size``, ``class_names``) may be ``None``:
    they are filled from the dataset's attributes of the same names before ``build`` is called.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the losses that ``losses`` yields for every micro-batch, in order."""

    conditional: ClassVar[bool] = False
    """Whether some micro-batches leave some parameters without a gradient (a branch not taken, say). Under DDP
    gradients are then reduced after the last backward instead of during it: exact, but not overlapped."""

    samples_interact: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its micro-batch (in-batch negatives, load balancing): the
    cut then changes the gradient, which the plan says; without it, such losses are refused."""

    mixes: ClassVar[bool] = False
    """Whether ``losses`` knows of mixed samples (mixup, CutMix): where the batch has ``mixed_labels``, the loss is
    ``lam`` times that of ``labels`` and 1 - ``lam`` times that of ``mixed_labels``; ``lam`` is one number for all."""

    @property
    def seeded(self) -> bool:
        """Whether ``losses`` reads ``batch["seeds"]``, int64 (n,): numbers to draw by for each training sample, the
        same however the batch is cut; evaluations have none."""
        return False

    blocks: Sequence[type] = ()
    """Classes of the repeated modules (encoder layers): the unit of sharding, checkpointing and offload."""

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """How ranks share the blocks of ``module`` (``memory.tensor_parallel``): from names of linear layers, in which
        ``*`` stands for what is between two dots, to ``colwise`` for those that begin a part (queries, keys, values, an
        MLP's first) and ``rowwise`` for the one that ends it; docs/your-own-model.md has an example. Empty: unknown."""
        return {}

    lossy: Sequence[str] = ()
    """What of it trains something else than the whole model, in words (LoRA of rank 8, say); the plan names it."""

    def prepare(self) -> None:
        """Fetch what ``build`` reads (weights, configuration); called once a node before any rank builds."""

    def build(self) -> nn.Module:
        """Create the module on the current default device, in the current default dtype; by default the ``skeleton``,
        filled from what is ``pretrained``."""
        if not self.starts_on_meta():
            raise NotImplementedError(f"{type(self).__name__} must define build() -> nn.Module")
        from trainer.weights.streaming import build_streamed

        return build_streamed(self)

    def skeleton(self) -> nn.Module:
        """Create the module as ``build`` does, in the current default dtype, but load no weights: called where
        parameters go to meta as soon as they are made, and buffers are real."""
        raise RecipeError(f"{type(self).__name__} cannot start on meta: define skeleton() and pretrained()")

    def adapt(self, module: nn.Module) -> nn.Module:
        """What trains of the module that ``skeleton`` makes, in place: with adapters, say. By default all of it."""
        return module

    def pretrained(self) -> Pretrained:
        """Say where each value of the adapted module that ``skeleton`` makes comes from; reads files' headers only."""
        raise RecipeError(f"{type(self).__name__} cannot start on meta: define skeleton() and pretrained()")

    def base_files(self) -> Sequence[Path]:
        """The files that hold frozen weights: a checkpoint has their hashes, and leaves out what they hold."""
        return ()

    def in_base(self, module: nn.Module) -> Collection[str]:
        """The names of the parameters of the trained ``module`` that are as ``base_files`` have them."""
        return ()

    def unloaded(self) -> Model:
        """This model with random weights, so that ``build`` reads none: by default without its field ``weights``."""
        if getattr(self, "weights", None) is None:
            return self
        return dataclasses.replace(self, weights=None)  # type: ignore[type-var]

    def suited_to(self, data: Data) -> Model:
        """This model with what it takes from ``data``, prepared, besides the fields that both have."""
        return self

    def outlined(self, outline: Outline) -> Model:
        """This model as it is planned with data of which no more than ``outline`` is here: by default as it is."""
        return self

    @classmethod
    def starts_on_meta(cls) -> bool:
        """Whether both ``skeleton`` and ``pretrained`` are defined."""
        return cls.skeleton is not Model.skeleton and cls.pretrained is not Model.pretrained

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield one :class:`Loss` per name in ``loss_names``; each graph is freed before the next is asked for."""
        raise NotImplementedError(f"{type(self).__name__} must define losses(module, batch) -> Iterator[Loss]")

    def weigh(self, batch: Any) -> dict[str, float]:
        """The weight of every loss of a micro-batch, from its host copy, before any forward: by default the entries of
        ``batch["labels"]`` that are not ``-100``, samples for a classifier, tokens for a tagger or a language model."""
        if self.mixes and "mixed_labels" in batch:
            return weigh_mixed(batch, self.weigh)
        try:
            labels = batch["labels"]
            entries = labels.numel()
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise RecipeError(
                f"{type(self).__name__} has no weigh(), and its micro-batches no tensor 'labels' to count the entries "
                "of: define weigh(batch), a dict from each loss's name to how many items it is the sum of"
            ) from error
        if entries <= 64:  # a sample each, usually: a list is several times faster than tensor operations
            ignored = labels.flatten().tolist().count(IGNORED_LABEL)
        else:
            ignored = int((labels == IGNORED_LABEL).count_nonzero())
        return dict.fromkeys(self.loss_names, float(entries - ignored))

    def packs(self) -> bool:
        """Whether ``packed`` leaves padding out, so that a micro-batch has as many tokens as its samples together."""
        return False

    def packed(self, batch: Any) -> Any:
        """A collated micro-batch as ``losses`` gets it, made from the host copy before that goes to the device."""
        return batch

    def tokenizer_or_none(self) -> Any:
        """The tokenizer that the dataset must use, for text models."""
        return None

    def image_input(self) -> ImageInput | None:
        """The images that it was trained on, for datasets that leave their size or normalisation to the model."""
        return None

    own_format: ClassVar[bool] = False
    """Whether ``save`` and ``saved_in`` keep a trained model in a format of its own (a Hugging Face folder, say);
    by default it is kept as ``model.safetensors`` and ``config.json``."""

    def merged(self) -> Model:
        """This model as it is saved: without what is only there while it trains, such as adapters."""
        return self

    def merged_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors ``state`` of the trained ``module``, as they fit what ``merged().build()`` makes."""
        return dict(state)

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the trained model to an empty ``folder``, for a model with ``own_format``. The weights of ``module``
        may be sharded; ``state`` holds all weights and persistent buffers by name, whole."""
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define save(module, folder, state)")

    def saved_in(self, folder: Path) -> Model:
        """This model with everything that ``build`` reads taken from ``folder``, for a model with ``own_format``."""
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define saved_in(folder)")


class Metric:
    """A figure of an evaluation that no name of ``run.metrics`` stands for: ``Run(metrics=["f1_macro", Top3()])``."""

    name: ClassVar[str]
    """What it is called in ``metrics.csv``, in loggers and by ``run.best``."""
    higher_is_better: ClassVar[bool] = True

    def compute(self, predictions: Tensor, targets: Tensor) -> float:
        """The figure of a whole evaluation; called once, on the first rank.

        Args:
            predictions: what the model gives as ``Loss.logits``, of all items over all ranks, in the host's memory and
                in no particular order; float32 or float64, shape ``(items, ...)``.
            targets: ``Loss.targets`` of the same items, shape ``(items, ...)``; those that are -100 are left out.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute(predictions, targets) -> float")


def weigh_mixed(batch: Mapping[str, Any], weigh: Callable[[Any], dict[str, float]]) -> dict[str, float]:
    """The weights of a micro-batch of mixed samples: of its labels and its mixed labels, each by its share."""
    plain = {key: value for key, value in batch.items() if key not in ("mixed_labels", "lam")}
    share, own, other = float(batch["lam"][0]), weigh(plain), weigh({**plain, "labels": batch["mixed_labels"]})
    return {name: other[name] + share * (own[name] - other[name]) for name in own}  # exact where they are equal


class Data:
    """Where samples come from. A dataset of one's own is a dataclass that subclasses this.

    After ``prepare``, ``train``, ``val`` and ``test`` are map-style datasets (``len`` and ``[i]``) or ``None``.
    Such a dataset may also have ``lengths`` (tokens of each sample, for cutting a batch by length), ``augmented``
    (``True`` when ``[i]`` draws random numbers; torch, NumPy and ``random`` are then seeded per sample),
    ``__getitems__(indices)`` that returns a collated batch at once, ``groups`` (:class:`Groups`, where reading all over
    it would be slow), ``longest`` (samples that are likely to be the longest, where ``lengths`` are not known),
    ``labels`` (that of every sample, in their order), ``describe(i)``, the file or row of a sample for error messages,
    and ``fingerprint()``, a text that differs wherever the content of the split does: a run is resumed on the same data
    only. Without it, the fingerprint is made of the size, the lengths and up to 64 samples.

    ``workers`` processes load ahead (``None``: up to 4 a rank on a GPU); a micro-batch that takes one of them more than
    ``worker_timeout`` seconds ends the run. Up to ``max_bad_samples`` samples, over all splits and ranks, may turn out
    not to be loadable: they are left out, as if they had no weight. Any of the three may be a field, and so a flag.
    """

    tasks: ClassVar[Sequence[Task]] = ()
    """The tasks of models that it has labels for; empty where only its author knows."""

    seen_by: Model | None = None
    """The model of the recipe, which says what the dataset leaves open: see ``Model.image_input``."""

    prepared_for: Task = "single_label"
    """The task of the model, as its recipe says before ``prepare`` is called."""

    train: Any = None
    val: Any = None
    test: Any = None
    workers: int | None = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    def require_files(self) -> None:
        """Refuse files that must be here and are not: called before torch is imported, or anything is fetched."""

    def prepare(self, tokenizer: Any = None) -> None:
        """Find, download, check and tokenise; called on every rank, the first rank of a node first."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(tokenizer)")

    def outline(self) -> Outline | None:
        """What the dataset holds, where its files are not here: ``trainer plan`` then makes samples up. ``None`` where
        they are here, or nobody knows: they are prepared, as for a run."""
        return None

    def mixing(self) -> Mixing | None:
        """How the training samples of a batch are mixed with each other, ``pixel_values`` (n, channels, H, W) and
        ``labels``; ``None`` if they are not."""
        return None

    def chances(self) -> Sequence[float] | None:
        """How likely each training sample is drawn, with replacement, relative to the others, once they are prepared;
        ``None`` where an epoch has each of them once."""
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a micro-batch (any nest of tensors; the built-in models read a dict with ``labels``) of samples."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))
