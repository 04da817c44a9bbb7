"""Arguments of the data plugins that mean nothing are refused where they are given, in one sentence
that names them.
"""

from __future__ import annotations

import math
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_topt.plugins.cached_data import (
    CachedDataModule,
    CachePartition,
)
from lightning_topt.plugins.coordinated_data import CoordinatedDataModule
from lightning_topt.plugins.monitors import StallMonitor


class Data(pl.LightningDataModule):
    pass


CACHED = partial(CachedDataModule, Data(), directory="cache", memory_bytes=1 << 20)
COORDINATED = partial(CoordinatedDataModule, Data(), directory="jobs", memory_bytes=1 << 20)
NO_SIZE = [True, -1, 1.5, math.nan, "", "-8GiB", "8GiB/s", [1]]
NO_SECONDS = [True, 0, math.nan, math.inf, "5", None]
NO_WHOLE = [True, 1.5, math.nan, "1", [1]]
NO_TEXT = ["", b"1", 1.5, ["1"]]
WRONG = {
    (CACHED, "directory"): ["", 3, b"cache", "a\0b"],
    (CACHED, "memory_bytes"): NO_SIZE,
    (CACHED, "disk_bytes"): NO_SIZE,
    (CACHED, "data_version"): NO_TEXT,
    (CACHED, "partition"): ["nodes", 1, 1.5, {"port": 1}, CachePartition],
    (CachePartition, "interface"): [*NO_TEXT, 3],
    (CachePartition, "port"): [*NO_WHOLE, -1, 70000, None],
    (CachePartition, "seed"): [*NO_WHOLE, None],
    (CachePartition, "timeout_seconds"): NO_SECONDS,
    (CachePartition, "retry_seconds"): NO_SECONDS,
    (COORDINATED, "directory"): ["", 3, None],
    (COORDINATED, "memory_bytes"): [*NO_SIZE, 0, None],
    (COORDINATED, "seed"): [*NO_WHOLE, None],
    (COORDINATED, "data_version"): NO_TEXT,
    (COORDINATED, "timeout_seconds"): NO_SECONDS,
    (StallMonitor, "every_n_steps"): [*NO_WHOLE, 0, -1],
}
CASES = [(make, name, value) for (make, name), values in WRONG.items() for value in values]


@pytest.mark.parametrize(
    ("make", "name", "value"), CASES, ids=lambda value: repr(value) if not callable(value) else ""
)
def test_what_means_nothing_is_refused_at_once(make, name, value):
    with pytest.raises(ValueError, match=name) as caught:
        make(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [CACHED, COORDINATED])
@pytest.mark.parametrize("datamodule", [None, torch.utils.data.DataLoader([1]), Data, "Data"])
def test_only_a_datamodule_is_wrapped(make, datamodule):
    with pytest.raises(TypeError, match="wraps a LightningDataModule"):
        make.func(datamodule, **make.keywords)


def test_every_argument_is_in_the_list():
    import inspect

    for make in (CACHED, COORDINATED, CachePartition, StallMonitor):
        names = set(inspect.signature(getattr(make, "func", make)).parameters) - {"datamodule"}
        assert names == {name for one, name in WRONG if one is make}
