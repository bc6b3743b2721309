"""Any sequence or token classifier of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.contract import Packable, WholeBatch
from trainer.errors import RecipeError, require_choice
from trainer.models.base import Objective
from trainer.models.byte_tokenizer import BYTES, byte_tokenizer
from trainer.models.hub import HubClassifier, HubModel, is_local, is_model_type, max_positions
from trainer.values import DataSpec, Loss

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from typing_extensions import Self

_BERT = {f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")}
_BERT |= {"encoder.layer.*.attention.output.dense": "rowwise", "encoder.layer.*.intermediate.dense": "colwise"}
_BERT |= {"encoder.layer.*.output.dense": "rowwise"}
_BERT |= {f"encoder.layer.*.{part}output.LayerNorm": "sequence_parallel" for part in ("attention.", "")}
_DISTILBERT = {f"transformer.layer.*.attention.{name}": "colwise" for name in ("q_lin", "k_lin", "v_lin")}
_DISTILBERT |= {"transformer.layer.*.attention.out_lin": "rowwise", "transformer.layer.*.ffn.lin1": "colwise"}
_DISTILBERT |= {"transformer.layer.*.ffn.lin2": "rowwise"}
_DISTILBERT |= {f"transformer.layer.*.{part}_layer_norm": "sequence_parallel" for part in ("sa", "output")}
ENCODER_TP_PLANS = {  # tensor parallel plans of model types for which transformers has none
    "distilbert": _DISTILBERT,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "big_bird"), _BERT),
}
TP_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
_NORMS = {f"layers.*.{part}_layernorm": "sequence_parallel" for part in ("input", "post_attention")}
"""Norms of ``TP_DECODERS``, whose transformers plan splits the layers; the rest of a block works token by token."""

TextTask = Literal["single_label", "multi_label", "regression", "token"]
NO_TOKENIZER = "none"
UNPADDING_MODEL_TYPES = ("distilbert", "bert", "roberta", "xlm-roberta", "modernbert")  # types that support packing


def require_tokens(key: str, value: Any) -> None:
    """Check the setting ``model.KEY``, an optional number of tokens."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is not None and not whole:
        raise RecipeError(f"model.{key}={value!r} must be a number of tokens, 0 for all, or null")


class TextModel(HubModel, Packable):
    """Base class of text models, which have a tokenizer.

    Args:
        tokenizer: a hub id or a local folder; null takes that of weights, or of name; bytes needs no file and has one
            token per byte of UTF-8. A plan does not need one.
    """

    tokenizer: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cached_tokenizer: Any = None

    def prepare(self) -> None:
        self.tokenizer_or_none()
        super().prepare()

    def tokenizer_or_none(self) -> Any:
        """Return the tokenizer, which is loaded once."""
        if self._cached_tokenizer is None and self.tokenizer != NO_TOKENIZER:
            source = self.tokenizer or self.weights or self.name
            if not is_local(source) and is_model_type(source):
                missing = f"model.tokenizer is missing, and model.name={source} is a model type without a tokenizer"
                raise RecipeError(f"{missing}: give one")
            self._cached_tokenizer = self._load_tokenizer(source)
            # For a folder with only a configuration, transformers creates a tokenizer to which every word is unknown.
            if len(self._cached_tokenizer) == len(self._cached_tokenizer.all_special_tokens):
                fix = "give a folder or hub id with a tokenizer"
                raise RecipeError(f"model.tokenizer={source!r} has no vocabulary: {fix}")
        return self._cached_tokenizer

    def _load_tokenizer(self, source: str, **options: Any) -> Any:
        from transformers import AutoTokenizer

        if source == BYTES and not is_local(source):
            return byte_tokenizer()
        return self._load("tokenizer", source, AutoTokenizer.from_pretrained, trust_remote_code=False, **options)

    def _is_unmodified(self) -> bool:
        """Return whether module and losses are those of this package, not of a subclass, which may read padding."""
        names = ("build", "skeleton", "embed" if isinstance(self, WholeBatch) else "losses")
        return all(getattr(type(self), name).__module__.startswith("trainer.models.") for name in names)

    def unloaded(self) -> Self:
        """Return this model with random weights and the same tokenizer."""
        model = copy.copy(self)  # keeps the loaded tokenizer
        model.tokenizer, model.weights = self.tokenizer or self.weights, None
        return model

    def for_spec(self, spec: DataSpec) -> Self:
        """Return this model without a tokenizer, unless one is set: the configuration has the vocabulary size."""
        model = self if self.tokenizer else replace(cast(Any, self), tokenizer=NO_TOKENIZER)
        most = max_positions(model.unloaded()._configuration().to_dict())  # a plan reads no weights
        if most and spec.length and spec.length > most:
            limit = f"the max of {most} tokens of model.name={self.name!r}"
            raise RecipeError(f"data.max_length={spec.length} is more than {limit}: lower it")
        return model

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Split attention by heads and MLPs by hidden features: our plan if there is one, else transformers'."""
        config, prefix = cast(Any, module).config, cast(Any, module).base_model_prefix
        layers = ENCODER_TP_PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None) or {}
        layers = _NORMS | layers if config.model_type in TP_DECODERS else layers
        return {f"{prefix}.{name}": style for name, style in layers.items()}

    def _config_from_data(self) -> dict[str, Any]:
        tokenizer = self.tokenizer_or_none()
        return {} if tokenizer is None else {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}

    def _require_embeddings(self, module: nn.Module) -> None:
        """Check that the module has an embedding for every token of the tokenizer."""
        tokenizer = self.tokenizer_or_none()
        words = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if tokenizer is not None and len(tokenizer) > words:
            cause = f"model.tokenizer has {len(tokenizer)} tokens, but model.name={self.name!r} supports {words}"
            raise RecipeError(f"{cause}: use the tokenizer of this model")

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        super().save(module, folder, state)
        if (tokenizer := self.tokenizer_or_none()) is not None:
            tokenizer.save_pretrained(folder)

    def saved_in(self, folder: Path) -> Self:
        """Return the model whose configuration, weights and tokenizer ``save`` wrote to ``folder``."""
        tokenizer = NO_TOKENIZER if self.tokenizer == NO_TOKENIZER else str(folder)
        return replace(cast(Any, super().saved_in(folder)), tokenizer=tokenizer)


