"""The interfaces of models, metrics, datasets and splits. Imports no torch.

A custom model subclasses :class:`Model` and defines ``build`` and ``losses``; the other members of :class:`Model` are
optional. Everything below the line "Optional capabilities" is for models that do more than train.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from trainer.errors import RecipeError, require
from trainer.system.names import unknown_keyword
from trainer.values import IGNORED_LABEL, Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from trainer.values import DataSpec, ImageInput, Loss, MixupConfig, PretrainedWeights, ShuffleGroups

PADDING_MULTIPLE = 8
"""Texts are padded to a multiple of this many tokens, because tensor cores need it for full speed."""


class Settings:
    """Base class of dataclasses with settings, which suggests a name for an unknown keyword."""

    if not TYPE_CHECKING:  # otherwise checkers would accept any keyword

        def __new__(cls, *args: Any, **keywords: Any) -> Settings:
            is_dataclass = "__dataclass_fields__" in vars(cls)  # not only one of its bases
            known = [field.name for field in dataclasses.fields(cls) if field.init] if is_dataclass else keywords
            for name in keywords:
                if name not in known:
                    raise RecipeError(unknown_keyword(cls.__name__, name, known))
            return super().__new__(cls)


class OptionalAttributes(Settings):
    """Base class with typed attributes that a subclass may define. A missing one has its value in ``DEFAULTS``. The
    defaults are not class attributes: a dataclass would use those as defaults of its fields with the same names."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}

    if not TYPE_CHECKING:  # otherwise mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name in self.DEFAULTS:
                return self.DEFAULTS[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Model(OptionalAttributes):
    """A model to train. A custom model is a dataclass that subclasses this and defines ``build`` and ``losses``.

    The fields ``num_classes``, ``class_names``, ``image_size`` and ``channels`` may be ``None``: before ``build`` is
    called, they are filled from the attributes of the dataset with the same names.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the losses that ``losses`` yields for every micro-batch, in this order."""
    conditional: ClassVar[bool] = False
    """Whether some micro-batches leave some parameters without a gradient, for example by a branch that is not taken.
    DDP then reduces gradients after the last backward instead of during it: exact, but without overlap."""
    samples_interact: ClassVar[bool] = False
    """Whether the loss of a sample depends on other samples of its micro-batch (load balancing). The size of
    micro-batches then changes the gradient, which the plan reports. For in-batch negatives, use ``WholeBatch``."""
    blocks: Sequence[type] = ()
    """Classes of the repeated modules (encoder layers): the unit of sharding, checkpointing and offload."""

    task: Task | None  # what the model predicts
    num_classes: int | None
    class_names: list[str] | None
    image_size: int | None
    channels: int | None
    weights: Any  # the pretrained weights that ``build`` reads; ``None`` for random weights
    lora: Any

    DEFAULTS: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("task", "num_classes", "class_names", "image_size", "channels", "weights", "lora")
    )

    def build(self) -> nn.Module:
        """Create the module on the current default device, in the current default dtype."""
        if not isinstance(self, Streamable) or not self.starts_on_meta():
            raise NotImplementedError(f"{type(self).__name__} must define build() -> nn.Module")
        from trainer.weights.streaming import build_streamed

        return build_streamed(self)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield one :class:`Loss` per name in ``loss_names``. Each graph is freed before the next loss is requested."""
        raise NotImplementedError(f"{type(self).__name__} must define losses(module, batch) -> Iterator[Loss]")

    def weigh(self, batch: Any) -> dict[str, float]:
        """Return the weight of every loss of a micro-batch, from its copy on the host, before any forward. The default
        counts the ``batch["labels"]`` that are not -100: samples of a classifier, tokens of a language model."""
        if isinstance(self, DrawnInputs) and self.mixes and "mixed_labels" in batch:
            return mixed_sample_weights(batch, self.weigh)
        try:
            labels = batch["labels"]
            entries = labels.numel()
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            cause = f"{type(self).__name__} has no weigh(), and its micro-batches have no tensor 'labels' to count"
            fix = "define weigh(batch) and return a dict from each loss's name to the number of items in its sum"
            raise RecipeError(f"{cause}: {fix}") from error
        if entries <= 64:  # usually one per sample: a list is several times faster than tensor operations
            ignored = labels.flatten().tolist().count(IGNORED_LABEL)
        else:
            ignored = int((labels == IGNORED_LABEL).count_nonzero())
        return dict.fromkeys(self.loss_names, float(entries - ignored))

    def __init_subclass__(cls, **options: Any) -> None:
        if cls.__module__ != __name__:
            _check_capabilities(cls)
        super().__init_subclass__(**options)


# Optional capabilities of a model. A model subclasses those that it needs, as in ``class Net(Streamable, Exportable)``.
# Callers ask ``isinstance(model, Streamable)``, or ``capability(model, Packable).packs()`` for a default answer.


class Streamable(Model):
    """A model that keeps frozen weights out of checkpoints, or that starts on meta (``memory.init=meta``): it then
    defines ``skeleton`` and ``pretrained``, which the default ``build`` uses."""

    def skeleton(self) -> nn.Module:
        """Create the module as ``build`` does, without loading weights. Parameters go to meta; buffers are real."""
        raise RecipeError(f"{type(self).__name__} cannot start on meta: define skeleton() and pretrained()")

    def pretrained(self) -> PretrainedWeights:
        """Return where each value of the adapted ``skeleton`` comes from. Reads only the headers of files."""
        raise RecipeError(f"{type(self).__name__} cannot start on meta: define skeleton() and pretrained()")

    def adapt(self, module: nn.Module) -> nn.Module:
        """Change the module from ``skeleton`` in place to what trains, for example by adding adapters."""
        return module

    def base_files(self) -> Sequence[Path]:
        """Return the files with frozen weights. A checkpoint stores their hashes instead of the weights."""
        return ()

    def in_base(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parameters of the trained ``module`` whose values ``base_files`` hold."""
        return ()

    def unloaded(self) -> Model:
        """Return this model with random weights, so that ``build`` reads no file. Default: ``weights`` is ``None``."""
        return without_weights(self)

    @classmethod
    def starts_on_meta(cls) -> bool:
        """Return whether both ``skeleton`` and ``pretrained`` are defined."""
        return cls.skeleton is not Streamable.skeleton and cls.pretrained is not Streamable.pretrained


