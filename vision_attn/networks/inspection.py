"""A network looked at before anything is inserted: what a block would cost at each stage, and where to try one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.attention.blocks import use_impl
from vision_attn.attention.patterns import Window
from vision_attn.checks import check_count, check_counts, check_number
from vision_attn.errors import SiteError
from vision_attn.networks.insertion import InsertedBlock, inserted, plain_network
from vision_attn.networks.insertion.attach import RECORD
from vision_attn.networks.insertion.backbone import Example, end_of_sequential, example_of, run_quietly
from vision_attn.networks.insertion.declared import DryRun, Map
from vision_attn.networks.insertion.insert import new_block
from vision_attn.networks.insertion.record import fitting_heads
from vision_attn.networks.insertion.sites import select_sites, stages_of, targets_of
from vision_attn.networks.inspection_report import (
    GIBI,
    IMPLS_COUNTED,
    LONGEST,
    SHORTEST,
    Inspection,
    Proposal,
    Share,
    Site,
    cost_of,
)

__all__ = ["Inspection", "Site", "inspect_model"]

#: What stands before the names of torchvision's networks.
TORCHVISION = "torchvision:"

#: Sides of windows, the most usual first.
WINDOWS = (7, 8, 6, 9, 10, 5)

#: A proposal that adds more than this share to a network's multiply-adds is followed by a cheaper one, ...
DEAR = 0.25

#: ... whose heads are the first of these wide that does not.
NARROW = (64, 32, 16, 8)


def inspect_model(
    model: str | nn.Module,
    *,
    input_size: int | Sequence[int] | None = None,
    example_input: Any = None,
    batch_size: int = 128,
    stages: int | str | Iterable[int | str] | None = None,
    names: str | Iterable[str] | None = None,
    at: str = "after",
    num_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    memory_limit: float | None = None,
    **block_options: Any,
) -> Inspection:
    """What an attention block would cost at each stage of a network, and where it is worth trying.

    The network is run as :func:`vision_attn.insert_` runs it; blocks are not run at all. With ``stages`` or ``names``
    what is reported is what blocks at these sites cost. The model is left as it is.

    Args:
        model: a network, or the name of one: as timm knows it, or ``"torchvision:resnet18"``.
        input_size: side of the images, or their height and width, in pixels; the model's own when None, else 224.
        example_input: in its place, what the network's forward takes, as in :func:`vision_attn.insert_`.
        batch_size: images that one step of training holds.
        stages: as in :func:`vision_attn.insert_`.
        names: as in :func:`vision_attn.insert_`.
        at: as in :func:`vision_attn.insert_`; for sites that are chosen.
        num_heads: heads; at a stage that is not chosen, the largest number up to it that divides the channels. 8 when
            None, fitted to the channels of chosen sites too.
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
    check_count("batch_size", batch_size)
    check_counts(num_heads=num_heads)
    if memory_limit is not None:
        check_number("memory_limit", memory_limit, above=0)
    network = plain_network(network_of(model) if isinstance(model, str) else model)
    example = example_for(network, input_size, example_input)
    run, most = DryRun(network, example), num_heads or 8

    def price(one: Map, options: Mapping[str, Any], side: str = "after", **more: Any) -> Site:
        one = one._replace(form=one.form._replace(device=torch.device("meta"), dtype=dtype))
        block = new_block(run, None, one, side, options)
        record: InsertedBlock = vars(block)[RECORD]
        shape = (batch_size, record.channels, *record.map_size)
        saved = {impl: count_saved_bytes(block, shape, impl, dtype) for impl in IMPLS_COUNTED}
        return Site(**vars(record), saved=saved, **more)

    chosen = stages is not None or names is not None
    proposals: list[Proposal] = []
    if chosen:
        targets = targets_of(run, select_sites(run, stages=stages, names=names, where=None), at)
        side = "before" if at == "before" else "after"
        options = {**({} if num_heads is None else {"num_heads": num_heads}), **block_options}
        whole, _ = measure(network, [], example)
        sites = [price(one, options, side) for one in run.the_maps(targets, side)]
    else:
        paths = stages_of(run)
        if not paths:
            raise SiteError(f"model: {type(network).__name__} has no stages: give names=, globs on module paths")
        found = run.the_maps([end_of_sequential(network, path) for path in paths], "after")
        maps, taken = dict(zip(paths, found, strict=True)), inserted(network)
        whole, shares = measure(network, paths, example)
        sites = []
        for index, (path, one) in enumerate(maps.items()):
            options = {"num_heads": fitting_heads(one.shape[1], most), **block_options}
            site = price(one, options, stage=index, share=shares[path], occupied=one.target in taken)
            sites.append(replace(site, site=path))
        # The activation that ends a stem has learned nothing that positions could be compared by.
        learning = [site for site in sites if any(True for _ in network.get_submodule(site.site).parameters())]
        free = [site for site in learning if not site.occupied]
        proposals = propose(free, len(sites), whole, lambda path, how: price(maps[path], how), most, block_options)

    machine = machine_memory(torch.device("cuda") if torch.cuda.is_available() else example.image.device)
    # timm writes its name for a network into its configuration.
    known = model if isinstance(model, str) else (getattr(network, "pretrained_cfg", None) or {}).get("architecture")
    as_shape = example.shape if len(example.args) == 1 and not example.count else "example_input"
    return Inspection(
        model=known or type(network).__name__,
        input_shape=example.shape,
        example_input=None if input_size is None and example_input is None else as_shape,
        batch_size=batch_size,
        dtype=dtype,
        options=block_options,
        whole=whole,
        sites=tuple(sites),
        chosen=chosen,
        memory_limit=machine if memory_limit is None else round(memory_limit * GIBI),
        proposals=tuple(proposals),
    )


