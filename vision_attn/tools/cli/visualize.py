"""The command ``explore``, which opens a network and draws its attention maps."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from vision_attn.tools.hints import hint

if TYPE_CHECKING:
    from PIL import Image

Images = Annotated[Positional[tuple[Path, ...]], hint("IMAGE [IMAGE ...]", "required")]
Output = Annotated[Path, arg(aliases=["-o"])]
Block = Annotated[str | None, hint("MODULE:CLASS", "required for custom blocks")]


def crop_as_network(image: Image.Image, transform: Any) -> Image.Image:
    """Crop an image like a network does, but keep the resolution of the image if it is higher."""
    import numpy as np

    steps = [copy(step) for step in transform.transforms if hasattr(step, "size")]  # resize and crop
    scale = max(1.0, min(image.size) / max(np.max(step.size) for step in steps))
    for step in steps:
        step.size = (scale * np.array(step.size)).round().astype(int).tolist()
        image = step(image)
    return image


def load_run(run: Path, block: str | None) -> Any:
    """Load the network of a run, with blocks of the class ``MODULE:CLASS`` if there is one."""
    from vision_attn.networks.block_factories import get_block_factory
    from vision_attn.networks.checkpoints import folder

    if block is None:
        return folder.load_model(run)
    from vision_attn.tools.training.network import block_class  # requires the packages for training

    return folder.load_model(run, block=get_block_factory(block_class(block)))


def open_network(name: str, pretrained: bool, block: str | None = None) -> Any:
    """Load a network from a folder or create it by name, with its classes and image transform."""
    from timm.data import ImageNetInfo, infer_imagenet_subset
    from timm.models import get_pretrained_cfg

    from vision_attn.networks.checkpoints import folder
    from vision_attn.networks.checkpoints.hub import SCHEME
    from vision_attn.networks.convert.swap import swap_
    from vision_attn.networks.models.registry import create_model, get_model_cfg

    if Path(name).exists() or name.startswith(SCHEME):
        model = load_run(Path(name), block)
    else:
        known = get_pretrained_cfg(name)
        count = known.num_classes if known else 1000
        model = create_model(name, num_classes=count, pretrained=pretrained).eval()
        subset = infer_imagenet_subset(get_model_cfg(model))
        describe = ImageNetInfo(subset).index_to_description if subset else None
        vars(model)["classes"] = describe and tuple(map(describe, range(count)))
        vars(model)["transform"] = folder.create_eval_transform(model)
    if swapped := swap_(model).swapped:
        print(f"replaced {len(swapped)} attention modules by equivalent blocks, which can be captured")
    return model


def explore(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    images: Images,
    /,
    pretrained: bool = False,
    names: Annotated[tuple[str, ...], hint("MODULE [MODULE ...]", "default: all attention modules")] = (),
    output: Output = Path("report.html"),
    top: int = 5,
    block: Block = None,
) -> None:
    """Write an interactive HTML page with the attention maps of a network.

    Args:
        model: Folder of a training run, hf-hub:OWNER/NAME, or name of a timm model.
        images: Image files, or folders of images.
        pretrained: Load the pretrained weights of the timm model.
        names: Attention modules to show: names, or globs such as 'layer*.1'.
        output: HTML file to write.
        top: Number of classes to show for each image.
        block: Class of the inserted blocks.
    """
    import torch
    from torchvision.transforms import Compose

    from vision_attn.attention.blocks import attention_modules
    from vision_attn.networks.checkpoints.hub import SCHEME
    from vision_attn.tools import explorer
    from vision_attn.tools.images import check_none_skipped, find_images, load_images, open_image

    network, files, note = open_network(model, pretrained, block), find_images(images), ""
    if not attention_modules(network):
        expected = "expected a network with attention, such as a run of vision-attn train --stages"
        raise ValueError(f"model {model} has no attention modules: {expected} or vit_tiny_patch16_224")
    if not (pretrained or Path(model).exists() or model.startswith(SCHEME)):
        note = f"The weights of {model} are random. Use --pretrained to download pretrained weights."
        print(note)
    *crop, normalize = network.transform.transforms
    loaded = load_images(files, Compose(crop))
    if not loaded:
        check_none_skipped(files, 0)
    pixels = torch.stack([*loaded.values()])
    page = explorer.explore(
        network, pixels, output, normalize=normalize, classes=network.classes or (), names=names or None, top=top,
        titles=[file.name for file in loaded], title=f"Attention maps of {Path(model).name}", note=note,
        pictures=[crop_as_network(open_image(file), network.transform) for file in loaded],
    )  # fmt: skip
    print(f"wrote {page} ({page.stat().st_size / 1e3:,.0f} kB). Open it in a browser")
    check_none_skipped(files, len(loaded))