class Exportable(Model):
    """A model that decides how it is saved after training. The default is ``model.safetensors`` and ``config.json``."""

    own_format: ClassVar[bool] = False
    """Whether ``save`` and ``saved_in`` write and read a custom format, for example a Hugging Face folder."""

    def merged(self) -> Model:
        """Return this model as it is saved: without parts that exist only in training, such as adapters."""
        return self

    def merged_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert ``state``, the whole tensors of the trained ``module``, to the names of ``merged().build()``."""
        return dict(state)

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the trained model to an empty ``folder``. Required with ``own_format``. ``module`` may be sharded;
        ``state`` holds all weights and persistent buffers by name, whole."""
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define save(module, folder, state)")

    def saved_in(self, folder: Path) -> Model:
        """Return this model so that ``build`` reads everything from ``folder``. Required with ``own_format``."""
        raise NotImplementedError(f"{type(self).__name__} has own_format and must define saved_in(folder)")


class Packable(Model):
    """A model that changes micro-batches before the forward pass, for example to leave out padding."""

    def packs(self) -> bool:
        """Return whether ``packed`` removes padding, so that a micro-batch has exactly the tokens of its samples."""
        return False

    def packed(self, batch: Any) -> Any:
        """Convert a collated micro-batch to the input of ``losses``, on the host, before it goes to the device."""
        return batch


