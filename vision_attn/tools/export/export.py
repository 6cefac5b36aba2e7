"""A network written as a graph that others run: ONNX, or torch.export; or as a folder of its own."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import Normalize

from vision_attn.attention.blocks import set_impl_
from vision_attn.checks import check_type
from vision_attn.errors import ExportError
from vision_attn.networks.insertion import inserted_blocks, plain_network
from vision_attn.networks.models.folder import save_model
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.version import __version__

#: The entry of the metadata that says, as JSON, what must be known to use the graph.
ENTRY = "classifier"
#: Difference from the network's output that rounding explains, as a share of its largest value.
TOLERANCE = 1e-4
#: How an image is cropped and resized where a network does not say it, in timm's words.
CROP = {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}
#: Images in the batches that are compared: other numbers than the two that a graph is traced with.
BATCHES = (1, 3)


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it compares; prints as a summary."""

    path: Path
    #: of an image that it takes: channels, rows, columns
    input_size: tuple[int, int, int]
    #: whether it normalises the pixels itself
    normalize: bool
    #: largest difference of an output from the network's, and the largest output
    difference: float
    largest: float

    def __str__(self) -> str:
        pixels = "of pixels in 0…1, normalised inside" if self.normalize else "normalised by mean and std before"
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:.2f} MB; takes images (batch, "
            f"{', '.join(map(str, self.input_size))}) {pixels}\n"
            f"read back and run on {sum(BATCHES)} random images: the largest difference from the network's output is "
            f"{self.difference:.1e}, of values up to {self.largest:.3g}"
        )


def export_model(
    model: nn.Module,
    output: str | Path,
    *,
    normalize: bool = True,
    classes: Sequence[str] | None = None,
    input_size: tuple[int, int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> ExportReport | Path:
    """Write a network in a form that others run, and prove that it computes the same.

    A graph takes batches of any size and holds float32 weights, and as metadata, under ``classifier``, a text of JSON
    with the classes, the size and the statistics of images. It is read back, run on random images and compared with
    the network before it takes its place.

    Args:
        model: a network that takes images ``(b, c, h, w)``, such as :func:`vision_attn.load_model` gives.
        output: ``.onnx`` for ONNX, ``.pt2`` for ``torch.export``; without an ending a folder, as
            :func:`vision_attn.save_model` writes it.
        normalize: whether the graph takes pixels in 0…1 and normalises them itself.
        classes: name of each class; by default ``model.classes``.
        input_size: channels, rows and columns of an image; by default, as mean and std, of ``model.pretrained_cfg``.
        mean: of each channel, of pixels in 0…1.
        std: standard deviation of each channel.

    Returns:
        What was written and how it compares; of a folder its path.

    Raises:
        ValueError: ``output`` has another ending, or the network does not say what its images are like.
        ExportError: the network cannot be exported, or what was written computes something else. No file is left of
            it, and a file that was there before stays.
        OSError: the file cannot be written, which is found before the network is exported.

    >>> import tempfile
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> statistics = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    >>> report = export_model(network, Path(tempfile.mkdtemp()) / "network.pt2", classes=("cat", "dog"), **statistics)
    >>> report.difference < 1e-5
    True
    """
    check_type("model", model, nn.Module, "a network")
    output, plain = Path(output).absolute(), plain_network(model)
    ending = output.suffix.lower()
    if ending not in ("", *FORMATS):
        raise ValueError(f"output must end in {' or '.join(FORMATS)}, or in nothing for a folder; got {output.name!r}")
    if not ending:
        return save_model(plain, output, classes=classes)
    config = getattr(plain, "pretrained_cfg", None) or {}
    about: dict[str, Any] = {
        "classes": list(classes or vars(plain).get("classes") or ()),
        "input_size": input_size or config.get("input_size"),
        "mean": mean or config.get("mean"),
        "std": std or config.get("std"),
    }
    missing = [name for name, value in about.items() if value is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given: the network has no pretrained_cfg that says them")
    network = copy.deepcopy(plain).cpu().float().eval()
    set_impl_(network, "sdpa")  # all compute the same; this one is exported with batches of any size
    if normalize:
        network = nn.Sequential(Normalize(list(about["mean"]), list(about["std"])), network).eval()
    about |= {
        **{name: config.get(name, usual) for name, usual in CROP.items()},
        "pixels": "0…1" if normalize else "0…1, then (pixels - mean) / std",
        "architecture": config.get("architecture"),
        "inserted": list(inserted_blocks(plain)),
        "library": f"vision_attn {__version__}",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    check_writable(output)
    content, difference, largest = export_and_compare(network, ending, about)
    write_atomically(output, content)
    return ExportReport(output, tuple(about["input_size"]), normalize, difference, largest)


def export_and_compare(network: nn.Module, ending: str, about: dict[str, Any]) -> tuple[bytes, float, float]:
    """Return a graph as the content of its file, the largest difference of its outputs, and the largest output."""
    write, reopen = FORMATS[ending]
    images = [torch.rand(b, *about["input_size"], generator=torch.Generator().manual_seed(0)) for b in BATCHES]
    with torch.no_grad():
        expected = torch.cat([network(batch) for batch in images])
    if about["classes"] and expected.shape[1:] != (len(about["classes"]),):
        raise ValueError(f"classes must be {expected.shape[1]}, as many as outputs; got {len(about['classes'])}")
    if not expected.isfinite().all():
        raise ExportError("The output of the network is not finite: training may have diverged. No file was written.")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # Of the exporters, about themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
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
            f"what was written computes something else: an output differs by {difference:.1e} from the network's, "
            f"which are up to {largest:.3g}; nothing is left of it"
        )
    return content, difference, largest


def write_onnx(network: nn.Module, images: Tensor, about: str) -> bytes:
    import onnxruntime  # noqa: F401 - said to be missing before the work
    import onnxscript  # noqa: F401

    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": ({0: "batch"},)}
    # Its verify=True only logs what differs; what was written is compared here.
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


#: By the ending of the file: the functions that serialize a graph and read it back.
FORMATS = {".onnx": (write_onnx, open_onnx), ".pt2": (write_program, open_program)}