def network_of(name: str) -> nn.Module:
    """A network without weights, by a name that timm knows or, after ``torchvision:``, that torchvision knows."""
    if not name.startswith(TORCHVISION):
        from timm.models import get_pretrained_cfg

        from vision_attn.networks.models import create_model

        config = None
        with suppress(RuntimeError):  # there is no such tag, which is refused in the next line with those there are
            config = get_pretrained_cfg(name)
        return create_model(name, num_classes=config.num_classes if config else 1000)

    from torchvision.models import get_model

    wanted = name.removeprefix(TORCHVISION)
    # Weights are drawn and then never looked at: some of torchvision's networks ask, with a warning, how to draw them.
    options = {"init_weights": False} if wanted in ("googlenet", "inception_v3") else {}
    network: nn.Module = get_model(wanted, weights=None, **options)
    return network


def example_for(model: nn.Module, input_size: int | Sequence[int] | None, example_input: Any = None) -> Example:
    """What the model is run on: what is given, or one image of the size that is asked for, or of the model's own."""
    if input_size is None:
        return example_of(model, example_input)
    if example_input is not None:
        raise ValueError("input_size must be left out with example_input, which has the size of its images")
    own = example_of(model)
    axes = len(own.size)
    size = (*own.size[:-2], *(input_size,) * min(axes, 2)) if isinstance(input_size, int) else tuple(input_size)
    if len(size) != axes or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in size):
        several = "a height and a width" if axes == 2 else f"a length for each of {axes} axes"
        raise ValueError(f"input_size must be a side or {several}, in pixels; got {input_size!r}")
    return example_of(model, (*own.shape[:2], *size))


