"""Any sequence or token classifier of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer.errors import RecipeError, require, require_choice
from trainer.models.common import MOST_LAYERS, Objective, Supervised, require_filled, train_last_blocks
from trainer.models.hub import from_hub, is_local, local_folder, positions, refuse_code
from trainer.models.lora import Adaptable, LoRA, add_adapters
from trainer.values import Loss, Outline, Pretrained, Task
from trainer.weights.blocks import find_blocks, switch_cache_off

if TYPE_CHECKING:
    from torch import Tensor, nn

_BERT = {f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")}
_BERT |= {"encoder.layer.*.attention.output.dense": "rowwise", "encoder.layer.*.intermediate.dense": "colwise"}
_BERT |= {"encoder.layer.*.output.dense": "rowwise"}
_BERT |= {f"encoder.layer.*.{part}output.LayerNorm": "sequence_parallel" for part in ("attention.", "")}
_DISTILBERT = {f"transformer.layer.*.attention.{name}": "colwise" for name in ("q_lin", "k_lin", "v_lin")}
_DISTILBERT |= {"transformer.layer.*.attention.out_lin": "rowwise", "transformer.layer.*.ffn.lin1": "colwise"}
_DISTILBERT |= {"transformer.layer.*.ffn.lin2": "rowwise"}
_DISTILBERT |= {f"transformer.layer.*.{part}_layer_norm": "sequence_parallel" for part in ("sa", "output")}
ENCODERS = {
    "distilbert": _DISTILBERT,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "big_bird"), _BERT),
}
"""How ranks share the blocks of model types for which transformers does not say it."""
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
_NORMS = {f"layers.*.{part}_layernorm": "sequence_parallel" for part in ("input", "post_attention")}
"""Types whose plan of transformers splits layers, and whose blocks compute all else token by token."""

NO_TOKENIZER = "none"
# The names under which configurations keep their dropout rates.
DROPOUT_FIELDS = (
    *("dropout", "attention_dropout", "seq_classif_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("classifier_dropout", "hidden_dropout", "classifier_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
)
PACKED = ("distilbert", "bert", "roberta", "xlm-roberta")
"""Types of models that compute without padding, as transformers makes them."""
PROBLEM_TYPES: dict[str, str] = {name: f"{name}_classification" for name in ("single_label", "multi_label")}
PROBLEM_TYPES["regression"] = "regression"
"""How transformers calls the tasks of its sequence classifiers."""


@dataclass
class TextClassifier(Supervised, Adaptable):
    """Any ``AutoModelForSequenceClassification``: DistilBERT, BERT, RoBERTa, ... With the task token any
    ``AutoModelForTokenClassification``.

    The loss is computed here from the logits, never by the model itself: the losses of transformers' sequence
    classifiers are means that ignore how many micro-batches a step has.

    Args:
        name: where the configuration comes from: a hub id, a local folder, or a model type such as distilbert.
        weights: a hub id or a local folder, as save_pretrained writes it; null for random weights.
        tokenizer: a hub id or a local folder; null takes that of weights, or of name. A plan can do with none.
        config: entries of the configuration to override, such as {n_layers: 2, dim: 128}.
        revision: of everything that comes from the hub: a branch, tag or commit.
        num_classes: null takes the dataset's.
        class_names: null takes the dataset's; saved with the model.
        dropout: sets all dropout rates of the configuration; null leaves them.
        padding_free: compute on the tokens that are there only, which changes no result but the masks of dropout; null
            does so for DistilBERT, BERT, RoBERTa, XLM-RoBERTa and BigBird with full attention, but not for the task
            token, and in no subclass with a module or losses of its own: one that reads no token but the first, and no
            attention_mask, may say true.
        train_last_blocks: freeze all but the last n blocks and the head; null trains everything.
        lora: train adapters in the blocks, and the head, instead of all weights.
    """

    name: str = "distilbert"
    weights: str | None = None
    tokenizer: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    dropout: float | None = None
    padding_free: bool | None = None
    train_last_blocks: int | None = None
    lora: LoRA = field(default_factory=LoRA)
    task: Task = "single_label"
    loss: Objective = field(default_factory=Objective)

    own_format = True

    def __post_init__(self) -> None:
        require_choice("model.task", self.task, Task)
        self.loss.require_fit(self.task)
        all_tokens = "model.padding_free=true computes the last block for the first token only, and model.task=token"
        require(not (self.padding_free and self.task == "token"), f"{all_tokens} reads all: leave it at null")
        require(self.dropout is None or 0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")
        self.lora.require_alone(self.train_last_blocks)
        self._cached_tokenizer: Any = None
        self._can_pack: bool | None = None  # not looked for yet

    def prepare(self) -> None:
        """Fetch configuration, tokenizer and weights into the hub's cache."""
        self.tokenizer_or_none()
        self._configuration()
        if self.weights is not None:
            self._folder(self.weights)

    def tokenizer_or_none(self) -> Any:
        """The tokenizer, loaded once."""
        if self._cached_tokenizer is None and self.tokenizer != NO_TOKENIZER:
            from transformers import AutoTokenizer

            source = self.tokenizer or self.weights or self.name
            has_none = f"model.tokenizer is missing: model.name={source} is a model type and has no tokenizer"
            require(is_local(source) or not _is_model_type(source), has_none)
            self._cached_tokenizer = self._load(
                "tokenizer", source, AutoTokenizer.from_pretrained, trust_remote_code=False
            )
            # Of a folder that has a configuration only, transformers makes one to which every word is unknown.
            words = len(self._cached_tokenizer) - len(self._cached_tokenizer.all_special_tokens)
            fix = "give a folder or hub id with a tokenizer"
            require(words > 0, f"model.tokenizer={source!r} has no vocabulary: {fix}")
        return self._cached_tokenizer

    def unloaded(self) -> TextClassifier:
        """This classifier with random weights, and the tokenizer that it has."""
        model = copy.copy(self)  # with the tokenizer that is loaded already
        model.tokenizer, model.weights = self.tokenizer or self.weights, None
        return model

    def outlined(self, outline: Outline) -> TextClassifier:
        """This classifier without the tokenizer, unless one is named: the configuration knows how many words it has."""
        model = self if self.tokenizer else replace(self, tokenizer=NO_TOKENIZER)
        most = positions(model._configuration().to_dict())
        long = f"data.max_length={outline.length} is more than the {most} tokens that model.name={self.name!r} takes"
        require(not most or not outline.length or outline.length <= most, f"{long}: lower it")
        return model

    def packs(self) -> bool:
        """Whether micro-batches are packed, as ``padding_free`` says."""
        if self.padding_free is False or self.task == "token":
            return False
        if self._can_pack is None:
            config = self._configuration()
            whole = not getattr(config, "is_decoder", False) and not getattr(config, "chunk_size_feed_forward", 0)
            left = getattr(self.tokenizer_or_none(), "padding_side", "right") == "left"
            known = self._has_known_blocks(config) and config._attn_implementation in (None, "sdpa")
            self._can_pack = known and whole and not left and (self.padding_free or self._is_plain())
            self._padding_idx = config.pad_token_id if config.model_type.endswith("roberta") else None
            require(
                self._can_pack or self.padding_free is None,
                f"model.padding_free=true is for encoders ({', '.join(PACKED)}; BigBird with model.attention full) "
                f"with sdpa attention and padding on the right, and model.name={self.name!r} is none: leave it at null",
            )
        return self._can_pack

    def _has_known_blocks(self, config: Any) -> bool:
        """Whether models/unpadded.py says how blocks of that configuration compute, as they are here."""
        return config.model_type in PACKED

    def _is_plain(self) -> bool:
        """Whether module and losses are those of this class, which look at the first token of a text and no mask."""
        own = ("build", "skeleton", "losses")
        return all(getattr(type(self), name) is getattr(TextClassifier, name) for name in own)

    def packed(self, batch: Any) -> Any:
        """The micro-batch without its padding, where the module computes without it."""
        if not self.packs() or not isinstance(batch, Mapping) or "attention_mask" not in batch:
            return batch
        from trainer.models.unpadded import pack

        return pack(batch, self._padding_idx) or batch

    def build(self) -> nn.Module:
        """The module: from ``input_ids`` and ``attention_mask`` (n, tokens) to logits (n, classes), of the task token
        (n, tokens, classes)."""
        module = self.skeleton() if self.weights is None else self._from_pretrained(self.weights)
        add_adapters(module, self.lora, self.blocks)
        return module

    def _from_pretrained(self, weights: str) -> nn.Module:
        import torch
        import transformers

        from trainer.weights.streaming import draw_new, skeleton_on_meta

        require_filled(type(self).__name__, num_classes=self.num_classes)
        require(
            not Path(local_folder(weights), "adapter_config.json").exists(),  # transformers would load what it names
            f"model.weights={weights} is or holds a PEFT adapter: merge it into its model and save that",
        )
        module, found = self._load(
            "weights",
            weights,
            getattr(transformers, self._auto).from_pretrained,
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
        module = module.to(torch.get_default_device())
        if new:  # drawn again, as when the weights are streamed: the way of loading then changes no result
            with torch.no_grad():
                for name, value in draw_new(skeleton_on_meta(self), new, _initialise, torch.initial_seed()).items():
                    module.get_parameter(name).copy_(value)
        return self._finished(module)

    def skeleton(self) -> nn.Module:
        """The module with random weights, without adapters."""
        require_filled(type(self).__name__, num_classes=self.num_classes)
        return self._finished(self._from_configuration(self._auto))

    @property
    def _auto(self) -> str:
        """The class of transformers that makes the module."""
        return f"AutoModelFor{'Token' if self.task == 'token' else 'Sequence'}Classification"

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
        from trainer.weights.streaming import skeleton_on_meta, stored_in, tied_names

        require(self.weights is not None, "there is nothing to stream: model.weights is null")
        skeleton = skeleton_on_meta(self)
        own = skeleton.state_dict()
        name_of = _renaming(skeleton, own)
        found = [(name_of(key), *value) for key, value in stored_in(self._folder(self.weights or "")).items()]
        stored = {name: place for name, place, shape in found if name in own and tuple(own[name].shape) == shape}
        new = {names[0] for names in tied_names(skeleton) if not stored.keys() & set(names)}
        self._require_body(skeleton, new)
        return Pretrained(stored, new, _initialise)

    def _folder(self, weights: str) -> Path:
        """Where the files of ``weights`` are: a local folder, or one in the hub's cache, which is filled."""
        if is_local(weights):
            return Path(local_folder(weights))
        from huggingface_hub import snapshot_download

        options = {"revision": self.revision, "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model"]}
        return Path(from_hub("weights", weights, snapshot_download, weights, **options))

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Attention by heads, the MLP by hidden features: transformers' own plan, or for those without one ours."""
        config, prefix = cast(Any, module).config, cast(Any, module).base_model_prefix
        layers = ENCODERS.get(config.model_type) or getattr(config, "base_model_tp_plan", None) or {}
        layers = _NORMS | layers if config.model_type in DECODERS else layers
        return {f"{prefix}.{name}": style for name, style in layers.items()}

    def _finished(self, module: nn.Module) -> nn.Module:
        """The module without a cache, and with the parameters frozen that do not train."""
        switch_cache_off(module)
        if self.packs():
            from trainer.models.unpadded import unpad

            unpad(module)
        if self.train_last_blocks is not None:
            train_last_blocks(module, self.train_last_blocks, self.blocks)
        return module

    def _require_body(self, module: nn.Module, new: Collection[str]) -> None:
        """Only the head may be new; transformers would fill anything else with random numbers as well."""
        from trainer.weights.files import shortened

        blocks = find_blocks(module, self.blocks)
        last = list(blocks[-1].parameters())[-1] if blocks else None
        names, parameters = zip(*module.named_parameters(), strict=True)
        end = next((at for at, parameter in enumerate(parameters, 1) if parameter is last), len(names))
        lost = sorted(set(new) & set(names[:end]))
        foreign = f"model.weights={self.weights!r} are not those of this {cast(Any, module).config.model_type}"
        require(not lost, f"{foreign}: {shortened(lost)} are missing or of another shape")

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """That of the task, from the logits; the batch is a tokenizer's output plus ``labels``."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        yield self.loss_of(module(**inputs).logits, batch["labels"])

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``from_pretrained`` of the task's class of transformers, and ``AutoTokenizer``, load."""
        module.save_pretrained(folder, state_dict=self.merged_state(module, state))  # type: ignore[operator]
        if (tokenizer := self.tokenizer_or_none()) is not None:
            tokenizer.save_pretrained(folder)

    def saved_in(self, folder: Path) -> TextClassifier:
        """The classifier whose configuration, weights and tokenizer ``save`` wrote to ``folder``."""
        source = str(folder)
        return replace(self, name=source, weights=source, tokenizer=source, config={}, revision=None, lora=LoRA())

    def _configuration(self) -> Any:
        from transformers import AutoConfig

        is_type = not is_local(self.name) and _is_model_type(self.name)
        if is_type:
            config = AutoConfig.for_model(self.name)
            if (tokenizer := self.tokenizer_or_none()) is not None:
                config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
        else:
            config = self._load("name", self.name, AutoConfig.from_pretrained, trust_remote_code=False)
        unknown = [key for key in self.config if not hasattr(config, key)]
        if unknown:
            near = get_close_matches(unknown[0], list(config.to_dict()), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RecipeError(f"model.config: {config.model_type} has no setting {unknown[0]!r}{hint}")
        changes = dict(self.config)
        if self.dropout is not None:
            changes = {key: self.dropout for key in DROPOUT_FIELDS if getattr(config, key, None) is not None} | changes
        if is_type:  # settings that others are derived from must be there from the beginning
            known = {"vocab_size": config.vocab_size, "pad_token_id": config.pad_token_id}
            config = AutoConfig.for_model(self.name, **{**known, **changes})
        for key, value in changes.items():
            setattr(config, key, value)
        if self.num_classes is not None:
            names = self.class_names or [f"LABEL_{number}" for number in range(self.num_classes)]
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
        config.problem_type = cast(Any, PROBLEM_TYPES.get(self.task))
        refuse_code(self.name, config)
        layers = getattr(config, "num_hidden_layers", None) or 0
        require(layers <= MOST_LAYERS, f"model.name={self.name!r} is configured with {layers:,} layers: take another")
        return config


def _initialise(skeleton: Any) -> None:
    """Initialise as transformers does; parameters on meta stay there."""
    for module in skeleton.modules():
        module._is_hf_initialized = False  # set when the skeleton was made
    skeleton.initialize_weights()


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
        several = f"memory.init=meta cannot stream {key}: transformers computes {name} from several tensors of the file"
        require(converter is None or name not in own, f"{several}; use memory.init device")
        return name

    return name_of


def _is_model_type(name: str) -> bool:
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING
