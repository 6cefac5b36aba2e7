"""Interactive HTML page with the attention maps of a network on some images."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from vision_attn.checks import check_above
from vision_attn.networks.capture.maps import AttentionMap, scale_end
from vision_attn.networks.capture.recording import capture
from vision_attn.networks.contributions import branches, compute_scores, measure_branches, rms_ratio
from vision_attn.networks.inspection.network import quiet_eval, unwrap_model
from vision_attn.networks.inspection.selection import Globs
from vision_attn.networks.safe import check_writable, write_atomically

#: Largest height and width of a map on the page. Positions of larger maps are merged.
MAX_SIDE = 28
#: Largest side of a picture in pixels, and largest side of pictures with lossless compression.
MAX_PICTURE, MAX_PNG = 1024, 256
#: Names of prefix tokens in their order, with the names of their parameters. All other prefix tokens are registers.
TOKENS = {
    "the class token": {"cls_token", "class_token", "class_embedding"},
    "the distillation token": {"dist_token", "distillation_token"},
}
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
    pictures: Sequence[Image.Image] = (),
    names: Globs = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    top: int = 5,
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
        images: images ``(b, 1 or 3, height, width)`` in 0…1.
        output: HTML file to write.
        normalize: function that converts images to the input of the network; identity by default.
        classes: name of each class.
        titles: title of each image.
        pictures: Pillow images to show instead of ``images``, with the same content and any resolution.
        names: show only attention at or in these modules: a name, glob or compiled regular expression, or a list.
        where: show only attention at or in the modules for which ``where(name, module)`` is true.
        top: number of classes to show for each image.
        title: title of the page.
        note: note below the title, for example that the weights are random.

    Returns:
        The file.

    Raises:
        ValueError: there is no image, the number of titles or pictures is wrong, a feature map does not have two axes,
            or an argument is invalid for :func:`capture`.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), AttentionBlock2d(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> page = explore(model, torch.rand(1, 3, 8, 8), Path(tempfile.mkdtemp()) / "report.html")
    >>> page.read_text()[:15]
    '<!doctype html>'
    """
    check_above(0, top=top)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(f"images must have shape (b, 1 or 3, height, width) with b ≥ 1, got {tuple(images.shape)}")
    check_writable(Path(output))
    rounded = (images.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    titles = titles or [f"image {number}" for number in range(1, len(images) + 1)]
    plain = unwrap_model(model)
    weight, shown, chosen = next(plain.parameters()), [], {"names": names, "where": where}
    with quiet_eval(model):
        for image, name, picture in zip(images.split(1), titles, pictures or map(to_pil_image, rounded), strict=True):
            x = (image if normalize is None else normalize(image)).to(weight)
            source = {"source": encode_picture(picture)}
            shown.append({"title": name, **explore_image(model, x, chosen, classes, top), **source})
    architecture = (getattr(plain, "pretrained_cfg", None) or {}).get("architecture") or type(plain).__name__
    about = f"{architecture}, {sum(parameter.numel() for parameter in plain.parameters()):,} parameters"
    top_of_scale = scale_end(max(block["largest"] for image in shown for block in image["blocks"]))
    content = {"title": title, "note": note, "about": about, "top": top_of_scale, "images": shown}
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")  # no closing script tag
    write_atomically(Path(output), page.replace("/* DATA */", text).encode())
    return Path(output)


def explore_image(
    model: nn.Module, x: Tensor, chosen: dict[str, Any], classes: Sequence[str], top: int
) -> dict[str, Any]:
    """Return the attention maps and predictions for one image."""
    with capture(model, "all", **chosen) as maps, measure_branches(model) as measures:
        scores = predict(model, x)
    for site, one in maps.items():
        if len(one.map_size) != 2:
            axes = f"expected feature maps with 2 axes, got {len(one.map_size)} at {site!r}"
            raise ValueError(f"model: {axes}. Select other modules with names=")
    kinds = {"heads": maps, "rollout": maps.rollout()}
    encoded = {site: {kind: encode(found[site]) for kind, found in kinds.items()} for site in maps}
    blocks = [{"site": site, **describe(model, one), **encoded[site]} for site, one in maps.items()]
    shown: dict[str, Any] = {"size": x.shape[2:], "blocks": blocks, "prediction": [], "ablations": []}
    if scores is None:
        return shown

    def name(label: int) -> str:
        return classes[label] if label < len(classes) else f"class {label}"

    best = scores.topk(min(top, len(scores))).indices.tolist()
    shown["prediction"] = [[name(label), round(scores[label].item(), 6)] for label in best]
    modules = modules_to_disable(model, maps)
    ablations = {module: [module] for module in modules} | ({"all blocks": modules} if len(modules) > 1 else {})
    for what, off in ablations.items():
        ablated: Any = predict(model, x, off)
        ratio = round(rms_ratio(measures[what].sum(1)).item(), 6) if what in measures else None
        prediction = {"name": name(int(ablated.argmax())), "probability": round(ablated[best[0]].item(), 6)}
        shown["ablations"].append({"disabled": what, "ratio": ratio, **prediction})
    return shown


def describe(model: nn.Module, one: AttentionMap) -> dict[str, Any]:
    """Return measures of each head and of all heads, and the names of the prefix tokens."""
    known = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    count = 0 if one.prefix is None else one.prefix.shape[2]
    tokens = [token for token, names in TOKENS.items() if names & known][:count]
    return {
        "largest": one.weights.max().item() * one.weights[0, 0, 0].numel(),  # as a multiple of uniform attention
        "selects": one.describe_width(),
        "distance": one.distance()[0].mean(1).tolist(),
        "width": (one.entropy().exp()[0].mean(1) / one.weights[0, 0, 0].numel()).tolist(),
        "tokens": tokens + [f"register {number}" for number in range(1, count - len(tokens) + 1)],
    }


def modules_to_disable(model: nn.Module, maps: Iterable[str]) -> list[str]:
    """Return for each attention map the residual block that contains its module, or else the module."""
    sites, modules = list(branches(model)), [name.partition(":")[0] for name in maps]
    blocks = (next((site for site in sites if f"{one}.".startswith(f"{site}.")), one) for one in modules)
    return list(dict.fromkeys(blocks))


def predict(model: nn.Module, x: Tensor, off: Iterable[str] = ()) -> Tensor | None:
    """Return the probability of each class, ``(classes,)``, or None if the model does not return class scores."""
    scores = compute_scores(model, x, off)
    return None if scores is None or scores.dim() > 2 else scores[0].softmax(0).cpu()


def encode(one: AttentionMap) -> dict[str, Any]:
    """Encode weights for the page: integers relative to the largest weight of each query, on maps of limited size.

    Queries on the feature map precede prefix tokens.
    """
    weights = one.weights[0].float().cpu()
    step, key_step = (-(-max(size) // MAX_SIDE) for size in (one.map_size, weights.shape[2:]))
    if step > 1:  # the query in the middle of the merged positions
        rows, columns = (torch.arange(0, n, step).add(step // 2).clamp(max=n - 1) for n in one.map_size)
        weights = weights[:, (rows[:, None] * one.map_size[1] + columns).flatten()]
    if one.prefix is not None:
        weights = torch.cat([weights, one.prefix[0].float().cpu()], dim=1)
    if key_step > 1:
        weights = F.avg_pool2d(weights, key_step, ceil_mode=True, divisor_override=1)
    keys, weights = weights.shape[2:], weights.flatten(2)
    peaks = weights.amax(2)
    parts = (weights / torch.where(peaks > 0, peaks, 1.0)[:, :, None] * LEVELS).round().to(torch.uint8)
    sizes = {"map": [-(-n // step) for n in one.map_size], "keys": keys, "step": key_step, "levels": LEVELS}
    packed = {"maps": zlib.compress(parts.numpy().tobytes()), "peaks": peaks.numpy().astype("<f4").tobytes()}
    return {**sizes, "names": one.heads, **{name: as_text(content) for name, content in packed.items()}}


def encode_picture(picture: Image.Image) -> str:
    """Encode a picture as a data URL: as PNG if it is small, otherwise as JPEG."""
    picture, file = picture.convert("RGB"), io.BytesIO()
    picture.thumbnail((MAX_PICTURE, MAX_PICTURE))
    file_format = "PNG" if max(picture.size) <= MAX_PNG else "JPEG"
    picture.save(file, file_format, quality=90)
    return f"data:image/{file_format.lower()};base64,{as_text(file.getvalue())}"


def as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()