class WholeBatch(Model):
    """A model whose loss compares all samples of a batch (in-batch negatives). It defines ``embed`` and ``loss_of_all``
    instead of ``losses``. Steps are exact for any cut: see trainer/engine/two_pass.py. Evaluations use batches of the
    same size, in the order of the split."""

    def embed(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the embeddings of a micro-batch, shape ``(samples, ...)``. Each depends only on its own sample."""
        raise NotImplementedError(f"{type(self).__name__} must define embed(module, batch) -> Tensor")

    def loss_of_all(self, embeddings: Tensor) -> Loss:
        """Return the loss of a batch from ``embeddings``, in fp32 or wider, of all its samples over all ranks, summed
        over them, as the only one of ``loss_names``. It has no parameters: apply those in ``embed``."""
        raise NotImplementedError(f"{type(self).__name__} must define loss_of_all(embeddings) -> Loss")


class DrawnInputs(Model):
    """A model whose ``losses`` reads random draws of the loader from the batch: mixed labels, or a seed per sample."""

    mixes: ClassVar[bool] = False
    """Whether ``losses`` accepts mixed samples (mixup, CutMix). If the batch has ``mixed_labels``, the loss is ``lam``
    times the loss of ``labels`` plus 1 - ``lam`` times that of ``mixed_labels``; ``lam`` is one number for all."""

    @property
    def seeded(self) -> bool:
        """Whether ``losses`` reads ``batch["seeds"]``, int64 (n,): one seed per training sample, independent of how the
        batch is split. Evaluation batches have no seeds."""
        return False


class Preparable(Model):
    """A model that fetches files before ``build``, or that shares facts with the dataset."""

    def prepare(self) -> None:
        """Fetch what ``build`` reads (weights, configuration). Called once per node before any rank builds."""

    def suited_to(self, data: Data) -> Model:
        """Return this model adjusted to the prepared ``data``, in addition to the fields that both have."""
        return self

    def tokenizer_or_none(self) -> Any:
        """Return the tokenizer that the dataset must use, for text models."""
        return None

    def image_input(self) -> ImageInput | None:
        """Return which images the model was trained on, for datasets that leave size or normalisation to the model."""
        return None


class Plannable(Model):
    """A model that supports tensor parallelism, plans without data, or training of only a part."""

    lossy: Sequence[str] = ()
    """The lossy techniques of this model, such as "LoRA of rank 8"; shown in the plan."""

    def for_spec(self, spec: DataSpec) -> Model:
        """Return the model to plan with if the data is missing and only ``spec`` is known."""
        return self

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Return how ranks share the blocks of ``module`` (``memory.tensor_parallel``). Empty: not supported.

        Keys are names of linear layers, with ``*`` for the text between two dots. Values are ``colwise`` for layers
        that begin a part (queries, keys, values) and ``rowwise`` for the layer that ends it: docs/your-own-model.md.
        """
        return {}


CAPABILITIES: tuple[type[Model], ...] = (
    *(Streamable, Exportable, Packable, WholeBatch, DrawnInputs, Preparable, Plannable),
)
M = TypeVar("M", bound=Model)


def capability(model: Model, kind: type[M]) -> M:
    """Return ``model`` if it is a ``kind``, otherwise a default ``kind``. Ask it only for members whose default does
    not depend on the model."""
    return model if isinstance(model, kind) else kind()


def without_weights(model: Model) -> Model:
    """Return ``model`` with random weights: what its ``unloaded`` returns, or a copy with ``weights=None``."""
    if isinstance(model, Streamable) and type(model).unloaded is not Streamable.unloaded:
        return model.unloaded()
    return model if model.weights is None else dataclasses.replace(model, weights=None)  # type: ignore[type-var]


def _check_capabilities(cls: type[Model]) -> None:
    """Reject a class that defines members of a capability without subclassing it: nothing would call them."""
    own = {name for name in vars(cls) if not name.startswith("_")}
    members = {kind: own & vars(kind).keys() for kind in CAPABILITIES if not issubclass(cls, kind)}
    missing = {kind.__name__: names for kind, names in members.items() if names}
    defined = ", ".join(sorted(set().union(*missing.values())))
    require(not missing, f"{cls.__qualname__} defines {defined}: subclass trainer.contract.{', '.join(missing)}")


class Metric:
    """A custom metric, for metrics without a name in ``run.metrics``: ``Run(metrics=["f1_macro", Top3()])``."""

    name: ClassVar[str]
    """The name in ``metrics.csv``, in loggers and for ``run.best``."""
    higher_is_better: ClassVar[bool] = True

    def compute(self, predictions: Tensor, targets: Tensor) -> float:
        """Return the value for a whole evaluation. Called once, on the first rank. ``predictions`` are ``Loss.logits``
        of all items over all ranks, in host memory and in any order, float32 or float64, shape ``(items, ...)``;
        ``targets`` are their ``Loss.targets``, shape ``(items, ...)``, without items whose target is -100."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(predictions, targets) -> float")


def mixed_sample_weights(batch: Mapping[str, Any], weigh: Callable[[Any], dict[str, float]]) -> dict[str, float]:
    """Return the weights of a micro-batch of mixed samples: those of both labels, weighted by their shares."""
    plain = {key: value for key, value in batch.items() if key not in ("mixed_labels", "lam")}
    share, own, other = float(batch["lam"][0]), weigh(plain), weigh({**plain, "labels": batch["mixed_labels"]})
    return {name: other[name] + share * (own[name] - other[name]) for name in own}  # exact if both are equal


class Samples(OptionalAttributes):
    """Base class of a split. A subclass defines ``__len__`` and ``__getitem__``; everything else is optional. A list, a
    torch ``Dataset`` or a ``datasets.Dataset`` is a split, too: :func:`as_samples` reads the same attributes."""

    augmented: bool  # whether ``[i]`` draws random numbers, from torch, NumPy or ``random``, seeded per sample
    lengths: Sequence[int] | None  # tokens of each sample, to split a batch by length
    longest: Sequence[int]  # samples that are probably the longest, if ``lengths`` are unknown
    labels: Sequence[Any] | None  # the label of every sample, in order
    groups: ShuffleGroups | None  # neighbouring samples, if reading in random order is slow
    bytes_per_token: float | None  # average bytes of text per predicted token, for the metric bits_per_byte
    __getitems__: Callable[[Sequence[int]], Any] | None  # for several indices: a collated batch or a list

    samples: Sequence[Any] | None  # ``(path, label)`` of every image file, as in torchvision
    digests: Sequence[bytes] | None  # a hash of every sample without its label, to find duplicates
    images: Tensor | None  # all images, if in memory, to find duplicates
    table: Any  # the ``datasets.Dataset`` with ``input_ids`` of the samples, to find duplicates
    chosen: Sequence[int] | None  # the rows of ``table`` that are the samples

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "augmented": False,
        "longest": (),
        **dict.fromkeys(("lengths", "labels", "groups", "bytes_per_token", "__getitems__")),
        **dict.fromkeys(("samples", "digests", "images", "table", "chosen")),
    }

    @property
    def original(self) -> Any:
        """The split as the dataset defines it: this object, or the object that :func:`as_samples` adapted."""
        return self

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__()")

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __getitem__(index)")

    def describe(self, index: int) -> str:
        """Return the file or row of a sample, for error messages."""
        return f"sample {index} of {type(self.original).__name__}"

    def fingerprint(self) -> str | None:
        """Return a text that differs if the content differs: a run resumes only on the same data. ``None`` stands for
        a hash of the size, the lengths and up to 64 samples."""
        return None

    def files(self) -> Mapping[str, str]:
        """Return a short hash of every file by its name, so that a resumed run can name the file that changed."""
        return {}


class DrawnSamples(Samples):
    """A split that loads samples one by one and converts a whole micro-batch at once, which is faster for images."""

    def draw(self, index: int) -> Any:
        """Return a sample before conversion."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(index)")

    def together(self, drawn: Sequence[Any]) -> Any:
        """Return the micro-batch of samples from ``draw``."""
        raise NotImplementedError(f"{type(self).__name__} must define together(drawn)")


