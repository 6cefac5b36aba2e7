"""Quantization of weights and activations to 8 bits, and the accuracy before and after quantization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import normalize, to_dtype

from vision_attn.errors import DataError, ExportError
from vision_attn.tools.export.formats import open_onnx
from vision_attn.tools.training.data import DecodedImages, eval_transform, open_data
from vision_attn.tools.training.settings import Settings

#: Numbers of images for calibration and evaluation, evenly spaced in the order of classes.
CALIBRATION, EVALUATION = 128, 1000


def quantize(path: Path, calibration: list[Tensor], images: list[Tensor], labels: Tensor) -> str:
    """Quantize an ONNX file with images for calibration; return a line with its accuracy before and after."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        remaining = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            return next(({"images": image.numpy()} for image in self.remaining), None)

    try:
        before = torch.cat([*map(open_onnx(path), images)])
        quant_pre_process(path, path, skip_symbolic_shape=True)  # converts weights to constants, which can be quantized
        # Weights have 7 bits, because sums of two 8-bit products saturate on CPUs without VNNI instructions.
        quantize_static(path, path, Reader(), per_channel=True, reduce_range=True)
        after = torch.cat([*map(open_onnx(path), images)])
    except Exception as error:  # the quantizer raises many types of errors
        raise ExportError(f"the network cannot be quantized ({type(error).__name__}: {error})") from error
    exact, rounded = (100 * float((logits.argmax(1) == labels).float().mean()) for logits in (before, after))
    accuracy = f"accuracy {exact:.2f} % before and {rounded:.2f} % after, on {len(images)} images"
    return f"quantized to 8 bits with {len(calibration)} images: {accuracy}"


def load_images(folder: Path, metadata: Mapping[str, Any], *, train: bool) -> tuple[list[Tensor], Tensor]:
    """Return batches of one image, preprocessed for the exported file, and their class indices in the network."""
    source = open_data(Settings(data=folder), train=train)
    classes = metadata["classes"]
    if unknown := [name for name in source.classes if name not in classes]:
        raise DataError(f"{source.name} contains the class {unknown[0]!r}, which is not a class of the network")
    count = min(CALIBRATION if train else EVALUATION, len(source))
    indices = torch.linspace(0, len(source) - 1, count).long()
    batches = DecodedImages(source, eval_transform(metadata), 0, 0).batches(indices.split(1))
    images, labels = zip(*((to_dtype(pixels, scale=True), label) for pixels, label in batches), strict=True)
    if metadata["pixels"] != "0…1":
        images = tuple(normalize(image, metadata["mean"], metadata["std"]) for image in images)
    return list(images), torch.tensor([classes.index(source.classes[int(label)]) for label in labels])
