"""Classify images with an ONNX network that `vision-attn export` wrote. Requires onnxruntime and Pillow, but not torch.

    python examples/classify.py model.onnx photo.jpg another.png

The script prints one line per image, with the three most probable classes and their probabilities.
"""

import argparse
import json
import math
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def decode(path):
    """Read an image as in training: rotated according to EXIF, 16-bit values reduced to their upper 8 bits."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode == "F" or (image.mode == "I" and file.format not in ("PNG", "PPM")):
            raise ValueError("images with 32 bits per pixel are not supported: their value range is unknown")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    return image.convert("RGB")


def resize_and_crop(image, size, crop_pct, crop_mode, interpolation):
    """Resize an image and crop its center, as timm does for evaluation. Sizes are (width, height)."""
    scaled = [math.floor(side / crop_pct) for side in size]
    if crop_mode == "squash":
        resized = scaled
    elif scaled[0] == scaled[1]:
        resized = [scaled[0] * side // min(image.size) for side in image.size]
    else:
        ratio = min(side / target for side, target in zip(image.size, scaled, strict=True))
        resized = [round(side / ratio) for side in image.size]
    if resized != list(image.size):
        image = image.resize(resized, Image.Resampling[interpolation.upper()])
    left, top = (round((side - target) / 2) for side, target in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1]))


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("network", help="ONNX file that vision-attn export wrote")
parser.add_argument("images", nargs="+", help="image files to classify")
options = parser.parse_args()

try:
    session = onnxruntime.InferenceSession(options.network)
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["classifier"])
except Exception as error:  # the exceptions of onnxruntime have no common base class
    sys.exit(f"{options.network}: expected an ONNX file that vision-attn export wrote ({error!r})")
channels, height, width = metadata["input_size"]
crop = metadata["crop_pct"], metadata["crop_mode"], metadata["interpolation"]
for path in options.images:
    try:
        image = resize_and_crop(decode(path), (width, height), *crop).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # an image decoder may raise any exception
        sys.exit(f"{path}: cannot read this image ({error})")
    pixels = np.asarray(image, dtype=np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 255
    if metadata["pixels"] != "0…1":  # exported with --no-normalize
        mean, std = (np.float32(metadata[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    logits = session.run(["logits"], {"images": pixels[None]})[0][0]
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    best = np.argsort(-probabilities)[:3]
    print(path, *(f"{metadata['classes'][i]} {100 * probabilities[i]:.1f} %" for i in best), sep="  ")
