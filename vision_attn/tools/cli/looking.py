"""The commands that look into a network: ``explore`` and ``maps``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_attn.checks import check_counts
from vision_attn.text import escaped

if TYPE_CHECKING:
    from torch import Tensor

    from vision_attn.tools.export.classifier import Classifier

__all__ = ["add_explore", "add_maps"]


def add_explore(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.explore`."""
    command.set_defaults(command=run_explore)
    add_looking(command)
    command.add_argument("-o", "--output", default="report.html", help="page to write (default: %(default)s)")
    command.add_argument("--top", type=int, default=5, help="classes of each image (default: %(default)s)")


def add_maps(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.networks.figures.attention_figure`."""
    command.set_defaults(command=run_maps)
    add_looking(command)
    add = command.add_argument
    add("-o", "--output", default="maps", help="folder for the pictures (default: %(default)s)")
    text = "points to look from, in pixels of what the network is given (default: the middle)"
    add("--query", nargs="+", metavar="Y,X", help=text)
    add("--heads", nargs="+", type=int, metavar="N", help="only these heads, by number")
    text = "one picture for all heads, or none: one for each (default: %(default)s)"
    add("--reduce", choices=("none", "mean", "max"), default="none", help=text)


def add_looking(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("images", nargs="+", metavar="IMAGE", help="image files, or folders of them")
    text = "a name that timm knows, or one of ours; or what a run of vision-attn train left, as for predict"
    add("--model", required=True, metavar="NAME|RUN", help=text)
    add("--pretrained", action="store_true", help="the weights that come with the name (fetched, if they are not here)")
    add("--adapter", metavar="FILE", help="blocks for the network of that name, as a run or save_adapter wrote them")
    add("--sites", nargs="+", metavar="SITE", help="only attention at or in these modules (globs)")


def run_explore(options: argparse.Namespace) -> None:
    from vision_attn.tools.explorer import explore

    check_counts(top=options.top)
    run, pixels, paths = what_to_look_at(options)
    page = explore(
        run.model,
        pixels,
        options.output,
        normalize=run.normalization,
        classes=run.classes,
        titles=[path.name for path in paths],
        sites=options.sites,
        top=options.top,
        title=f"Where {run.architecture or Path(options.model).name} looks",
    )
    print(f"wrote {page}, {page.stat().st_size / 1e3:,.0f} kB: open it in a browser")


def run_maps(options: argparse.Namespace) -> None:
    from vision_attn.networks.figures import attention_figure, save_figure, summary_figure
    from vision_attn.networks.insertion import quiet_eval
    from vision_attn.networks.recording import capture

    run, pixels, paths = what_to_look_at(options)
    points = [point_of(word) for word in options.query or ()] or [tuple(side / 2 for side in pixels.shape[2:])]
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    how: dict[str, Any] = {"sites": options.sites}
    with quiet_eval(run.model), capture(run.model, points, heads=options.heads, **how) as maps:
        run.model(run.normalization(pixels))
    for site, one in maps.items():
        # As long as a panel is wide, without the sign that matplotlib takes for a formula's.
        titles = [escaped(path.stem[:12]).replace("$", r"\$") for path in paths]
        queries = range(len(points)) if len(points) > 1 else 0
        count = 1 if options.reduce != "none" else len(one.heads)
        figure = attention_figure(
            pixels, one, query=queries, reduction=options.reduce, titles=titles, width=2.0 + 1.5 * (1 + count)
        )
        save_figure(figure, folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', site) or 'model'}.png")
    with quiet_eval(run.model), capture(run.model, heads=options.heads, **how) as maps:
        run.model(run.normalization(pixels[:8]))
    save_figure(summary_figure(maps), folder / "summary.png")
    print(f"wrote a picture for each of {len(maps)} modules and summary.png to {folder}")


def point_of(word: str) -> tuple[float, ...]:
    try:
        y, x = map(float, word.split(","))
    except ValueError:
        raise ValueError(f"query must be y,x in pixels, such as 112,80; got {word}") from None
    return y, x


def what_to_look_at(options: argparse.Namespace) -> tuple[Classifier, Tensor, list[Path]]:
    """The network, and the images ``(b, c, h, w)`` as it sees them, in 0…1."""
    import torch

    from vision_attn.tools.export.classifier import images_in, open_image

    paths = images_in(options.images)
    run = classifier_of(options.model, options.pretrained, options.adapter)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (run.mean, run.std))
    pixels = torch.stack([run.transform(open_image(path)) * std + mean for path in paths])
    return run, pixels.clamp(0, 1), paths


def classifier_of(name: str, pretrained: bool, adapter: str | None) -> Classifier:
    """A trained network by the path of its run, or a network by its name; attention of its own is exchanged."""
    from vision_attn.networks.convert.swap import swap_
    from vision_attn.tools.export.classifier import load_run

    if not Path(name).exists():
        run = named(name, pretrained, adapter)
    elif adapter is None:
        run = load_run(name, weights="pretrained" if pretrained else None)
    else:
        raise ValueError(f"adapter goes with a name, and {name} is a file or folder: give it alone as --model")
    exchanged = swap_(run.model)
    if exchanged:
        print(f"attention of the network's own is run by blocks, to look into it: {len(exchanged)} modules exchanged")
    return run


def named(name: str, pretrained: bool, adapter: str | None) -> Classifier:
    """A network that timm knows, with the classes and images that it, or else the adapter's run, was trained for."""
    from timm.data import ImageNetInfo, infer_imagenet_subset
    from timm.models import get_pretrained_cfg

    from vision_attn.networks.checkpoints import load_adapter_
    from vision_attn.networks.checkpoints.adapter import read_adapter
    from vision_attn.networks.models.registry import config_of, create_model
    from vision_attn.tools.export.classifier import Classifier

    about = read_adapter(adapter).about if adapter else {}
    classes, known = about.get("classes", ()), get_pretrained_cfg(name)
    count = len(classes) or (known.num_classes if known else 1000)
    model = create_model(name, num_classes=count, pretrained=pretrained).eval()
    if adapter:
        load_adapter_(model, adapter)
    config = {**config_of(model), **({"crop_pct": 1.0, "interpolation": "bilinear"} if about else {}), **about}
    classes = classes or config.get("label_names")
    if not classes and (subset := infer_imagenet_subset(config)):
        classes = map(ImageNetInfo(subset).index_to_description, range(count))
    size, mean, std = (tuple(config[key]) for key in ("input_size", "mean", "std"))
    names = tuple(classes or map(str, range(count)))
    return Classifier(model, names, size, mean, std, name, config["crop_pct"], config["interpolation"])
