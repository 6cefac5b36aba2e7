"""Attention that adds to its map: of diffusers, guided and latent diffusion, of SAGAN, and timm's non-local block."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.blocks.residual import AttentionBlock, AttentionBlock1d, AttentionBlock2d, AttentionBlock3d
from vision_attn.convert.family import OWN, Family, random_map
from vision_attn.convert.proof import check_carried, check_kind, check_parts, check_source, drop_of, proven
from vision_attn.convert.weights import (
    Rows,
    attention,
    check_rank,
    filled,
    heads_first,
    identity_rows,
    input_projections,
    parameters_of,
    rows_of,
    side_by_side,
)

__all__ = [
    "RESIDUAL",
    "from_diffusers_attention",
    "from_guided_diffusion_attention",
    "from_latent_diffusion_attention",
    "from_sagan_attention",
    "from_timm_non_local_attn",
]

BLOCKS = {1: AttentionBlock1d, 2: AttentionBlock2d, 3: AttentionBlock3d}


def residual(attn: Attention, norm: Any = None, gate: Tensor | None = None) -> AttentionBlock:
    """``x + gate · attn(norm(x))`` with a norm as the source's, or none; a gate that it has not is not trained."""
    block = BLOCKS[attn.rank](attn.channels, 1, device="meta")
    block.attn, block.norm, block.begins_open = attn, nn.Identity(), False  # type: ignore[assignment]
    if norm is not None:
        copied = nn.GroupNorm(norm.num_groups, norm.num_channels, norm.eps, device="meta")
        block.norm = filled(copied, {"weight": norm.weight, "bias": norm.bias}, training=attn.training)  # type: ignore[assignment]
    scale = attn.proj.weight.new_ones(()) if gate is None else gate
    ones = torch.ones(attn.channels, dtype=scale.dtype, device=scale.device)
    block.gate = nn.Parameter((ones * scale).detach(), requires_grad=gate is not None and gate.requires_grad)
    return block.train(attn.training)


