"""Look at a network before anything is inserted in it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.insertion import InsertionReport, SiteError, insert_, inserted, plain_network
from vision_attn.insertion.dry_run import DryRun
from vision_attn.insertion.sites import last_of_sequential
from vision_attn.insertion.stages import stages_of
from vision_attn.inspection.advice import propose
from vision_attn.inspection.memory import machine_memory
from vision_attn.inspection.network import TORCHVISION, Work, example_for, measure, network_of
from vision_attn.inspection.report import Inspection
from vision_attn.inspection.sites import Cost, Site, cost_of, cost_of_default, heads_for
from vision_attn.inspection.units import GIBI

__all__ = ["inspect_model"]


def inspect_model(
    model: str | nn.Module,
    *,
    input_size: int | Sequence[int] | None = None,
    batch_size: int = 128,
    stages: int | str | Iterable[int | str] | None = None,
    names: str | Iterable[str] | None = None,
    at: str = "after",
    num_heads: int = 8,
    dtype: torch.dtype = torch.float32,
    memory_limit: float | None = None,
    **block_options: Any,
) -> Inspection:
    """What an attention block would cost at each stage of a network, and where it is worth trying.

    The network is run once, on one empty image; blocks are not run at all. With ``stages`` or ``names`` blocks are
    inserted in a copy, and what is reported is what these cost. The model is left as it is.

    Args:
        model: a network, or the name of one: as timm knows it, or ``"torchvision:resnet18"``.
        input_size: side of the images, or their height and width, in pixels; the model's own when None, else 224.
        batch_size: images that one step of training holds.
        stages: as in :func:`vision_attn.insert_`.
        names: as in :func:`vision_attn.insert_`.
        at: as in :func:`vision_attn.insert_`; for sites that are chosen.
        num_heads: heads; at a stage that is not chosen, the largest number up to it that divides the channels.
        dtype: type of the block and its maps.
        memory_limit: memory that there is, in GiB; when None that of the GPU, or of the machine if there is none.
        **block_options: further arguments of :class:`vision_attn.AttentionBlock2d`, such as ``pattern``.

    Returns:
        An inspection that prints as tables, with warnings and proposals.

    Raises:
        ValueError: no such model, a size that it does not take, an option that the block refuses.
        SiteError: no such site, or one that cannot take a block.

    >>> inspection = inspect_model("torchvision:resnet18", input_size=64, batch_size=1)
    >>> [(site.path, site.size) for site in inspection.sites][-2:]
    [('layer3', '4×4'), ('layer4', '2×2')]
    """
    check_limits(batch_size, num_heads, memory_limit)
    network = plain_network(network_of(model) if isinstance(model, str) else model)
    example = example_for(network, input_size)
    run = dry_run(network, example, model if isinstance(model, str) else type(network).__name__)
    device = example.device if not isinstance(model, str) or not torch.cuda.is_available() else torch.device("cuda")
    limit = machine_memory(device) if memory_limit is None else round(memory_limit * GIBI)

    paths = stages_of(run)
    work = measure(network, paths, example)
    chosen = stages is not None or names is not None
    report = None
    if chosen:
        network = network if isinstance(model, str) else copy.deepcopy(network)
        options = {"num_heads": num_heads, **block_options}
        report = insert_quietly(network, stages=stages, names=names, at=at, example_input=example, **options)
        sites = sites_of(network, report, batch_size, dtype)
    elif not paths:
        raise SiteError(f"model: {type(network).__name__} has no modules that give maps of the image")
    else:
        sites = stages_as_sites(run, paths, work, batch_size, dtype, num_heads, block_options)

    def cost(site: Site, heads: int, options: dict[str, Any]) -> Cost:
        # By one implementation: einx takes a while to read a line for a size that it has not seen.
        shape = (batch_size, site.channels, site.height, site.width)
        return cost_of_default(shape, heads, dtype, options, impls=("sdpa",))

    return Inspection(
        model=model if isinstance(model, str) else type(network).__name__,
        trainable=isinstance(model, str) and not model.startswith(TORCHVISION),
        input_shape=tuple(example.shape),
        own_size=input_size is None,
        batch_size=batch_size,
        dtype=dtype,
        options=block_options,
        whole=work.whole,
        sites=tuple(sites),
        inserted=report,
        memory_limit=limit,
        proposals=() if chosen else tuple(propose(sites, work.whole, cost, num_heads=num_heads, options=block_options)),
    )


def check_limits(batch_size: int, num_heads: int, memory_limit: float | None) -> None:
    for name, value in (("batch_size", batch_size), ("num_heads", num_heads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")
    if memory_limit is not None and not 0 < memory_limit < math.inf:
        raise ValueError(f"memory_limit must be positive, in GiB; got {memory_limit!r}")


def dry_run(network: nn.Module, example: Tensor, name: str) -> DryRun:
    try:
        return DryRun(network, example)
    except SiteError as error:
        size = "×".join(map(str, example.shape[1:]))
        raise ValueError(
            f"input_size: {name!r} does not run on an image of {size} ({error.__cause__ or error}): "
            "give a size that it takes"
        ) from error


def insert_quietly(network: nn.Module, **arguments: Any) -> InsertionReport:
    with warnings.catch_warnings():  # of small maps, which an inspection says in its own words
        warnings.filterwarnings("ignore", "the map at")
        return insert_(network, **arguments)


def sites_of(network: nn.Module, report: InsertionReport, batch_size: int, dtype: torch.dtype) -> list[Site]:
    """The sites that blocks are inserted at."""
    blocks = inserted(network)
    return [
        Site(
            path=record.site if record.at == "after" else f"{record.at} {record.site}",
            stage=None,
            channels=record.channels,
            height=record.height,
            width=record.width,
            share=None,
            cost=cost_of(
                blocks[record.site].to(dtype), (batch_size, record.channels, record.height, record.width), dtype
            ),
        )
        for record in report.blocks
    ]


def stages_as_sites(
    run: DryRun,
    paths: Sequence[str],
    work: Work,
    batch_size: int,
    dtype: torch.dtype,
    num_heads: int,
    options: dict[str, Any],
) -> list[Site]:
    """Every stage, with what a block after it would cost."""
    sites, taken = [], inserted(run.model)
    for index, path in enumerate(paths):
        host = last_of_sequential(run.model, path)
        _, tensor, layout = run.the_map(host)
        _, channels, height, width = layout.map_shape(tensor.shape)
        sites.append(
            Site(
                path=path,
                stage=index,
                channels=channels,
                height=height,
                width=width,
                share=work.of_stage[path],
                cost=cost_of_default(
                    (batch_size, channels, height, width), heads_for(channels, num_heads), dtype, options
                ),
                learns=any(True for _ in run.model.get_submodule(path).parameters()),
                occupied=host in taken,
            )
        )
    return sites
