"""PIL images come back with their pixels, palette and info."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.data.test_sample_codec import entry_of, kept


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def pictures():
    rng = np.random.default_rng(0)
    rgb, rgba = (Image.fromarray(rng.integers(0, 255, (7, 5, n), dtype=np.uint8)) for n in (3, 4))
    modes = [
        "1",
        "L",
        "LA",
        "La",
        "P",
        "PA",
        "RGB",
        "RGBX",
        "RGBA",
        "RGBa",
        "CMYK",
        "YCbCr",
        "HSV",
        "I",
        "F",
    ]
    found = {
        mode: (rgba if mode in ("La", "RGBa") else rgb).convert({"La": "LA"}.get(mode, mode))
        for mode in modes
    }
    found |= {mode: Image.new(mode, (3, 2), 259) for mode in ("I;16", "I;16B")}
    found |= {f"empty {mode}": Image.new(mode, (0, 3)) for mode in ("RGB", "P", "1")}
    found["4 colours"] = rgb.quantize(4)
    found["RGBA palette"] = rgba.quantize(5)
    found["no palette"] = Image.new("P", (2, 3))
    found["transparent index"] = saved(rgb.quantize(4), format="PNG", transparency=2)
    found["transparencies"] = saved(rgb.quantize(4), format="PNG", transparency=b"\x10\x20")
    found["transparent colour"] = saved(rgb, format="PNG", transparency=(1, 2, 3))
    found["gif"] = saved(rgb.quantize(4), format="GIF", transparency=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    found["jpeg"] = saved(rgb, format="JPEG", exif=exif, dpi=(72, 72), icc_profile=b"profile")
    return found


@pytest.mark.parametrize("name", pictures())
def test_pictures(name):
    image = pictures()[name]
    found = kept([image])[0]
    image.load()
    assert type(found) is Image.Image
    assert (
        found.mode == image.mode and found.size == image.size and found.tobytes() == image.tobytes()
    )
    assert found.info == image.info and dict(found.getexif()) == dict(image.getexif())
    assert found.getpalette(None) == image.getpalette(None)
    if image.mode in ("P", "PA"):
        assert found.im.getpalettemode() == image.im.getpalettemode()
        assert (
            found.palette.mode == image.palette.mode
            and found.palette.colors == image.palette.colors
        )
        assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    if image.mode not in ("La", "I;16B"):  # which Pillow itself does not convert
        assert found.convert().mode == image.convert().mode
    assert entry_of([found]) == entry_of([image])


def test_of_info_what_is_plain_data_is_kept():
    image = Image.new("RGB", (1, 1))
    image.info |= {"a": (1, b"x"), "b": object(), 3: "three", "c": {"d": {1, 2}}}
    assert kept(image).info == {"a": (1, b"x"), 3: "three"}
