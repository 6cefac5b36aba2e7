"""Images as the input of a network, the same in training, evaluation and use."""

from typing import Any

import numpy as np
from PIL import Image, ImageOps


def to_rgb(image: Any) -> Any:
    """Return a Pillow image as RGB, rotated by its EXIF orientation, with the upper 8 bits of 16-bit pixels.

    A tensor is returned unchanged.

    Raises:
        ValueError: the pixels have 32 bits, whose range is not defined.

    >>> to_rgb(Image.fromarray(np.full((1, 1), 100 * 256 + 7, np.uint16))).getpixel((0, 0))
    (100, 100, 100)
    """
    if not isinstance(image, Image.Image):
        return image
    found = ImageOps.exif_transpose(image)
    # Pillow opens some 16-bit formats in a 32-bit mode, and would clip the values to 255.
    if found.mode.startswith("I;16") or (found.mode == "I" and image.format in ("PNG", "PPM")):
        found = Image.fromarray((np.asarray(found) // 256).astype(np.uint8))
    if found.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no defined range")
    return found.convert("RGBA" if "transparency" in found.info else "RGB").convert("RGB")
