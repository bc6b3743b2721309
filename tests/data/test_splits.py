"""Splits are scikit-learn's, and so are the digits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from trainer.data.base import hold_out
from trainer.data.image_splits import read_digits
from trainer.errors import RecipeError

LABELS = st.lists(st.integers(0, 4), min_size=6, max_size=90)


@settings(max_examples=60)
@given(labels=LABELS, fraction=st.floats(0.02, 0.98), seed=st.integers(0, 1000))
def test_the_split_is_that_of_scikit_learn(labels, fraction, seed):
    try:
        parts = train_test_split(range(len(labels)), test_size=fraction, random_state=seed, stratify=labels)
    except ValueError:
        with pytest.raises(RecipeError, match=r"data\.val_fraction=.*(one sample|would have)"):
            hold_out(labels, fraction, "data.val_fraction", seed)
    else:
        assert hold_out(labels, fraction, "data.val_fraction", seed) == tuple(map(sorted, parts))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_digits_are_those_of_scikit_learn(elsewhere, monkeypatch):
    if elsewhere:
        monkeypatch.setattr("trainer.data.image_splits.find_spec", lambda name: None)
    digits = load_digits()
    pixels, classes = read_digits()
    assert np.array_equal(pixels, digits.images)
    assert np.array_equal(classes, digits.target)
