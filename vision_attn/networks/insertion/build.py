"""Build blocks for their sites, with their records."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention2d
from vision_attn.attention.blocks.gated_residual import GatedResidual, is_residual
from vision_attn.attention.patterns import resolve_pattern
from vision_attn.attention.position.relative_table import RelativePosition
from vision_attn.errors import SiteError
from vision_attn.networks import block_factories
from vision_attn.networks.block_factories import BlockFactory, describe_error, make_block
from vision_attn.networks.insertion.attributes import is_inserted, replaced_module, set_record_
from vision_attn.networks.insertion.exact import ZEROS, init_identity_, wrap_exactly
from vision_attn.networks.insertion.hooks import FUSED, is_norm
from vision_attn.networks.insertion.record import CHILD, InsertedBlock, SecondMap, Site
from vision_attn.networks.inspection.costs import count_saved_bytes, measure_cost
from vision_attn.networks.inspection.dry_run import DryRun
from vision_attn.networks.inspection.feature_maps import FeatureMap
from vision_attn.networks.inspection.selection import ancestor_paths, require_module
from vision_attn.networks.inspection.wrappers import is_layer_wrapper, unwrap_key
from vision_attn.text import did_you_mean

#: Modules that contain other modules and may loop over them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def new_block(
    run: DryRun,
    block: BlockFactory | str | None,
    x: FeatureMap,
    at: str,
    options: Mapping[str, Any],
    y: FeatureMap | None = None,
    method: str = ZEROS,
    inside: bool = False,
    context: FeatureMap | None = None,
    dry_run: bool = False,
) -> nn.Module:
    """Build a block with its record.

    A block that replaces a module maps the feature map ``x`` to one like ``y``. A ``method`` of
    :func:`init_identity_` initializes any other block, which is stored in a module inside its target with ``inside``.
    """
    make, channels, spec = block_factories.get_block_factory(block, len(x.size)), x.shape[1], x.spec
    spec = spec._replace(device=torch.device("meta")) if dry_run else spec
    options = {**block_factories.default_widths(make, channels, options), **options}
    is_timm = isinstance(block, str) and block in block_factories.TIMM_BLOCKS
    if is_timm and "feat_size" in block_factories.get_arguments(make):
        options = {"feat_size": x.size, **options}
    position = options.get("position")
    if isinstance(position, RelativePosition) and position.feat_size is None:
        sides = resolve_pattern(options.get("pattern", "full")).expand_to_rank(len(x.size)).window_shape
        feat_size = tuple(None if side else length for side, length in zip(sides, x.size, strict=True))
        options["position"] = replace(position, feat_size=feat_size if any(feat_size) else None)
    if context is not None:
        options = {"context_channels": context.shape[1], **options}
    new = build_block(run.model, x.target, at, make, channels, options, spec)
    name = str(block) if is_timm else type(new).__name__
    identity: tuple[str, dict[str, Any]] = "", {}
    if y is None and not is_residual(new):
        if "context_channels" in options:
            what = "with a second feature map, block must add a gated branch to its input, as AttentionBlock2d does"
            raise ValueError(f"{what}, got {name}")
        # Blocks on the meta device have no values to test.
        test_spec = spec._replace(device=torch.device("cpu")) if spec.device.type == "meta" else spec
        if test_spec is not spec:
            new = build_block(run.model, x.target, at, make, channels, options, test_spec)
        # A layer that the block shares with the network must not be set to zero, nor the gate of a branch of zeros.
        shared = isinstance(new, GatedResidual) or not {*run.model.parameters()}.isdisjoint(new.parameters())
        identity = init_identity_(new, x.target, x.shape, test_spec, method, shared)
        new = wrap_exactly(new, channels, test_spec, identity[1]).to(spec.device)
    second_map = None if context is None else SecondMap(context.target, context.layout, context.element, context.size)
    site = Site(x.target, at, channels, x.size, run.example.shape, x.layout, x.element if y is None else None, x.used)
    path = x.target if at == "replace" else choose_block_path(run.model, x.target, inside)
    replaced = (run.model.get_submodule(x.target),) if at == "replace" else ()
    record = InsertedBlock(site, name, options, path, second_map, identity, replaced=replaced)
    dtype, shape = like_parameters(new, run.model).dtype, record.context_shape
    images = run.example.shape[0]
    cost = measure_cost(new, x, y or x, shape, images)
    saved = count_saved_bytes(new, (1, channels, *x.size), dtype, shape) * x.shape[0] // images if dry_run else 0
    return set_record_(new, replace(record, cost=cost._replace(saved_bytes=saved)))


def rebuild(model: nn.Module, record: InsertedBlock, factories: Mapping[str, BlockFactory]) -> nn.Module:
    """Build the block of a record for a model, without values; ``factories`` are functions by the name of the class."""
    site = record.target
    block = build_block(model, site.path, site.at, factories[record.block], site.channels, record.options)
    target = require_module(model, site.path)
    name = record.block if record.block in block_factories.TIMM_BLOCKS else type(block).__name__
    block = wrap_exactly(block, site.channels, like_parameters(target, model), record.identity[1])
    return set_record_(block, replace(record, block=name, replaced=(target,) if site.at == "replace" else ()))


def build_block(
    model: nn.Module, site: str, at: str, make: Callable[..., nn.Module], channels: int, options: Any, like: Any = None
) -> nn.Module:
    """Build a block in the training or evaluation mode of the module at its site.

    Device and dtype are copied from ``like``, or by default from this module or the model.
    """
    target = require_module(model, site)
    if like is None:
        like = like_parameters(target, model)
    copied = replacement_options(target) if at == "replace" else {}
    try:
        block = make_block(make, channels, device=like.device, dtype=like.dtype, **copied, **options)
    except Exception as error:  # A custom block may raise any exception.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        what = f"the block at {site!r} cannot be built for {channels} channels"
        unknown = re.search("unexpected keyword argument '(.*?)'", str(error))
        known = block_factories.get_arguments(make)
        known |= block_factories.get_arguments(Attention2d) if "attention" in known else {}
        guess = did_you_mean(unknown[1], known) if unknown else ""
        raise kind(f"{what}: {describe_error(error)}{guess and '.'}{guess}") from error
    if not isinstance(block, nn.Module) or is_inserted(block):
        raise ValueError(f"block must return a new module for each site, got {type(block).__name__}")
    return block.train(target.training)


def like_parameters(*modules: nn.Module) -> Tensor:
    """Return the first floating-point parameter, whose device and dtype a new block has."""
    return next((p for module in modules for p in module.parameters() if p.is_floating_point()), torch.empty(0))


def replacement_options(old: nn.Module) -> dict[str, int]:
    """Return the options of a block that are copied from the convolution that it replaces."""
    return {"stride": int(old.stride[0]), "out_channels": old.out_channels} if isinstance(old, nn.Conv2d) else {}


def choose_block_path(model: nn.Module, target: str, inside: bool = False) -> str:
    """Choose the path of the block for a target, as a child of the first possible of these modules.

    - If the target is a norm or convolution, which other code may freeze, fuse or convert: the nearest parent that is
      not a container.
    - The target, unless it is a container, which would run the block as one of its children, or ``inside`` is set,
      because the target depends on its number of children.
    - The first module inside the target that is not a container.

    >>> model = nn.Sequential(nn.ModuleDict({"conv": nn.Conv2d(3, 8, 1)}), nn.Flatten())
    >>> choose_block_path(model, "1"), choose_block_path(model, "0")
    ('1.inserted', '0.conv.inserted_0')
    >>> layers = nn.Sequential(nn.TransformerEncoderLayer(8, 2))
    >>> choose_block_path(layers, "0.norm1"), choose_block_path(layers, "0.self_attn")
    ('0.inserted_norm1', '0.self_attn.inserted')
    """
    module = model.get_submodule(target)
    # The network itself is not considered: it may run its children in sequence.
    around = ancestor_paths(target)[::-1] if is_norm(module) or isinstance(module, FUSED) else []
    within = [path for path, _ in module.named_modules(prefix=target) if path != target]
    # A block that replaced a module is removed with all of its children when the module is restored.
    within = [x for x in within if not any(map(replaced_module, map(model.get_submodule, (*ancestor_paths(x), x))))]
    for path in (within or [target]) if inside else (*around, target, *within):
        owner, rest = model.get_submodule(path), unwrap_key(target.removeprefix(f"{path}.")).replace(".", "_")
        child = CHILD if path == target else f"{CHILD}_{rest}"
        # A wrapper has the attributes of the layer inside, and other code removes it.
        if not isinstance(owner, CONTAINERS) and not hasattr(owner, child) and not is_layer_wrapper(owner):
            return f"{path}.{child}"
    what = f"{target!r} cannot have a child {CHILD!r}: it has an attribute of that name"
    raise SiteError(f"{what}. Choose another module")
