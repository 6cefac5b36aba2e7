"""The forms that a network is written in, each with the way to read it back and run it.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from vision_attn.blocks import use_impl
from vision_attn.checkpoints import write_atomically
from vision_attn.checkpoints.write import copy_to_write
from vision_attn.export.classifier import Classifier, NormalizedNetwork
from vision_attn.insertion import inserted, records
from vision_attn.models.registry import config_of, save_model

__all__ = ["ENTRY", "FOLDER", "FORMATS", "Format"]

#: The name of the metadata's entry.
ENTRY = "classifier"
#: What a folder of timm's holds.
FOLDER = frozenset({"config.json", "model.safetensors"})
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


def network_to_write(classifier: Classifier, normalize: bool) -> tuple[nn.Module, tuple[Tensor]]:
    """The network that becomes a graph, and images to trace it with."""
    network = NormalizedNetwork(classifier).eval() if normalize else classifier.model
    return network, (torch.zeros(2, *classifier.input_size),)  # one image would fix the batch


def notes(classifier: Classifier, normalize: bool) -> str:
    return json.dumps(classifier.about(normalize=normalize), ensure_ascii=False)


# --- onnx -------------------------------------------------------------------------------------------------------------


def write_onnx(classifier: Classifier, normalize: bool, path: Path) -> None:
    network, example = network_to_write(classifier, normalize)
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
    program.model.metadata_props[ENTRY] = notes(classifier, normalize)
    program.save(path, external_data=False)


def open_onnx(classifier: Classifier, path: Path) -> Classify:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


# --- torch.export -----------------------------------------------------------------------------------------------------


def write_program(classifier: Classifier, normalize: bool, path: Path) -> None:
    network, example = network_to_write(classifier, normalize)
    program = torch.export.export(network, example, dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path, extra_files={ENTRY: notes(classifier, normalize)})


def open_program(classifier: Classifier, path: Path) -> Classify:
    return torch.export.load(path).module()


# --- timm -------------------------------------------------------------------------------------------------------------


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
    config = json.loads((path / "config.json").read_text())
    config["label_names"] = list(classifier.classes)
    write_atomically(path / "config.json", (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def open_folder(classifier: Classifier, path: Path) -> Classify:
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def architecture_of(classifier: Classifier) -> tuple[str, dict[str, Any]]:
    """The name under which timm makes this network with its blocks, and the arguments that are not the usual ones."""
    base, known = classifier.architecture or "network", []
    names = (base, f"{base}_attention") if "pretrained_cfg" in vars(classifier.model) else ()
    for name in filter(timm.is_model, names):
        channels = classifier.input_size[0]
        options = {} if channels == timm.get_pretrained_cfg(name).input_size[0] else {"in_chans": channels}
        with torch.device("meta"):
            made = timm.create_model(name, num_classes=len(classifier.classes), **options)
        if descriptions(made) == descriptions(classifier.model):
            return name, options
        known.append(f"{name} has {said(made)}")
    raise ValueError(
        f"format: timm makes no {base} with {said(classifier.model)} ({'; '.join(known) or 'it knows no such name'}): "
        "choose onnx, torch-export or safetensors"
    )


def descriptions(model: nn.Module) -> dict[str, str]:
    """What is inserted in a network, by site: the number of heads and the like are not in the shapes of its weights."""
    with use_impl(model, "bmm"):
        return {site: str(block) for site, block in inserted(model).items()}


def said(model: nn.Module) -> str:
    """The same in short: the blocks and their options."""
    blocks = []
    for record in records(model):
        options = ", ".join(f"{name}={value!r}" for name, value in record.options.items() if name != "impl")
        blocks.append(f"{record.block}({options}) at {record.site}")
    return " and ".join(blocks) or "no blocks"


# --- weights ----------------------------------------------------------------------------------------------------------


def write_weights(classifier: Classifier, normalize: bool, path: Path) -> None:
    tensors = {key: copy_to_write(value) for key, value in classifier.model.state_dict().items()}
    write_atomically(path, save(tensors, {ENTRY: notes(classifier, normalize)}))


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
