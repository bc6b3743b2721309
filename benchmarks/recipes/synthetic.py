"""Data and vocabularies made in memory: what memory and speed depend on is their shape, not what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import Data

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
        size: samples in the training set; there is no other.
    """

    image_size: int = 224
    num_classes: int = 10
    size: int = 1024

    def prepare(self, tokenizer: Any = None) -> None:
        """Draw the images."""
        import torch

        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(POOL) % self.num_classes
        pixels = torch.randn(POOL, 3, self.image_size, self.image_size, generator=generator)
        pixels += torch.randn(self.num_classes, 3, 1, 1, generator=generator)[labels]
        self.train = _Repeated({"pixel_values": pixels, "labels": labels}, self.size)


@dataclass
class RandomTexts(Data):
    """Texts of random tokens, all as long as can be, the first quarter of which tells the label.

    Args:
        tokens: of every text.
        num_classes: labels go from 0 to one less.
        size: samples in the training set; there is no other.
    """

    tokens: int = 512
    num_classes: int = 2
    size: int = 1024

    def prepare(self, tokenizer: Any = None) -> None:
        """Draw the texts from the tokenizer's vocabulary, without its padding token (number 0)."""
        import torch

        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(POOL) % self.num_classes
        ids = torch.randint(1, len(tokenizer), (POOL, self.tokens), generator=generator)
        ids[:, : self.tokens // 4] = 2 + labels[:, None]
        self.train = _Repeated({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}, self.size)


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
