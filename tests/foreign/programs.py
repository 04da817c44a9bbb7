"""All programs, by their names: importing this module fills the shelf."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from tests.foreign import (  # noqa: F401  (fill the shelves)
    awkward,
    classics,
    once,
    once_collectives,
    once_manual,
    once_modes,
    once_optimizers,
    once_public,
    once_python,
    once_training,
    transformers_models,
    vision,
)
from tests.foreign.once_shelf import COUNTED, put_shelves

put_shelves()
ALL = tuple(COUNTED)
