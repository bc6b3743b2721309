"""Where the real samples are."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sample_data() -> Path:
    """The folder of real samples: $TRAINER_TEST_DATA, or shared/data beside the repository."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TRAINER_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no sample data in {folder}: set TRAINER_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def tokenizer(sample_data):
    """BERT's uncased WordPiece tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(sample_data / "tokenizers" / "bert-base-uncased")
