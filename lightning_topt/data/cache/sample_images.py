"""PIL images as pixels and palette, and back. PIL is imported where a sample has an image, and only
there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import lru_cache
from typing import Any

from lightning_topt.data.cache.sample_layout import UnsupportedSample

Palette = tuple[str, bytes]  # mode, and the colours in it


def is_image(value: Any) -> bool:
    """Return whether it is one of PIL's own: a class that derives from theirs may hold more."""
    module = sys.modules.get("PIL.Image")
    return (
        module is not None
        and isinstance(value, module.Image)
        and type(value).__module__.startswith("PIL.")
    )


def pixels_of(image: Any) -> bytes:
    """Return all pixels, read where the image has not been read yet."""
    return image.tobytes()  # type: ignore[no-any-return]


def palette_of(image: Any) -> Palette | None:
    """Return the palette of an image that has been read, in its own mode; None where it has
    none.
    """
    if image.mode not in ("P", "PA"):
        return None
    return image.im.getpalettemode(), bytes(image.getpalette(None))


def image_of(
    mode: str, size: tuple[int, int], pixels: bytes, palette: Palette | None, info: dict[Any, Any]
) -> Any:
    """Return a plain PIL image. Raises UnsupportedSample where PIL is missing."""
    image = _pil_image().frombytes(mode, size, pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
        image.load()  # before there is an info, whose transparency it may put into the palette
    image.info.update(info)
    return image


@lru_cache(maxsize=1)
def _pil_image() -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedSample("a cached sample is a PIL image: install pillow")
    return importlib.import_module("PIL.Image")
