"""Data and vocabularies made in memory: what memory and speed depend on is their shape, not what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import Data
from trainer.engine.cut import padded

if TYPE_CHECKING:
    from torch import Tensor

POOL = 64
"""Different images; more would only take longer to draw."""


@dataclass
class RandomImages(Data):
    """Noise, tinted by its label, so that a few steps lower the loss.

    Args:
        image_size: height and width in pixels.
        num_classes: labels go from 0 to one less.
        size: samples in the training set.
        val_size: samples in the validation set; 0 for none.
        workers: processes that load ahead.
    """

    image_size: int = 224
    num_classes: int = 10
    size: int = 1024
    val_size: int = 0
    workers: int | None = 0

    def prepare(self, tokenizer: Any = None) -> None:
        """Draw the images."""
        import torch

        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(POOL) % self.num_classes
        pixels = torch.randn(POOL, 3, self.image_size, self.image_size, generator=generator)
        pixels += torch.randn(self.num_classes, 3, 1, 1, generator=generator)[labels]
        pool = {"pixel_values": pixels, "labels": labels}
        self.train = _Repeated(pool, self.size)
        self.val = _Repeated(pool, self.val_size) if self.val_size else None


@dataclass
class RandomTexts(Data):
    """Texts of random tokens, all as long as can be unless told otherwise, the start of which tells the label.

    Args:
        tokens: of the longest text.
        shortest: tokens of the shortest text; null makes all as long as the longest.
        num_classes: labels go from 0 to one less.
        size: samples in the training set.
        val_size: samples in the validation set; 0 for none.
    """

    tokens: int = 512
    shortest: int | None = None
    num_classes: int = 2
    size: int = 1024
    val_size: int = 0

    def prepare(self, tokenizer: Any = None) -> None:
        """Draw the texts from the tokenizer's vocabulary, without its padding token (number 0)."""
        import torch

        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(POOL) % self.num_classes
        ids = torch.randint(1, len(tokenizer), (POOL, self.tokens), generator=generator)
        ids[:, : self.tokens // 4] = 2 + labels[:, None]
        mask = torch.ones_like(ids)
        pool = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        kind = _Repeated
        if self.shortest is not None:
            kind = _Ragged
            mask[:] = _ragged(self.shortest, self.tokens, generator)
            ids *= mask
        self.train = kind(pool, self.size)
        self.val = kind(pool, self.val_size) if self.val_size else None


@dataclass
class RandomTokens(Data):
    """Texts of random tokens to predict, all as long as can be unless told otherwise.

    Args:
        tokens: of the longest text.
        words: that tokens are drawn from, the first ones of a vocabulary.
        size: samples in the training set.
        shortest: tokens of the shortest text; null makes all as long as the longest.
    """

    tokens: int = 4096
    words: int = 100
    size: int = 256
    shortest: int | None = None

    def prepare(self, tokenizer: Any = None) -> None:
        """Draw the texts."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, self.words, (POOL, self.tokens), generator=generator)
        mask, labels = torch.ones_like(ids), ids
        if self.shortest is not None:
            mask = _ragged(self.shortest, self.tokens, generator)
            ids, labels = ids * mask, ids.masked_fill(mask == 0, -100)
        kind = _Repeated if self.shortest is None else _Ragged
        self.train = kind({"input_ids": ids, "attention_mask": mask, "labels": labels}, self.size)


def _ragged(shortest: int, longest: int, generator: Any) -> Tensor:
    """The attention mask of ``POOL`` texts, int64: lengths at even distances, in any order."""
    import torch

    lengths = torch.linspace(shortest, longest, POOL).round()[torch.randperm(POOL, generator=generator)]
    return (torch.arange(longest) < lengths[:, None]).long()


class _Repeated:
    """A map-style dataset of ``size`` samples: the few of ``pool`` over and over."""

    def __init__(self, pool: dict[str, Tensor], size: int) -> None:
        self.pool, self.size = pool, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: values[index % POOL] for key, values in self.pool.items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = [index % POOL for index in indices]
        return {key: values[rows] for key, values in self.pool.items()}


class _Ragged(_Repeated):
    """Texts that are padded to the longest of their micro-batch, up to the multiple that our own data has."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        of_pool = self.pool["attention_mask"].sum(1).tolist()
        return [of_pool[index % POOL] for index in range(self.size)]

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        width = padded(int(batch["attention_mask"].sum(1).max()))
        return {key: values if values.ndim < 2 else values[:, :width] for key, values in batch.items()}


def make_tokenizer(folder: Path, words: int) -> Path:
    """Save a tokenizer that knows ``words`` words in ``folder``, as a model of that vocabulary needs one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number for number in range(2, words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return folder


def make_llama(folder: Path, shape: Mapping[str, int]) -> Path:
    """Save the configuration of a decoder like Llama in ``folder``; padding is token 0, as ``make_tokenizer`` has it.

    Args:
        folder: to make.
        shape: fields of ``LlamaConfig`` that differ from its defaults.
    """
    from transformers import LlamaConfig

    LlamaConfig(pad_token_id=0, bos_token_id=None, eos_token_id=None, use_cache=False, **shape).save_pretrained(folder)
    return folder
