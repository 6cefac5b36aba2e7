"""The command ``explore``, which opens a network and draws its attention maps."""

from __future__ import annotations

import re
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from vision_attn.text import escape_control_characters
from vision_attn.tools.hints import hint

if TYPE_CHECKING:
    from PIL import Image

Images = Annotated[Positional[tuple[Path, ...]], hint("IMAGE [IMAGE ...]", "required")]
Output = Annotated[Path, arg(aliases=["-o"])]


def crop_as_network(image: Image.Image, transform: Any) -> Image.Image:
    """Crop an image like a network does, but keep the resolution of the image if it is higher."""
    import numpy as np

    steps = [copy(step) for step in transform.transforms if hasattr(step, "size")]  # resize and crop
    scale = max(1.0, min(image.size) / max(np.max(step.size) for step in steps))
    for step in steps:
        step.size = (scale * np.array(step.size)).round().astype(int).tolist()
        image = step(image)
    return image


def open_network(name: str, pretrained: bool, adapter: Path | None) -> Any:
    """Load a network from a folder or create it by name, with its classes and image transform."""
    from timm.data import ImageNetInfo, infer_imagenet_subset
    from timm.models import get_pretrained_cfg

    from vision_attn.networks.checkpoints import folder, load_adapter_
    from vision_attn.networks.checkpoints.adapter import read_adapter
    from vision_attn.networks.checkpoints.hub import SCHEME
    from vision_attn.networks.convert.swap import swap_
    from vision_attn.networks.models.registry import create_model, get_model_cfg

    if Path(name).exists() or name.startswith(SCHEME):
        if adapter:
            raise ValueError(f"adapter requires the name of a model, but {name} is a folder, which contains its blocks")
        model = folder.load_model(name)
    else:
        metadata = read_adapter(adapter).metadata if adapter else {}
        classes, known = tuple(metadata.get("classes", ())), get_pretrained_cfg(name)
        count = len(classes) or (known.num_classes if known else 1000)
        model = create_model(name, num_classes=count, pretrained=pretrained).eval()
        if adapter:
            load_adapter_(model, adapter)
        config = {
            **get_model_cfg(model),
            **({"crop_pct": 1.0, "interpolation": "bilinear"} if metadata else {}),
            **metadata,
        }
        if not classes and (subset := infer_imagenet_subset(config)):
            classes = tuple(map(ImageNetInfo(subset).index_to_description, range(count)))
        vars(model).update(classes=classes or None, pretrained_cfg=config)
        vars(model)["transform"] = folder.create_eval_transform(model)
    if swapped := swap_(model).swapped:
        print(
            f"replaced {len(swapped)} attention modules by equivalent blocks of this library to capture their weights"
        )
    return model


def explore(
    images: Images,
    /,
    model: str,
    pretrained: bool = False,
    adapter: Annotated[Path | None, hint("FILE")] = None,
    names: Annotated[tuple[str, ...], hint("MODULE [MODULE ...]", "default: all attention modules")] = (),
    output: Output = Path("report.html"),
    top: int = 5,
    png: Annotated[Path | None, hint("FOLDER")] = None,
) -> None:
    """Write an interactive HTML page with the attention maps of a network.

    Args:
        images: Image files, or folders of images.
        model: Folder of a training run, hf-hub:OWNER/NAME, or name of a timm model.
        pretrained: Load the pretrained weights of the timm model.
        adapter: Adapter file (adapter.safetensors) to load into the timm model.
        names: Attention modules to show: names, or globs such as 'layer*.1'.
        output: HTML file to write.
        top: Number of classes to show for each image.
        png: Folder for one PNG image per module, with the attention maps of the query at the image center.
    """
    import torch
    from torchvision.transforms import Compose

    from vision_attn.attention.blocks import attention_modules
    from vision_attn.networks.capture.figures import attention_figure, save_figure
    from vision_attn.networks.capture.recording import capture
    from vision_attn.networks.checkpoints.hub import SCHEME
    from vision_attn.networks.network import quiet_eval
    from vision_attn.networks.safe import check_writable
    from vision_attn.tools import explorer
    from vision_attn.tools.images import check_none_skipped, find_images, load_images, open_image

    files, network, note = find_images(images), open_network(model, pretrained, adapter), ""
    if not attention_modules(network):
        expected = "expected a network with attention, such as a run of vision-attn train --stages"
        raise ValueError(f"model {model} has no attention modules: {expected} or vit_tiny_patch16_224")
    if not (pretrained or Path(model).exists() or model.startswith(SCHEME)):
        but = " except for the adapter" if adapter else ""
        note = f"The weights of {model} are random{but}. Use --pretrained to download pretrained weights."
        print(note)
    *crop, normalize = network.transform.transforms
    loaded = load_images(files, Compose(crop))
    if not loaded:
        check_none_skipped(files, 0)
    pixels = torch.stack([*loaded.values()])
    if png:
        png.mkdir(parents=True, exist_ok=True)
        check_writable(png / "model.png")
    page = explorer.explore(
        network, pixels, output, normalize=normalize, classes=network.classes or (), names=names or None, top=top,
        titles=[file.name for file in loaded], title=f"Attention maps of {Path(model).name}", note=note,
        pictures=[crop_as_network(open_image(file), network.transform) for file in loaded],
    )  # fmt: skip
    print(f"wrote {page} ({page.stat().st_size / 1e3:,.0f} kB). Open it in a browser")
    if png:
        # Short enough for a panel. Matplotlib parses text between dollar signs as a formula.
        titles = [escape_control_characters(file.stem[:12]).replace("$", r"\$") for file in loaded]
        middle = tuple(side / 2 for side in pixels.shape[2:])
        with quiet_eval(network), capture(network, [middle], names=names or None) as maps:
            network(normalize(pixels))
        for site, one in maps.items():
            width = 3.5 + 1.5 * len(one.heads)
            figure = attention_figure(pixels, one, reduction="none", titles=titles, width=width)
            save_figure(figure, png / f"{re.sub(r'[^A-Za-z0-9._-]', '_', site) or 'model'}.png")
        print(f"wrote {len(maps)} PNG image{'s' * (len(maps) > 1)} to {png}")
    check_none_skipped(files, len(loaded))
