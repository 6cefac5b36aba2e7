"""Image files: find them, open them, and skip damaged ones with a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from vision_attn.errors import DataError


def is_image(name: str) -> bool:
    """Return True for a name with an image extension that does not start with a dot."""
    return name.lower().endswith(IMG_EXTENSIONS) and not os.path.basename(name).startswith(".")


def open_image(file: Any) -> Image.Image:
    """Open an image file as RGB, rotated by its EXIF orientation, with the upper 8 bits of 16-bit pixels."""
    with Image.open(file) as image:
        found = ImageOps.exif_transpose(image)
        # Pillow opens some 16-bit formats in a 32-bit mode, and would clip the values to 255.
        if found.mode.startswith("I;16") or (found.mode == "I" and image.format in ("PNG", "PPM")):
            found = Image.fromarray((np.asarray(found) // 256).astype(np.uint8))
        if found.mode in ("I", "F"):
            raise ValueError("32-bit pixels have no defined range")
        return found.convert("RGBA" if "transparency" in found.info else "RGB").convert("RGB")


def find_images(names: Sequence[Path]) -> list[Path]:
    """Return the given image files and all images in the given folders, each once."""
    if not names:
        raise ValueError("images are required: expected image files or folders of images, got none")
    found: list[Path] = []
    for name in names:
        if not name.exists():
            raise DataError(f"{name} does not exist. Expected an image file or a folder of images")
        inner = [file for file in sorted(name.rglob("*")) if is_image(file.name)] if name.is_dir() else [name]
        if not inner:
            raise DataError(f"{name} contains no images")
        found += inner
    return list(dict.fromkeys(found))


def load_images(files: Sequence[Path], transform: Callable[[Image.Image], Tensor]) -> dict[Path, Tensor]:
    """Return the transformed images by file. A file that cannot be read is skipped with a warning."""
    loaded = {}
    for file in files:
        try:
            loaded[file] = transform(open_image(file))
        except Exception as error:  # Pillow raises many types of errors for damaged files
            reason = " ".join(str(error).split())
            warnings.warn(f"{file} cannot be read as an image ({reason}). It is skipped", stacklevel=2)
    return loaded


def check_none_skipped(files: Sequence[Path], loaded: int) -> None:
    """Raise an error after all work is done if images were skipped, so that a program reports it to its caller."""
    if skipped := len(files) - loaded:
        raise DataError(f"{skipped} of {len(files)} images cannot be read and were skipped")
