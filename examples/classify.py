"""Say what is on images, by a network that `vision-attn export` wrote as ONNX; needs onnxruntime and Pillow, no torch.

python examples/classify.py model.onnx photo.jpg another.png
"""

import argparse
import json
import math
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def decode(path):
    """An image as training sees it: upright, of 16 bits the upper 8."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode == "F" or (image.mode == "I" and file.format not in ("PNG", "PPM")):
            raise ValueError("32 bits a pixel, whose range is not known")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    return image.convert("RGB")


def cropped(image, size, crop_pct, crop_mode, interpolation):
    """The centre of an image, as timm resizes and crops for evaluation; sizes are columns and rows."""
    whole = [math.floor(side / crop_pct) for side in size]
    if crop_mode == "squash":
        resized = whole
    elif whole[0] == whole[1]:
        resized = [whole[0] * side // min(image.size) for side in image.size]
    else:
        ratio = min(side / wanted for side, wanted in zip(image.size, whole, strict=True))
        resized = [round(side / ratio) for side in image.size]
    if resized != list(image.size):
        image = image.resize(resized, Image.Resampling[interpolation.upper()])
    left, top = (round((side - wanted) / 2) for side, wanted in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1]))


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("network", help=".onnx")
parser.add_argument("images", nargs="+")
options = parser.parse_args()

try:
    session = onnxruntime.InferenceSession(options.network)
    about = json.loads(session.get_modelmeta().custom_metadata_map["classifier"])
except Exception as error:  # onnxruntime's own have nothing in common
    sys.exit(f"{options.network}: no network that vision-attn export wrote ({error!r})")
channels, height, width = about["input_size"]
crop = about["crop_pct"], about["crop_mode"], about["interpolation"]
for path in options.images:
    try:
        image = cropped(decode(path), (width, height), *crop).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # a decoder may raise any
        sys.exit(f"{path}: a damaged or no image ({error})")
    pixels = np.asarray(image, dtype=np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 255
    if about["pixels"] != "0…1":  # exported with --no-normalize
        mean, std = (np.float32(about[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    logits = session.run(["logits"], {"images": pixels[None]})[0][0]
    shares = np.exp(logits - logits.max())
    best = np.argsort(-shares)[:3]
    print(path, *(f"{about['classes'][i]} {100 * shares[i] / shares.sum():.1f} %" for i in best), sep="  ")
