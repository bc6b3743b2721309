"""Models that transformers loads from folders and from the hub, without executing code from there."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from trainer.contract import Preparable
from trainer.errors import RecipeError, RunError, require, suggest_name
from trainer.models.base import MAX_LAYERS, SupervisedModel, require_filled, train_last_blocks
from trainer.models.lora import LORA_KEY, LoRA, SupportsLoRA, reset_adapters, save_adapters
from trainer.system.environment import is_first_process
from trainer.system.files import read_json_object, require_regular, room_in
from trainer.system.hub import offline_advice, offline_reason, warn_offline_cache
from trainer.system.imports import quick_imports
from trainer.system.status_line import say
from trainer.system.text import escaped, format_names
from trainer.values import PretrainedWeights
from trainer.weights.blocks import disable_kv_cache

if TYPE_CHECKING:
    from torch import Tensor, nn
    from typing_extensions import Self

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
POSITIONS_FROM_PADDING_IDX = ("roberta", "camembert", "longformer", "mpnet", "luke", "ibert", "xmod")
"""Parts of model types whose positions start after the padding token's id."""

NOT_FEATURE_DROPOUT = ("layerdrop", "path", "connect", "token")
"""Parts of setting names with ``drop`` that are not a dropout rate of features or attention weights."""

PROBLEM_TYPES = {name: f"{name}_classification" for name in ("single_label", "multi_label")}
PROBLEM_TYPES["regression"] = "regression"
"""transformers' ``problem_type`` of our tasks for whole samples."""

ADAPTER_FOLDER = "adapter"
"""Subfolder of a saved model with its adapters."""

