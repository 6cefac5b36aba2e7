"""Save a timm network with its blocks as a folder in the layout of Hugging Face and timm, and load it.

=====================  ===========================================================================================
``config.json``        timm's configuration, and under ``vision_attn`` the format and the hash of the save
``model.safetensors``  the weights and the records of the blocks
``README.md``          a model card; an existing one is kept
=====================  ===========================================================================================

The metadata of ``model.safetensors`` have a copy of the configuration, and both have a hash that identifies the save.
If ``config.json`` is from another save, because a process was killed or two saved at once, the copy is used.

A folder may come from an untrusted source. It can only name networks that timm has, and blocks of this library: no code
in it is run, and nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.models._hub import save_config_for_hf
from timm.models._pretrained import filter_pretrained_cfg
from torch import nn
from torchvision.transforms import Compose
from torchvision.transforms.v2 import RGB, Grayscale

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import file_format
from vision_attn.networks.checkpoints.file_format import gather, plain_key
from vision_attn.networks.checkpoints.load import load_checkpoint, refuse_without_values
from vision_attn.networks.checkpoints.specification import get_arguments
from vision_attn.networks.insertion import inserted_blocks, plain_network, quiet_eval, records, remove_
from vision_attn.networks.insertion.exact import unwrap
from vision_attn.networks.insertion.makers import BLOCKS
from vision_attn.networks.models.registry import get_model_cfg
from vision_attn.networks.safe import read_file, write_atomically
from vision_attn.networks.safe.write import TEMPORARY, name_errors
from vision_attn.text import escaped, shorten
from vision_attn.version import __version__

#: This library's section of the configuration.
SECTION = "vision_attn"
#: Where the folder of a training run keeps its best network.
RUN_SUBFOLDER = "model"
#: Largest number of bytes of a configuration.
MAX_CONFIG_BYTES = 2**20
#: The entries of timm's configuration that are read from a folder: sources of weights are not.
CFG_KEYS = {
    *("input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std"),
    *("num_classes", "label_names", "pool_size", "first_conv", "classifier"),
}
#: Arguments with which timm reads or downloads files.
FILE_ARGS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "features_only"}
#: Largest sum of all numbers in the arguments of a network.
MAX_ARGUMENT_SUM = 100_000
#: Largest number of elements of an input.
MAX_INPUT_NUMEL = 2**24
#: Largest difference of outputs, relative to the largest output, that a different order of sums explains.
TOLERANCE = 1e-3

#: Held while a thread saves: comparing a network changes its mode and the random state for a moment.
SAVING = Lock()

#: The model card; blocks and classes are in the other files.
CARD = """---
library_name: vision-attn
pipeline_tag: image-classification
tags: [image-classification, timm, vision-attn]
---
# {architecture}

