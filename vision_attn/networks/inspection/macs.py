"""Parameters and MACs (multiply-accumulate operations) of a module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vision_attn.attention.blocks import attention_modules
from vision_attn.attention.blocks.config import blocks_for_impl
from vision_attn.attention.scopes import scope
from vision_attn.checks import product
from vision_attn.networks.inspection.network import quiet_eval

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


class Cost(NamedTuple):
    """Cost of a network, or a difference between two costs."""

    #: number of parameters (scalars)
    parameters: int
    #: MACs of one forward pass of one image
    macs: int


def describe_added(added: Cost, network: Cost) -> str:
    """Describe an added cost as a percentage of the cost of the network.

    >>> describe_added(Cost(269, 500), Cost(1000, 0))
    'total +26.9 % parameters, – MACs'
    """
    parameters, macs = map(percent, added, network)
    return f"total {parameters} parameters, {macs} MACs"


def percent(part: float, total: float) -> str:
    return f"{100 * part / total:+,.1f} %" if total else "–"


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
    """Return the number of query-key pairs of the full attention in a block on a feature map of this size, or 0."""
    layers = [layer for layer in attention_modules(block).values() if layer.resolved_pattern.is_global]
    return max((product(size) * product(-(-side // layer.kv_stride) for side in size) for layer in layers), default=0)


def count_macs(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the MACs of one forward pass of one image or feature map, without computing values.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> count_macs(Attention2d(64, 4, device="meta"), (1, 64, 14, 14))  # 4·64²·196 + 2·64·196²
    8128512
    """
    return run_on_meta(module, shape[1:])[1]


def run_on_meta(module: nn.Module, shape: Sequence[int], context: Sequence[int] | None = None) -> tuple[Tensor, int]:
    """Return the output of a module for feature maps of these shapes, without values, and the MACs."""
    state = {name: x.to("meta") for name, x in (*module.named_parameters(), *module.named_buffers())}
    like = next(module.parameters(), torch.empty(0))

    def inputs(device: Any) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        shapes = {"x": shape} if context is None else {"x": shape, "context": context}
        maps = {name: torch.zeros(1, *sizes, device=device, dtype=like.dtype) for name, sizes in shapes.items()}
        return (maps.pop("x"),), maps

    # All products of the implementation "bmm" are matrix products, which the counter supports.
    bmm = dict.fromkeys(blocks_for_impl(module, "bmm"), "bmm")
    with scope(module, "impl", bmm), quiet_eval(module):
        try:
            with count_flops() as counter:
                output = functional_call(module, state, *inputs("meta"))
        except Exception:  # A module that creates tensors or reads values does not run on the meta device.
            with count_flops() as counter:
                args, kwargs = inputs(like.device)
                output = module(*args, **kwargs)
    return output, counter.get_total_flops() // 2