class _AdaptedSamples(Samples):
    """A split of another class with the attributes of :class:`Samples`; missing ones have their defaults."""

    def __init__(self, split: Any) -> None:
        self._split = split
        for name in ("describe", "fingerprint", "files"):
            if (own := getattr(split, name, None)) is not None:
                setattr(self, name, own)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            default = super().__getattr__(name)
            value = getattr(self._split, name, default)
            return default if value is None else value

    @property
    def original(self) -> Any:
        return self._split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> Any:
        return self._split[index]


def as_samples(split: Any) -> Samples:
    """Return ``split`` as :class:`Samples`: unchanged if it is one, otherwise adapted."""
    return split if isinstance(split, Samples) else _AdaptedSamples(split)


def splits_of(data: Data) -> dict[str, Samples]:
    """Return the splits of a prepared dataset by name: train, val and test, if they exist."""
    found = {"train": data.train, "val": data.val, "test": data.test}
    return {name: as_samples(split) for name, split in found.items() if split is not None}


class Data(OptionalAttributes):
    """A dataset. A custom dataset is a dataclass that subclasses this and defines ``prepare``.

    After ``prepare``, ``train``, ``val`` and ``test`` are splits or ``None``: objects with ``len`` and ``[i]``, and
    with any of the attributes of :class:`Samples`.
    """

    tasks: ClassVar[Sequence[Task]] = ()  # the tasks that the dataset has labels for; empty if unknown

    train: Any = None
    val: Any = None
    test: Any = None

    # A dataset may define these three as fields, which makes them flags.
    workers: int | None = 0  # processes that load ahead; ``None`` is up to 4 per rank on a GPU
    worker_timeout: float = 300.0  # seconds that a worker may take for a micro-batch before the run ends
    max_bad_samples: int = 0  # samples of all splits and ranks that may fail to load; they have no weight

    num_classes: int | None
    class_names: Sequence[str] | None
    image_size: int | None
    channels: int | None
    max_length: int | None  # maximum number of tokens of a sample
    text_column: str | None  # the column of tables with the text, for ``trainer predict``
    val_fraction: float | None  # the share of training samples held out for validation, if it is a setting
    answers: ClassVar[bool]  # whether a model answers a text or messages; otherwise it continues the text
    belonging: ClassVar[Mapping[str, Sequence[str]]]  # for a setting, those that are reset with it
    load_image: Callable[[str], Tensor] | None  # read an image file for ``trainer predict``
    encode: Callable[[Sequence[Any], Any], Any] | None
    """Convert texts with a tokenizer to a batch without labels, for ``trainer predict``."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "answers": False,
        "belonging": {},
        **dict.fromkeys(("num_classes", "class_names", "image_size", "channels", "max_length")),
        **dict.fromkeys(("text_column", "val_fraction", "load_image", "encode")),
    }

    _model: Model | None = None

    def require_files(self) -> None:
        """Refuse missing files. Called before torch is imported and before anything is downloaded."""

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        """Find, download, check and tokenise. Called on every rank, on the first rank of a node first. ``tokenizer``
        is the model's, if it has one. ``model`` is the recipe's; the signature may omit it."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(tokenizer, model)")

    def use_model(self, model: Model | None) -> None:
        """Store the model that the samples are for. Called before ``spec``, ``prepare`` and predictions."""
        self._model = model or self._model

    def for_evaluation(self, model: Model | None = None, path: str | None = None) -> Data:
        """Return the dataset that evaluates a trained ``model``, without the training files if possible.

        Args:
            model: the trained model; ``None`` before it is loaded, when only the files are checked.
            path: a file to evaluate instead of the test set.
        """
        require(path is None, f"{type(self).__name__} cannot evaluate the file {path!r}: set its test set by flags")
        return self

    def spec(self) -> DataSpec | None:
        """Return the shapes and sizes of the dataset if its files are missing, so that ``trainer plan`` can create
        synthetic samples. ``None`` if the files exist, or if nothing is known."""
        return None

    def mixup_config(self) -> MixupConfig | None:
        """Return the settings of mixup and CutMix, for batches of ``pixel_values`` and ``labels``; ``None`` is off."""
        return None

    def sample_weights(self) -> Sequence[float] | None:
        """Return a weight per training sample, to draw with replacement; ``None`` draws each once per epoch."""
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate samples to any nested structure of tensors. Built-in models read a dict with ``labels``."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    @property
    def _task(self) -> Task:
        return (self._model and self._model.task) or "single_label"


def prepare_data(data: Data, model: Model | None, tokenizer: Any) -> None:
    """Call ``data.prepare``, with the model if its signature accepts one."""
    data.use_model(model)
    parameters = inspect.signature(data.prepare).parameters.values()
    if any(one.name == "model" or one.kind is one.VAR_KEYWORD for one in parameters):
        data.prepare(tokenizer, model=model)
    else:
        data.prepare(tokenizer)
