"""Datasets that are prepared, or are refused."""

import pytest

from trainer.errors import RecipeError


def prepared(data, tokenizer=None):
    data.prepare(tokenizer)
    return data


def refused(message, data, tokenizer=None):
    with pytest.raises(RecipeError, match=message):
        data.prepare(tokenizer)
