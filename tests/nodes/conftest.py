"""Two machines at a switch."""

from __future__ import annotations

import pytest
from nodes.hosts import Hosts, why_not

REASON = why_not()


@pytest.fixture
def hosts(tmp_path):
    """``nodea`` and ``nodeb``."""
    if REASON is not None:
        pytest.skip(REASON)
    with Hosts(tmp_path, "nodea", "nodeb") as pair:
        yield pair
