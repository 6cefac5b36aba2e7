"""Export of networks as graphs: ONNX and torch.export."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import Normalize

from vision_attn.attention.blocks import set_impl_
from vision_attn.errors import ExportError
from vision_attn.networks.insertion import inserted_blocks, plain_network
from vision_attn.networks.models.registry import get_model_cfg
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.version import __version__

#: Metadata entry of a graph, JSON text about its use.
ENTRY = "classifier"
#: Difference from the network's output that rounding explains, as a fraction of its largest value.
TOLERANCE = 1e-4
#: Crop and interpolation of images by default, in timm's words.
CROP = {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}
#: Sizes of the batches that are compared, other than the two images that a graph is traced with.
BATCHES = (1, 3)


@dataclass(frozen=True)
class ExportReport:
    """The exported file, and how it compares with the network; prints as a summary."""

    path: Path
    #: channels, rows and columns of an input image
    input_size: tuple[int, int, int]
    #: True if the graph normalizes pixels
    normalize: bool
    #: largest difference of an output from the network's, and the largest output
    difference: float
    largest: float

    def __str__(self) -> str:
        pixels = "of pixels in 0…1, normalized inside" if self.normalize else "normalized by mean and std before"
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:.2f} MB; takes images (batch, "
            f"{', '.join(map(str, self.input_size))}) {pixels}\n"
            f"read back and run on {sum(BATCHES)} random images: the largest difference from the network's output is "
            f"{self.difference:.1e}, of values up to {self.largest:.3g}"
        )


def export_model(model: nn.Module, output: str | Path, *, normalize: bool = True) -> ExportReport:
    """Export a network, and compare the outputs of the file with the network's.

    A graph takes batches of any size and holds float32 weights, and as metadata, under ``classifier``, JSON text with
    the classes, and the size and statistics of images. It is read back, run on random images and compared with the
    network before it replaces a file.

    Args:
        model: a classifier that takes images ``(b, c, h, w)``, with ``pretrained_cfg`` and, if they are known,
            ``classes``, such as :func:`vision_attn.load_model` returns.
        output: ``.onnx`` for ONNX, ``.pt2`` for ``torch.export``.
        normalize: let the graph take pixels in 0…1 and normalize them.

    Raises:
        ValueError: ``output`` has another ending.
        ExportError: the network cannot be exported, or the file computes something else. It is not kept, and a file
            that was there before stays.
        OSError: the file cannot be written, which is checked before the network is exported.

    >>> import tempfile
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> network.classes = ("cat", "dog")
    >>> network.pretrained_cfg = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    >>> report = export_model(network, Path(tempfile.mkdtemp()) / "network.pt2")
    >>> report.difference < 1e-5
    True
    """
    output, plain = Path(output).absolute(), plain_network(model)
    if output.suffix.lower() not in FORMATS:
        raise ValueError(f"output must end in {' or '.join(FORMATS)}; got {output.name!r}")
    config = get_model_cfg(plain)
    network = copy.deepcopy(plain).cpu().float().eval()
    set_impl_(network, "sdpa")  # all compute the same; this one is exported with batches of any size
    if normalize:
        network = nn.Sequential(Normalize(list(config["mean"]), list(config["std"])), network).eval()
    about: dict[str, Any] = {
        "classes": list(vars(plain).get("classes") or ()),
        **{name: config[name] for name in ("input_size", "mean", "std")},
        **{name: config.get(name, default) for name, default in CROP.items()},
        "pixels": "0…1" if normalize else "0…1, then (pixels - mean) / std",
        "architecture": config.get("architecture"),
        "inserted": list(inserted_blocks(plain)),
        "library": f"vision_attn {__version__}",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    check_writable(output)
    content, difference, largest = export_and_compare(network, output.suffix.lower(), about)
    write_atomically(output, content)
    return ExportReport(output, tuple(about["input_size"]), normalize, difference, largest)


def export_and_compare(network: nn.Module, ending: str, about: dict[str, Any]) -> tuple[bytes, float, float]:
    """Return the content of the file, the largest difference of its outputs, and the largest output."""
    write, reopen = FORMATS[ending]
    images = [torch.rand(b, *about["input_size"], generator=torch.Generator().manual_seed(0)) for b in BATCHES]
    with torch.no_grad():
        expected = torch.cat([network(batch) for batch in images])
    if not expected.isfinite().all():
        raise ExportError("The output of the network is not finite: training may have diverged. No file was written.")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            for category in (DeprecationWarning, FutureWarning):  # of the exporters, about themselves
                warnings.simplefilter("ignore", category)
            content = write(network, torch.zeros(2, *about["input_size"]), json.dumps(about, ensure_ascii=False))
            run = reopen(content)
            found = torch.cat([run(batch) for batch in images])
    except (ImportError, OSError):
        raise
    except Exception as error:  # torch's exporters, and what runs their graphs, may fail in any way
        raise ExportError(f"the network cannot be exported ({type(error).__name__}: {error})") from error
    largest = float(expected.abs().max())
    difference = float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")
    if not difference <= TOLERANCE * largest:  # also where it is no number
        raise ExportError(
            f"the exported graph computes something else: an output differs by {difference:.1e} from the network's, "
            f"which are up to {largest:.3g}; no file was written"
        )
    return content, difference, largest


def write_onnx(network: nn.Module, images: Tensor, about: str) -> bytes:
    import onnxruntime  # noqa: F401 - a missing package is reported before the work
    import onnxscript  # noqa: F401

    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": ({0: "batch"},)}
    # Its verify=True only logs what differs; the outputs are compared here.
    program = torch.onnx.export(network, (images,), dynamo=True, verbose=False, **names)
    assert program is not None
    program.model.metadata_props[ENTRY] = about
    return bytes(program.model_proto.SerializeToString())


def open_onnx(content: bytes) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def write_program(network: nn.Module, images: Tensor, about: str) -> bytes:
    program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, file := io.BytesIO(), extra_files={ENTRY: about})
    return file.getvalue()


def open_program(content: bytes) -> Callable[[Tensor], Tensor]:
    return torch.export.load(io.BytesIO(content)).module()


#: Functions that serialize a graph and read it back, by the ending of the file.
FORMATS = {".onnx": (write_onnx, open_onnx), ".pt2": (write_program, open_program)}
