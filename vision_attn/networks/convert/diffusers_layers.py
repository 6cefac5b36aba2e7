"""diffusers' attention, under its current and its earlier names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.residual import AttentionBlock
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.networks.convert.proof import random_map
from vision_attn.networks.convert.refusal import check_carried
from vision_attn.networks.convert.weights import Rows, input_projections, residual, rows_of

__all__ = ["diffusers_rows", "from_diffusers_attention"]

#: What diffusers calls its projections: now, and in earlier versions.
NAMES = (("to_q", "to_k", "to_v", "to_out.0"), ("query", "key", "value", "proj_attn"))
DIFFUSERS = ("diffusers.models.attention_processor.Attention", "diffusers.models.attention.AttentionBlock")


def from_diffusers_attention(module: nn.Module, *, rank: int = 2) -> Attention | AttentionBlock:
    """The block that computes what diffusers' ``Attention`` does, under its current and its earlier names.

    Args:
        module: the layer, with the processor that it is made with. With ``encoder_hidden_states`` of other channels it
            becomes ``block(x, context=y)``.
        rank: axes of the maps that the block is for: 1, 2 or 3.

    Returns:
        :class:`Attention2d`, or :class:`AttentionBlock2d` where the layer has a group norm or adds its input; or those
        for ``rank`` axes.

    Raises:
        ValueError: it is no such layer, or does what the block does not, as with norms of queries and keys.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/diffusers/blob/main/src/diffusers/models/attention_processor.py

    >>> import torch
    >>> from diffusers.models.attention_processor import Attention as DiffusersAttention
    >>> from_diffusers_attention(DiffusersAttention(64, heads=4, dim_head=16))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    layer, adds = known(module, *DIFFUSERS), adds_input(module)
    remedy = "the block has a norm only where it adds its input"
    check_carried(module, "group_norm", adds or module.group_norm is None, remedy)

    def whole(module: Any, rank: int) -> AttentionBlock:
        return residual(layer.block(module, rank=rank), module.group_norm)

    return converted(module, layer, whole if adds else None, rank=rank)


def adds_input(module: Any) -> bool:
    return bool(getattr(module, "residual_connection", True))  # the layer of before always did


def plainly_processed(module: Any) -> bool:
    processor = type(getattr(module, "processor", None)).__name__  # the layer of before had none
    return processor in ("AttnProcessor", "AttnProcessor2_0", "NoneType")


def diffusers_rows(module: Any) -> dict[str, Rows]:
    q, k, v, out = (rows_of(attrgetter(name)(module)) for name in NAMES[not hasattr(module, "to_q")])
    return {**input_projections(q, k, v), "proj": out}


def options_of(module: Any) -> dict[str, Any]:
    heads = module.heads if hasattr(module, "heads") else module.channels // (module.num_head_size or module.channels)
    return {"num_heads": heads, "scale": getattr(module, "scale", None)}


def attend_diffusers(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temb: Tensor | None = None,  # for a norm that a module which is exchanged has not
    **others: Any,
) -> Any:
    x, crosses = hidden_states, getattr(module, "is_cross_attention", False)
    if attention_mask is not None or others or not plainly_processed(module):
        return OWN
    if (crosses and encoder_hidden_states is None) or x.dim() not in (3, 4):
        return OWN
    y = x.flatten(2) if x.dim() == 4 else x.transpose(1, 2)
    y = y if module.group_norm is None else module.group_norm(y)
    y = attend(y, None, None if encoder_hidden_states is None else encoder_hidden_states.transpose(1, 2))
    y = y.unflatten(2, x.shape[2:]) if x.dim() == 4 else y.transpose(1, 2)
    return ((y + x) if adds_input(module) else y) / module.rescale_output_factor


def example_of(module: Any) -> tuple[Any, ...]:
    x = random_map(2, getattr(module, "query_dim", None) or module.channels, 3, 4)
    x = x if adds_input(module) else x.flatten(2).mT
    crosses = getattr(module, "is_cross_attention", False)
    return (x, random_map(2, 4, module.cross_attention_dim)) if crosses else (x,)


ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_q_proj")
LAYERS |= dict.fromkeys(
    DIFFUSERS,
    Layer(
        diffusers_rows,
        options_of,
        rank=1,
        linear=(*NAMES[0], *NAMES[1]),
        drops=("", "to_out.1"),
        without=dict.fromkeys(ABSENT, "the block has no such part: only layers without it are converted"),
        around={"rescale_output_factor": "let swap_ exchange it, which divides as it does"},
        check=lambda module: check_carried(
            module, "processor", plainly_processed(module), "set the one that it is made with"
        ),
        settings=("rescale_output_factor",),
        call=attend_diffusers,
        arguments=example_of,
        own="calls with a mask or further arguments, and all while it has another processor",
    ),
)
