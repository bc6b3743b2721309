"""Tiny tokenizers of the kinds that language models have, made here."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["hello world", "what is the answer?", "the answer is forty two.\n\n", "a film, a book\n\n\n", "good\n\ngood"]
SPECIAL = ["<s>", "<|end|>", "<|im_start|>", "<|im_end|>"]


def byte_pairs(begins: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level pairs, as GPT-2, Llama 3 and Qwen have them, with merges over blanks and line breaks; ``begins`` puts
    <s> before every text, as Llama's does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator(WORDS * 3, trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return _finished(made, **options)


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Letters and words with a blank put before every text, as SentencePiece of Llama 2 and Mistral does."""
    pieces = [*SPECIAL, "▁", *"abcdefghijklmnopqrstuvwxyz?.,\n[]/INSTA:", "▁hello", "▁the", "▁answer"]
    made = Tokenizer(
        models.Unigram([(piece, -1.0 - len(piece) / 9) for piece in pieces], unk_id=0, byte_fallback=False)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return _finished(made)


def _finished(made: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    settings = {"eos_token": "<|end|>", "bos_token": "<s>", "extra_special_tokens": SPECIAL[2:], **options}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **settings)
