"""What tests of plugins share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch import end_pools


@pytest.fixture(autouse=True, scope="module")
def pools_of_ranks_end_with_their_module() -> Iterator[None]:
    """Most fits are of two ranks, which stay for all modules; more take memory."""
    yield
    end_pools(above=2)
