"""Image files of any format, mode and size, decoded to pixels of one size; what cannot be decoded is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as transforms
from tqdm import tqdm

from vision_attn.errors import DataError
from vision_attn.training.images import ImageSet

__all__ = ["ImageFiles"]

#: What makes an image one of a size.
Crop = Callable[[Image.Image, tuple[int, int]], Image.Image]

#: How many damaged files one message names.
NAMED = 20

#: Pillow's formats of which it gives 16 bits a pixel in a mode of 32; of TIFF it gives any 32 bits in it.
SIXTEEN_BITS = ("PNG", "PPM")


class ImageFiles:
    """Image files and the class of each, not yet decoded.

    Each image becomes RGB, upright by its EXIF orientation, resized by its shorter side and cropped to its centre, or
    a random crop of it is resized. Of an animation the first frame is taken, of 16 bits the upper 8. Transparency is
    dropped, as torchvision and timm drop it: what shows is the colour that the file holds beneath.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int]) -> None:
        # An array: of a list of strings every worker process would end up with a copy, as it counts references.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.paths)

    def decode(
        self, rows: Sequence[int], size: tuple[int, int], *, crop_scale: float | None = None, seed: int = 0
    ) -> Tensor:
        """Decode some of them."""

        def crops() -> Iterator[Tensor | str]:
            for row in rows:
                crop = centre if crop_scale is None else partial(random_crop, scale=crop_scale, seed=(seed, row))
                yield pixels(self.paths[row], size, crop)

        return stacked(crops(), len(rows), size)

    def read(self, size: tuple[int, int]) -> ImageSet:
        """Decode all of them."""
        return ImageSet(stacked(self.decoded(size), len(self), size), self.labels)

    def check(self) -> None:
        """Decode all of them and keep none."""
        refuse([found for found in self.decoded((1, 1)) if isinstance(found, str)])

    def decoded(self, size: tuple[int, int]) -> Iterator[Tensor | str]:
        """Decode all of them, by as many threads as there are cores."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            decoded = pool.map(partial(pixels, size=size), self.paths)
            yield from tqdm(decoded, "decode", len(self), leave=False, disable=None)


def centre(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    height, width = size
    return image if image.size == (width, height) else ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


def random_crop(image: Image.Image, size: tuple[int, int], *, scale: float, seed: tuple[int, int]) -> Image.Image:
    """A crop of this share of the image or more and of 3:4 to 4:3, wherever it is, brought to the size."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        top, left, height, width = RandomResizedCrop.get_params(image, [scale, 1.0], [3 / 4, 4 / 3])
    return transforms.resized_crop(image, top, left, height, width, list(size))


def stacked(decoded: Iterable[Tensor | str], count: int, size: tuple[int, int]) -> Tensor:
    images = torch.empty(count, 3, *size, dtype=torch.uint8)
    damaged = []
    for index, found in enumerate(decoded):
        if isinstance(found, str):
            damaged.append(found)
        else:
            images[index] = found
    refuse(damaged)
    return images


def refuse(damaged: Sequence[str]) -> None:
    if damaged:
        more = f" and {len(damaged) - NAMED:,} more" if len(damaged) > NAMED else ""
        raise DataError(f"damaged or no images: {', '.join(damaged[:NAMED])}{more}: fetch them again or remove them")


def pixels(path: bytes, size: tuple[int, int], crop: Crop = centre) -> Tensor | str:
    """One image, ``(3, *size)``, or which file it is that cannot be decoded, and why."""
    try:
        with Image.open(os.fsdecode(path)) as file:
            image = rgb(ImageOps.exif_transpose(file), file.format)
    except Exception as error:  # what a decoder raises that meets bytes of any kind, is not known to its caller
        reason = "is of no known format" if isinstance(error, UnidentifiedImageError) else error
        return f"{os.fsdecode(path)} ({' '.join(str(reason).split())})"
    return torch.from_numpy(np.array(crop(image, size))).permute(2, 0, 1)


def rgb(image: Image.Image, format: str | None) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels, whose range is not known")
    if image.mode == "I" and format not in SIXTEEN_BITS:
        raise ValueError("32 bits a pixel, whose range is not known")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # or Pillow warns
    return image.convert("RGB")
