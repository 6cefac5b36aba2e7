"""Attention of which many repositories have a copy: it is known by its parts.

That of guided and latent diffusion and of SAGAN, which add to their map, of lucidrains' bottleneck transformer, and of
natten.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.residual import AttentionBlock
from vision_attn.attention.patterns import Neighborhood
from vision_attn.attention.position import AbsPos, RelPosDecomposed
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer, converted
from vision_attn.networks.convert.refusal import check_parts
from vision_attn.networks.convert.timm_tokens import fused_rows
from vision_attn.networks.convert.weights import Rows, Weights, heads_first, residual, rows_of, side_by_side

__all__ = [
    "from_guided_diffusion_attention",
    "from_latent_diffusion_attention",
    "from_lucidrains_attention",
    "from_natten",
    "from_sagan_attention",
    "guided_rows",
    "latent_rows",
]

# --- added to its map -------------------------------------------------------------------------------------------------


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
    return converted(module, GUIDED, lambda x, **options: residual(GUIDED.block(x, **options), x.norm), rank=rank)


def guided_rows(module: Any) -> dict[str, Rows]:
    return {"qkv": rows_of(module.qkv), "proj": rows_of(module.proj_out)}


def guided_weights(module: Any) -> Weights:
    rows = guided_rows(module)
    if type(module.attention).__name__.endswith("Legacy"):
        rows["qkv"] = heads_first(rows["qkv"], module.attention.n_heads)
    return rows


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
    return converted(module, LATENT, lambda x, **options: residual(LATENT.block(x), x.norm))


def latent_rows(module: Any) -> dict[str, Rows]:
    return {
        "qkv": side_by_side(**{name: rows_of(getattr(module, name)) for name in "qkv"}),
        "proj": rows_of(module.proj_out),
    }


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
    check_parts(module, "the attention of SAGAN", *SAGAN.linear, "gamma")
    return converted(module, SAGAN, lambda x, **options: residual(SAGAN.block(x), gate=x.gamma))


def sagan_weights(module: Any) -> Weights:
    return {"qkv": side_by_side(**{name: rows_of(getattr(module, name)) for name in SAGAN.linear})}


GUIDED = Layer(
    guided_weights,
    lambda module: {"num_heads": module.attention.n_heads},
    linear=("qkv", "proj_out"),
    settings=(),
    call=lambda module, attend, x: OWN if x.dim() != 4 else x + attend(module.norm(x)),
)
LATENT = Layer(
    latent_rows,
    lambda module: {"num_heads": 1},
    linear=("q", "k", "v", "proj_out"),
    settings=(),
    call=GUIDED.call,
)
SAGAN = Layer(
    sagan_weights,
    lambda module: {"num_heads": 1, "value_dim": module.value_conv.out_channels, "scale": 1.0},
    linear=("query_conv", "key_conv", "value_conv"),
)
LAYERS |= {
    "guided_diffusion.unet.AttentionBlock": GUIDED,
    "improved_diffusion.unet.AttentionBlock": GUIDED,
    "ldm.modules.diffusionmodules.openaimodel.AttentionBlock": GUIDED,
    "ldm.modules.diffusionmodules.model.AttnBlock": LATENT,
    "taming.modules.diffusionmodules.model.AttnBlock": LATENT,
}

# --- lucidrains and natten --------------------------------------------------------------------------------------------


def from_lucidrains_attention(module: nn.Module) -> Attention:
    """The block that computes what ``Attention`` of lucidrains' bottleneck transformer does.

    It is known by its parts, ``to_qkv`` and ``pos_emb``. Its positions, relative or absolute, become
    :class:`RelPosDecomposed` or :class:`AbsPos`. It has no output projection: the block's is the identity and is not
    trained.

    Args:
        module: the layer.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/lucidrains/bottleneck-transformer-pytorch

    >>> from_lucidrains_attention(stack.net[0].net[3])(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "the attention of lucidrains' bottleneck transformer", "to_qkv", "pos_emb")
    return converted(module, LUCIDRAINS)


def lucidrains_weights(module: Any) -> Weights:
    names = {"rel_height": "height_rel", "rel_width": "width_rel", "height": "height", "width": "width"}
    factor = module.scale if is_relative(module) else 1.0  # in a product with queries that are scaled
    tables = {f"position.{names[name]}": factor * table for name, table in module.pos_emb.named_parameters()}
    return {"qkv": rows_of(module.to_qkv), **tables}


def is_relative(module: Any) -> bool:
    return hasattr(module.pos_emb, "rel_height")


def lucidrains_size(module: Any) -> tuple[int, ...]:
    rows = map(len, module.pos_emb.parameters())
    return tuple((row + 1) // 2 if is_relative(module) else row for row in rows)


LUCIDRAINS = Layer(
    lucidrains_weights,
    lambda module: {
        "num_heads": module.heads,
        "scale": module.scale,
        "position": (RelPosDecomposed if is_relative(module) else AbsPos)(lucidrains_size(module)),
    },
    linear=("to_qkv",),
    settings=("heads", "scale"),
    size=lucidrains_size,
)
LAYERS["bottleneck_transformer_pytorch.bottleneck_transformer_pytorch.Attention"] = LUCIDRAINS


def from_natten(module: nn.Module) -> Attention:
    """The block that computes what natten's ``NeighborhoodAttention1D``, ``2D`` or ``3D`` does.

    ``module(x)`` on ``(b, h, w, c)`` becomes ``block(x)`` on ``(b, c, h, w)``, with the pattern :class:`Neighborhood`.
    On maps that are too small for its kernel, which natten refuses, the block attends to all there is.

    Args:
        module: the layer; it is known by its parts and by the name of its class.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or has biases by relative position, as older versions have.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/SHI-Labs/NATTEN

    >>> from_natten(NeighborhoodAttention2D(64, 4, 7))(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "a NeighborhoodAttention of natten", "qkv", "proj")
    name = type(module).__name__
    if name[-2:] not in RANKS:
        raise ValueError(f"module must be a NeighborhoodAttention1D, 2D or 3D; got {name}")
    return converted(module, NATTEN[name[-2:]])


def natten_options(module: Any) -> dict[str, Any]:
    rank = RANKS[type(module).__name__[-2:]]
    names = {"kernel_size": None, "dilation": 1, "stride": 1, "is_causal": False}
    values = [getattr(module, name, usual) or usual for name, usual in names.items()]
    shape: Any = [tuple(value) if isinstance(value, (list, tuple)) else (value,) * rank for value in values]
    return {"num_heads": module.num_heads, "pattern": Neighborhood(*shape), "scale": module.scale}


def natten_size(module: Any) -> tuple[int, ...]:
    """In which its kernel fits twice."""
    pattern = natten_options(module)["pattern"]
    return tuple(2 * side * step for side, step in zip(pattern.kernel_size, pattern.dilation, strict=True))


RANKS = {"1D": 1, "2D": 2, "3D": 3}
NATTEN = {
    axes: Layer(
        fused_rows,
        natten_options,
        rank=rank,
        last=True,
        linear=("qkv", "proj"),
        without={"rpb": "the block's tables are another: make the layer without rel_pos_bias"},
        settings=("num_heads", "kernel_size", "dilation", "stride", "is_causal", "scale"),
        size=natten_size,
    )
    for axes, rank in RANKS.items()
}
LAYERS |= {f"natten.modules.NeighborhoodAttention{axes}": layer for axes, layer in NATTEN.items()}
