"""Save a network with its blocks to a folder in the layout of Hugging Face and timm, and load it.

=====================  =============================================================================================
``model.safetensors``  the weights, the records of the blocks and the configuration
``config.json``        a copy of the configuration for timm and the Hugging Face Hub: timm's configuration, or the name
                       and arguments of the class of another network
``README.md``          a model card; an existing file is kept
=====================  =============================================================================================

The configuration in ``model.safetensors`` is used if it has one. ``config.json`` is read for folders of timm.

A folder can come from an untrusted source. It can refer only to timm networks and blocks of this library; the caller
passes other classes. Loading it runs no code from the folder, and files in it cannot cause downloads.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.models import filter_pretrained_cfg
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn
from torchvision.transforms import Compose, Lambda
from torchvision.transforms.v2 import Grayscale

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import file_format
from vision_attn.networks.checkpoints.file_format import BlockClasses, gather
from vision_attn.networks.checkpoints.hub import resolve_source
from vision_attn.networks.checkpoints.load import Target, load_file_, refuse_without_values
from vision_attn.networks.checkpoints.option_code import get_arguments
from vision_attn.networks.insertion import remove_
from vision_attn.networks.insertion.attributes import RANDOM
from vision_attn.networks.insertion.registry import inserted_blocks, records, replaced_modules
from vision_attn.networks.insertion.second_map import random_contexts
from vision_attn.networks.inspection.example import float_tensors, make_example, tree_leaves
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.networks.inspection.wrappers import unwrap_average, unwrap_key
from vision_attn.networks.models.images import to_rgb  # also registers networks that folders refer to
from vision_attn.networks.safe import read_file, write_atomically
from vision_attn.networks.safe.write import name_errors, temporary_folder
from vision_attn.text import escape_control_characters, shorten

#: Subfolder of a training run with the best network.
RUN_SUBFOLDER = "model"
#: Largest number of bytes of a configuration.
MAX_CONFIG_BYTES = 2**20
#: Arguments that cause timm to read or download files.
FILE_ARGS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "features_only"}
#: Largest sum of all numbers in the arguments of a network, which limits its size.
MAX_ARGUMENT_SUM = 100_000
#: Largest number of elements of an input image.
MAX_INPUT_NUMEL = 2**24
#: Largest accepted difference of outputs, relative to the largest output, because of a different order of summation.
TOLERANCE = 1e-3

#: Saving and loading temporarily change global state: the mode of the network, the random state and warning filters.
LOCK = RLock()

#: Model card.
CARD = "---\nlibrary_name: vision-attn\n---\n\nLoad this network with `vision_attn.load_model(folder)`.\n"


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    architecture: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    network: Callable[..., nn.Module] | None = None,
    block: BlockClasses | None = None,
    example_input: Any = None,
) -> Path:
    """Save a network and its blocks to a folder that :func:`load_model` reads.

    The network is written to a temporary folder and reloaded, and its output for an image is compared. Then
    ``model.safetensors`` and ``config.json`` are replaced, each atomically, and ``README.md`` is added if it does not
    exist. Other files do not change. If the process is killed, or several processes save to the same folder,
    :func:`load_model` returns one of the saved networks. Modules that were replaced by ``replace_`` are not saved, so
    ``remove_`` cannot restore their weights in a loaded network, and issues a warning.

    A network whose output is not finite cannot be compared and is saved with a warning.

    Args:
        model: a network, with or without inserted blocks and wrappers.
        folder: path of the folder, which is created if it does not exist.
        classes: names of the classes; by default ``model.classes``, which :func:`load_model` sets.
        architecture: name of the network in timm; by default, the name with which the network was created.
        model_args: other arguments with which the network was created, if timm did not record them: values of JSON.
        network: class or function that creates the network as ``network(**model_args)``, if timm cannot create it. The
            folder contains its name, but not its code.
        block: the function that builds a custom block, as for :func:`load_model`; by default, the class of the block.
        example_input: arguments of the forward pass whose output is compared, or the shape of images; by default, one
            image of the size in the model's metadata.

    Returns:
        The folder.

    Raises:
        ValueError: timm or ``network`` does not create this network, or a block cannot be saved.
        OSError: the folder cannot be written.

    >>> import tempfile
    >>> from vision_attn.networks.insertion import insert_
    >>> model = timm.create_model("resnet20", num_classes=3)
    >>> report = insert_(model, stages=-1, num_heads=4)
    >>> folder = save_model(model, Path(tempfile.mkdtemp()) / "net", classes=["a", "b", "c"])
    >>> list(inserted_blocks(load_model(folder)))
    ['layer3.2']

    A network that timm cannot create:

    >>> def build(channels):
    ...     return nn.Sequential(nn.Conv2d(3, channels, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> folder = save_model(build(8), Path(tempfile.mkdtemp()) / "net", network=build, model_args={"channels": 8})
    >>> load_model(folder, network=build)[0].out_channels
    8
    """
    model, target = unwrap_average(model), Path(folder).resolve()
    refuse_without_values(model)
    architecture = architecture or (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    remedy = "For another network, pass its class or function as network= and its arguments as model_args="
    # The networks of features_only=True have no num_classes.
    if network is None and not (timm.is_model(str(architecture)) and hasattr(model, "num_classes")):
        got = f"{type(model).__name__} with the architecture {architecture!r}"
        raise ValueError(f"model must be a classifier of timm, got {got}. {remedy}")
    count, known = (getattr(model, name, None) for name in ("num_classes", "classes"))
    if classes is None and isinstance(known, list | tuple) and count in (None, len(known)):  # some store the number
        classes = known if all(isinstance(name, str) for name in known) else None
    classes = [classes] if isinstance(classes, str) else classes
    if classes is not None and count not in (None, len(classes)):
        raise ValueError(f"classes must be the names of the {count} classes, got {len(classes)} names")
    arguments, blocks = get_arguments(model.state_dict()), file_format.blocks_to_save(model)
    state = {unwrap_key(key): gather(value) for key, value in model.state_dict().items()}
    with LOCK, name_errors(Path(folder)):
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target if target.is_dir() else target.parent) as new:
            path, labels, options = new / "config.json", {"label_names": list(classes or ())}, dict(model_args or {})
            if network is None:
                # The complete configuration: timm before 1.0.31 uses it instead of the configuration of the model.
                complete = filter_pretrained_cfg(vars(model)["pretrained_cfg"], remove_source=True)
                config = {**labels, "pretrained_cfg": complete | {"architecture": architecture}}
                save_config_for_hf(model, path, config, model_args=options)
            else:
                named: Any = getattr(network, "func", network)  # of a partial
                config = {**labels, "network": f"{named.__module__}.{named.__qualname__}", "model_args": options}
                path.write_text(json.dumps(config, indent=2))
            saved = file_format.Saved(state, blocks, arguments=arguments, metadata=json.loads(path.read_text()))
            file_format.write_saved(new / "model.safetensors", saved)
            load = partial(load_model, new, block=block or file_format.foreign_classes(model), network=network)
            what = f"network {network!r}" if network else f"architecture: timm's {architecture!r}"
            verify(model, load, what, example_input)
            target.mkdir(exist_ok=True)
            for name in ("model.safetensors", "config.json"):
                write_atomically(target / name, (new / name).read_bytes())
        if not (target / "README.md").exists():
            write_atomically(target / "README.md", CARD.encode())
    return Path(folder)


@torch.inference_mode(False)  # Tensors created in inference mode cannot be trained.
def load_model(
    folder: str | Path, *, block: BlockClasses | None = None, network: Callable[..., nn.Module] | None = None
) -> nn.Module:
    """Load a network with its blocks, classes and image transform, in evaluation mode on the CPU.

    No code from the files is run, and nothing is downloaded except the repository that ``folder`` names.

    Args:
        folder: a folder written by :func:`save_model`, by timm (without blocks), or by a training run, or a repository
            of the Hugging Face Hub with such a folder, ``"hf-hub:owner/name[@revision]"``. For a training run, the best
            network is loaded.
        block: as in :func:`vision_attn.load_adapter_`: the classes of blocks, patterns and position encodings that are
            not of this library.
        network: the class or function that was passed to :func:`save_model`, if timm cannot create the network.

    Returns:
        The network. ``model.classes`` is a tuple of names, or None if the folder contains no names. ``model.transform``
        converts a Pillow image to an input ``(c, h, w)`` with timm's preprocessing for evaluation; it is None if the
        network has no ``pretrained_cfg``. Attributes of the network with these names are kept instead of None.

    Raises:
        FileNotFoundError: the folder or one of its files does not exist.
        CheckpointError: the folder is damaged, the network does not exist in timm and ``network`` is not given, the
            weights do not match it, or the Hub cannot be read.

    >>> from PIL import Image
    >>> from vision_attn.networks.models.registry import weights_folder
    >>> model = load_model(weights_folder() / "resnet20_attention_cifar100")
    >>> model.classes[:2], model(model.transform(Image.new("RGB", (60, 40)))[None]).shape
    (('apple', 'aquarium_fish'), torch.Size([1, 100]))
    """
    folder = resolve_source(folder)
    if not (folder / "config.json").is_file():
        folder = folder / RUN_SUBFOLDER
    path = folder / "config.json"
    if not path.is_file():
        remedy = "Pass a folder written by va.save_model, timm or vision-attn train"
        raise FileNotFoundError(f"{escape_control_characters(path)}: file not found. {remedy}")
    file = read_file(folder / "model.safetensors")
    saved = file_format.read_saved(file)
    weights: Mapping[str, Any] = file.content
    with open(path, "rb") as opened:
        text = opened.read(MAX_CONFIG_BYTES)
    if saved is None or not saved.metadata.keys() & {"architecture", "network"}:
        config = check_config(path, text)
    else:
        config = check_config(file.path, json.dumps(dict(saved.metadata)))
        if text.strip() != json.dumps(config, indent=2).encode():
            remedy = "The configuration in model.safetensors is used; save the network again to change it"
            warnings.warn(f"{path} differs from the configuration in model.safetensors. {remedy}", stacklevel=3)

    if (name := config.get("network")) and network is None:
        remedy = f"Pass its class or function: va.load_model({str(folder)!r}, network={str(name).rpartition('.')[2]})"
        raise CheckpointError(f"{folder} contains the network {name}, which timm cannot create. {remedy}")

    block_classes = {} if saved is None else file_format.match_classes(saved, folder, block)

    def build() -> nn.Module:
        model = create(config) if network is None else network(**config["model_args"])
        if saved is not None:
            if inserted_blocks(model):  # inserted by the class of the network; the file lists all blocks
                remove_(model)
            file_format.insert_saved_(model, saved, block_classes)
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        if other := [k for k in {**shapes, **weights} if k not in weights or weights[k].shape != shapes.get(k)]:
            raise CheckpointError(f"{folder}: the weights do not match the network in config.json: {shorten(other)}")
        return model

    try:
        if network is None:
            # On the meta device first: no memory is allocated for tensors that the file does not contain.
            with LOCK, torch.device("meta"), warnings.catch_warnings(action="ignore"):  # repeated by the second build
                build()
        with torch.random.fork_rng(devices=[]):
            model = build()
    except CheckpointError:
        raise
    except Exception as error:  # invalid arguments can cause any exception
        raise CheckpointError(f"{folder}: cannot create the network ({type(error).__name__}: {error})") from error
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and weights[key].is_floating_point():
            tensor.data = tensor.data.to(weights[key].dtype)
    load_file_(Target(model), file)
    for old in replaced_modules(model).values():
        setattr(old, RANDOM, True)
    classes = config.get("label_names")
    transform = create_eval_transform(model) if getattr(model, "pretrained_cfg", None) else None
    for name, value in {"classes": tuple(classes) if classes else None, "transform": transform}.items():
        if value is not None or not hasattr(model, name):  # a network may use the name for something else
            vars(model)[name] = value
    return model.eval()


def create_eval_transform(model: nn.Module) -> Compose:
    """Return timm's evaluation transform for a network, which accepts Pillow images as ``Image.open`` returns them."""
    config = resolve_data_config(pretrained_cfg=vars(model)["pretrained_cfg"])
    gray = [] if config["input_size"][0] == 3 else [Grayscale()]
    return Compose([Lambda(to_rgb), *gray, *create_transform(**config).transforms])


def check_config(path: Path, text: str | bytes) -> dict[str, Any]:
    """Return the configuration in a JSON text; raise an error if an entry is invalid."""
    try:
        config: dict[str, Any] = dict(json.loads(text))
        arguments, names, count = config.get("model_args") or {}, config.get("label_names"), None
        if "network" not in config:
            if not timm.is_model(str(config["architecture"])):
                raise ValueError("architecture must be a model name of timm")
            count = arguments.get("num_classes", config["num_classes"])
        if refused := sorted(name for name in FILE_ARGS & arguments.keys() if arguments[name]):
            raise ValueError(f"model_args must not contain {refused}")
        if sum(abs(number) for number in tree_leaves(arguments) if isinstance(number, int | float)) > MAX_ARGUMENT_SUM:
            raise ValueError("the numbers in model_args are too large for the size of a network")
        strings = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if names is not None and not (strings and count in (None, len(names))):
            raise ValueError(f"label_names must be a list of names{f' for {count} classes' * (count is not None)}")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or has another version: {error}") from error
    return config


def create(config: Mapping[str, Any]) -> nn.Module:
    """Create the network of a configuration, with random weights."""
    arguments = {"num_classes": config["num_classes"], **(config.get("model_args") or {})}
    classes = {"label_names": config.get("label_names"), "num_classes": arguments["num_classes"]}
    kept = filter_pretrained_cfg(config["pretrained_cfg"] | classes, remove_source=True)
    kept = {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}
    channels = arguments.get("in_chans", kept["input_size"][0])
    kept["input_size"] = (channels, *kept["input_size"][1:])
    if not 0 < math.prod(kept["input_size"]) <= MAX_INPUT_NUMEL or len(kept["input_size"]) != 3:
        raise ValueError(f"input_size must be (channels, height, width) of an image, got {kept['input_size']}")
    for name in ("mean", "std"):
        if len(kept[name]) != channels:
            kept[name] = (sum(kept[name]) / len(kept[name]),) * channels
    return timm.create_model(config["architecture"], pretrained_cfg=kept, **arguments)


def verify(model: nn.Module, load: Callable[[], nn.Module], what: str, example_input: Any) -> None:
    """Raise an error unless a model and its saved copy have the same output; ``what`` is how the user named it."""
    if example_input is None:  # Blocks for tokens require the image size with which they were inserted.
        example_input = next(((1, *block.target.input_shape[1:]) for block in records(model)), None)
    example = make_example(model, example_input)
    try:
        copy = load().to(example.image.device)

        def run(network: nn.Module) -> list[Tensor]:
            with random_contexts(network, inserted_blocks(network).values(), example.shape[0]):
                return float_tensors(network(*example.args, **example.kwargs))

        with quiet_eval(model):
            try:
                expected = run(model)
            except Exception as error:  # another input can cause any exception
                failed = f"the forward pass of the network with inputs {example} failed ({error})"
                raise ValueError(f"{failed}. Pass the arguments of a forward pass as example_input") from error
            output = run(copy)
        if not expected or not all(y.isfinite().all() for y in expected):
            cause = "Training may have diverged. The saved network was not verified."
            warnings.warn(f"The output of the network is not finite. {cause}", stacklevel=3)
            return
        pairs = zip(expected, output, strict=True)
        if all(torch.allclose(y, x, rtol=0, atol=TOLERANCE * float(x.abs().max())) for x, y in pairs):
            return
        reason = "its output differs"
    except CheckpointError as error:
        reason = str(error).partition(": ")[2]
    remedy = "Pass the arguments that create it as model_args, and the function that builds custom blocks as block"
    raise ValueError(f"{what} is not this network ({reason}). {remedy}")
