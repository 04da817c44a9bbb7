"""What tests of plugins share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def pools_of_ranks_end_with_their_module() -> None:
    """Here they stay for all modules: new ranks would do again what torch does once in each."""
