"""Write an interactive HTML page with the attention maps of a network on some images.

vision-attn explore runs/train-1 photo.jpg --output report.html
python my_explore.py vit_tiny_patch16_224 photo.jpg --pretrained        # a copy of this file with your changes
"""

import base64
import io
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_data_config
from torch import Tensor, nn
from torchvision.transforms import Compose
from torchvision.utils import save_image

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.models import create_model
from vision_attn.recipes.data import find_images, open_image
from vision_attn.recipes.runs import check_writable, load_run, unwrap, write_file
from vision_attn.recipes.settings import Exploration

#: Largest height and width of a map on the page. Positions of larger maps are merged.
MAX_SIDE = 28
#: Number of classes to show for each image.
TOP = 5
#: Number of quantization levels of the weights.
LEVELS = 255


def explore(
    model: nn.Module,
    images: Tensor,
    output: str | Path,
    *,
    normalize: Callable[[Tensor], Tensor] | None = None,
    classes: Sequence[str] = (),
    titles: Sequence[str] = (),
    names: Any = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    title: str = "Attention maps",
    note: str = "",
) -> Path:
    """Write an interactive HTML page with the attention maps of all heads and queries.

    The page is a single file that works offline. It contains the attention maps of :func:`capture`, their mean over
    heads and their rollout, the prediction of the network, and the prediction with each block disabled. Class and
    register tokens can be selected as queries. Weights are rounded to 1/255 of the largest weight of the query. In
    feature maps with more than 28 positions along a side, neighboring positions are merged: one of them is the query,
    and weights are summed.

    Args:
        model: network with attention, as in :func:`capture`.
        images: images ``(b, 1 or 3, height, width)`` in 0…1. They run one at a time: inside :func:`context`, pass one
            image and its features.
        output: HTML file to write.
        normalize: function that converts images to the input of the network; identity by default.
        classes: name of each class.
        titles: title of each image.
        names: show only attention at or in these modules: a name, glob or compiled regular expression, or a list.
        where: show only attention at or in the modules for which ``where(name, module)`` is true.
        title: title of the page.
        note: note below the title, for example that the weights are random.

    Returns:
        The file.

    Raises:
        ValueError: there is no image, the number of titles is wrong, a feature map does not have two axes,
            or an argument is invalid for :func:`capture`.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), AttentionBlock2d(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> page = explore(model, torch.rand(1, 3, 8, 8), Path(tempfile.mkdtemp()) / "report.html")
    >>> page.read_text()[:15]
    '<!doctype html>'
    """
    shape = tuple(images.shape) if isinstance(images, Tensor) else ()
    if len(shape) != 4 or shape[1] not in (1, 3) or not shape[0]:
        got = shape if isinstance(images, Tensor) else repr(images)
        raise ValueError(f"images must be a tensor of shape (b, 1 or 3, height, width) with b ≥ 1, got {got}")
    low, high = images.min().item(), images.max().item()
    if not (low > -0.01 and high < 1.01):
        raise ValueError(f"images must be in 0…1, got {low:.1f}…{high:.1f}. Pass the normalization as normalize=")
    if titles and len(titles) != len(images):
        raise ValueError(f"titles must be one text for each of the {len(images)} images, got {len(titles)}")
    check_writable(Path(output))
    plain, titles = unwrap(model), titles or [f"image {number + 1}" for number in range(len(images))]
    weight, shown, modes = next(plain.parameters()), [], [(module, module.training) for module in plain.modules()]
    plain.eval()
    try:
        for image, name in zip(images.split(1), titles, strict=True):
            x = (image if normalize is None else normalize(image)).to(weight)
            found = explore_image(plain, x, {"names": names, "where": where}, classes)
            shown.append({"title": name, **found, "source": encode_picture(image[0])})
    finally:
        for module, mode in modes:
            module.training = mode
    architecture = (getattr(plain, "pretrained_cfg", None) or {}).get("architecture") or type(plain).__name__
    about = f"{architecture}, {sum(parameter.numel() for parameter in plain.parameters()):,} parameters"
    content = {"title": title, "note": note, "about": about, "images": shown}
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")  # no closing script tag
    write_file(Path(output), page.replace("/* DATA */", text))
    return Path(output)


