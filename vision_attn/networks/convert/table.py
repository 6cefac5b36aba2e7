"""The table: a row for each attention layer of another library, by the path of its class.

No library is imported to be asked. To add a layer, add its row: what its weights are in our order, and what else the
block has to know. ``from_layer``, ``swap_`` and the table in the docs read it, and each proves the row on every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vision_attn.attention.patterns import Halo
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.networks.convert import other_layers as other, timm_layers as of_timm
from vision_attn.networks.convert.proof import path_of, random_map
from vision_attn.networks.convert.row import Row, named, rows_of


def of_transformers(kinds: str) -> list[str]:
    """The paths of classes of transformers, which are named alike.

    >>> of_transformers("vit.ViT")
    ['transformers.models.vit.modeling_vit.ViTAttention']
    """
    parts = [kind.split(".") for kind in kinds.split()]
    return [f"transformers.models.{name}.modeling_{name}.{kind}Attention" for name, kind in parts]


#: Rows by the path of the class.
TABLE: dict[str, Row] = {
    "torch.nn.modules.activation.MultiheadAttention": other.MULTIHEAD,
    "timm.layers.attention.Attention": of_timm.MASKED,
    "timm.models.vision_transformer.Attention": of_timm.MASKED,  # in older versions
    "timm.models.metaformer.Attention": of_timm.VIT,
    "timm.models.fastvit.Attention": of_timm.MAPS,
    "timm.models.visformer.Attention": of_timm.MAPS,
    "timm.models.beit.Attention": replace(
        of_timm.VIT, bias=of_timm.beit_bias, around=("relative_position_bias_table",)
    ),
    "timm.models.nextvit.EfficientAttention": replace(of_timm.VIT, call=of_timm.attend_strided, around=("sr",)),
    "timm.models.vision_transformer_relpos.RelPosAttention": replace(
        of_timm.VIT, bias=of_timm.relative_bias, around=("rel_pos",)
    ),
    "timm.models.efficientformer.Attention": of_timm.EFFICIENTFORMER,
    "timm.models.tiny_vit.Attention": replace(
        of_timm.EFFICIENTFORMER, call=of_timm.attend_normed, around=("norm", "attention_biases")
    ),
    "timm.models.convit.MHSA": of_timm.VIT,
    "timm.models.davit.WindowAttention": of_timm.VIT,
    "timm.models.tnt.Attention": replace(of_timm.VIT, weights=named("qk v", "proj")),
    "timm.models.volo.Attention": replace(of_timm.VIT, axes="b h w c"),
    "timm.models.volo.ClassAttention": of_timm.class_row("q|kv"),
    "timm.models.cait.ClassAttn": of_timm.class_row("q|k v"),
    "timm.models.crossvit.CrossAttention": of_timm.class_row("wq|wk wv"),
    "timm.models.pvt_v2.Attention": of_timm.REDUCED,
    "timm.models.twins.GlobalSubSampleAttn": of_timm.REDUCED,
    "timm.models.twins.LocallyGroupedAttn": of_timm.TWINS,
    "timm.models.gcvit.WindowAttentionGlobal": replace(
        of_timm.VIT,
        bias=of_timm.relative_bias,
        refuses={"use_global": "its queries are not made of its map"},
        around=("rel_pos",),
    ),
    "timm.models.hiera.MaskUnitAttention": replace(
        of_timm.VIT,
        options={"num_heads": "heads"},
        refuses={"q_stride": of_timm.POOLED_QUERIES},
        call=of_timm.attend_units,
        example=of_timm.example_units,
        around=("use_mask_unit_attn",),
    ),
    "timm.models.hieradet_sam2.MultiScaleAttention": replace(
        of_timm.VIT, axes="b h w c", refuses={"q_pool": of_timm.POOLED_QUERIES}
    ),
    "timm.models.vision_transformer_sam.Attention": of_timm.SAM,
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": replace(
        of_timm.VIT, weights=of_timm.cr_weights, bias=of_timm.cr_bias, around=("meta_mlp",)
    ),
    "timm.layers.attention_pool2d.AttentionPool2d": replace(
        of_timm.VIT,
        call=of_timm.attend_pool,
        example=lambda layer: (random_map(2, layer.pos_embed.shape[1], *layer.feat_size),),
        around=("pos_embed",),
    ),
    "timm.layers.attention2d.Attention2d": of_timm.MAPS,
    "timm.layers.attention2d.MultiQueryAttention2d": Row(
        weights=named("query.proj key.proj value.proj", "output.proj"),
        options={"num_kv_heads": 1},
        drops=("attn_drop", "output.drop"),
        refuses={"query_strides": of_timm.POOLED, "kv_stride": of_timm.POOLED},
    ),
    "timm.layers.attention2d.MultiQueryAttentionV2": Row(
        weights=of_timm.multi_query_kernels,
        options={"num_kv_heads": 1},
        call=lambda layer, attend, x, m=None: attend(x, None, m),
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": Row(
        weights=lambda layer: {"qkv": rows_of(layer.qkv), **of_timm.tables(layer)},
        options={"position": lambda layer: RelPosDecomposed(feat_size=of_timm.map_size(layer))},
        around=("pool",),
        size=of_timm.map_size,
        call=of_timm.attend_pooled,
    ),
    "timm.layers.halo_attn.HaloAttn": Row(
        weights=of_timm.halo_weights,
        options={"pattern": lambda layer: Halo(layer.block_size, layer.halo_size), "position": RelPosDecomposed()},
        refuses={"block_stride": "the block has no stride: use avg_down=True"},
        around=("pool",),
        size=lambda layer: (layer.block_size, 2 * layer.block_size),
        call=of_timm.attend_pooled,
    ),
    "timm.layers.non_local_attn.NonLocalAttn": Row(
        weights=named("t p g", "z"),
        options={"num_heads": 1, "scale": "scale"},
        call=lambda layer, attend, x: layer.norm(attend(x)) + x,
        finish=of_timm.non_local,
    ),
    "timm.models.maxxvit.Attention2d": of_timm.MAXXVIT,
    "timm.models.maxxvit.AttentionCl": replace(of_timm.MAXXVIT, axes="b h w c"),
    "timm.models.swin_transformer.WindowAttention": of_timm.TIMM_SWIN,
    "timm.models.swin_transformer_v2.WindowAttention": of_timm.TIMM_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": of_timm.TORCHVISION_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": of_timm.TORCHVISION_SWIN,
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": of_timm.TORCHVISION_MAXVIT,
    **dict.fromkeys(of_transformers("vit.ViT vit_mae.ViTMAE vit_msn.ViTMSN deit.DeiT beit.Beit"), other.TRANSFORMERS),
    **dict.fromkeys(of_transformers("ijepa.IJepa dinov2.Dinov2"), other.TRANSFORMERS),
    **dict.fromkeys(of_transformers("dinov2_with_registers.Dinov2WithRegisters"), other.TRANSFORMERS),
    **dict.fromkeys(of_transformers("clip.CLIP clipseg.CLIPSeg siglip.Siglip siglip2.Siglip2"), other.CLIP),
    **dict.fromkeys(of_transformers("segformer.Segformer"), other.SEGFORMER),
    **dict.fromkeys(of_transformers("swin.Swin"), other.TRANSFORMERS_SWIN),
    "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwinAttention": other.MASKFORMER_SWIN,
    "transformers.models.sam.modeling_sam.SamVisionSdpaAttention": replace(
        of_timm.SAM, options={**of_timm.SAM.options, "num_heads": "num_attention_heads"}, drops=("", "")
    ),
    "vit_pytorch.vit.Attention": other.VIT_PYTORCH,
    "vit_pytorch.simple_vit.Attention": replace(other.VIT_PYTORCH, weights=named("to_qkv", "to_out"), drops=("", "")),
    "vit_pytorch.max_vit.Attention": other.VIT_PYTORCH_MAXVIT,
    "monai.networks.blocks.selfattention.SABlock": other.MONAI,
    "ultralytics.nn.modules.block.Attention": replace(other.YOLO, slower=True),
    "ultralytics.nn.modules.block.AAttn": other.YOLO,
    "diffusers.models.attention_processor.Attention": Row(
        weights=named("to_q to_k to_v", "to_out.0"),
        options={"num_heads": "heads", "scale": "scale"},
        axes="b t c",
        drops=("", "to_out.1"),
        refuses=dict.fromkeys(other.ABSENT, "the block has no such part: only layers without it are converted"),
        around=("rescale_output_factor",),
        call=other.attend_diffusers,
        example=other.example_diffusers,
        finish=other.with_input,
    ),
    "natten.modules.NeighborhoodAttention1D": other.NATTEN,
    "natten.modules.NeighborhoodAttention2D": replace(other.NATTEN, axes="b h w c"),
    "natten.modules.NeighborhoodAttention3D": replace(other.NATTEN, axes="b t h w c"),
    "keras.src.layers.attention.multi_head_attention.MultiHeadAttention": other.KERAS,
    "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention": other.KERAS,
}

#: Why no row is for a layer that attends, by the path of its class, where that can be said better.
LEFT = {
    path: reason
    for reason, paths in {
        "it attends between channels, not between positions": "timm.models.xcit.XCA timm.models.davit.ChannelAttention"
        " timm.models.davit.ChannelAttentionV2 timm.models.edgenext.CrossCovarianceAttn",
        "its attention has no softmax": "timm.models.efficientvit_mit.LiteMLA timm.models.coat.FactorAttnConvRelPosEnc"
        " timm.models.mobilevit.LinearSelfAttention timm.models.swiftformer.EfficientAdditiveAttention",
        "it adds two softmaxes, of contents and of places": "timm.models.convit.GPSA",
        "it mixes its heads": "timm.models.cait.TalkingHeadAttn timm.models.efficientformer_v2.Attention2d",
        "each of its heads is given what the one before it found": "timm.models.efficientvit_msra.CascadedGroupAttention",
        "a position says by itself where it looks, without keys": "timm.models.volo.OutlookAttention",
        "an activation is between its heads and its projection": "timm.models.levit.Attention",
        "its network hands it the rotation of its queries": "timm.models.eva.EvaAttention"
        " timm.layers.attention.AttentionRope",
        "its queries and keys have positions that its values have not": " ".join(
            f"transformers.models.maskformer.modeling_maskformer.MaskFormerDetr{kind}Attention"
            for kind in ("Self", "Cross")
        ),
        "it pools its queries after their projection": "timm.models.mvitv2.MultiScaleAttention",
    }.items()
    for path in paths.split()
}


def known_class(module: object) -> type | None:
    """The class that a layer is known by; None if it is not known."""
    return next((kind for kind in type(module).__mro__ if path_of(kind) in TABLE), None)


def row_of(module: object) -> tuple[str, Any, Row]:
    """The path of the class that a layer is known by, the class, and its row; refused with a reason."""
    path = path_of(kind := known_class(module) or type(module))
    if path not in TABLE:
        raise ValueError(f"no row of the table is for {path}" + (f": {LEFT[path]}" if path in LEFT else ""))
    return path, kind, TABLE[path]
