"""What transformers reads from folders and from the hub, with no code executed that comes from there."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from trainer.contract import Preparable
from trainer.errors import RecipeError, RunError, nearest, require
from trainer.models.common import MOST_LAYERS, Supervised, require_filled, train_last_blocks
from trainer.models.lora import OWN, Adaptable, LoRA, reset_adapters, save_adapters
from trainer.system.files import require_regular, room_in
from trainer.system.hub import advice, away, tell_of_cache
from trainer.values import Pretrained
from trainer.weights.blocks import find_blocks, switch_cache_off

if TYPE_CHECKING:
    from torch import Tensor, nn
    from typing_extensions import Self

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
FROM_PADDING = ("roberta", "camembert", "longformer", "mpnet", "luke", "ibert", "xmod")  # in names of model types

NO_DROPOUT = ("layerdrop", "path", "connect", "token")
"""What a configuration may drop besides features and weights of attention: in names with ``drop``."""

PROBLEM_TYPES = {name: f"{name}_classification" for name in ("single_label", "multi_label")}
PROBLEM_TYPES["regression"] = "regression"
"""How transformers calls the tasks of its classifiers of whole samples."""

ADAPTER_FOLDER = "adapter"
"""In the folder of a saved model."""

PEFT_TASKS = {"AutoModelForSequenceClassification": "SEQ_CLS", "AutoModelForTokenClassification": "TOKEN_CLS"}
PEFT_TASKS["AutoModelForCausalLM"] = "CAUSAL_LM"
"""What peft calls the task of a class of transformers."""

MOST_TEXT = 500_000_000
"""Bytes of a file of settings or words; the largest vocabularies take some ten millions."""


def local_folder(source: str) -> str:
    """The path of a ``file://`` URL; anything else as it is."""
    return source.removeprefix("file://")


PUBLISHED = {
    **dict.fromkeys(("distilbert/distilbert-base-uncased", "distilbert-base-uncased"), "distilbert-base-uncased"),
    "google/bigbird-roberta-base": "bigbird-roberta-base",
    **{f"HuggingFaceTB/SmolLM2-{size}": f"SmolLM2-{size}" for size in ("135M", "135M-Instruct", "360M", "1.7B")},
    **{f"meta-llama/Llama-{size}": f"Llama-{size}" for size in ("3.1-8B", "3.2-1B", "3.2-3B")},
    **{f"Qwen/Qwen{size}": f"Qwen{size}" for size in ("2.5-7B", "3-0.6B", "3-1.7B", "3-4B", "3-8B")},
}
"""Hub ids of packaged recipes and language models, and the folders here with the ``config.json`` they publish."""


def published(source: str) -> Path | None:
    """The folder in this package that holds the ``config.json`` of the hub id ``source``."""
    name = None if is_local(source) else PUBLISHED.get(source)
    return None if name is None else Path(__file__).parent / "published" / name


def is_local(source: str) -> bool:
    """Whether ``source`` is a folder here."""
    return isdir(local_folder(source))  # Path.is_dir raises an error for a name that is too long


