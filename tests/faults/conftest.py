"""Disturbed runs that a test cannot leave behind."""

from __future__ import annotations

import sys

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

from faults.runs import DisturbedRun


@pytest.fixture
def start(tmp_path):
    """A function that starts a :class:`DisturbedRun`."""
    started = []

    def begin(launcher, ranks, *flags):
        started.append(DisturbedRun(tmp_path, launcher, ranks, *flags))
        return started[-1]

    yield begin
    for run in started:
        run.end()