PEFT_TASKS = {"AutoModelForSequenceClassification": "SEQ_CLS", "AutoModelForTokenClassification": "TOKEN_CLS"}
PEFT_TASKS |= {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModel": "FEATURE_EXTRACTION"}
"""peft's task type by transformers class."""

MAX_CONFIG_BYTES = 500_000_000
"""Max bytes of a settings or vocabulary file; the largest vocabularies take some 10 MB."""


def local_folder(source: str) -> str:
    """Return the path of a ``file://`` URL, or ``source`` itself."""
    return source.removeprefix("file://")


BUNDLED_CONFIGS = {
    **dict.fromkeys(("distilbert/distilbert-base-uncased", "distilbert-base-uncased"), "distilbert-base-uncased"),
    "google/bigbird-roberta-base": "bigbird-roberta-base",
    **{f"HuggingFaceTB/SmolLM2-{size}": f"SmolLM2-{size}" for size in ("135M", "135M-Instruct", "360M", "1.7B")},
    **{f"meta-llama/Llama-{size}": f"Llama-{size}" for size in ("3.1-8B", "3.2-1B", "3.2-3B")},
    **{f"Qwen/Qwen{size}": f"Qwen{size}" for size in ("2.5-7B", "3-0.6B", "3-1.7B", "3-4B", "3-8B")},
}
"""Hub ids of packaged recipes and language models, and the packaged folders with their ``config.json``."""


def bundled_config_folder(source: str) -> Path | None:
    """Return the packaged folder with the ``config.json`` of the hub id ``source``, or ``None``."""
    name = None if is_local(source) else BUNDLED_CONFIGS.get(source)
    return None if name is None else Path(__file__).parent / "published" / name


def is_local(source: str) -> bool:
    return isdir(local_folder(source))  # Path.is_dir raises an error if the name is too long


def from_hub(key: str, source: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a ``load`` function of transformers with the remaining arguments.

    Any failure except out of memory is an error about ``model.key``. ``source`` is a hub id, folder or file URL.
    """
    from safetensors import SafetensorError

    if source.startswith(("file://", "/", "./", "../")) and not is_local(source):
        raise RecipeError(f"model.{key}={source} is not a folder")
    if is_local(source):
        _require_files(Path(local_folder(source)))
    why_not = "" if is_local(source) or load.__name__ == "from_config" else offline_reason()  # it was read before
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import StrictDataclassError

    try:
        with room_in(Path(HF_HUB_CACHE), "set HF_HOME to a folder on another disk"):
            found = load(*args, **kwargs)
    except Exception as error:  # transformers rarely validates a file before using it
        is_out_of_memory = isinstance(error, MemoryError | RuntimeError) and "memory" in str(error)
        if isinstance(error, RunError | RecipeError) or is_out_of_memory:
            raise  # not caused by the files
        is_invalid = isinstance(error, StrictDataclassError)  # its first line names a validator, the last one the cause
        reason = (str(error).strip().splitlines() or [""])[-is_invalid].strip()
        if not isinstance(error, OSError | ValueError | SafetensorError | StrictDataclassError):
            reason = f"{type(error).__name__}: {reason}."
        fix = "Correct config.json" if is_invalid else "Give a local folder as save_pretrained writes it, or a hub id"
        if why_not and isinstance(error, OSError):
            reason = f"it is neither a local folder nor in the hub's cache, and {why_not}."
            kinds = {
                "name": ", or a model type such as distilbert or vit",
                "tokenizer": ", or bytes, which needs no files",
            }
            fix = f"Give a local folder as save_pretrained writes it{kinds.get(key, '')}; {offline_advice()}"
        if "trust_remote_code" in str(error):
            reason = "it needs Python code from its repository (auto_map), and remote code is never executed."
            known = "Use a model whose architecture is part of transformers"
            fix = f"{known}, or review the code and write a trainer.Model that imports it"
        raise RecipeError(f"model.{key}={source!r} cannot be loaded: {reason.rstrip('.')}. {fix}") from error
    if why_not:
        warn_offline_cache()
    return found


def _require_cached(source: str) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    if not is_local(source) and not isdir(f"{HF_HUB_CACHE}/models--{source.replace('/', '--')}") and offline_reason():
        raise FileNotFoundError(source)


def _require_files(folder: Path) -> None:
    """Reject files that would block transformers or never end: named pipes, devices, JSON of gigabytes."""
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            try:
                require_regular(path.stat(), path)
            except OSError as error:
                raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
            if path.suffix in (".json", ".txt") and path.stat().st_size > MAX_CONFIG_BYTES:
                most = f"{MAX_CONFIG_BYTES / 1e6:g} MB, the max for settings or vocabularies"
                raise RecipeError(f"{path} is larger than {most}")


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the max number of tokens of a model from its ``config.json``, or ``None`` if there is no limit."""
    kind = str(config.get("model_type"))
    found = next((config[name] for name in POSITION_KEYS if isinstance(config.get(name), int)), 0)
    if any(name in kind for name in POSITIONS_FROM_PADDING_IDX):  # their positions start after the padding token's id
        found -= 1 + (config.get("pad_token_id") or 0)
    return found if found > 0 and "t5" not in kind else None  # T5 has the entry, but only relative positions


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress the reports and progress bars of transformers: what matters in them is reported here."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def max_tokens(source: str) -> int | None:
    """Return the max number of tokens of the model and the tokenizer in a local folder, or of a published model;
    ``None`` if it is unknown before a download, or unlimited."""
    folder = bundled_config_folder(source) or Path(local_folder(source))
    config = read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
    tokenizer = read_json_object(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
    limits = [max_positions(config), tokenizer.get("model_max_length")]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


COUNT = re.compile(r"(?!.*(per_layer|_size$|_dim|channels)).*(layer|depth|blocks|block_sizes|experts|stages)")
"""Matches names of settings that count layers, which are built one by one, and not sizes of tensors."""

MAX_LABELS = 500_000  # each is stored in two mappings


def require_moderate_config(said: str, config: Mapping[str, Any]) -> None:
    """Reject counts of layers and labels that would exhaust the machine when transformers builds them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            require_moderate_config(said, value)
        numbers = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, int)]
        # A list holds the number of layers per stage, or the indices of layers.
        count = sum(numbers) if "depth" in str(key) or "num" in str(key) else max(numbers, default=0)
        labels = len(value) if isinstance(value, Mapping) else count if key == "num_labels" else 0
        require(labels <= MAX_LABELS, f"{said}: {key} has {labels:,} labels, and the max is {MAX_LABELS:,}: lower it")
        if COUNT.match(str(key)):
            if max(count, len(numbers)) > MAX_LAYERS:
                raise RecipeError(f"{said}: {key} stands for {count:,} layers, and the max is {MAX_LAYERS:,}: lower it")
            ends = str(key).endswith(("layers", "depths", "block_sizes"))
            if ends and min(numbers, default=1) < (not str(key).endswith("layers")):  # a decoder may have no layers
                raise RecipeError(f"{said}: {key} {value!r:.80} must be at least 1")


def _import_transformers() -> None:
    """Import what every model of transformers needs, which takes seconds."""
    with quick_imports():
        import transformers.modeling_utils  # noqa: F401


def _read_config(source: str, **options: Any) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    require_moderate_config(f"model.name={source!r}", PretrainedConfig.get_config_dict(source, **options)[0])
    return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def reject_remote_code(name: str, config: Any) -> None:
    """Reject a ``config`` of the folder or hub id ``name`` for which transformers would run code from the hub."""
    wished = [getattr(config, key, None) for key in ("_attn_implementation", "_experts_implementation")]
    kernels = [text for text in map(str, wished) if "/" in text]
    asks = f"model.name={name!r}: its configuration asks for"
    kernel = f"the kernel {', '.join(kernels)}, which is code from the hub and is never executed"
    require(not kernels, f"{asks} {kernel}: remove attn_implementation from its config.json")
    quantised = f"{asks} quantised weights, which cannot be trained and may need code from the hub"
    fix = "use a model without quantization_config in its config.json"
    require(getattr(config, "quantization_config", None) is None, f"{quantised}: {fix}")
    pickled = f"{asks} timm's checkpoint_path, a file that may be a pickle"
    fix = "remove it from model_args, and give a folder of weights with model.weights"
    require("checkpoint_path" not in (getattr(config, "model_args", None) or {}), f"{pickled}: {fix}")


@dataclass
class HubModel(SupportsLoRA, Preparable):
    """Base class of models that a transformers class builds from a configuration or from weights.

    Args:
        name: the source of the configuration: a hub id, a local folder, or a model type such as distilbert.
        weights: a hub id or a local folder, as save_pretrained writes it; null for random weights.
        config: entries of the configuration to override, such as {num_hidden_layers: 2, hidden_size: 128}.
        revision: branch, tag or commit of everything that comes from the hub.
        dropout: sets all dropout rates of the configuration; null keeps them.
        train_last_blocks: freeze everything except the last n blocks and the head; null trains everything.
        lora: train adapters in the blocks, and the head, instead of all weights.
    """

    name: str
    weights: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    dropout: float | None = None
    train_last_blocks: int | None = None
    lora: LoRA = field(default_factory=LoRA)

    own_format = True
    auto: ClassVar[str]
    """Name of the transformers class, an ``AutoModelFor…``, that builds the module."""

    def __post_init__(self) -> None:
        require(self.dropout is None or 0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")
        self.lora.require_alone(self.train_last_blocks)

    def require_files(self) -> None:
        """Refuse missing files, as far as they are known before torch is imported and anything is downloaded."""
        name = None if self.name in BUNDLED_CONFIGS else self.name
        sources = ("tokenizer", getattr(self, "tokenizer", None)), ("name", name), ("weights", self.weights)
        for key, source in sources:
            if source and "/" in source and not source.startswith("timm/"):  # others may be model types, or timm's
                from_hub(key, source, _require_cached, source)

    def prepare(self) -> None:
        _import_transformers()  # now, so that its host memory is not attributed to the run
        self._configuration()
        if self.weights is not None:
            self._folder(self.weights)

    def build(self) -> nn.Module:
        """Build the module with transformers, and add adapters if requested."""
        _import_transformers()
        if self.weights is None:
            return self.adapt(self.skeleton())
        # Quantised weights are never held in full precision, so they are streamed.
        return super().build() if self.lora.base == "nf4" else self._from_pretrained(self.weights)

    def _from_pretrained(self, weights: str) -> nn.Module:
        import torch
        import transformers

        self._require_complete()
        adapter = Path(local_folder(weights), "adapter_config.json")  # transformers would load the base that it names
        cause = f"model.weights={weights} is or contains a PEFT adapter"
        require(not adapter.exists(), f"{cause}: merge it into its model and save the result")
        with quiet_transformers():
            module, found = self._load(
                "weights",
                weights,
                getattr(transformers, self.auto).from_pretrained,
                config=self._configuration(),
                dtype=torch.get_default_dtype(),  # from_pretrained ignores it otherwise
                trust_remote_code=False,
                use_safetensors=True,  # never a pickle
                ignore_mismatched_sizes=True,  # replaces a head for another number of classes
                output_loading_info=True,
            )
        wrong = [*found["missing_keys"], *found["mismatched_keys"]]
        new = {key if isinstance(key, str) else key[0] for key in wrong} & dict(module.named_parameters()).keys()
        self._require_only_head_new(module, new)
        if new and is_first_process():
            say(escaped(f"weights of {weights}; new in the model: {format_names(sorted(new))}"))
        module = self.adapt(self._finalize_module(module.to(torch.get_default_device())))
        self.draw_new(module, _initialise, new)
        return module

    def skeleton(self) -> nn.Module:
        self._require_complete()
        return self._finalize_module(self._from_configuration(self.auto))

    def _require_complete(self) -> None:
        """Check that all settings that the dataset fills are set."""

    def _from_configuration(self, auto: str) -> nn.Module:
        import torch
        import transformers

        load, dtype = getattr(transformers, auto), torch.get_default_dtype()  # from_config ignores it otherwise
        config = self._configuration()
        return from_hub("name", self.name, load.from_config, config, dtype=dtype, trust_remote_code=False)

    def _load(self, key: str, source: str, load: Any, **options: Any) -> Any:
        return from_hub(key, source, load, local_folder(source), revision=self.revision, **options)

    def pretrained(self) -> PretrainedWeights:
        """Return the tensors of ``weights`` under their names in the module; the head may be new."""
        from trainer.weights.streaming import on_meta, tensors_in, tied_names

        require(self.weights is not None, "there is nothing to stream: model.weights is null")
        skeleton = on_meta(self.skeleton)
        own = skeleton.state_dict()
        name_of = _key_mapping(skeleton, own)
        found = [(name_of(key), *value) for key, value in tensors_in(self._folder(self.weights or "")).items()]
        stored = {name: place for name, place, shape in found if name in own and tuple(own[name].shape) == shape}
        new = {names[0] for names in tied_names(skeleton) if not stored.keys() & set(names)}
        self._require_only_head_new(skeleton, new)
        return self.map_to_adapted(PretrainedWeights(stored, new, _initialise), skeleton)

    def _folder(self, weights: str) -> Path:
        """Return the local folder of ``weights``, downloaded to the hub's cache if necessary."""
        if is_local(weights):
            return Path(local_folder(weights))
        from huggingface_hub import snapshot_download

        options = {"revision": self.revision, "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model"]}
        return Path(from_hub("weights", weights, snapshot_download, weights, **options))

    def weight_files(self) -> Sequence[Path]:
        from trainer.weights.streaming import tensors_in

        found = tensors_in(self._folder(self.weights)) if self.weights is not None else {}
        return sorted({place.file for place, _ in found.values()})

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        """Disable the KV cache, and freeze the parameters that do not train."""
        disable_kv_cache(module)
        if self.train_last_blocks is not None:
            train_last_blocks(module, self.train_last_blocks, self.blocks)
        return module

    def _require_only_head_new(self, module: nn.Module, new: Collection[str]) -> None:
        """Check that only the head is new. transformers would also fill other missing weights with random numbers."""
        head = self.new_head(module)
        lost = sorted(name for name, parameter in module.named_parameters() if name in new and parameter not in head)
        cause = f"model.weights={self.weights!r} do not fit this {cast(Any, module).config.model_type}"
        require(not lost, f"{cause}: {format_names(lost)} are missing or have another shape")

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``from_pretrained`` loads. Its subfolder ``adapter`` holds trained adapters for peft."""
        merged, own = self.merged_state(module, state), cast(Any, module)
        dtype = next(value.dtype for value in merged.values() if value.is_floating_point())  # saving empties ``merged``
        with quiet_transformers():
            own.save_pretrained(folder, state_dict=merged)
        config = copy.copy(own.config)  # its dtype is that of the device; master weights on the host are wider
        config.dtype = dtype
        config.save_pretrained(folder)
        if self.lora.rank and self.weights is not None:
            self.save_adapters(module, state, folder / ADAPTER_FOLDER)

    def save_adapters(self, module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapters in peft's format, based on ``weights``; see :func:`save_adapters`."""
        weights = str(self.weights)
        source = str(Path(local_folder(weights)).absolute()) if is_local(weights) else weights
        facts = {"base_model_name_or_path": source, "revision": self.revision, "task_type": PEFT_TASKS.get(self.auto)}
        save_adapters(module, state, folder, **facts)

    def saved_in(self, folder: Path) -> Self:
        """Return the model whose configuration and weights ``save`` wrote to ``folder``."""
        source: Any = {"name": str(folder), "weights": str(folder), "config": {}, "revision": None, "lora": LoRA()}
        return replace(self, **source)

    def _type(self) -> str | None:
        """Return the model type if ``name`` is one, ``None`` for a folder or hub id."""
        return self.name if not is_local(self.name) and is_model_type(self.name) else None

    def _config_from_data(self) -> dict[str, Any]:
        """Return the settings that the data determines, for a configuration made from a model type alone."""
        return {}

    def _configuration(self) -> Any:
        import torch
        from transformers import AutoConfig

        kind = self._type()
        require_moderate_config("model.config", self.config)
        if kind is not None:
            of_data = self._config_from_data()
            config = AutoConfig.for_model(kind, **of_data)
        elif self.weights is None and self.revision is None and (folder := bundled_config_folder(self.name)):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config.name_or_path = self.name
        else:
            config = self._load("name", self.name, _read_config)
        unknown = [key for key in self.config if not hasattr(config, key)]
        if unknown:
            hint = suggest_name(unknown[0], config.to_dict())
            raise RecipeError(f"model.config: {config.model_type} has no setting {unknown[0]!r}{hint}")
        changes = dict(self.config)
        if self.dropout is not None:
            rates = {key for key, value in config.to_dict().items() if "drop" in key and type(value) in (int, float)}
            rates = {key for key in rates if not any(part in key for part in NOT_FEATURE_DROPOUT)}
            changes = dict.fromkeys(rates, self.dropout) | changes
        if kind is not None:  # other settings are derived from these, so they must be set at construction
            config = AutoConfig.for_model(kind, **{**of_data, **changes})
            # If a task has several architectures (DeiT), transformers uses the first.
            config.architectures = config.architectures or []
        for key, value in changes.items():
            setattr(config, key, value)
        if torch.get_default_dtype() == torch.float64 and getattr(config, "_experts_implementation", "") is None:
            config._experts_implementation = "eager"  # the grouped matmul has no kernel for float64
        reject_remote_code(self.name, config)
        return config


class HubClassifier(HubModel, SupervisedModel):
    """Base class of transformers' classifiers."""

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
        module._is_hf_initialized = LORA_KEY in name  # set when the skeleton was made
    skeleton.initialize_weights()
    reset_adapters(skeleton)


def _key_mapping(skeleton: Any, own: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function from keys of a file to names in ``own``: prefixes and old names, as transformers maps them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping, prefix = get_model_conversion_mapping(skeleton), skeleton.base_model_prefix
    converters: Any = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings: Any = [one for one in mapping if not isinstance(one, WeightConverter)]

    def name_of(key: str) -> str:
        name, converter = rename_source_key(key, renamings, converters, prefix, own)  # type: ignore[arg-type]
        if name not in own and key in own:
            return key
        cause = f"{key} cannot be streamed: transformers computes {name} from several tensors of the file"
        require(converter is None or name not in own, f"{cause}; use memory.init device and model.lora.base full")
        return name

    return name_of


def is_model_type(name: str) -> bool:
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING
