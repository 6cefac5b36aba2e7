"""The attention modules that :func:`vision_attn.swap_` knows: how one is called, and what a block needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.convert.family import OWN, Family, lent_maps, lent_tokens, random_map, refusal
from vision_attn.convert.map_layers import MAPS, without_projection
from vision_attn.convert.proof import check_source, path_of, to_tokens
from vision_attn.convert.refused import REFUSED
from vision_attn.convert.residual import RESIDUAL
from vision_attn.convert.timm_layers import (
    attention2d,
    bottleneck,
    bottleneck_weights,
    check_multi_query,
    check_vit,
    fused_rows,
    multi_query,
    multi_query_rows,
    vit,
    vit_weights,
)
from vision_attn.convert.torch_layers import check_multihead, multihead, multihead_rows
from vision_attn.convert.weights import Rows, attention, heads_first, parameters_of, rows_of
from vision_attn.convert.windows import (
    TABLES,
    TIMM_SWIN,
    check_maxxvit,
    check_swin,
    continuous_table,
    maxvit,
    maxxvit,
    maxxvit_weights,
    swin,
    torchvision_weights,
)

__all__ = ["FAMILIES", "OWN", "Family", "family_of"]


def vit_mask(module: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
    return OWN if is_causal else attn_mask


def beit_mask(module: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Any:
    if module.relative_position_bias_table is None:
        return shared_rel_pos_bias
    own = module._get_rel_pos_bias()
    return own if shared_rel_pos_bias is None else own + shared_rel_pos_bias


def relative_mask(module: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    return shared_rel_pos if module.rel_pos is None else module.rel_pos.get_bias()


def swin_mask(module: Any, x: Tensor, mask: Tensor | None = None) -> Any:
    if hasattr(module, "logit_scale"):
        tokens = module.window_size[0] * module.window_size[1]
        biases = continuous_table(module)[module.relative_position_index.flatten()]
        biases = biases.view(tokens, tokens, -1).permute(2, 0, 1)[None]
    else:
        biases = module._get_rel_pos_bias()
    return biases if mask is None else biases + mask.repeat(len(x) // len(mask), 1, 1)[:, None]


def example_swin_windows(module: Any) -> tuple[Any, ...]:
    tokens = module.window_size[0] * module.window_size[1]
    return random_map(4, tokens, module.qkv.in_features), random_map(2, tokens, tokens)


def forward_strided(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    """Of NextViT, whose keys are of tokens averaged some in a row."""
    x = x.transpose(1, 2)
    keys = None if module.sr is None else module.norm(module.sr(x))
    return attend(x, None, keys).transpose(1, 2)


def forward_multihead(
    module: Any,
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    masked = is_causal or key_padding_mask is not None or attn_mask is not None
    apart = module.vdim != module.kdim
    if masked or need_weights or (key is not value and not apart) or query.dim() != 3 or query.is_nested:
        return OWN
    source = torch.cat([key, value], dim=2) if apart else key
    x, context = (y.transpose(1, 2) if module.batch_first else y.permute(1, 2, 0) for y in (query, source))
    y = attend(x, None, None if source is query else context)
    return y.transpose(1, 2) if module.batch_first else y.permute(2, 0, 1), None


def example_multihead(module: Any) -> tuple[Any, ...]:
    query, key, value = random_map(2, 5, module.embed_dim), random_map(2, 4, module.kdim), random_map(2, 4, module.vdim)
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if module.kdim == module.vdim:
        key = value = query if module.kdim == module.embed_dim else key
    return query, key, value, None, False


def forward_bottleneck(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    tables = module.pos_embed
    return module.pool(attend(x)) if len(x) and tuple(x.shape[2:]) == (tables.height, tables.width) else OWN


def forward_maxxvit(module: Any, attend: Callable[..., Tensor], x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    first = isinstance(module.qkv, nn.Conv2d)
    if x.dim() != 4 or shared_rel_pos is not None:
        return OWN
    x = x if first else x.movedim(-1, 1)
    mask = None
    if module.rel_pos is not None:
        if tuple(x.shape[2:]) != tuple(module.rel_pos.window_size):
            return OWN
        if type(module.rel_pos).__name__ not in TABLES:
            mask = module.rel_pos.get_bias()
    y = attend(x, mask)
    return y if first else y.movedim(1, -1)


def example_maxxvit(module: Any) -> tuple[Any, ...]:
    x = random_map(2, module.qkv.weight.shape[1], *(getattr(module.rel_pos, "window_size", None) or (3, 4)))
    return (x if isinstance(module.qkv, nn.Conv2d) else x.movedim(1, -1),)


def forward_maxvit(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    if x.shape[2] != module.size**2:
        return OWN
    maps = x.flatten(0, 1).transpose(1, 2).unflatten(2, (module.size, module.size))
    return to_tokens(attend(maps)).unflatten(0, x.shape[:2])


def forward_swin(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    return attend(x.movedim(-1, 1)).movedim(1, -1) if x.dim() == 4 else OWN


def example_swin(module: Any) -> tuple[Any, ...]:
    height, width = module.window_size
    return (random_map(2, max(1, 2 * height - 1), 2 * width + 1, module.qkv.in_features),)


def efficient_rows(module: Any) -> dict[str, Rows]:
    widths = (module.key_dim, module.key_dim, module.val_dim)
    return {"qkv": heads_first(rows_of(module.qkv), module.num_heads, *widths), "proj": rows_of(module.proj)}


MASKS = "calls with a mask"

#: By the path of the class, so that no library is imported to be asked.
FAMILIES: dict[str, Family] = {
    "torch.nn.modules.activation.MultiheadAttention": Family(
        check_multihead,
        lambda module: multihead(module, 1),
        lambda module: parameters_of(multihead_rows(module), rank=1),
        forward_multihead,
        example_multihead,
        ("num_heads", "dropout"),
        own="calls with a mask, with need_weights, or with values that are not the keys",
    ),
    "timm.layers.attention2d.Attention2d": Family(
        lambda module: check_source(module, "qkv", "proj"),
        attention2d,
        lambda module: parameters_of(fused_rows(module)),
        lent_maps,
        lambda module: (random_map(2, module.qkv.in_channels, 3, 4),),
        ("num_heads", "dim_head"),
        own=MASKS,
    ),
    "timm.layers.attention2d.MultiQueryAttention2d": Family(
        check_multi_query,
        multi_query,
        lambda module: parameters_of(multi_query_rows(module)),
        lent_maps,
        lambda module: (random_map(2, module.query.proj.in_channels, 3, 4),),
        ("num_heads", "key_dim", "value_dim"),
        own=MASKS,
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": Family(
        lambda module: check_source(module, "qkv"),
        lambda module: without_projection(bottleneck(module)),
        lambda module: parameters_of(*bottleneck_weights(module)),
        forward_bottleneck,
        lambda module: (random_map(2, module.qkv.in_channels, module.pos_embed.height, module.pos_embed.width),),
        ("num_heads", "scale_pos_embed"),
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": Family(
        check_swin,
        swin,
        lambda module: parameters_of(*torchvision_weights(module, module.qkv, module.proj)),
        forward_swin,
        example_swin,
        ("num_heads", "window_size", "shift_size", "attention_dropout", "dropout"),
    ),
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": Family(
        lambda module: check_source(module, "to_qkv", "merge"),
        lambda module: maxvit(module, "full"),
        lambda module: parameters_of(*torchvision_weights(module, module.to_qkv, module.merge)),
        forward_maxvit,
        lambda module: (random_map(2, 3, module.size**2, module.to_qkv.in_features),),
        ("n_heads", "size", "scale_factor"),
    ),
}
VIT = Family(
    check_vit,
    lambda module: vit(module, 1),
    lambda module: parameters_of(*vit_weights(module), rank=1),
    lent_tokens(),
    lambda module: (random_map(2, 5, module.qkv.in_features),),
    ("num_heads",),
)
VIT_ON_MAPS = replace(
    VIT,
    block=lambda module: vit(module, 2),
    weights=lambda module: parameters_of(*vit_weights(module)),
    forward=lent_maps,
    example=lambda module: (random_map(2, module.qkv.weight.shape[1], 3, 4),),
)
FAMILIES |= {
    "timm.layers.attention.Attention": replace(VIT, forward=lent_tokens(vit_mask), own="causal calls"),
    "timm.models.beit.Attention": replace(
        VIT,
        forward=lent_tokens(beit_mask),
        example=lambda module: (
            random_map(2, module.relative_position_index.shape[0] if module.window_size else 5, module.qkv.in_features),
        ),
    ),
    "timm.models.efficientformer.Attention": Family(
        lambda module: check_source(module, "qkv", "proj"),
        lambda module: attention(
            1,
            efficient_rows(module),
            training=module.training,
            num_heads=module.num_heads,
            key_dim=module.key_dim,
            value_dim=module.val_dim,
        ),
        lambda module: parameters_of(efficient_rows(module), rank=1),
        lent_tokens(lambda module, x: module.attention_biases[:, module.attention_bias_idxs][None]),
        lambda module: (random_map(2, module.attention_biases.shape[1], module.qkv.in_features),),
        ("num_heads", "key_dim", "val_dim"),
    ),
    "timm.models.fastvit.Attention": VIT_ON_MAPS,
    "timm.models.metaformer.Attention": VIT,
    "timm.models.nextvit.EfficientAttention": replace(
        VIT,
        forward=forward_strided,
        example=lambda module: (random_map(2, 8, module.q.in_features),),
        settings=("num_heads", "sr_ratio"),
    ),
    "timm.models.vision_transformer_relpos.RelPosAttention": replace(
        VIT,
        forward=lent_tokens(relative_mask),
        example=lambda module: (
            random_map(2, 5 if module.rel_pos is None else module.rel_pos.get_bias().shape[2], module.qkv.in_features),
        ),
    ),
    "timm.models.visformer.Attention": VIT_ON_MAPS,
    **dict.fromkeys(
        TIMM_SWIN,
        replace(
            VIT, forward=lent_tokens(swin_mask), example=example_swin_windows, settings=("num_heads", "window_size")
        ),
    ),
    **RESIDUAL,
    **MAPS,
    **{path: refusal(reason) for path, reason in REFUSED.items()},
}
FAMILIES["timm.layers.attention2d.MultiQueryAttentionV2"] = replace(
    FAMILIES["timm.layers.attention2d.MultiQueryAttention2d"],
    forward=lambda module, attend, x, m=None: attend(x, None, m),
    example=lambda module: (random_map(2, len(module.key_proj), 3, 4),),
    own="",
)
FAMILIES["timm.models.vision_transformer.Attention"] = FAMILIES["timm.layers.attention.Attention"]  # in older ones
FAMILIES["torchvision.models.swin_transformer.ShiftedWindowAttentionV2"] = FAMILIES[
    "torchvision.models.swin_transformer.ShiftedWindowAttention"
]
for name in ("Attention2d", "AttentionCl"):
    FAMILIES[f"timm.models.maxxvit.{name}"] = Family(
        check_maxxvit,
        lambda module: maxxvit(module, "full"),
        lambda module: parameters_of(*maxxvit_weights(module)),
        forward_maxxvit,
        example_maxxvit,
        ("num_heads", "dim_head", "head_first"),
        own="calls with shared relative positions",
    )


def family_of(module: nn.Module) -> tuple[str, type[nn.Module]] | None:
    """The path of the class that a module is known by, and the class."""
    return next(((path_of(kind), kind) for kind in type(module).__mro__ if path_of(kind) in FAMILIES), None)
