"""Texts and a tokenizer, for trainers that tokenize: a word for each token."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from conformance.cases import END, VOCABULARY


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, ..., one for each token."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token=f"w{END}")


def words(tokens: Tensor) -> str:
    """Return the text of tokens."""
    return "".join(f" w{token}" for token in tokens.tolist())
