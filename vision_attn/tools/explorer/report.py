"""One page of HTML with the attention maps of a network on some images, to be explored in any browser."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vision_attn.checks import check_count, check_type
from vision_attn.networks.contributions import branches, disabled, measured
from vision_attn.networks.insertion import plain_network, quiet_eval
from vision_attn.networks.insertion.sites import Names
from vision_attn.networks.maps import AttentionMap
from vision_attn.networks.recording import capture
from vision_attn.networks.safe import check_writable, write_atomically

#: Cells along a side of a map that the page has: of a larger one several are taken together.
CELLS = 28
#: Pixels along a side of a picture at most, and those above which it is packed as photographs are.
PICTURE, PHOTOGRAPH = 1024, 256
#: What tokens beside the map are called, by their parameters and in their order; all others are registers.
TOKENS = {
    "the class token": {"cls_token", "class_token", "class_embedding"},
    "the distillation token": {"dist_token", "distillation_token"},
}
#: Steps that weights are rounded to, of a row's largest; the finest that keep an image's maps below so many characters.
LEVELS, LARGEST = (255, 127, 63, 31, 15, 7), 14_000_000


def explore(
    model: nn.Module,
    images: Tensor,
    output: str | Path,
    *,
    normalize: Callable[[Tensor], Tensor] | None = None,
    classes: Sequence[str] = (),
    titles: Sequence[str] = (),
    pictures: Sequence[Image.Image] = (),
    sites: Names | Iterable[Names] | None = None,
    top: int = 5,
    title: str = "Where it looks",
    note: str = "",
) -> Path:
    """Write a page of HTML on which to explore where every head of every block looks, from each place of an image.

    The page is one file, works without a network, and has the maps of :func:`capture` in it, their mean and rollout,
    what the network says, and what becomes of that with each block disabled. One can look from class and register
    tokens as well. Weights are rounded to a 255th of the largest in their row, or to coarser steps if an image would
    take more than 14 MB; the page says which. Of a map with more than 28 cells along a side, several cells are taken
    together: one of them is looked from, and their weights are added up.

    Args:
        model: a network with attention in it, as in :func:`capture`.
        images: ``(b, 1 or 3, height, width)``, in 0…1.
        output: the file to write, ``.html``.
        normalize: makes of images what the network is given; nothing when None.
        classes: name of each class.
        titles: name of each image.
        pictures: what is shown of each image in its stead, Pillow's, of any size: the same part, in finer pixels.
        sites: only attention at or in these modules, as in :func:`capture`.
        top: classes to show of each image.
        title: of the page.
        note: a line below the title, such as that the weights are random.

    Returns:
        The path.

    Raises:
        ValueError: there is no image, titles or pictures are not as many, the maps are not of images, or as in
            :func:`capture`.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), AttentionBlock2d(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> page = explore(model, torch.rand(1, 3, 8, 8), Path(tempfile.mkdtemp()) / "report.html")
    >>> page.read_text()[:15]
    '<!doctype html>'
    """
    check_type("images", images, Tensor, "a tensor (b, 1 or 3, height, width)")
    check_count("top", top)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(f"images must be (b, 1 or 3, height, width), of one at least; got {tuple(images.shape)}")
    for name, given in (("titles", titles), ("classes", classes), ("pictures", pictures)):
        check_type(name, given, (list, tuple), f"a list of {'images' if name == 'pictures' else 'texts'}")
        if given and name != "classes" and len(given) != len(images):
            raise ValueError(f"{name} must be as many as the images, {len(images)}; got {len(given)}")
    check_writable(Path(output))
    names = titles or [f"image {number}" for number in range(1, len(images) + 1)]
    place = next(plain_network(model).parameters())
    shown = []
    with quiet_eval(model):
        for image, name, picture in zip(images.split(1), names, pictures or map(drawn, images), strict=True):
            x = (image if normalize is None else normalize(image)).to(place)
            shown.append({"title": name, **looked_at(model, x, sites, classes, top), "source": as_source(picture)})
    content = {"title": title, "note": note, "about": about(model), "images": shown}
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")  # no tag ends the script
    write_atomically(Path(output), page.replace("/* DATA */", text).encode())
    return Path(output)


def looked_at(
    model: nn.Module, x: Tensor, sites: Names | Iterable[Names] | None, classes: Sequence[str], top: int
) -> dict[str, Any]:
    """What the page has of one image."""
    with capture(model, "all", sites=sites) as maps, measured(model) as found:
        scores = scores_of(model, x)
    for path, one in maps.items():
        if len(one.map_size) != 2:
            raise ValueError(f"model: {path!r} has maps of {len(one.map_size)} axes, and an image has 2: choose sites")
    rolled = maps.rollout()
    parts = [(path, measures(model, one), coarse(one), coarse(rolled[path])) for path, one in maps.items()]
    for levels in LEVELS:
        blocks = [
            {"path": path, **said, "heads": packed(*heads, levels), "rollout": packed(*rolled_out, levels)}
            for path, said, heads, rolled_out in parts
        ]
        if len(json.dumps(blocks)) < LARGEST:
            break
    shown: dict[str, Any] = {"size": x.shape[2:], "blocks": blocks, "prediction": [], "closings": []}
    if scores is None:
        return shown

    def name(label: int) -> str:
        return classes[label] if label < len(classes) else f"class {label}"

    best = scores.topk(min(top, len(scores))).indices.tolist()
    shown["prediction"] = [[name(label), round(scores[label].item(), 6)] for label in best]
    paths = switches(model, maps)
    for what, shut in [*((path, [path]) for path in paths), *([("all of them", paths)] if len(paths) > 1 else [])]:
        with without(model, shut):
            others: Any = scores_of(model, x)
        share = round(found[what].share, 6) if what in found else None
        probability = round(others[best[0]].item(), 6)
        answer = {"what": what, "share": share, "name": name(int(others.argmax())), "probability": probability}
        shown["closings"].append(answer)
    return shown


def measures(model: nn.Module, one: AttentionMap) -> dict[str, Any]:
    """How far each head looks, in pixels, and how widely, as a share of the map; and the tokens beside the map."""
    known = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    count = 0 if one.prefix is None else one.prefix.shape[2]
    tokens = [called for called, names in TOKENS.items() if names & known][:count]
    return {
        "far": one.distance()[0].mean(1).tolist(),
        "wide": (one.entropy().exp()[0].mean(1) / one.weights[0, 0, 0].numel()).tolist(),
        "tokens": tokens + [f"register {number}" for number in range(1, count - len(tokens) + 1)],
    }


def scores_of(model: nn.Module, x: Tensor) -> Tensor | None:
    """The probability of each class, ``(classes,)``; None where the model gives no scores of classes."""
    output = plain_network(model)(x)
    output = getattr(output, "logits", output)
    return output[0].float().softmax(0).cpu() if isinstance(output, Tensor) and output.dim() == 2 else None


# --- blocks disabled --------------------------------------------------------------------------------------------------


def switches(model: nn.Module, maps: Iterable[str]) -> list[str]:
    """What is disabled to be without each of these maps: the block around it that adds to a map, or else the module."""
    sites, paths = list(branches(model)), [path.partition(":")[0] for path in maps]
    return list(dict.fromkeys(next((site for site in sites if f"{one}.".startswith(f"{site}.")), one) for one in paths))


@contextmanager
def without(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Inside, what is added to maps is not, and what other attention gives is zero."""
    wanted, around = switches(model, paths), branches(model)

    def zero(module: nn.Module, args: Any, y: Any) -> Any:
        return (torch.zeros_like(y[0]), *y[1:]) if isinstance(y, tuple) else torch.zeros_like(y)

    with disabled(model, [path for path in wanted if path in around]), ExitStack() as stack:
        for path in wanted:
            if path not in around:
                handle = plain_network(model).get_submodule(path).register_forward_hook(zero)
                stack.callback(handle.remove)
        yield


# --- numbers and pictures as text -------------------------------------------------------------------------------------


def coarse(one: AttentionMap) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], int, tuple[str, ...]]:
    """Weights ``(heads, queries, h, w)`` with no more than so many cells, the sizes of both maps, and the step.

    After the queries on the map come the tokens beside it.
    """
    weights = one.weights[0].float().cpu()
    (step, queries), (key_step, keys) = (coarse_size(size) for size in (one.map_size, tuple(weights.shape[2:])))
    if step > 1:
        rows, columns = (
            (torch.arange(n) * step + step // 2).clamp(max=length - 1)
            for n, length in zip(queries, one.map_size, strict=True)
        )
        weights = weights[:, (rows[:, None] * one.map_size[1] + columns).flatten()]
    if one.prefix is not None:
        weights = torch.cat([weights, one.prefix[0].float().cpu()], dim=1)
    if key_step > 1:
        height, width = (n * key_step - length for n, length in zip(keys, weights.shape[2:], strict=True))
        weights = F.avg_pool2d(F.pad(weights, (0, width, 0, height)), key_step) * key_step**2
    return weights, queries, keys, key_step, one.heads


def coarse_size(size: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many cells along each side become one, and how many of those there are."""
    step = -(-max(size) // CELLS)
    return step, tuple([-(-length // step) for length in size])


def packed(
    weights: Tensor, queries: tuple[int, ...], keys: tuple[int, ...], step: int, names: Sequence[str], levels: int
) -> dict[str, Any]:
    """Each row as whole numbers in parts of its largest weight, for the page to read."""
    weights = weights.flatten(2)
    peaks = weights.amax(2)
    parts = weights / torch.where(peaks > 0, peaks, 1.0)[:, :, None]
    return {
        "map": queries,
        "keys": keys,
        "step": step,
        "names": names,
        "levels": levels,
        "maps": as_text(zlib.compress((parts * levels).round().to(torch.uint8).numpy().tobytes())),
        "peaks": as_text(peaks.numpy().astype("<f4").tobytes()),
    }


def drawn(image: Tensor) -> Image.Image:
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.movedim(0, -1).expand(-1, -1, 3).numpy())


def as_source(picture: Image.Image) -> str:
    """A picture as the address of itself: small ones exactly, large ones as photographs are packed."""
    check_type("pictures", picture, Image.Image, "Pillow's images")
    picture, file = picture.convert("RGB"), io.BytesIO()
    picture.thumbnail((PICTURE, PICTURE))
    form = "PNG" if max(picture.size) <= PHOTOGRAPH else "JPEG"
    picture.save(file, form, quality=90)
    return f"data:image/{form.lower()};base64,{as_text(file.getvalue())}"


def as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def about(model: nn.Module) -> str:
    plain = plain_network(model)
    count = sum(parameter.numel() for parameter in plain.parameters())
    name = (getattr(plain, "pretrained_cfg", None) or {}).get("architecture")
    return f"{name or type(plain).__name__}, {count:,} parameters"
