"""A classifier, and the forms that it is written in, each with the way to read it back and run it.

===============  ===========================================================================================
``onnx``         a graph for onnxruntime and others; what must be known is in its metadata
``torch-export`` a graph for ``torch.export.load``; what must be known is in its extra files
``timm``         a folder for ``timm.create_model("local-dir:FOLDER", pretrained=True)``, with its config.json
``safetensors``  the weights alone; what must be known is in the metadata
===============  ===========================================================================================

Metadata have one entry, ``classifier``, a text of JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torchvision.transforms.v2 import Normalize

from vision_attn.blocks import set_impl, use_impl
from vision_attn.checkpoints import write_atomically
from vision_attn.checkpoints.write import copy_to_write
from vision_attn.insertion import inserted, plain_network
from vision_attn.models.registry import config_of, save_model
from vision_attn.version import __version__

__all__ = ["ENTRY", "FOLDER", "FORMATS", "Classifier", "Format"]

#: The name of the metadata's entry.
ENTRY = "classifier"
#: What a folder of timm's holds.
FOLDER = frozenset({"config.json", "model.safetensors"})
#: What makes logits of images.
Classify = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Classifier:
    """A network, its classes and what it is fed with.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> classifier = Classifier(network, ("cat", "dog"), (3, 8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    >>> json.loads(classifier.about(normalize=True))["classes"]
    ['cat', 'dog']
    """

    #: gives logits ``(b, classes)`` for images ``(b, c, h, w)``
    model: nn.Module
    #: name of each class
    classes: tuple[str, ...]
    #: channels, rows and columns of an image
    input_size: tuple[int, int, int]
    #: mean of each channel, of pixels in 0…1
    mean: tuple[float, ...]
    #: standard deviation of each channel
    std: tuple[float, ...]
    #: the name under which timm makes the network without its blocks, if it does
    architecture: str | None = None

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.input_size[0] or not min(self.std) > 0:
            raise ValueError(
                f"mean and std must have a value for each of the {self.input_size[0]} channels, and std positive ones; "
                f"got {tuple(self.mean)} and {tuple(self.std)}"
            )

    def about(self, *, normalize: bool) -> str:
        """What whoever runs the network has to know, as JSON."""
        notes = {
            "classes": self.classes,
            "input_size": self.input_size,
            "pixels": "0…1" if normalize else "0…1, then (pixels - mean) / std",
            "mean": self.mean,
            "std": self.std,
            "architecture": self.architecture,
            "inserted": list(inserted(self.model)),
            "library": f"vision_attn {__version__}",
        }
        return json.dumps(notes, ensure_ascii=False)

    def to_export(self) -> Classifier:
        """The same with a copy of the network: on the CPU, in float32 and evaluation mode, its attention as ``"sdpa"``.

        All implementations compute the same; this is the one that exports with any batch.
        """
        model = copy.deepcopy(plain_network(self.model)).cpu().float().eval()
        set_impl(model, "sdpa")
        return replace(self, model=model)

    @property
    def normalization(self) -> Normalize:
        """From pixels in 0…1 to what the network takes."""
        return Normalize(list(self.mean), list(self.std))

    def to_trace(self, normalize: bool) -> tuple[nn.Module, tuple[Tensor]]:
        """The network that becomes a graph, and images to trace it with: one image would fix the batch."""
        network = nn.Sequential(self.normalization, self.model).eval() if normalize else self.model
        return network, (torch.zeros(2, *self.input_size),)


@dataclass(frozen=True)
class Format:
    """How a network is written, and run from what was written."""

    #: of the file; "" for a folder
    ending: str
    #: whether it holds a program, and so may hold the normalisation
    graph: bool
    #: packages that it needs
    packages: tuple[str, ...]
    #: writes a classifier to a path, given whether it normalises
    write: Callable[[Classifier, bool, Path], None]
    #: reads it back
    reopen: Callable[[Classifier, Path], Classify]


def write_onnx(classifier: Classifier, normalize: bool, path: Path) -> None:
    network, example = classifier.to_trace(normalize)
    program = torch.onnx.export(
        network,
        example,
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: "batch"},),
    )
    assert program is not None
    program.model.metadata_props[ENTRY] = classifier.about(normalize=normalize)
    program.save(path, external_data=False)


def open_onnx(classifier: Classifier, path: Path) -> Classify:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def write_program(classifier: Classifier, normalize: bool, path: Path) -> None:
    network, example = classifier.to_trace(normalize)
    program = torch.export.export(network, example, dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path, extra_files={ENTRY: classifier.about(normalize=normalize)})


def open_program(classifier: Classifier, path: Path) -> Classify:
    return torch.export.load(path).module()


def write_folder(classifier: Classifier, normalize: bool, path: Path) -> None:
    architecture, options = architecture_of(classifier)
    # timm's configuration is of the published weights: the folder has that of these, and of training's evaluation.
    model = copy.copy(classifier.model)
    vars(model)["pretrained_cfg"] = {
        **config_of(model),
        "input_size": classifier.input_size,
        "mean": classifier.mean,
        "std": classifier.std,
        "num_classes": len(classifier.classes),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
    save_model(model, path, architecture=architecture, model_args=options)
    config = {**json.loads((path / "config.json").read_text()), "label_names": classifier.classes}
    (path / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def open_folder(classifier: Classifier, path: Path) -> Classify:
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def architecture_of(classifier: Classifier) -> tuple[str, dict[str, Any]]:
    """The name under which timm makes this network with its blocks, and the arguments that are not the usual ones."""
    base, channels = classifier.architecture or "network", classifier.input_size[0]
    names = (base, f"{base}_attention") if "pretrained_cfg" in vars(classifier.model) else ()
    for name in filter(timm.is_model, names):
        options = {} if channels == timm.get_pretrained_cfg(name).input_size[0] else {"in_chans": channels}
        with torch.device("meta"):
            made = timm.create_model(name, num_classes=len(classifier.classes), **options)
        if blocks_of(made) == blocks_of(classifier.model):
            return name, options
    raise ValueError(
        f"format: timm knows no {base} with the blocks {blocks_of(classifier.model)}: "
        "choose onnx, torch-export or safetensors"
    )


def blocks_of(model: nn.Module) -> dict[str, str]:
    """What is inserted in a network, by site: the number of heads and the like are not in the shapes of its weights."""
    with use_impl(model, "bmm"):
        return {site: str(block) for site, block in inserted(model).items()}


def write_weights(classifier: Classifier, normalize: bool, path: Path) -> None:
    tensors = {key: copy_to_write(value) for key, value in classifier.model.state_dict().items()}
    write_atomically(path, save(tensors, {ENTRY: classifier.about(normalize=normalize)}))


def open_weights(classifier: Classifier, path: Path) -> Classify:
    model = copy.deepcopy(classifier.model)
    model.load_state_dict(load_file(path), strict=True)
    return model


#: By name.
FORMATS = {
    "onnx": Format(".onnx", True, ("onnx", "onnxruntime", "onnxscript"), write_onnx, open_onnx),
    "torch-export": Format(".pt2", True, (), write_program, open_program),
    "timm": Format("", False, (), write_folder, open_folder),
    "safetensors": Format(".safetensors", False, (), write_weights, open_weights),
}
