"""A tokenizer without a vocabulary file: every byte of a text is a token."""

from __future__ import annotations

from typing import Any

BYTES = "bytes"  # the value of ``model.tokenizer`` that selects it

END, PAD = "<|endoftext|>", "<|pad|>"
TURNS = ("<|im_start|>", "<|im_end|>")  # for chat templates, such as ChatML
MASKING = ("<|mask|>", "<|cls|>")  # for masked language models


def byte_tokenizer(masks: bool = False) -> Any:
    """Build a fast tokenizer of 260 tokens: the bytes 0 to 255 of UTF-8, end of text, padding, start and end of a turn.

    With ``masks`` there are two more, a mask and a start of text, and a text is between start and end, as in BERT.
    It is saved in files that ``AutoTokenizer`` reads. transformers' ``ByT5Tokenizer`` loops over bytes in Python.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made = Tokenizer(models.BPE({letter: byte for byte, letter in bytes_to_unicode().items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (END, PAD, *TURNS, *MASKING[: 2 * masks])]
    )
    special: Any = {"eos_token": END, "pad_token": PAD, "extra_special_tokens": list(TURNS)}
    if masks:
        special |= {"mask_token": MASKING[0], "cls_token": MASKING[1], "sep_token": END}
        ids = [(text, made.token_to_id(text)) for text in (MASKING[1], END)]
        text, pair = f"{MASKING[1]} $A {END}", f"{MASKING[1]} $A {END} $B {END}"
        made.post_processor = processors.TemplateProcessing(single=text, pair=pair, special_tokens=ids)
    options: Any = {"model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, **options)
