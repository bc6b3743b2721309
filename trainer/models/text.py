"""Any sequence classifier of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.blocks import find_blocks
from trainer.contract import Loss, Model
from trainer.errors import RecipeError, require
from trainer.models.common import classification_loss, require_filled, train_last_blocks

if TYPE_CHECKING:
    from torch import Tensor, nn

# The names under which configurations keep their dropout rates.
DROPOUT_FIELDS = (
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "hidden_dropout",
    "classifier_dropout_prob",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)


@dataclass
class TextClassifier(Model):
    """Any ``AutoModelForSequenceClassification``: DistilBERT, BERT, RoBERTa, ...

    The loss is computed here from the logits, never by the model itself: the losses of transformers' sequence
    classifiers are means that ignore how many micro-batches a step has.

    Args:
        name: where the configuration comes from: a hub id, a local folder, or a model type such as distilbert.
        weights: a hub id or a local folder, as save_pretrained writes it; null for random weights.
        tokenizer: a hub id or a local folder; null takes that of weights, or of name.
        config: entries of the configuration to override, such as {n_layers: 2, dim: 128}.
        revision: of everything that comes from the hub: a branch, tag or commit.
        num_classes: null takes the dataset's.
        class_names: null takes the dataset's; saved with the model.
        dropout: sets all dropout rates of the configuration; null leaves them.
        train_last_blocks: freeze all but the last n blocks and the head; null trains everything.
    """

    name: str = "distilbert"
    weights: str | None = None
    tokenizer: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    dropout: float | None = None
    train_last_blocks: int | None = None

    own_format = True

    def __post_init__(self) -> None:
        require(self.dropout is None or 0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")
        self._cached_tokenizer: Any = None

    def prepare(self) -> None:
        """Fetch configuration, tokenizer and weights into the hub's cache."""
        self.tokenizer_or_none()
        self._configuration()
        if self.weights is not None and not _is_local(self.weights):
            from huggingface_hub import snapshot_download

            patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
            _from_hub(
                "weights",
                self.weights,
                snapshot_download,
                self.weights,
                revision=self.revision,
                allow_patterns=patterns,
            )

    def tokenizer_or_none(self) -> Any:
        """The tokenizer, loaded once."""
        if self._cached_tokenizer is None:
            from transformers import AutoTokenizer

            source = self.tokenizer or self.weights or self.name
            if not _is_local(source) and _is_model_type(source):
                raise RecipeError(
                    f"model.tokenizer is missing: model.name={source} is a model type and has no tokenizer"
                )
            self._cached_tokenizer = _from_hub(
                "tokenizer", source, AutoTokenizer.from_pretrained, _local(source), revision=self.revision
            )
        return self._cached_tokenizer

    def build(self) -> nn.Module:
        """The module: from ``input_ids`` and ``attention_mask`` (n, tokens) to logits (n, classes)."""
        import torch
        from transformers import AutoModelForSequenceClassification

        require_filled(type(self).__name__, num_classes=self.num_classes)
        dtype = torch.get_default_dtype()  # from_config and from_pretrained do not look at it themselves
        config = self._configuration()
        if self.weights is None:
            module = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        else:
            module, found = _from_hub(
                "weights",
                self.weights,
                AutoModelForSequenceClassification.from_pretrained,
                _local(self.weights),
                config=config,
                dtype=dtype,
                revision=self.revision,
                use_safetensors=True,  # never a pickle
                ignore_mismatched_sizes=True,  # a head for another number of classes is replaced
                output_loading_info=True,
            )
            self._require_body(module, found)
            module = module.to(torch.get_default_device())
        if self.train_last_blocks is not None:
            train_last_blocks(module, self.train_last_blocks, self.blocks)
        return module

    def _require_body(self, module: nn.Module, found: dict[str, Any]) -> None:
        """Only the head may be new; transformers would fill anything else with random numbers as well."""
        from trainer.weights import shortened

        blocks = find_blocks(module, self.blocks)
        last = list(blocks[-1].parameters())[-1] if blocks else None
        body = []
        for name, parameter in module.named_parameters():
            body.append(name)
            if parameter is last:
                break
        wrong = {
            key if isinstance(key, str) else key[0]
            for kind in ("missing_keys", "mismatched_keys")
            for key in found[kind]
        }
        if lost := sorted(wrong & set(body)):
            raise RecipeError(
                f"model.weights={self.weights!r} are not those of this {module.config.model_type}: "  # type: ignore[union-attr]
                f"{shortened(lost)} are missing or of another shape"
            )

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Cross entropy from the logits; the batch is a tokenizer's output plus ``labels`` (n,)."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        yield classification_loss(module(**inputs).logits, batch["labels"])

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``AutoModelForSequenceClassification.from_pretrained`` and ``AutoTokenizer`` load."""
        module.save_pretrained(folder, state_dict=dict(state))  # type: ignore[operator]
        self.tokenizer_or_none().save_pretrained(folder)

    def saved_in(self, folder: Path) -> TextClassifier:
        """The classifier whose configuration, weights and tokenizer ``save`` wrote to ``folder``."""
        from dataclasses import replace

        source = str(folder)
        return replace(self, name=source, weights=source, tokenizer=source, config={}, revision=None)

    def _configuration(self) -> Any:
        from transformers import AutoConfig

        if _is_model_type(self.name) and not _is_local(self.name):
            config = AutoConfig.for_model(self.name)
            tokenizer = self.tokenizer_or_none()
            config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
        else:
            config = _from_hub("name", self.name, AutoConfig.from_pretrained, _local(self.name), revision=self.revision)
        unknown = [key for key in self.config if not hasattr(config, key)]
        if unknown:
            from difflib import get_close_matches

            near = get_close_matches(unknown[0], list(config.to_dict()), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RecipeError(f"model.config: {config.model_type} has no setting {unknown[0]!r}{hint}")
        changes = dict(self.config)
        if self.dropout is not None:
            changes = {key: self.dropout for key in DROPOUT_FIELDS if getattr(config, key, None) is not None} | changes
        for key, value in changes.items():
            setattr(config, key, value)
        if self.num_classes is not None:
            names = self.class_names or [f"LABEL_{number}" for number in range(self.num_classes)]
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
        return config


def _local(source: str) -> str:
    return source.removeprefix("file://")


def _is_local(source: str) -> bool:
    return Path(_local(source)).is_dir()


def _is_model_type(name: str) -> bool:
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING


def _from_hub(key: str, source: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a loader of transformers; what goes wrong becomes one line that names the key."""
    from safetensors import SafetensorError

    if source.startswith(("file://", "/", "./", "../")) and not _is_local(source):
        raise RecipeError(f"model.{key}={source} is not a folder")
    try:
        return load(*args, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"model.{key}={source!r} cannot be loaded: {first_line} Give a local folder as save_pretrained writes it, "
            "or a hub id"
        ) from error
