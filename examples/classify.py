"""Say what is on images, by a network that `vision-attn export` wrote as ONNX; needs onnxruntime and Pillow, no torch.

python examples/classify.py model.onnx photo.jpg another.png
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("network", help=".onnx")
parser.add_argument("images", nargs="+")
options = parser.parse_args()

session = onnxruntime.InferenceSession(options.network)
about = json.loads(session.get_modelmeta().custom_metadata_map["classifier"])
channels, height, width = about["input_size"]
for path in options.images:
    image = ImageOps.exif_transpose(Image.open(path)).convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)  # as in training
    pixels = np.asarray(image, dtype=np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 255
    if about["pixels"] != "0…1":  # exported with --no-normalize
        mean, std = (np.float32(about[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    logits = session.run(["logits"], {"images": pixels[None]})[0][0]
    shares = np.exp(logits - logits.max())
    best = np.argsort(-shares)[:3]
    print(path, *(f"{about['classes'][i]} {100 * shares[i] / shares.sum():.1f} %" for i in best), sep="  ")
