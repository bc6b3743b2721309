"""Fixtures of the data tests."""

import shutil

import pytest


@pytest.fixture(scope="session")
def tokenizer(sample_data):
    """BERT's uncased WordPiece tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(sample_data / "tokenizers" / "bert-base-uncased")


@pytest.fixture
def folder(sample_data, tmp_path):
    """Real images of 2 classes: 5 for training and 3 for testing of each."""
    for part, count in (("train", 5), ("test", 3)):
        for name in ("cat", "ship"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for source in sorted((sample_data / "cifar10" / "folder" / part / name).iterdir())[:count]:
                shutil.copy(source, tmp_path / "images" / part / name)
    return tmp_path / "images"


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled from the moment on that they are written."""
    monkeypatch.setattr("trainer.data.cache.MTIME_SETTLE_NS", -(10**18))
