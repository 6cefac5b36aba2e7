"""The command ``explore``, which looks into a network, and what opens it and its images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from vision_attn.text import escaped

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

Output = Annotated[Path, arg(aliases=["-o"])]


def open_network(path: Path) -> Any:
    """The network in a folder of a run or of ``save_model``."""
    from vision_attn.networks.models.folder import load_model

    return load_model(path)


def images_in(names: Sequence[Path]) -> list[Path]:
    """Image files by name, and all those in folders."""
    from vision_attn.errors import DataError
    from vision_attn.tools.training.data import is_image

    if not names:
        raise ValueError("images must be files, or folders of them; got none")
    found: list[Path] = []
    for path in names:
        if not path.exists():
            raise DataError(f"images: there is no {path}")
        inner = [one for one in sorted(path.rglob("*")) if is_image(one.name)] if path.is_dir() else [path]
        if not inner:
            raise DataError(f"{path} has no images")
        found += inner
    return found


def opened(paths: Sequence[Path], model: Any) -> Tensor:
    """Images ``(b, c, h, w)`` as a network takes them."""
    import torch

    from vision_attn.errors import DataError
    from vision_attn.tools.training.data import open_image

    found = []
    for path in paths:
        try:
            found.append(model.transform(open_image(path)))
        except Exception as error:  # a damaged file can make Pillow fail in any way
            raise DataError(f"{path} cannot be read as an image ({error})") from error
    return torch.stack(found)


def finer(image: Image.Image, transform: Any) -> Image.Image:
    """What a network sees of an image, in the image's own pixels where these are smaller than the network's."""
    import numpy as np

    steps = [copy(step) for step in transform.transforms if hasattr(step, "size")]  # what resizes and crops
    times = max(1.0, min(image.size) / max(np.max(step.size) for step in steps))
    for step in steps:
        step.size = (times * np.array(step.size)).round().astype(int).tolist()
        image = step(image)
    return image


def named(name: str, pretrained: bool, adapter: Path | None) -> Any:
    """A network by the folder of its run or by its name, with its classes and the transform of its images."""
    from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_data_config
    from timm.models import get_pretrained_cfg

    from vision_attn.networks.checkpoints import load_adapter_
    from vision_attn.networks.checkpoints.adapter import read_adapter
    from vision_attn.networks.convert.swap import swap_
    from vision_attn.networks.models.registry import create_model, get_model_cfg

    if Path(name).exists():
        if adapter:
            raise ValueError(f"adapter goes with a name, and {name} is a folder: give it alone as --model")
        model = open_network(Path(name))
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
        transform = create_transform(**resolve_data_config(pretrained_cfg=config))
        vars(model).update(classes=classes or None, transform=transform, pretrained_cfg=config)
    if swapped := swap_(model):
        print(f"attention of the network's own is run by blocks, to look into it: {len(swapped)} modules swapped")
    return model


@dataclass(frozen=True)
class Looked:
    """A network to look into, and what it looks at."""

    images: Positional[tuple[Path, ...]]  # image files, or folders of them
    model: str  # folder of a run, or a network that timm knows
    pretrained: bool = False  # of a name: fetch the weights that come with it
    adapter: Path | None = None  # of a name: adapter.safetensors, to go into the network
    sites: tuple[str, ...] = ()  # modules with attention at or in them (default: all)

    @property
    def warning(self) -> str:
        """What is to be said of weights that nobody has trained."""
        but = ", but for those of the adapter" if self.adapter else ""
        random = f"The weights of {self.model} are random{but}: --pretrained fetches those that were trained."
        return "" if self.pretrained or Path(self.model).exists() else random

    def open(self) -> tuple[Any, Tensor, Any, list[Path]]:
        """The network, images in 0…1 as it sees them, what normalises these, and their files."""
        from torchvision.transforms.v2 import Normalize

        from vision_attn.attention.blocks import attention_modules

        paths, network = images_in(self.images), named(self.model, self.pretrained, self.adapter)
        if not attention_modules(network):
            remedy = "give vit_tiny_patch16_224, for one, or the folder of a run of vision-attn train --insert"
            raise ValueError(f"model: {self.model} has no attention to look into: {remedy}")
        if self.warning:
            print(self.warning)
        mean, std = (network.pretrained_cfg[name] for name in ("mean", "std"))
        back = Normalize([-m / s for m, s in zip(mean, std, strict=True)], [1 / s for s in std])
        return network, back(opened(paths, network)).clamp(0, 1), Normalize(list(mean), list(std)), paths


#: Its fields are flags of the command itself.
Look = Annotated[Looked, arg(name="")]


def explore(look: Look, output: Output = Path("report.html"), top: int = 5, png: Path | None = None) -> None:
    """Where every head of a network looks on images, as a page for a browser.

    Args:
        look: the network and the images
        output: page to write
        top: classes of each image
        png: folder for PNG images of the attention from the middle of each image, one image per module
    """
    from vision_attn.networks.safe import check_writable
    from vision_attn.tools import explorer
    from vision_attn.tools.training.data import open_image

    network, pixels, normalize, paths = look.open()
    if png:
        png.mkdir(parents=True, exist_ok=True)
        check_writable(png / "model.png")
    page = explorer.explore(
        network, pixels, output, normalize=normalize, classes=network.classes or (), sites=look.sites or None, top=top,
        titles=[path.name for path in paths], title=f"Where {Path(look.model).name} looks", note=look.warning,
        pictures=[finer(open_image(path), network.transform) for path in paths],
    )  # fmt: skip
    print(f"wrote {page}, {page.stat().st_size / 1e3:,.0f} kB: open it in a browser")
    if png:
        # As long as a panel is wide, without the sign that matplotlib takes for a formula's.
        titles = [escaped(path.stem[:12]).replace("$", r"\$") for path in paths]
        count = write_figures(network, pixels, normalize, look.sites, titles, png)
        print(f"wrote {count} PNG images to {png}")


def write_figures(
    network: Any, pixels: Tensor, normalize: Any, sites: Sequence[str], titles: Sequence[str], folder: Path
) -> int:
    """Draw the attention of every module and head from the middle of each image; return the number of files."""
    from vision_attn.networks.figures import attention_figure, save_figure
    from vision_attn.networks.insertion import quiet_eval
    from vision_attn.networks.recording import capture

    middle = tuple(side / 2 for side in pixels.shape[2:])
    with quiet_eval(network), capture(network, [middle], sites=sites or None) as maps:
        network(normalize(pixels))
    for site, one in maps.items():
        width = 3.5 + 1.5 * len(one.heads)
        figure = attention_figure(pixels, one, reduction="none", titles=titles, width=width)
        save_figure(figure, folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', site) or 'model'}.png")
    return len(maps)
