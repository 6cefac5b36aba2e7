"""The forms that a classifier is written in, each with the way to read it back and run it.

===============  ===========================================================================================
``onnx``         a graph for onnxruntime and others; what must be known is in its metadata
``torch-export`` a graph for ``torch.export.load``; what must be known is in its extra files
``folder``       for ``vision_attn.load_run``: weights, a configuration in timm's layout, a card
``timm``         such a folder, if ``timm.create_model("local-dir:FOLDER", pretrained=True)`` alone reads it
``safetensors``  the weights alone; what must be known is in the metadata
===============  ===========================================================================================

Metadata have one entry, ``classifier``, a text of JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vision_attn.networks.checkpoints.specification import Arguments, arguments_of
from vision_attn.networks.insertion import inserted
from vision_attn.networks.models.folder import foreign_block, load_model, save_model
from vision_attn.networks.models.registry import config_of
from vision_attn.networks.safe.write import write_tensors
from vision_attn.text import shorten
from vision_attn.tools.export.classifier import Classifier

__all__ = ["ENTRY", "FORMATS", "Format"]

#: The name of the metadata's entry.
ENTRY = "classifier"
#: What makes logits of images.
Classify = Callable[[Tensor], Tensor]


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
    write_for(classifier, path, name_in_timm(classifier) or classifier.architecture)


def write_timms_folder(classifier: Classifier, normalize: bool, path: Path) -> None:
    name = name_in_timm(classifier)
    if name is None:
        raise ValueError(
            f"format: timm alone knows no {classifier.architecture or 'network'} with the blocks at "
            f"{shorten(inserted(classifier.model))}: choose a folder, which load_run reads, or onnx, torch-export or "
            "safetensors"
        )
    write_for(classifier, path, name)


def write_for(classifier: Classifier, path: Path, architecture: str | None) -> None:
    # timm's configuration is of the published weights: the folder has that of these, and of training's evaluation.
    model = copy.copy(classifier.model)
    vars(model)["pretrained_cfg"] = {
        **(config_of(model) if "pretrained_cfg" in vars(model) else {}),
        "input_size": classifier.input_size,
        "mean": classifier.mean,
        "std": classifier.std,
        "crop_pct": classifier.crop_pct,
        "interpolation": classifier.interpolation,
    }
    save_model(model, path, classes=classifier.classes, architecture=architecture)


def open_folder(classifier: Classifier, path: Path) -> Classify:
    return load_model(path, block=foreign_block(classifier.model))


def open_timms_folder(classifier: Classifier, path: Path) -> Classify:
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def name_in_timm(classifier: Classifier) -> str | None:
    """The name under which timm makes this network, blocks and all; None where there is none."""
    ours = blocks_in_network(classifier.model)
    base = classifier.architecture or ""
    for name in filter(timm.is_model, (base, f"{base}_attention")):
        with torch.device("meta"):
            made = timm.create_model(name, num_classes=len(classifier.classes))
        if blocks_in_network(made) == ours:
            return name
    return None


def blocks_in_network(model: nn.Module) -> tuple[list[str], Arguments]:
    """The sites of the blocks in a network and what they are, which is not in the shapes of its weights."""
    return list(inserted(model)), arguments_of(model.state_dict())


def write_weights(classifier: Classifier, normalize: bool, path: Path) -> None:
    write_tensors(path, classifier.model.state_dict(), {ENTRY: classifier.about(normalize=normalize)})


def open_weights(classifier: Classifier, path: Path) -> Classify:
    model = copy.deepcopy(classifier.model)
    model.load_state_dict(load_file(path), strict=True)
    return model


#: By name.
FORMATS = {
    "onnx": Format(".onnx", True, ("onnx", "onnxruntime", "onnxscript"), write_onnx, open_onnx),
    "torch-export": Format(".pt2", True, (), write_program, open_program),
    "folder": Format("", False, (), write_folder, open_folder),
    "timm": Format("", False, (), write_timms_folder, open_timms_folder),
    "safetensors": Format(".safetensors", False, (), write_weights, open_weights),
}