def measure(model: nn.Module, stages: Sequence[str], example: Example) -> tuple[Share, dict[str, Share]]:
    """What a network has and does, and by stage what runs after the stage before it, up to this one."""
    from torch.utils.flop_counter import FlopCounterMode  # which loads Triton

    names = {id(model.get_submodule(stage)): stage for stage in stages}
    met: set[nn.Parameter] = set()
    until: dict[str, Share] = {}

    def note(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        met.update(module.parameters(recurse=False))
        if id(module) in names:
            until[names[id(module)]] = Share(sum(p.numel() for p in met), counter.get_total_flops() // 2)

    with FlopCounterMode(display=False) as counter:
        run_quietly(model, example, {name: note for name, _ in model.named_modules()})
    ends = [Share(0, 0), *until.values()]  # in the order in which they run
    shares = [Share(b.parameters - a.parameters, b.multiply_adds - a.multiply_adds) for a, b in pairwise(ends)]
    whole = Share(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)
    return whole, dict(zip(until, shares, strict=True))


def propose(
    free: Sequence[Site],
    count: int,
    whole: Share,
    price: Callable[..., Site],
    num_heads: int,
    asked: Mapping[str, Any],
) -> list[Proposal]:
    """What is worth trying first at free ones of so many stages: late, on a good size, and windows on a larger one."""

    def proposal(chosen: Sequence[Site], why: str, **options: Any) -> Proposal:
        heads = fitting_heads(math.gcd(*(site.channels for site in chosen)), num_heads)
        options = {"num_heads": heads, **asked, **options}
        sites = tuple(price(site.site, options) for site in chosen)
        # The last two stages are counted from the end, as one speaks of them.
        indices = [site.stage or 0 for site in chosen]
        stages = [index - count if index >= count - 2 else index for index in indices]
        if heads == 8:
            del options["num_heads"]
        return Proposal(sites, {"stages": stages, **options}, why)

    def between(least: int, most: float) -> list[Site]:
        return [site for site in free if least <= min(site.sides) <= max(site.sides) <= most]

    found = []
    if late := between(SHORTEST, LONGEST)[-2:]:
        found.append(proposal(late, "late, with enough positions to mix and few enough to compare all"))
        cost = cost_of(found[0].sites).multiply_adds
        if cost > DEAR * whole.multiply_adds and not {"key_dim", "value_dim"} & set(asked):
            why = "the same with narrower heads, for less"
            tried = [proposal(late, why, key_dim=width, value_dim=width) for width in NARROW]
            narrow = next(
                (one for one in tried if cost_of(one.sites).multiply_adds <= DEAR * whole.multiply_adds), tried[-1]
            )
            found += [narrow] if cost_of(narrow.sites).multiply_adds < cost else []
    elif small := between(3, LONGEST)[-1:]:
        found.append(proposal(small, "the latest with something to mix, if not much: a larger input is better"))
    large = [site for site in free if max(site.sides) > LONGEST and len(site.map_size) == 2][-1:]
    if large and not asked:
        # A window that divides the map; else the most usual, which pads it.
        window = next((side for side in WINDOWS if not any(length % side for length in large[0].map_size)), WINDOWS[0])
        why = f"finer detail, in windows: comparing all {large[0].tokens:,} positions costs too much"
        found.append(proposal(large, why, pattern=Window(window)))
    return found


def count_saved_bytes(block: nn.Module, shape: tuple[int, ...], impl: str, dtype: torch.dtype = torch.float32) -> int:
    """The bytes that autograd keeps of a block for its backward pass: the map that comes in and what is made of it.

    >>> from vision_attn.attention.blocks import AttentionBlock2d, use_impl
    >>> block = AttentionBlock2d(64, device="meta")
    >>> [count_saved_bytes(block, (1, 64, 56, 56), impl) >> 20 for impl in ("bmm", "sdpa")]
    [306, 5]
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that its number is not given to another
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), use_impl(block, impl):
        own = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            for name, tensor in (*block.named_parameters(), *block.named_buffers())
        }
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(block, own, (x,))
        for tensor in own.values():
            kept.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())


def machine_memory(device: torch.device) -> int | None:
    """The bytes of the GPU that a model is on, or of the machine's memory; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", ())):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