`vision_attn.load_model(folder)` makes the network of these files, with its blocks, classes and `model.transform`.
"""


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    architecture: str | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network of timm's, with whatever blocks are in it, as a folder that :func:`load_model` reads.

    The network is read back and must give the same output for an image before a file in the folder changes. Then
    ``model.safetensors`` and ``config.json`` are replaced, each atomically, and ``README.md`` is added if there is
    none; the folder and all other files stay as they are. If the process is killed at any moment, or several save into
    one folder, :func:`load_model` returns one of the networks as it was saved. Modules that ``replace_`` took out are
    not in the files: a network that is loaded again has blocks in their place for good.

    A network whose output is not finite is saved with a warning: it cannot be compared with what is read back.

    Args:
        model: what ``timm.create_model`` made, blocks inserted or not, in any wrapper.
        folder: where it goes; created if it is missing.
        classes: name of each class; by default ``model.classes``, which :func:`load_model` sets.
        architecture: the name under which timm makes the network; by default the one it was made under.
        model_args: what else it was made with, where timm does not know it any more.

    Returns:
        The folder.

    Raises:
        ValueError: timm makes no such network; a block cannot be written down.
        OSError: the folder cannot be written.

    >>> import tempfile
    >>> from vision_attn.networks.insertion import insert_
    >>> model = timm.create_model("resnet20", num_classes=3)
    >>> report = insert_(model, stages=-1, num_heads=4)
    >>> folder = save_model(model, Path(tempfile.mkdtemp()) / "net", classes=["a", "b", "c"])
    >>> list(inserted_blocks(load_model(folder)))
    ['layer3.2']
    """
    model, target = plain_network(model), Path(folder).resolve()
    refuse_without_values(model)
    architecture = architecture or (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        known = "architecture must be a name that timm knows"
        raise ValueError(f"{known}; got {architecture!r}: save_adapter saves blocks of other networks")
    if classes is None and len(vars(model).get("classes") or ()) == model.num_classes:
        classes = vars(model)["classes"]
    if classes is not None and len(classes) != model.num_classes:
        raise ValueError(f"classes must name the {model.num_classes} classes of the model; got {len(classes)}")
    arguments, blocks = get_arguments(model.state_dict()), file_format.blocks_to_save(model)
    state = {plain_key(key): gather(value) for key, value in model.state_dict().items()}
    # All of timm's configuration, since a timm before 1.0.31 takes this in the place of the model's.
    about = filter_pretrained_cfg(get_model_cfg(model), remove_source=True) | {"architecture": architecture}
    config: dict[str, Any] = {"pretrained_cfg": about, "label_names": list(classes or ())}
    identity = file_format.compute_hash([config, arguments, file_format.fingerprint(state)])
    config[SECTION] = {"format": file_format.FORMAT, "library": __version__, "save": identity}
    with SAVING, name_errors(Path(folder)):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=TEMPORARY, dir=target if target.is_dir() else target.parent) as temporary:
            new = Path(temporary)
            save_config_for_hf(model, new / "config.json", config, model_args=dict(model_args or {}))
            config = json.loads((new / "config.json").read_text())
            saved = file_format.Saved(state, blocks, arguments=arguments, about=config)
            file_format.write_saved(new / "model.safetensors", saved)
            verify(model, new, architecture)
            target.mkdir(exist_ok=True)
            for name in ("model.safetensors", "config.json"):
                write_atomically(target / name, (new / name).read_bytes())
        if not (target / "README.md").exists():
            write_atomically(target / "README.md", CARD.format(architecture=architecture).encode())
    return Path(folder)


def load_model(folder: str | Path, *, block: Callable[..., nn.Module] | None = None) -> nn.Module:
    """Load a network, ready to use: in evaluation mode on the CPU, with its classes and the transform for its images.

    Args:
        folder: a folder that :func:`save_model` wrote, or timm for a network without blocks; or the folder of a
            training run, whose best network is loaded.
        block: the class of the inserted blocks if it is not one of this library's.

    Returns:
        The network with its blocks and weights. ``model.classes`` is a tuple of names, or None if the folder has
        none; ``model.transform`` converts a Pillow image to an input ``(c, h, w)``, as timm does for evaluation. No
        code in the files is run, and nothing is downloaded.

    Raises:
        FileNotFoundError: there is no such folder, or not both files in it.
        CheckpointError: it is damaged, names a network that timm does not know, or its weights are of another network.

    >>> from PIL import Image
    >>> from vision_attn.networks.models.registry import weights_folder
    >>> model = load_model(weights_folder() / "resnet20_attention_cifar100")
    >>> model.classes[:2], model(model.transform(Image.new("RGB", (60, 40)))[None]).shape
    (('apple', 'aquarium_fish'), torch.Size([1, 100]))
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        folder = folder / RUN_SUBFOLDER
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{escaped(path)}: there is no such file: give a folder that save_model or timm wrote")
    with open(path, "rb") as opened:
        config = check_config(path, opened.read(MAX_CONFIG_BYTES))
    file = read_file(folder / "model.safetensors")
    weights: Mapping[str, Any] = file.content
    saved = file_format.read_saved(file)
    if saved is not None and SECTION in saved.about and saved.about[SECTION] != config.get(SECTION):
        remedy = "The configuration in model.safetensors is used; save the network again to renew config.json."
        warnings.warn(f"{folder}: config.json and model.safetensors are from different saves. {remedy}", stacklevel=2)
        config = check_config(file.path, json.dumps(dict(saved.about)))

    def build() -> nn.Module:
        model = create(config)
        if saved is not None:
            if inserted_blocks(model):  # by the network's class: the file lists all blocks
                remove_(model)
            file_format.insert_saved_(model, saved, file_format.find_makers(saved, folder, block))
        return model

    try:
        with torch.device("meta"):  # no memory is allocated for tensors that the file does not have
            shapes = {key: value.shape for key, value in build().state_dict().items()}
        other = [key for key in {**shapes, **weights} if key not in weights or weights[key].shape != shapes.get(key)]
        if other:
            raise CheckpointError(f"{folder}: its weights are of another network than it names: {shorten(other)}")
        with torch.random.fork_rng(devices=[]):
            model = build()
    except CheckpointError:
        raise
    except Exception as error:  # a network with invalid arguments can fail in any way
        raise CheckpointError(f"{folder}: its network cannot be made ({type(error).__name__}: {error})") from error
    kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
    if len(kinds) == 1:
        model.to(kinds.pop())
    load_checkpoint(model, folder / "model.safetensors")
    classes = config.get("label_names")
    vars(model).update(classes=tuple(classes) if classes else None, transform=create_eval_transform(model))
    return model.eval()


def create_eval_transform(model: nn.Module) -> Compose:
    """Return timm's transform for the evaluation of a network, for images of any mode."""
    config = resolve_data_config(pretrained_cfg=get_model_cfg(model))
    return Compose([RGB() if config["input_size"][0] == 3 else Grayscale(), *create_transform(**config).transforms])