def from_hub(key: str, source: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``load`` of transformers with the other arguments; what goes wrong, but lack of memory, becomes one line.

    That names the setting ``model.key``, whose value ``source`` is a hub id, a folder or a ``file://`` URL of one.
    """
    from safetensors import SafetensorError

    if source.startswith(("file://", "/", "./", "../")) and not is_local(source):
        raise RecipeError(f"model.{key}={source} is not a folder")
    if is_local(source):
        _require_files(Path(local_folder(source)))
    here = is_local(source) or load.__name__ == "from_config"  # made of a configuration that was read before
    why_not = "" if here else away()
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        with room_in(Path(HF_HUB_CACHE), "set HF_HOME to a folder on another disk"):
            found = load(*args, **kwargs)
    except Exception as error:  # transformers checks little of what is in a file before it uses it
        if isinstance(error, RunError | RecipeError) or (
            isinstance(error, MemoryError | RuntimeError) and "memory" in str(error)
        ):
            raise  # no fault of the files
        reason = next(iter(str(error).strip().splitlines()), "")
        if not isinstance(error, OSError | ValueError | SafetensorError):
            reason = f"{type(error).__name__}: {reason}."
        fix = "Give a local folder as save_pretrained writes it, or a hub id"
        if why_not and isinstance(error, OSError):
            reason = f"it is no folder here, nor in the hub's cache, and {why_not}."
            kinds = {"name": ", or a model type such as distilbert", "tokenizer": ", or bytes, which needs no files"}
            kind = kinds.get(key, "")
            fix = f"Give a local folder as save_pretrained writes it{kind}; {advice()}"
        if "trust_remote_code" in str(error):
            reason = "it needs Python code that comes with it (auto_map), and no such remote code is executed."
            fix = (
                "Give a model of an architecture that transformers has itself, or read the code and write a "
                "trainer.Model that imports it"
            )
        raise RecipeError(f"model.{key}={source!r} cannot be loaded: {reason.rstrip('.')}. {fix}") from error
    if why_not:
        tell_of_cache()
    return found


def _require_files(folder: Path) -> None:
    """Refuse what transformers would wait for, or read without an end: a named pipe, a device, JSON of gigabytes."""
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            try:
                require_regular(path.stat(), path)
            except OSError as error:
                raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
            small = path.suffix not in (".json", ".txt") or path.stat().st_size <= MOST_TEXT
            require(small, f"{path} is larger than {MOST_TEXT / 1e6:g} MB: too much for settings or words")


def positions(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model takes, from the settings in its ``config.json``; ``None`` where any number goes."""
    kind = str(config.get("model_type"))
    found = next((config[name] for name in POSITIONS if isinstance(config.get(name), int)), 0)
    if any(name in kind for name in FROM_PADDING):  # which do not use the positions up to that of the padding token
        found -= 1 + (config.get("pad_token_id") or 0)
    return found if found > 0 and "t5" not in kind else None  # T5 has the entry, but only relative positions


COUNT = re.compile(r"(?!.*(per_layer|_size$|_dim|channels)).*(layer|depth|blocks|block_sizes|experts|stages)")
"""Names of settings that count layers, which are built one by one; the settings left out are sizes of tensors."""

MAX_LABELS = 500_000  # each is a name in two mappings


def require_moderate_config(said: str, config: Mapping[str, Any]) -> None:
    """Refuse counts of layers and labels that would take the machine, before transformers builds anything of them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            require_moderate_config(said, value)
        numbers = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, int)]
        # A list has the layers of each stage, or the numbers of single layers.
        count = sum(numbers) if "depth" in str(key) or "num" in str(key) else max(numbers, default=0)
        labels = len(value) if isinstance(value, Mapping) else count if key == "num_labels" else 0
        require(labels <= MAX_LABELS, f"{said}: {key} has {labels:,} labels, and the max is {MAX_LABELS:,}: lower it")
        if COUNT.match(str(key)):
            many = f"{said}: {key} stands for {count:,} layers, and the max is {MOST_LAYERS:,}: lower it"
            require(max(count, len(numbers)) <= MOST_LAYERS, many)
            ends = str(key).endswith(("layers", "depths", "block_sizes"))
            few = ends and min(numbers, default=1) < (not str(key).endswith("layers"))  # a decoder may have no layers
            require(not few, f"{said}: {key} {value!r:.80} must be at least 1")


def _read_config(source: str, **options: Any) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    require_moderate_config(f"model.name={source!r}", PretrainedConfig.get_config_dict(source, **options)[0])
    return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def refuse_code(name: str, config: Any) -> None:
    """Refuse a ``config`` of the folder or hub id ``name`` for which transformers would run code from the hub."""
    wished = [getattr(config, key, None) for key in ("_attn_implementation", "_experts_implementation")]
    kernels = [text for text in map(str, wished) if "/" in text]
    asks = f"model.name={name!r}: its configuration asks for"
    require(
        not kernels,
        f"{asks} the kernel {', '.join(kernels)}, which is code from the hub, and is not executed: take "
        "attn_implementation out of its config.json",
    )
    require(
        getattr(config, "quantization_config", None) is None,
        f"{asks} quantised weights, which cannot be trained and may need code from the hub: give a model without "
        "quantization_config in its config.json",
    )
    require(
        "checkpoint_path" not in (getattr(config, "model_args", None) or {}),
        f"{asks} timm's checkpoint_path, a file that may be a pickle: take it out of model_args, and give the weights "
        "as a folder by model.weights",
    )


class HubModel(Adaptable, Preparable):
    """What the models share that a class of transformers makes, of a configuration or of weights.

    Args:
        name: where the configuration comes from: a hub id, a local folder, or a model type such as distilbert.
        weights: a hub id or a local folder, as save_pretrained writes it; null for random weights.
        config: entries of the configuration to override, such as {num_hidden_layers: 2}.
        revision: of everything that comes from the hub: a branch, tag or commit.
        dropout: sets all dropout rates of the configuration; null leaves them.
        train_last_blocks: freeze all but the last n blocks and the head; null trains everything.
        lora: train adapters in the blocks, and the head, instead of all weights.
    """

    name: str
    weights: str | None
    config: dict[str, Any]
    revision: str | None
    dropout: float | None
    train_last_blocks: int | None

    own_format = True
    auto: ClassVar[str]
    """The class of transformers, an ``AutoModelFor…``, that makes the module."""

    def __post_init__(self) -> None:
        require(self.dropout is None or 0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")
        self.lora.require_alone(self.train_last_blocks)

    def prepare(self) -> None:
        """Fetch configuration and weights into the hub's cache."""
        import transformers.modeling_utils  # noqa: F401  now: what it takes of the host is not the run's memory

        self._configuration()
        if self.weights is not None:
            self._folder(self.weights)

    def build(self) -> nn.Module:
        """The module that transformers makes, with adapters if some are to train."""
        if self.weights is None:
            return self.adapt(self.skeleton())
        # What is quantised is whole nowhere, not here either.
        return super().build() if self.lora.base == "nf4" else self._from_pretrained(self.weights)

    def _from_pretrained(self, weights: str) -> nn.Module:
        import torch
        import transformers

        self._require_complete()
        require(
            not Path(local_folder(weights), "adapter_config.json").exists(),  # transformers would load what it names
            f"model.weights={weights} is or holds a PEFT adapter: merge it into its model and save that",
        )
        module, found = self._load(
            "weights",
            weights,
            getattr(transformers, self.auto).from_pretrained,
            config=self._configuration(),
            dtype=torch.get_default_dtype(),  # it does not look at it itself
            trust_remote_code=False,
            use_safetensors=True,  # never a pickle
            ignore_mismatched_sizes=True,  # a head for another number of classes is replaced
            output_loading_info=True,
        )
        wrong = [*found["missing_keys"], *found["mismatched_keys"]]
        new = {key if isinstance(key, str) else key[0] for key in wrong} & dict(module.named_parameters()).keys()
        self._require_body(module, new)
        module = self.adapt(self._finished(module.to(torch.get_default_device())))
        self.draw_new(module, _initialise, new)
        return module

    def skeleton(self) -> nn.Module:
        """The module with random weights, without adapters."""
        self._require_complete()
        return self._finished(self._from_configuration(self.auto))

    def _require_complete(self) -> None:
        """Refuse to build while a setting is open that the dataset should have filled."""

    def _from_configuration(self, auto: str) -> nn.Module:
        """What the class of transformers with that name makes of the configuration, with random weights."""
        import torch
        import transformers

        load, dtype = getattr(transformers, auto), torch.get_default_dtype()  # it does not look at that itself
        config = self._configuration()
        return from_hub("name", self.name, load.from_config, config, dtype=dtype, trust_remote_code=False)

    def _load(self, key: str, source: str, load: Any, **options: Any) -> Any:
        """What a loader of transformers makes of ``source``, of the revision that is asked for."""
        return from_hub(key, source, load, local_folder(source), revision=self.revision, **options)

    def pretrained(self) -> Pretrained:
        """The tensors of ``weights`` under the names that transformers loads them to; the head may be new."""
        from trainer.weights.streaming import on_meta, stored_in, tied_names

        require(self.weights is not None, "there is nothing to stream: model.weights is null")
        skeleton = on_meta(self.skeleton)
        own = skeleton.state_dict()
        name_of = _renaming(skeleton, own)
        found = [(name_of(key), *value) for key, value in stored_in(self._folder(self.weights or "")).items()]
        stored = {name: place for name, place, shape in found if name in own and tuple(own[name].shape) == shape}
        new = {names[0] for names in tied_names(skeleton) if not stored.keys() & set(names)}
        self._require_body(skeleton, new)
        return self.as_adapted(Pretrained(stored, new, _initialise), skeleton)

    def _folder(self, weights: str) -> Path:
        """Where the files of ``weights`` are: a local folder, or one in the hub's cache, which is filled."""
        if is_local(weights):
            return Path(local_folder(weights))
        from huggingface_hub import snapshot_download

        options = {"revision": self.revision, "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model"]}
        return Path(from_hub("weights", weights, snapshot_download, weights, **options))

    def weight_files(self) -> Sequence[Path]:
        """The safetensors files of ``weights``."""
        from trainer.weights.streaming import stored_in

        found = stored_in(self._folder(self.weights)) if self.weights is not None else {}
        return sorted({place.file for place, _ in found.values()})

    def _finished(self, module: nn.Module) -> nn.Module:
        """The module without a cache, and with the parameters frozen that do not train."""
        switch_cache_off(module)
        if self.train_last_blocks is not None:
            train_last_blocks(module, self.train_last_blocks, self.blocks)
        return module

    def _require_body(self, module: nn.Module, new: Collection[str]) -> None:
        """Only a head may be new; transformers would fill anything else with random numbers as well."""
        from trainer.weights.files import shortened

        blocks = find_blocks(module, self.blocks)
        last = list(blocks[-1].parameters())[-1] if blocks else None
        names, parameters = zip(*module.named_parameters(), strict=True)
        end = next((at for at, parameter in enumerate(parameters, 1) if parameter is last), len(names))
        lost = sorted(set(new) & set(names[: end if self.head_is_new else None]))
        foreign = f"model.weights={self.weights!r} are not those of this {cast(Any, module).config.model_type}"
        require(not lost, f"{foreign}: {shortened(lost)} are missing or of another shape")

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``from_pretrained`` of the class ``auto`` loads. Where adapters have trained, ``adapter``
        in it is what peft loads onto ``weights``."""
        merged, own = self.merged_state(module, state), cast(Any, module)
        dtype = next(value.dtype for value in merged.values() if value.is_floating_point())
        own.save_pretrained(folder, state_dict=merged)
        config = copy.copy(own.config)  # has the type of the weights on the device; masters on the host are wider
        config.dtype = dtype
        config.save_pretrained(folder)
        if self.lora.rank and self.weights is not None:
            self.save_adapters(module, state, folder / ADAPTER_FOLDER)

    def save_adapters(self, module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write what peft loads onto ``weights``; ``module`` and ``state`` are as for :func:`save_adapters`."""
        weights = str(self.weights)
        source = str(Path(local_folder(weights)).absolute()) if is_local(weights) else weights
        facts = {"base_model_name_or_path": source, "revision": self.revision, "task_type": PEFT_TASKS.get(self.auto)}
        save_adapters(module, state, folder, **facts)

    def saved_in(self, folder: Path) -> Self:
        """The model whose configuration and weights ``save`` wrote to ``folder``."""
        source: Any = {"name": str(folder), "weights": str(folder), "config": {}, "revision": None, "lora": LoRA()}
        return replace(self, **source)  # type: ignore[type-var]

    def _type(self) -> str | None:
        """The model type, where it is all that ``name`` says; ``None`` for a folder or hub id."""
        return self.name if not is_local(self.name) and is_model_type(self.name) else None

    def _of_data(self) -> dict[str, Any]:
        """The settings of a configuration that is made of a model type alone which follow from the data."""
        return {}

    def _configuration(self) -> Any:
        import torch
        from transformers import AutoConfig

        kind = self._type()
        require_moderate_config("model.config", self.config)
        if kind is not None:
            of_data = self._of_data()
            config = AutoConfig.for_model(kind, **of_data)
        elif self.weights is None and self.revision is None and (folder := published(self.name)):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config.name_or_path = self.name
        else:
            config = self._load("name", self.name, _read_config)
        unknown = [key for key in self.config if not hasattr(config, key)]
        if unknown:
            hint = nearest(unknown[0], config.to_dict())
            raise RecipeError(f"model.config: {config.model_type} has no setting {unknown[0]!r}{hint}")
        changes = dict(self.config)
        if self.dropout is not None:
            rates = {key for key, value in config.to_dict().items() if "drop" in key and type(value) in (int, float)}
            rates = {key for key in rates if not any(part in key for part in NO_DROPOUT)}
            changes = dict.fromkeys(rates, self.dropout) | changes
        if kind is not None:  # settings that others are derived from must be there from the beginning
            config = AutoConfig.for_model(kind, **{**of_data, **changes})
            config.architectures = (
                config.architectures or []
            )  # of several for a task (DeiT), transformers takes the first
        for key, value in changes.items():
            setattr(config, key, value)
        if torch.get_default_dtype() == torch.float64 and getattr(config, "_experts_implementation", "") is None:
            config._experts_implementation = "eager"  # the grouped matmul has no kernel for float64
        refuse_code(self.name, config)
        return config