@torch.no_grad()
def explore_image(model: nn.Module, x: Tensor, chosen: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the attention maps and predictions for one image."""
    with va.capture(model, "all", **chosen) as maps:
        scores = predict(model, x)
    try:
        measures = va.measure_blocks(model, x)
    except ValueError:  # no block has a residual branch
        measures = {}
    shown: dict[str, Any] = {"size": x.shape[2:], "blocks": [], "prediction": [], "ablations": []}
    rollout = maps.rollout()
    for site, one in maps.items():
        if len(one.map_size) != 2:
            axes = f"expected feature maps with 2 axes, got {len(one.map_size)} at {site!r}"
            raise ValueError(f"model: {axes}. Select other modules with names=")
        encoded = {"heads": encode(one), "rollout": encode(rollout[site])}
        shown["blocks"].append({"site": site, **describe(one), **encoded})
    if scores is None:
        return shown
    names = [*classes, *(f"class {label}" for label in range(len(classes), len(scores)))]
    best = scores.topk(min(TOP, len(scores))).indices.tolist()
    shown["prediction"] = [[names[label], round(scores[label].item(), 6)] for label in best]
    blocks_off = {name: [name] for name in measures} | ({"all blocks": [*measures]} if len(measures) > 1 else {})
    for what, sites in blocks_off.items():
        with va.disabled(model, sites):
            ablated: Any = predict(model, x)
        ratio = round(measures[what]["residual_ratio"], 6) if what in measures else None
        prediction = {"name": names[int(ablated.argmax())], "probability": round(ablated[best[0]].item(), 6)}
        shown["ablations"].append({"disabled": what, "ratio": ratio, **prediction})
    return shown


def describe(one: Any) -> dict[str, Any]:
    """Return measures of each head and of all heads, and the names of the prefix tokens."""
    keys, prefixes = one.weights[0, 0, 0].numel(), 0 if one.prefix is None else one.prefix.shape[2]
    return {
        "largest": one.weights.max().item() * keys,  # as a multiple of uniform attention
        "selects": one.describe_width(), "distance": one.distance()[0].mean(1).tolist(),
        "width": one.width()[0].mean(1).tolist(),
        "tokens": [f"prefix token {number + 1}" for number in range(prefixes)],
    }  # fmt: skip


def predict(model: nn.Module, x: Tensor) -> Tensor | None:
    """Return the probability of each class, ``(classes,)``, or None if the model does not return class scores.

    >>> predict(nn.Flatten(), torch.zeros(1, 2)), predict(nn.Flatten(), torch.zeros(1, 1))
    (tensor([0.5000, 0.5000]), tensor([0.5000, 0.5000]))
    """
    output = model(x)
    output = output.get("logits") if isinstance(output, dict) else output
    if not isinstance(output, Tensor) or output.dim() != 2:
        return None
    scores = output[0].float()  # a single score is the logit of the second of two classes
    return (scores if len(scores) > 1 else F.pad(scores, (1, 0))).softmax(0).cpu()


def encode(one: Any) -> dict[str, Any]:
    """Encode weights for the page: integers relative to the largest weight of each query, on maps of limited size.

    Queries on the feature map precede prefix tokens.
    """
    weights = (one.spread() if one.key_lengths else one.weights)[0].float().cpu()
    step, key_step = (-(-max(size) // MAX_SIDE) for size in (one.map_size, weights.shape[2:]))
    # The query of merged positions is the one in their middle.
    rows, columns = (torch.arange(0, n, step).add(step // 2).clamp(max=n - 1) for n in one.map_size)
    weights = weights[:, (rows[:, None] * one.map_size[1] + columns).flatten()]
    if one.prefix is not None:
        weights = torch.cat([weights, one.prefix[0].float().cpu()], dim=1)
    weights = F.avg_pool2d(weights, key_step, ceil_mode=True, divisor_override=1)
    keys, peaks, weights = weights.shape[2:], weights.amax((2, 3)), weights.flatten(2)
    parts = (weights / torch.where(peaks > 0, peaks, 1.0)[:, :, None] * LEVELS).round().to(torch.uint8)
    sizes = {"map": [-(-n // step) for n in one.map_size], "keys": keys, "step": key_step, "levels": LEVELS}
    packed = {"maps": zlib.compress(parts.numpy().tobytes()), "peaks": peaks.numpy().astype("<f4").tobytes()}
    return {**sizes, "names": one.heads, **{name: base64.b64encode(x).decode() for name, x in packed.items()}}


def encode_picture(image: Tensor) -> str:
    """Encode an image in 0…1 as a data URL."""
    file = io.BytesIO()
    save_image(image.float(), file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def open_network(e: Exploration) -> tuple[Any, str]:
    """Load a network from a folder or create it by name, with its classes and image transform; and a note for users."""
    note = ""
    if Path(e.model).exists() or e.model.startswith("hf-hub:"):
        model: Any = load_run(e.model, e.block, "explore MODEL IMAGE")
    else:
        model = create_model(e.model, pretrained=e.pretrained).eval()
        subset = infer_imagenet_subset(model.pretrained_cfg)
        model.classes = [*map(ImageNetInfo(subset).index_to_description, range(model.num_classes))] if subset else ()
        model.transform = create_transform(**resolve_data_config(pretrained_cfg=model.pretrained_cfg))
        if not e.pretrained:
            note = f"The weights of {e.model} are random. Use --pretrained to download pretrained weights."
            print(note)
    if swapped := va.swap_(model).swapped:
        print(f"replaced {len(swapped)} attention modules by equivalent blocks, which can be captured")
    elif not any(isinstance(module, va.Attention2d) for module in model.modules()):
        remedy = "Pass a run of vision-attn train --block attention, or vit_tiny_patch16_224"
        raise ValueError(f"MODEL: {e.model} has no attention modules. {remedy}")
    return model, note


def explore_images(e: Exploration) -> Path:
    """Write the page of a network for image files."""
    files = find_images(e.images)
    check_writable(e.output, files)
    network, note = open_network(e)
    *crop, normalize = network.transform.transforms
    images = torch.stack([Compose(crop)(open_image(file)) for file in files])
    page = explore(
        network, images, e.output, normalize=normalize, classes=network.classes or (),
        names=e.names or None, titles=[file.name for file in files],
        title=f"Attention maps of {Path(e.model).name}", note=note,
    )  # fmt: skip
    print(f"wrote {page} ({page.stat().st_size / 1e3:,.0f} kB). Open it in a browser")
    return page


if __name__ == "__main__":
    cli.run_script("explore", explore_images)
