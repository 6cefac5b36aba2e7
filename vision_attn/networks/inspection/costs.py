"""Costs of networks and blocks: parameters, MACs (multiply-accumulate operations) and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.attention.scopes import scope
from vision_attn.checks import product
from vision_attn.networks.block_factories import describe_error
from vision_attn.networks.impl_choice import attention_modules, blocks_for_impl
from vision_attn.networks.inspection.feature_maps import FeatureMap
from vision_attn.networks.inspection.network import kept_tensors, quiet_eval

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

#: Channels and size of a feature map.
Shape = Sequence[int]


class Cost(NamedTuple):
    """Cost of a network, or a difference between two costs."""

    #: number of parameters (scalars)
    parameters: int
    #: MACs of one forward pass of one image
    macs: int


class BlockCost(NamedTuple):
    """Cost of a block for one image."""

    #: number of parameters (scalars)
    parameters: int = 0
    #: MACs of one forward pass
    macs: int = 0
    #: query-key pairs of its full attention; not stored in files
    attention_pairs: int = 0
    #: bytes that autograd saves for the backward pass, counted in a dry run; not stored in files
    saved_bytes: int = 0


def describe_added(added: Cost, network: Cost) -> str:
    """Describe an added cost as a percentage of the cost of the network.

    >>> describe_added(Cost(269, 500), Cost(1000, 0))
    'total +26.9 % parameters, – MACs'
    """
    parameters, macs = (f"{100 * x / y:+,.1f} %" if y else "–" for x, y in zip(added, network, strict=True))
    return f"total {parameters} parameters, {macs} MACs"


class NoModules(nullcontext[None]):
    """Replacement for torch's module tracker, whose hooks break networks that compute gradients in a forward pass."""

    parents: tuple[str, ...] = ("Global",)


def count_flops() -> FlopCounterMode:
    """Return torch's FLOP counter (two FLOPs per MAC), with formulas for the fused CPU kernels."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count  # This import loads Triton.

    def count_encoder(weights: Sequence[int], *shapes: Any, **options: Any) -> int:
        """Count the FLOPs of the projections and the attention of a layer on tokens ``(b, t, c)``, the first shape."""
        b, t, c = shapes[0]
        return 2 * b * t * (sum(product(shapes[index]) for index in weights) + 2 * t * c)

    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **options: sdpa_flop_count(q, k, v),
        aten._native_multi_head_attention: partial(count_encoder, (5, 7)),
        aten._transformer_encoder_layer_fwd: partial(count_encoder, (3, 5, 14, 16)),
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = NoModules()  # type: ignore[assignment]
    return counter


def count_attention_pairs(block: nn.Module, size: tuple[int, ...]) -> int:
    """Return the number of query-key pairs of the full attention in a block on a feature map of this size, or 0.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> count_attention_pairs(AttentionBlock2d(8, 2, kv_stride=2), (5, 4)) == 20 * 3 * 2
    True
    """
    layers = [layer for layer in attention_modules(block).values() if layer.resolved_pattern.is_global]
    return max((product(size) * product(-(-side // layer.kv_stride) for side in size) for layer in layers), default=0)


def count_macs(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the MACs of one forward pass of one image or feature map, without computing values.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> count_macs(Attention2d(64, 4, device="meta"), (1, 64, 14, 14))  # 4·64²·196 + 2·64·196²
    8128512
    """
    return run_on_meta(module, shape[1:])[1]


def make_maps(shape: Shape, context: Shape | None, **options: Any) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Return the arguments of a block: a feature map of zeros, and a second one if its shape without batch is given."""
    more = {} if context is None else {"context": torch.zeros(shape[0], *context, **options)}
    return (torch.zeros(*shape, **options),), more


def run_on_meta(module: nn.Module, shape: Shape, context: Shape | None = None) -> tuple[Tensor, int]:
    """Return the output of a module for feature maps of these shapes, without values, and the MACs."""
    state = {name: x.to("meta") for name, x in (*module.named_parameters(), *module.named_buffers())}
    like = next(module.parameters(), torch.empty(0))
    # All products of the implementation "bmm" are matrix products, which the counter supports.
    bmm = dict.fromkeys(blocks_for_impl(module, "bmm"), "bmm")
    with scope(module, "impl", bmm), quiet_eval(module):
        try:
            with count_flops() as counter:
                args, kwargs = make_maps((1, *shape), context, device="meta", dtype=like.dtype)
                output = functional_call(module, state, args, kwargs)
        except Exception:  # A module that creates tensors or reads values does not run on the meta device.
            with count_flops() as counter, kept_tensors(module, module.parameters()):
                args, kwargs = make_maps((1, *shape), context, device=like.device, dtype=like.dtype)
                output = module(*args, **kwargs)
    return output, counter.get_total_flops() // 2


def measure_cost(block: nn.Module, x: FeatureMap, y: FeatureMap, context: Shape | None, images: int) -> BlockCost:
    """Return the cost of a block for one image, in all calls of its module; raise unless it returns maps like ``y``.

    The batch of a call may differ from the number of images, for example if frames are folded into it.
    """
    macs = 0
    for (batch, *shape), (_, *expected) in zip(x.shapes, y.shapes, strict=True):
        try:
            output, count = run_on_meta(block, shape, context)
        except Exception as error:
            raise feature_map_error(block, x.target, shape, error) from error
        if [*output.shape[1:]] != expected:
            got = f"{type(block).__name__} returns {tuple(output.shape)} for {(1, *shape)}"
            raise ValueError(f"block must return a feature map of shape {(1, *expected)} at {x.target!r}; {got}")
        macs += count * batch // images
    return BlockCost(sum(p.numel() for p in block.parameters()), macs, count_attention_pairs(block, x.size))


def feature_map_error(block: nn.Module, site: str, shape: Shape, error: Exception) -> ValueError:
    """Return the error for a block that does not run on the feature map at a site."""
    what = f"block must accept the feature map of shape {(1, *shape)} at {site!r}; {type(block).__name__} does not"
    return ValueError(f"{what} ({describe_error(error)})")


def count_saved_bytes(
    block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, context: Shape | None = None
) -> int:
    """Count the bytes that autograd saves for the backward pass of a block: its input and intermediate results.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> blocks = (AttentionBlock2d(64, impl=impl, device="meta") for impl in ("bmm", "auto"))
    >>> [count_saved_bytes(block, (1, 64, 56, 56)) >> 20 for block in blocks]
    [306, 5]
    >>> count_saved_bytes(nn.Sigmoid(), (1, 64, 56, 56)) // 4 == 64 * 56 * 56
    True
    >>> count_saved_bytes(nn.BatchNorm2d(512).eval(), (2, 512, 1, 1)) // 4 == 2 * 512  # without its buffers
    True
    """
    saved: list[Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = (*block.named_parameters(), *block.named_buffers())
        own = {name: torch.empty_like(x, device="cpu", requires_grad=x.requires_grad) for name, x in tensors}
        args, kwargs = make_maps(shape, context, dtype=dtype, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            functional_call(block, own, args, kwargs)
        storages = {*map(Tensor.untyped_storage, saved)} - {*map(Tensor.untyped_storage, own.values())}
        return sum(storage.nbytes() for storage in storages)
