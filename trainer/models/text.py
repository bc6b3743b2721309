"""Any sequence or token classifier of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.contract import Packable
from trainer.errors import require, require_choice
from trainer.models.bytes import BYTES, byte_tokenizer
from trainer.models.common import Objective
from trainer.models.hub import HubClassifier, HubModel, is_local, is_model_type, positions
from trainer.models.lora import LoRA
from trainer.values import Loss, Outline

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
ENCODERS = {  # how ranks share the blocks of model types for which transformers has no plan
    "distilbert": _DISTILBERT,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "big_bird"), _BERT),
}
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
_NORMS = {f"layers.*.{part}_layernorm": "sequence_parallel" for part in ("input", "post_attention")}
"""Types whose plan of transformers splits layers, and whose blocks compute all else token by token."""

TextTask = Literal["single_label", "multi_label", "regression", "token"]
NO_TOKENIZER = "none"
PACKED = ("distilbert", "bert", "roberta", "xlm-roberta", "modernbert")  # types that compute without padding


class TextModel(HubModel, Packable):
    """What the models of texts share: a tokenizer.

    Args:
        tokenizer: a hub id or a local folder; null takes that of weights, or of name; bytes, which needs no file, has a
            token for every byte of UTF-8. A plan can do with none.
    """

    tokenizer: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cached_tokenizer: Any = None

    def prepare(self) -> None:
        """Fetch configuration, tokenizer and weights into the hub's cache."""
        self.tokenizer_or_none()
        super().prepare()

    def tokenizer_or_none(self) -> Any:
        """The tokenizer, loaded once."""
        if self._cached_tokenizer is None and self.tokenizer != NO_TOKENIZER:
            source = self.tokenizer or self.weights or self.name
            has_none = f"model.tokenizer is missing: model.name={source} is a model type and has no tokenizer"
            require(is_local(source) or not is_model_type(source), has_none)
            self._cached_tokenizer = self._load_tokenizer(source)
            # Of a folder that has a configuration only, transformers makes one to which every word is unknown.
            words = len(self._cached_tokenizer) - len(self._cached_tokenizer.all_special_tokens)
            fix = "give a folder or hub id with a tokenizer"
            require(words > 0, f"model.tokenizer={source!r} has no vocabulary: {fix}")
        return self._cached_tokenizer

    def _load_tokenizer(self, source: str, **options: Any) -> Any:
        from transformers import AutoTokenizer

        if source == BYTES and not is_local(source):
            return byte_tokenizer()
        return self._load("tokenizer", source, AutoTokenizer.from_pretrained, trust_remote_code=False, **options)

    def unloaded(self) -> Self:
        """This model with random weights, and the tokenizer that it has."""
        model = copy.copy(self)  # with the tokenizer that is loaded already
        model.tokenizer, model.weights = self.tokenizer or self.weights, None
        return model

    def outlined(self, outline: Outline) -> Self:
        """This model without the tokenizer, unless one is named: the configuration knows how many words it has."""
        model = self if self.tokenizer else replace(cast(Any, self), tokenizer=NO_TOKENIZER)
        most = positions(model.unloaded()._configuration().to_dict())  # a plan reads no weights
        long = f"data.max_length={outline.length} is more than the {most} tokens that model.name={self.name!r} takes"
        require(not most or not outline.length or outline.length <= most, f"{long}: lower it")
        return model

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Attention by heads, the MLP by hidden features: transformers' own plan, or for those without one ours."""
        config, prefix = cast(Any, module).config, cast(Any, module).base_model_prefix
        layers = ENCODERS.get(config.model_type) or getattr(config, "base_model_tp_plan", None) or {}
        layers = _NORMS | layers if config.model_type in DECODERS else layers
        return {f"{prefix}.{name}": style for name, style in layers.items()}

    def _of_data(self) -> dict[str, Any]:
        tokenizer = self.tokenizer_or_none()
        return {} if tokenizer is None else {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``from_pretrained`` of the class ``auto`` and ``AutoTokenizer`` load."""
        super().save(module, folder, state)
        if (tokenizer := self.tokenizer_or_none()) is not None:
            tokenizer.save_pretrained(folder)

    def saved_in(self, folder: Path) -> Self:
        """The model whose configuration, weights and tokenizer ``save`` wrote to ``folder``."""
        tokenizer = NO_TOKENIZER if self.tokenizer == NO_TOKENIZER else str(folder)
        return replace(cast(Any, super().saved_in(folder)), tokenizer=tokenizer)


@dataclass
class TextClassifier(TextModel, HubClassifier):
    """Any ``AutoModelForSequenceClassification``: DistilBERT, BERT, RoBERTa, ... With the task token any
    ``AutoModelForTokenClassification``.

    The loss is computed here from the logits, never by the model itself: the losses of transformers' sequence
    classifiers are means that ignore how many micro-batches a step has.

    Args:
        config: entries of the configuration to override, such as {n_layers: 2, dim: 128}.
        padding_free: compute on the tokens that are there only, which changes no result but the masks of dropout; null
            does so for DistilBERT, BERT, RoBERTa, XLM-RoBERTa, ModernBERT and BigBird with full attention, but not for
            the task token, and in no subclass with a module or losses of its own: one that reads no token but the
            first, and no attention_mask, may say true.
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
    task: TextTask = "single_label"
    loss: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.task", self.task, TextTask)
        all_tokens = "model.padding_free=true computes the last block for the first token only, and model.task=token"
        require(not (self.padding_free and self.task == "token"), f"{all_tokens} reads all: leave it at null")
        self._can_pack: bool | None = None  # not looked for yet

    @property
    def auto(self) -> str:  # type: ignore[override]
        """The class of transformers for the task."""
        return f"AutoModelFor{'Token' if self.task == 'token' else 'Sequence'}Classification"

    def _load_tokenizer(self, source: str, **options: Any) -> Any:
        found = super()._load_tokenizer(source, **options)
        if self.task == "token" and getattr(found, "add_prefix_space", None) is False:  # RoBERTa's
            return super()._load_tokenizer(source, add_prefix_space=True)  # without it, it takes no words
        return found

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
            self._asks = config.model_type == "modernbert"
            require(
                self._can_pack or self.padding_free is None,
                f"model.padding_free=true is for encoders ({', '.join(PACKED)}; BigBird with model.attention full) "
                "whose head reads the first token, with sdpa attention and padding on the right, and "
                f"model.name={self.name!r} is none: leave it at null",
            )
        return self._can_pack

    def _has_known_blocks(self, config: Any) -> bool:
        """Whether models/unpadded.py says how blocks of that configuration compute, as they are here."""
        from trainer.models.packed_attention import stretched

        first = getattr(config, "classifier_pooling", "cls") == "cls"  # of ModernBERT's, some read the mean
        return config.model_type in PACKED and first and stretched(config) is None

    def _is_plain(self) -> bool:
        """Whether module and losses are those of this class, which look at the first token of a text and no mask."""
        own = ("build", "skeleton", "losses")
        return all(getattr(type(self), name) is getattr(TextClassifier, name) for name in own)

    def packed(self, batch: Any) -> Any:
        """The micro-batch without its padding, where the module computes without it."""
        if not self.packs() or not isinstance(batch, Mapping) or "attention_mask" not in batch:
            return batch
        from trainer.models.packed_attention import made_mask
        from trainer.models.unpadded import pack

        packed = pack(batch, self._padding_idx)
        if packed is not None and self._asks:
            packed["attention_mask"] = made_mask()
        return packed or batch

    def _finished(self, module: nn.Module) -> nn.Module:
        module = super()._finished(module)
        if self.packs():
            from trainer.models.packed_attention import NAME, register
            from trainer.models.unpadded import unpad

            unpad(module)
            if self._asks:
                register()
                module.set_attn_implementation(NAME)  # type: ignore[operator]
        return module

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """That of the task, from the logits; the batch is a tokenizer's output plus ``labels``."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        yield self.loss_of(module(**inputs).logits, batch["labels"])
