"""8-bit weights and activations: calibration with training images, and the accuracy on others before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import normalize, to_dtype

from vision_attn.errors import DataError, ExportError
from vision_attn.tools.export.formats import open_onnx
from vision_attn.tools.training.data import Decoded, eval_transform, open_data
from vision_attn.tools.training.settings import Settings

#: Numbers of images for calibration and for the accuracy, spread evenly over the images in the order of classes.
CALIBRATION, EVALUATION = 128, 1000


def quantize(path: Path, calibration: list[Tensor], images: list[Tensor], labels: Tensor) -> str:
    """Quantize an ONNX file with images for calibration; return its accuracy on labeled images before and after."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        remaining = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            return next(({"images": image.numpy()} for image in self.remaining), None)

    try:
        before = torch.cat([*map(open_onnx(path), images)])
        quant_pre_process(path, path, skip_symbolic_shape=True)  # only constants are quantized, which weights become
        # 7 bits of the weights, because sums of two 8-bit products saturate on CPUs without VNNI instructions.
        quantize_static(path, path, Reader(), per_channel=True, reduce_range=True)
        after = torch.cat([*map(open_onnx(path), images)])
    except Exception as error:  # the quantizer may fail in any way
        raise ExportError(f"the network cannot be quantized ({type(error).__name__}: {error})") from error
    if not after.isfinite().all():
        raise ExportError("the output of the quantized network is not finite; no file was written")
    exact, rounded = (100 * float((logits.argmax(1) == labels).float().mean()) for logits in (before, after))
    return (
        f"then quantized to 8 bits with {len(calibration)} images: accuracy {exact:.2f} % before and {rounded:.2f} % "
        f"after, on {len(images)} images"
    )


def load_images(folder: Path, about: Mapping[str, Any], *, train: bool) -> tuple[list[Tensor], Tensor]:
    """Return batches of one image, as the exported file takes them, and their classes as the network numbers them."""
    source = open_data(Settings(data=folder), train=train)
    classes = about["classes"]
    if not classes:
        raise DataError("int8: the network has no names of classes, which those of the folder are compared with")
    if about["input_size"][0] != 3:
        raise DataError(f"int8: images of a folder have 3 channels, the network takes {about['input_size'][0]}")
    if unknown := [name for name in source.classes if name not in classes]:
        raise DataError(f"{source.name} has images of {unknown[0]!r}, which is not one of the network's classes")
    count = min(CALIBRATION if train else EVALUATION, len(source))
    rows = torch.linspace(0, len(source) - 1, count).long()
    batches = Decoded(source, eval_transform(about), 0, 0).batches(rows.split(1))
    images, labels = zip(*((to_dtype(pixels, scale=True), label) for pixels, label in batches), strict=True)
    if about["pixels"] != "0…1":
        images = tuple(normalize(image, about["mean"], about["std"]) for image in images)
    return list(images), torch.tensor([classes.index(source.classes[int(label)]) for label in labels])