class PackedEncoder(TextModel):
    """Base class of encoders whose micro-batches may have no padding."""

    padding_free: bool | None

    reads_first_token = True
    """Whether the head reads only the first token of each text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._can_pack: bool | None = None  # not determined yet

    def packs(self) -> bool:
        if self.padding_free is False or self.task == "token":
            return False
        if self._can_pack is None:
            config = self._configuration()
            whole = not getattr(config, "is_decoder", False) and not getattr(config, "chunk_size_feed_forward", 0)
            left = getattr(self.tokenizer_or_none(), "padding_side", "right") == "left" and self.reads_first_token
            known = self._supports_unpadding(config) and config._attn_implementation in (None, "sdpa")
            self._can_pack = known and whole and not left and (self.padding_free or self._is_unmodified())
            self._padding_idx = config.pad_token_id if config.model_type.endswith("roberta") else None
            self._asks = config.model_type == "modernbert"
            if not self._can_pack and self.padding_free is not None:
                encoders = f"{', '.join(UNPADDING_MODEL_TYPES)}; BigBird with model.attention full"
                reads = " whose head reads the first token" if self.reads_first_token else ""
                cause = f"model.padding_free=true is for encoders ({encoders}){reads}, with"
                unlike = f"sdpa attention and padding on the right, unlike model.name={self.name!r}"
                raise RecipeError(f"{cause} {unlike}: leave it at null")
        return self._can_pack

    def _supports_unpadding(self, config: Any) -> bool:
        from trainer.models.packed_attention import length_dependent_rope

        # The heads of some ModernBERT classifiers read the mean.
        fits = not self.reads_first_token or getattr(config, "classifier_pooling", "cls") == "cls"
        return config.model_type in UNPADDING_MODEL_TYPES and fits and length_dependent_rope(config) is None

    def packed(self, batch: Any) -> Any:
        """Remove the padding of the micro-batch if the module supports that."""
        if not self.packs() or not isinstance(batch, Mapping) or "attention_mask" not in batch:
            return batch
        from trainer.models.packed_attention import dummy_mask
        from trainer.models.padding_free import pack

        packed = pack(batch, self._padding_idx)
        if packed is not None and self._asks:
            packed["attention_mask"] = dummy_mask()
        return packed or batch

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        module = super()._finalize_module(module)
        if self.packs():
            from trainer.models.packed_attention import NAME, register_packed_attention
            from trainer.models.padding_free import unpad

            unpad(module, self.reads_first_token)
            if self._asks:
                register_packed_attention()
                module.set_attn_implementation(NAME)  # type: ignore[operator]
        return module


@dataclass
class TextClassifier(PackedEncoder, HubClassifier):
    """Any ``AutoModelForSequenceClassification`` or, for the task token, ``AutoModelForTokenClassification``.

    Examples are DistilBERT, BERT and RoBERTa. The loss is computed here from the logits, never by the model itself:
    transformers' sequence classifiers return means that ignore how many micro-batches a step has.

    Args:
        config: entries of the configuration to override, such as {n_layers: 2, dim: 128}.
        padding_free: skip padding. This changes only the masks of dropout. null enables it for DistilBERT, BERT,
            RoBERTa, XLM-RoBERTa, ModernBERT and BigBird with full attention, but neither for the task token nor in
            subclasses with a custom module or custom losses. Such a subclass may set true if it reads only the first
            token and no attention_mask.
    """

    name: str = "distilbert"
    tokenizer: str | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    padding_free: bool | None = None
    task: TextTask = "single_label"
    loss: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.task", self.task, TextTask)
        if self.padding_free and self.task == "token":
            cause = "model.padding_free=true computes the last block for the first token only, but model.task=token"
            raise RecipeError(f"{cause} reads all tokens: leave it at null")

    @property
    def auto(self) -> str:  # type: ignore[override]
        """Name of the transformers class for the task."""
        return f"AutoModelFor{'Token' if self.task == 'token' else 'Sequence'}Classification"

    def _load_tokenizer(self, source: str, **options: Any) -> Any:
        found = super()._load_tokenizer(source, **options)
        if self.task == "token" and getattr(found, "add_prefix_space", None) is False:  # RoBERTa's
            # Without the prefix, it rejects text that is split into words.
            return super()._load_tokenizer(source, add_prefix_space=True)
        return found

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the task's loss, from the logits; the batch is a tokenizer's output plus ``labels``."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        yield self.loss_of(module(**inputs).logits, batch["labels"])