def check_config(path: Path, text: str | bytes) -> dict[str, Any]:
    """Return the configuration that a file holds as JSON; raise unless each part that is used is valid."""
    try:
        config: dict[str, Any] = dict(json.loads(text))
        arguments, names = config.get("model_args") or {}, config.get("label_names")
        refused = sorted(FILE_ARGS & arguments.keys())
        if not timm.is_model(str(config["architecture"])) or refused:
            raise ValueError(f"architecture must be a network of timm's, and model_args have none of {refused}")
        if SECTION in config:
            file_format.check_format(path, config[SECTION])
        if sum(map(abs, iterate_numbers(arguments))) > MAX_ARGUMENT_SUM:
            raise ValueError("its model_args ask for a network of a size that there is none of")
        count = arguments.get("num_classes", config["num_classes"])
        if names is not None and not (isinstance(names, list) and [type(name) for name in names] == [str] * count):
            raise ValueError(f"label_names must be the names of its {count} classes")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or of another version: {error}") from error
    return config


def iterate_numbers(value: object) -> Iterator[float]:
    """Yield all numbers in plain values."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from iterate_numbers(part)
    if isinstance(value, int | float):
        yield value


def create(config: Mapping[str, Any]) -> nn.Module:
    """Create the network of a configuration, with random weights."""
    arguments = {"num_classes": config["num_classes"], **(config.get("model_args") or {})}
    classes = {"label_names": config.get("label_names"), "num_classes": arguments["num_classes"]}
    cfg = config["pretrained_cfg"] | classes
    kept = {key: tuple(value) if isinstance(value, list) else value for key, value in cfg.items() if key in CFG_KEYS}
    channels = arguments.get("in_chans", kept["input_size"][0])
    kept["input_size"] = (channels, *kept["input_size"][1:])
    if not 0 < math.prod(kept["input_size"]) <= MAX_INPUT_NUMEL or len(kept["input_size"]) != 3:
        raise ValueError(f"input_size must be channels, rows and columns of an image; got {kept['input_size']}")
    for name in ("mean", "std"):
        if len(kept[name]) != channels:
            kept[name] = (sum(kept[name]) / len(kept[name]),) * channels
    return timm.create_model(config["architecture"], pretrained_cfg=kept, **arguments)


def verify(model: nn.Module, folder: Path, architecture: str) -> None:
    """Raise unless the network in a folder gives the same output for an image as the model."""
    classes = [type(unwrap(block)) for block in inserted_blocks(model).values()]
    try:
        copy = load_model(folder, block=next((cls for cls in classes if cls.__name__ not in BLOCKS), None))
        value = next(p for p in model.parameters() if p.is_floating_point())
        # Blocks on tokens need the size that they were inserted for.
        size = next((block.input_shape[1:] for block in records(model)), get_model_cfg(copy)["input_size"])
        images = torch.rand(1, *size, generator=torch.Generator().manual_seed(0)).to(value)
        with torch.no_grad(), quiet_eval(model):
            expected, output = model(images), copy.to(value.device)(images)
        if not expected.isfinite().all():
            warnings.warn("The output is not finite: training may have diverged. The copy is unverified.", stacklevel=3)
            return
        if torch.allclose(output, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())):
            return
        reason = "it computes something else"
    except CheckpointError as error:
        reason = str(error).partition(": ")[2]
    what = f"timm's {architecture!r} is not this network ({reason})"
    raise ValueError(f"architecture: {what}: pass its name, and as model_args the arguments it was created with")