class HubClassifier(HubModel, Supervised):
    """What the classifiers of transformers share.

    Args:
        num_classes: null takes the dataset's.
        class_names: null takes the dataset's; saved with the model.
    """

    num_classes: int | None
    class_names: list[str] | None

    def __post_init__(self) -> None:
        self.loss.require_fit(self.task)
        super().__post_init__()

    def _require_complete(self) -> None:
        require_filled(type(self).__name__, num_classes=self.num_classes)

    def _configuration(self) -> Any:
        config = super()._configuration()
        if self.num_classes is not None:
            names = self.class_names or [f"LABEL_{number}" for number in range(self.num_classes)]
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
        config.problem_type = cast(Any, PROBLEM_TYPES.get(self.task))
        return config


def _initialise(skeleton: Any) -> None:
    """Initialise as transformers does; parameters on meta stay there."""
    for name, module in skeleton.named_modules():
        module._is_hf_initialized = OWN in name  # set when the skeleton was made
    skeleton.initialize_weights()
    reset_adapters(skeleton)


def _renaming(skeleton: Any, own: Mapping[str, Any]) -> Callable[[str], str]:
    """From a key of a file to the name in the module ``own``, as transformers has it: with or without the prefix of
    the base model, and with the names of old files made new."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping, prefix = get_model_conversion_mapping(skeleton), skeleton.base_model_prefix
    converters: Any = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings: Any = [one for one in mapping if not isinstance(one, WeightConverter)]

    def name_of(key: str) -> str:
        name, converter = rename_source_key(key, renamings, converters, prefix, own)  # type: ignore[arg-type]
        if name not in own and key in own:
            return key
        several = f"{key} cannot be streamed: transformers computes {name} from several tensors of the file"
        require(converter is None or name not in own, f"{several}; use memory.init device and model.lora.base full")
        return name

    return name_of


def is_model_type(name: str) -> bool:
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING
