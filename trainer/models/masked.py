"""Masked language models of transformers, whose masks depend only on the seed of each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from trainer.contract import DrawnInputs
from trainer.errors import RecipeError, require, require_choice
from trainer.models.bigbird import ATTENTION_TYPES, adapt_bigbird
from trainer.models.byte_tokenizer import BYTES, byte_tokenizer
from trainer.models.hub import is_local
from trainer.models.text import PackedEncoder, require_tokens
from trainer.values import IGNORED_LABEL, Loss, Task

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor, nn
    from typing_extensions import Self

    from trainer.values import DataSpec

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of the chosen tokens that become the mask token, or a random token; the others stay (Devlin et al. 2019)."""

WORD_STARTS = ("Ġ", "Ċ", "ĉ", "č", "▁")
"""First characters of tokens that begin a word: whitespace in byte-level BPE, and SentencePiece's space."""


def _roberta_head(module: Any, hidden: Tensor) -> Any:
    from torch.nn.functional import gelu

    return module.lm_head.layer_norm(gelu(module.lm_head.dense(hidden)))


HEADS: dict[str, Callable[[Any, Tensor], Any]] = {
    **dict.fromkeys(("bert", "big_bird"), lambda module, hidden: module.cls.predictions.transform(hidden)),
    **dict.fromkeys(("roberta", "xlm-roberta"), _roberta_head),
    "distilbert": lambda module, hidden: module.vocab_layer_norm(module.activation(module.vocab_transform(hidden))),
    "modernbert": lambda module, hidden: module.head(hidden),
}
"""The part of the head between the encoder and the linear layer to the vocabulary, by model type."""


class TokenMasking(NamedTuple):
    """Chooses tokens and replaces them, as a function of the seed of a sample and the position of a token in it."""

    rate: float
    mask_id: int
    words: int  # size of the vocabulary from which random tokens are drawn
    is_special: ndarray  # bool (words,): tokens that are never chosen
    begins: ndarray | None  # bool (words,): tokens that begin a word, to choose whole words; ``None`` for tokens

    def choose(self, batch: Mapping[str, Tensor]) -> tuple[ndarray, ndarray, ndarray]:
        """Return the tokens and which are chosen, both ``(n, length)``, and the seeds ``(n,)`` of the samples.

        Evaluation batches have no ``seeds``: they are computed from the tokens, so that each evaluation has the same
        masks.
        """
        import numpy as np
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # a plan has real batches on the host, and its mode cannot convert them
            ids, labels, mask = (batch[name].numpy() for name in ("input_ids", "labels", "attention_mask"))
            seeds = batch["seeds"].numpy().astype(np.uint64) if "seeds" in batch else None
        places = np.arange(ids.shape[1], dtype=np.uint64)
        if seeds is None:
            seeds = np.where(mask, _random_bits(ids.astype(np.uint64), places), 0).sum(1, dtype=np.uint64)
        allowed = (labels != IGNORED_LABEL) & (mask != 0) & ~self.is_special[ids]
        draws = _uniform(seeds[:, None], 3 * places)
        if self.begins is not None:  # each token has the draw of the first one of its word
            first = self.begins[ids] | ~allowed
            first[:, 1:] |= ~allowed[:, :-1]
            first[:, 0] = True
            start = np.maximum.accumulate(np.where(first, np.arange(ids.shape[1]), 0), axis=1)
            draws = np.take_along_axis(draws, start, axis=1)
        return ids, allowed & (draws < self.rate), seeds

    def replace(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens with replacements, and the labels: -100 except for chosen tokens; ``(n, length)``."""
        import numpy as np
        import torch

        ids, chosen, seeds = self.choose(batch)
        rows, places = chosen.nonzero()
        draws = [_uniform(seeds[rows], 3 * places.astype(np.uint64) + np.uint64(number)) for number in (1, 2)]
        drawn = (draws[1] * self.words).astype(np.int64)
        made, kinds = ids.copy(), [draws[0] < MASK_SHARE, draws[0] < MASK_SHARE + RANDOM_SHARE]
        made[rows, places] = np.select(kinds, [self.mask_id, drawn], ids[rows, places])
        return torch.from_numpy(made), torch.from_numpy(np.where(chosen, ids, IGNORED_LABEL))


def _random_bits(seeds: ndarray, counters: ndarray) -> ndarray:
    """Return the output at ``counters`` of SplitMix64 (Steele et al. 2014) seeded by ``seeds``, all uint64."""
    bits = seeds + (counters + 1) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


def _uniform(seeds: ndarray, counters: ndarray) -> ndarray:
    return (_random_bits(seeds, counters) >> 11) * 2.0**-53


def make_masking(tokenizer: Any, rate: float, whole_words: bool) -> TokenMasking:
    """Return the masking for ``tokenizer``; one without a mask token, or without words if needed, is rejected."""
    import numpy as np

    cause = "the tokenizer of model.tokenizer has no mask token"
    require(tokenizer.mask_token_id is not None, f"{cause}: use that of a masked language model, or bytes")
    words, begins = len(tokenizer), None
    is_special = np.isin(np.arange(words), tokenizer.all_special_ids)
    if whole_words:
        texts = [str(text) for text in tokenizer.convert_ids_to_tokens(range(words))]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        inner = getattr(backend and backend.model, "continuing_subword_prefix", None)  # WordPiece
        begins = np.array([not text.startswith(inner) if inner else text.startswith(WORD_STARTS) for text in texts])
        cause = "model.masking=whole_words: the tokens of model.tokenizer do not show where a word begins"
        require(bool((begins & ~is_special).any()), f"{cause}: use tokens")
    return TokenMasking(rate, tokenizer.mask_token_id, words, is_special, begins)


@dataclass
class MaskedLM(PackedEncoder, DrawnInputs):
    """An ``AutoModelForMaskedLM``: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ModernBERT or BigBird with full attention.

    The loss is computed here, never by the model itself: the cross entropy summed over the masked tokens, weighted by
    their number. The masks of a sample depend only on the seed of the run, the epoch and the sample; in evaluation
    they are always the same. The mask token replaces 80 % of the masked tokens, a random token 10 %, and 10 % stay.

    Args:
        mask_rate: probability that a token is masked (special tokens never are).
        masking: tokens masks each token independently; whole_words masks all tokens of a word or none.
        padding_free: skip padding. This changes only the masks of dropout. null enables it, except in subclasses with
            a custom module or custom losses, which must set true.
        lora: train adapters in the blocks instead of all weights; the head stays frozen, too.
        loss_chunk: number of masked tokens whose logits are held at once; 0 holds all. null uses as many as fit in
            64 MiB in fp32.
    """

    name: str = "bert"
    tokenizer: str | None = None
    mask_rate: float = 0.15
    masking: Literal["tokens", "whole_words"] = "tokens"
    padding_free: bool | None = None
    loss_chunk: int | None = None

    auto = "AutoModelForMaskedLM"
    head_is_new = False
    reads_first_token = False
    seeded = True
    task: ClassVar[Task] = "masked_language"  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.masking", self.masking, Literal["tokens", "whole_words"])
        rate = self.mask_rate
        require(0 < rate <= 1, f"model.mask_rate={rate} must be more than 0 and at most 1; BERT has 0.15")
        require_tokens("loss_chunk", self.loss_chunk)
        self._masking: TokenMasking | None = None  # not determined yet

    def prepare(self) -> None:
        super().prepare()
        if self.tokenizer_or_none() is not None:
            self._make_masking()

    def for_spec(self, spec: DataSpec) -> Self:
        """Return this model with masks for the synthetic samples of a plan, which repeat one token."""
        import numpy as np

        model = copy.copy(super().for_spec(spec))
        model._masking = TokenMasking(self.mask_rate, 0, 1, np.zeros(1, bool), None)
        return model

    def _make_masking(self) -> TokenMasking:
        if self._masking is None:
            tokenizer = self.tokenizer_or_none()
            require(tokenizer is not None, "model.tokenizer=none has no mask token: give a tokenizer")
            self._masking = make_masking(tokenizer, self.mask_rate, self.masking == "whole_words")
        return self._masking

    def weigh(self, batch: Any) -> dict[str, float]:
        """Return the number of masked tokens."""
        if "labels" not in batch:
            return super().weigh(batch)  # raises an error that names the missing key
        return {"loss": float(self._make_masking().choose(batch)[1].sum())}

    def packed(self, batch: Any) -> Any:
        """Mask tokens, remove the padding if supported, and add ``places`` and ``targets`` of the masked tokens."""
        if not isinstance(batch, Mapping) or "labels" not in batch:
            return batch
        ids, labels = self._make_masking().replace(batch)
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "seeds")}
        inputs = dict(super().packed({**inputs, "input_ids": ids, "targets": labels}))
        labels = inputs["targets"].flatten()
        places = (labels != IGNORED_LABEL).nonzero().flatten()
        return {**inputs, "places": places, "targets": labels[places]}

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the cross entropy of the masked tokens; the batch has ``input_ids``, ``attention_mask`` and ``labels``,
        int64 ``(n, length)``, and in training ``seeds``; or it is ``packed``."""
        batch = self.packed(batch)
        yield Loss(module(**batch), float(len(batch["targets"])))

    def _supports_unpadding(self, config: Any) -> bool:
        return config.model_type == "big_bird" or super()._supports_unpadding(config)

    def _load_tokenizer(self, source: str, **options: Any) -> Any:
        if source == BYTES and not is_local(source):
            return byte_tokenizer(masks=True)
        return super()._load_tokenizer(source, **options)

    def _config_from_data(self) -> dict[str, Any]:
        tokenizer, names = self.tokenizer_or_none(), [f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")]
        special = {} if tokenizer is None else {name: getattr(tokenizer, name) for name in names}
        return super()._config_from_data() | special

    def _configuration(self) -> Any:
        config = super()._configuration()
        cause = f"model.name={self.name!r} is a {config.model_type}, and MaskedLM supports {', '.join(HEADS)}"
        require(config.model_type in HEADS, f"{cause}: choose one of these")
        if getattr(config, "is_decoder", False):
            raise RecipeError("model.config.is_decoder=true hides later tokens from a masked language model: set false")
        if config.model_type == "big_bird":
            given = self.config.get("attention_type", ATTENTION_TYPES["full"])
            cause = f"model.config.attention_type={given!r} depends on the length that a micro-batch is padded to"
            require(given == ATTENTION_TYPES["full"], f"{cause}: leave it out, for full attention")
            config.attention_type = given
        return config

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        """Make the module return the summed loss when given ``places`` and ``targets``."""
        from trainer.models.chunked_loss import NO_TRANSFORM

        module = super()._finalize_module(module)
        self._require_embeddings(module)
        if module.config.model_type == "big_bird":  # type: ignore[union-attr]
            adapt_bigbird(module, "full")
        module.loss_chunk, module.logit_transform = self.loss_chunk, NO_TRANSFORM  # type: ignore[assignment]
        module.__class__ = _make_loss_class(type(module))  # type: ignore[arg-type]
        return module


@cache
def _make_loss_class(kind: type[nn.Module]) -> type[nn.Module]:
    from trainer.models.chunked_loss import chunked_loss

    plain: Callable[..., Any] = kind.forward

    @wraps(plain)
    def forward(
        self: Any, *args: Any, places: Tensor | None = None, targets: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if places is None or targets is None:
            return plain(self, *args, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1).index_select(0, places)
        hidden = HEADS[self.config.model_type](self, hidden)
        chunk = len(targets) if self.loss_chunk == 0 else self.loss_chunk
        return chunked_loss(hidden, self.get_output_embeddings(), targets, self.logit_transform, chunk)

    # Keep the class name: transformers writes it to config.json and uses it to find modules that must not be split.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
