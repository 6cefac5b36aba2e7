"""The command ``explore``, and how commands open networks and images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from vision_attn.text import escaped

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

Output = Annotated[Path, arg(aliases=["-o"])]


def find_images(names: Sequence[Path]) -> list[Path]:
    """Return the given image files, and all those in the given folders."""
    from vision_attn.errors import DataError
    from vision_attn.tools.training.data import is_image

    if not names:
        raise ValueError("images must be files, or folders of them; got none")
    found: list[Path] = []
    for path in names:
        inner = [one for one in sorted(path.rglob("*")) if is_image(one.name)] if path.is_dir() else [path]
        if not inner:
            raise DataError(f"{path} has no images")
        found += inner
    return found


def load_images(paths: Sequence[Path], transform: Any) -> Tensor:
    """Load images ``(b, c, h, w)`` through a transform."""
    import torch

    from vision_attn.errors import DataError
    from vision_attn.tools.training.data import open_image

    found = []
    for path in paths:
        try:
            found.append(transform(open_image(path)))
        except Exception as error:  # a damaged file can make Pillow fail in any way
            raise DataError(f"{path} cannot be read as an image ({error})") from error
    return torch.stack(found)


def crop_as_network(image: Image.Image, transform: Any) -> Image.Image:
    """Crop an image as a network does, but in its own pixels where these are finer than the network's."""
    import numpy as np

    steps = [copy(step) for step in transform.transforms if hasattr(step, "size")]  # resize and crop
    scale = max(1.0, min(image.size) / max(np.max(step.size) for step in steps))
    for step in steps:
        step.size = (scale * np.array(step.size)).round().astype(int).tolist()
        image = step(image)
    return image


def open_network(name: str, pretrained: bool, adapter: Path | None) -> Any:
    """Open a network by its folder or create it by its name, with its classes and the transform of its images."""
    from timm.data import ImageNetInfo, infer_imagenet_subset
    from timm.models import get_pretrained_cfg

    from vision_attn.networks.checkpoints import load_adapter_
    from vision_attn.networks.checkpoints.adapter import read_adapter
    from vision_attn.networks.convert.swap import swap_
    from vision_attn.networks.models import folder
    from vision_attn.networks.models.registry import create_model, get_model_cfg

    if Path(name).exists():
        if adapter:
            raise ValueError(f"adapter goes with a name, and {name} is a folder: give it alone as --model")
        model = folder.load_model(Path(name))
    else:
        about = read_adapter(adapter).about if adapter else {}
        classes, known = tuple(about.get("classes", ())), get_pretrained_cfg(name)
        count = len(classes) or (known.num_classes if known else 1000)
        model = create_model(name, num_classes=count, pretrained=pretrained).eval()
        if adapter:
            load_adapter_(model, adapter)
        config = {**get_model_cfg(model), **({"crop_pct": 1.0, "interpolation": "bilinear"} if about else {}), **about}
        if not classes and (subset := infer_imagenet_subset(config)):
            classes = tuple(map(ImageNetInfo(subset).index_to_description, range(count)))
        vars(model).update(classes=classes or None, pretrained_cfg=config)
        vars(model)["transform"] = folder.create_eval_transform(model)
    if swapped := swap_(model):
        print(f"to capture the network's attention, {len(swapped)} modules are swapped for blocks of this library")
    return model


def explore(
    images: Positional[tuple[Path, ...]],
    /,
    model: str,
    pretrained: bool = False,
    adapter: Path | None = None,
    sites: tuple[str, ...] = (),
    output: Output = Path("report.html"),
    top: int = 5,
    png: Path | None = None,
) -> None:
    """Where every head of a network looks on images, as a page for a browser.

    Args:
        images: image files, or folders of them
        model: folder of a run, or name of a network that timm knows
        pretrained: load the pretrained weights of a network given by its name
        adapter: adapter.safetensors to load into a network given by its name
        sites: modules with attention at or in them (default: all)
        output: page to write
        top: number of classes for each image
        png: folder for PNG images of the attention from the middle of each image, one image per module
    """
    from torchvision.transforms import Compose

    from vision_attn.attention.blocks import attention_modules
    from vision_attn.networks.figures import attention_figure, save_figure
    from vision_attn.networks.insertion import quiet_eval
    from vision_attn.networks.recording import capture
    from vision_attn.networks.safe import check_writable
    from vision_attn.tools import explorer
    from vision_attn.tools.training.data import open_image

    paths, network, note = find_images(images), open_network(model, pretrained, adapter), ""
    if not attention_modules(network):
        remedy = "give vit_tiny_patch16_224, for one, or the folder of a run of vision-attn train --insert"
        raise ValueError(f"model: {model} has no attention to look into: {remedy}")
    if not (pretrained or Path(model).exists()):
        but = ", but for those of the adapter" if adapter else ""
        note = f"The weights of {model} are random{but}: --pretrained fetches those that were trained."
        print(note)
    *crop, normalize = network.transform.transforms
    pixels = load_images(paths, Compose(crop))
    if png:
        png.mkdir(parents=True, exist_ok=True)
        check_writable(png / "model.png")
    page = explorer.explore(
        network, pixels, output, normalize=normalize, classes=network.classes or (), sites=sites or None, top=top,
        titles=[path.name for path in paths], title=f"Where {Path(model).name} looks", note=note,
        pictures=[crop_as_network(open_image(path), network.transform) for path in paths],
    )  # fmt: skip
    print(f"wrote {page}, {page.stat().st_size / 1e3:,.0f} kB: open it in a browser")
    if png:
        # As long as a panel is wide, without the sign that matplotlib takes for a formula's.
        titles = [escaped(path.stem[:12]).replace("$", r"\$") for path in paths]
        middle = tuple(side / 2 for side in pixels.shape[2:])
        with quiet_eval(network), capture(network, [middle], sites=sites or None) as maps:
            network(normalize(pixels))
        for site, one in maps.items():
            width = 3.5 + 1.5 * len(one.heads)
            figure = attention_figure(pixels, one, reduction="none", titles=titles, width=width)
            save_figure(figure, png / f"{re.sub(r'[^A-Za-z0-9._-]', '_', site) or 'model'}.png")
        print(f"wrote {len(maps)} PNG images to {png}")