def forward_normed(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    return OWN if x.dim() != 4 else x + attend(module.norm(x))


# --- diffusion models -------------------------------------------------------------------------------------------------


def from_guided_diffusion_attention(module: nn.Module, *, rank: int = 2) -> AttentionBlock:
    """The block that computes what ``AttentionBlock`` of guided diffusion (OpenAI) does, in either order of its rows.

    It is known by its parts, since its class is in many repositories.

    Args:
        module: the layer.
        rank: axes of the maps that the block is for: 1, 2 or 3.

    Returns:
        :class:`AttentionBlock2d`, or that for ``rank`` axes, with copies of the weights, a group norm as the layer has,
        and a gate of ones that is not trained.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/openai/guided-diffusion/blob/main/guided_diffusion/unet.py

    >>> from_guided_diffusion_attention(unet.middle_block[1])(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "an AttentionBlock of guided diffusion", "norm", "qkv", "attention", "proj_out")
    check_rank(rank)
    check_guided(module)
    return proven(module, lambda module: residual(guided(module, rank), module.norm))


def check_guided(module: Any) -> None:
    check_source(module, "qkv", "proj_out")


def guided_rows(module: Any) -> dict[str, Rows]:
    rows = rows_of(module.qkv)
    if type(module.attention).__name__.endswith("Legacy"):
        rows = heads_first(rows, module.attention.n_heads)
    return {"qkv": rows, "proj": rows_of(module.proj_out)}


def guided(module: Any, rank: int = 2) -> Attention:
    return attention(rank, guided_rows(module), training=module.training, num_heads=module.attention.n_heads)


def from_latent_diffusion_attention(module: nn.Module) -> AttentionBlock:
    """The block that computes what ``AttnBlock`` of latent diffusion and of taming transformers does, with one head.

    It is known by its parts, since its class is in many repositories.

    Args:
        module: the layer.

    Returns:
        The :class:`AttentionBlock2d`, as :func:`from_guided_diffusion_attention` gives it.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/CompVis/latent-diffusion/blob/main/ldm/modules/diffusionmodules/model.py

    >>> from_latent_diffusion_attention(decoder.mid.attn_1)(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "an AttnBlock of latent diffusion", "norm", "q", "k", "v", "proj_out")
    check_latent(module)
    return proven(module, lambda module: residual(latent(module), module.norm))


def check_latent(module: Any) -> None:
    check_source(module, "q", "k", "v", "proj_out")


def latent_rows(module: Any) -> dict[str, Rows]:
    return {"qkv": side_by_side(*map(rows_of, (module.q, module.k, module.v))), "proj": rows_of(module.proj_out)}


def latent(module: Any) -> Attention:
    return attention(2, latent_rows(module), training=module.training, num_heads=1)


#: What diffusers calls its projections, now and before.
NAMES = (("to_q", "to_k", "to_v", "to_out.0"), ("query", "key", "value", "proj_attn"))
DIFFUSERS = ("diffusers.models.attention_processor.Attention", "diffusers.models.attention.AttentionBlock")


def from_diffusers_attention(module: nn.Module, *, rank: int = 2) -> Attention | AttentionBlock:
    """The block that computes what diffusers' ``Attention`` does, under its names of now and before.

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

    >>> from diffusers.models.attention_processor import Attention as DiffusersAttention
    >>> from_diffusers_attention(DiffusersAttention(64, heads=4, dim_head=16))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_kind("module", module, *DIFFUSERS)
    check_rank(rank)
    check_diffusers(module)
    adds, factor = adds_input(module), bool(module.rescale_output_factor == 1)
    check_carried(
        module,
        ("rescale_output_factor", factor, "let swap_ exchange it, which divides as it does"),
        ("group_norm", adds or module.group_norm is None, "the block has a norm only where it adds its input"),
    )

    def convert(module: Any) -> Any:
        attn = diffusers(module, rank)
        return residual(attn, module.group_norm) if adds else attn

    def run(module: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
        keys = {} if context is None else {"encoder_hidden_states": context.flatten(2).transpose(1, 2)}
        y: Tensor = module(x.flatten(2)[..., None], **keys)
        return y.flatten(2).unflatten(2, x.shape[2:])

    return proven(module, convert, run)


def plainly_processed(module: Any) -> bool:
    processor = type(getattr(module, "processor", None)).__name__  # the layer of before had none
    return processor in ("AttnProcessor", "AttnProcessor2_0", "NoneType")


def adds_input(module: Any) -> bool:
    return bool(getattr(module, "residual_connection", True))  # the layer of before always did


def check_diffusers(module: Any) -> None:
    check_source(module, *names_of(module))
    if not plainly_processed(module):
        check_carried(module, ("processor", False, "set the one that it is made with"))
    for name in ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_q_proj"):
        if getattr(module, name, None) is not None:
            check_carried(module, (name, False, "the block has no such part: only layers without it are converted"))


def names_of(module: Any) -> tuple[str, ...]:
    return NAMES[not hasattr(module, "to_q")]


def diffusers_rows(module: Any) -> dict[str, Rows]:
    q, k, v, out = (rows_of(attrgetter(name)(module)) for name in names_of(module))
    return {**input_projections(q, k, v), "proj": out}


def diffusers(module: Any, rank: int = 1) -> Attention:
    rows = diffusers_rows(module)
    scale = getattr(module, "scale", None)
    heads = module.heads if hasattr(module, "heads") else module.channels // (module.num_head_size or module.channels)
    width = len((rows.get("q") or Rows(rows["qkv"].weight.chunk(3)[0])).weight) // heads
    drop = drop_of(module, "to_out.1") if hasattr(module, "to_out") else 0.0
    options = {"key_dim": width, "value_dim": width, "scale": scale, "proj_drop": drop}
    return attention(rank, rows, training=module.training, num_heads=heads, **options)


def forward_diffusers(
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


def example_diffusers(module: Any) -> tuple[Any, ...]:
    x = random_map(2, 5, getattr(module, "query_dim", None) or module.channels)
    if not hasattr(module, "to_q"):  # which took maps only
        return (x.transpose(1, 2)[..., None],)
    return (x, random_map(2, 4, module.cross_attention_dim)) if module.is_cross_attention else (x,)


# --- others -----------------------------------------------------------------------------------------------------------


def from_sagan_attention(module: nn.Module) -> AttentionBlock:
    """The block that computes what the ``Self_Attn`` of SAGAN's ports does: ``gamma · attention(x) + x``.

    It is known by its parts, ``query_conv``, ``key_conv``, ``value_conv`` and ``gamma``.

    Args:
        module: the layer.

    Returns:
        The :class:`AttentionBlock2d` with one head, without a norm; ``gamma`` becomes the gate, one for each channel,
        and the output projection is the identity and is not trained.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/heykeetae/Self-Attention-GAN/blob/master/sagan_models.py

    >>> from_sagan_attention(generator.attn2)(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "the attention of SAGAN", "query_conv", "key_conv", "value_conv", "gamma")
    check_source(module, "query_conv", "key_conv", "value_conv")

    def convert(module: Any) -> AttentionBlock:
        q, k, v = map(rows_of, (module.query_conv, module.key_conv, module.value_conv))
        rows = {"qkv": side_by_side(q, k, v), "proj": identity_rows(len(v.weight), v.weight)}
        options: dict[str, Any] = {"num_heads": 1, "key_dim": len(q.weight), "value_dim": len(v.weight), "scale": 1.0}
        return residual(attention(2, rows, training=module.training, **options), gate=module.gamma)

    def run(module: Any, x: Tensor) -> Tensor:
        y = module(x)
        return y[0] if isinstance(y, tuple) else y

    return proven(module, convert, run)


def from_timm_non_local_attn(module: nn.Module) -> AttentionBlock:
    """The block that computes what ``timm.layers.NonLocalAttn`` does in evaluation mode: ``x + norm(attention(x))``.

    The batch norm becomes part of the output projection, and is trained as that.

    Args:
        module: the layer, in evaluation mode.

    Returns:
        The :class:`AttentionBlock2d` with one head, without a norm of its input, with a gate that is not trained.

    Raises:
        ValueError: it is no such layer, or in training mode.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/non_local_attn.py

    >>> from timm.layers.non_local_attn import NonLocalAttn
    >>> from_timm_non_local_attn(NonLocalAttn(64).eval())(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_kind("module", module, "timm.layers.non_local_attn.NonLocalAttn")
    check_non_local(module)
    check_carried(module, ("training", not module.training, "its batch norm is not that of one map: call .eval()"))

    def convert(module: Any) -> AttentionBlock:
        rows, norm = non_local_rows(module), module.norm
        factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        out = rows["proj"]
        bias = (out.bias - norm.running_mean) * factor + norm.bias
        rows["proj"] = Rows(out.weight * factor[:, None], bias)
        return residual(attention(2, rows, training=False, num_heads=1, **widths(module)))

    return proven(module, convert)


def check_non_local(module: Any) -> None:
    check_source(module, "t", "p", "g", "z")


def non_local_rows(module: Any) -> dict[str, Rows]:
    return {"qkv": side_by_side(*map(rows_of, (module.t, module.p, module.g))), "proj": rows_of(module.z)}


def widths(module: Any) -> dict[str, Any]:
    width = len(module.t.weight)
    return {"key_dim": width, "value_dim": width, "scale": module.scale}


def example_map(name: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda module: (random_map(2, getattr(module, name).weight.shape[1], 3, 4),)


GUIDED = Family(
    check_guided, guided, lambda module: parameters_of(guided_rows(module)), forward_normed, example_map("qkv"), ()
)
LATENT = Family(
    check_latent, latent, lambda module: parameters_of(latent_rows(module)), forward_normed, example_map("q"), ()
)
RESIDUAL = {
    "guided_diffusion.unet.AttentionBlock": GUIDED,
    "improved_diffusion.unet.AttentionBlock": GUIDED,
    "ldm.modules.diffusionmodules.openaimodel.AttentionBlock": GUIDED,
    "ldm.modules.diffusionmodules.model.AttnBlock": LATENT,
    "taming.modules.diffusionmodules.model.AttnBlock": LATENT,
    **dict.fromkeys(
        DIFFUSERS,
        Family(
            check_diffusers,
            diffusers,
            lambda module: parameters_of(diffusers_rows(module), rank=1),
            forward_diffusers,
            example_diffusers,
            ("rescale_output_factor",),
            own="calls with a mask or further arguments, and all while it has another processor",
        ),
    ),
    "timm.layers.non_local_attn.NonLocalAttn": Family(
        check_non_local,
        lambda module: attention(2, non_local_rows(module), training=module.training, num_heads=1, **widths(module)),
        lambda module: parameters_of(non_local_rows(module)),
        lambda module, attend, x: module.norm(attend(x)) + x,
        example_map("t"),
        ("scale",),
    ),
}
