"""Fixtures of the data tests."""

import pytest


@pytest.fixture(scope="session")
def tokenizer(sample_data):
    """BERT's uncased WordPiece tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(sample_data / "tokenizers" / "bert-base-uncased")
