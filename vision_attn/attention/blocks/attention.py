"""``Attention1d``, ``Attention2d`` and ``Attention3d``: multi-head attention on feature maps, and their arguments."""

from __future__ import annotations

from torch import nn

from vision_attn.attention.blocks.attention_nd import Attention
from vision_attn.attention.blocks.config import blocks_with_impl


class Attention1d(Attention):
    """:class:`Attention2d` for maps with one axis, ``(b, c, w)``, projected by ``Conv1d``.

    Arguments and errors are those of :class:`Attention2d`.

    >>> import torch
    >>> Attention1d(64, num_heads=4)(torch.randn(2, 64, 50)).shape
    torch.Size([2, 64, 50])
    """

    rank = 1


class Attention2d(Attention):
    """Multi-head attention between the positions of a feature map, projected by 1×1 convolutions.

    ::

        qkv     = Conv2d(c, 3c, 1)(x)               rows ordered (qkv, heads, head_dim)
        q, k, v : (b, heads, tokens, head_dim)      tokens row-major over (h, w)
        y       = softmax(scale q kᵀ + mask) v
        out     = Conv2d(c, c, 1)(y)

    The state dict is ``qkv.weight (3c, c, 1, 1)``, ``qkv.bias (3c)``, ``proj.weight (c, c, 1, 1)``, ``proj.bias (c)``
    in every implementation, which may be changed at any time with :func:`set_impl_` or :func:`use_impl`. With other
    widths the rows are ``[heads·key_dim, kv_heads·key_dim, kv_heads·value_dim]``.

    Args:
        channels: channels of the map; divisible by ``num_heads``, unless ``key_dim`` and ``value_dim`` are given.
        num_heads: number of heads.
        impl: the implementation, one of :data:`vision_attn.IMPLS`, ``"auto"`` or a registered one. All give the same
            result. The memory of ``"sdpa"`` and ``"flex"`` grows with the tokens where torch has a fused kernel; the
            others store every attention weight. ``"auto"`` is the faster of ``"sdpa"`` and ``"bmm"``, by device, dtype,
            tokens, gradients, dropout and mask. ``"flex"`` compiles FlexAttention on first use.
        pattern: which positions attend to each other: ``"full"``, ``"rows"``, ``"columns"``, a :class:`Window`,
            :class:`Grid`, :class:`Halo`, :class:`Neighborhood` or :class:`Pattern`, or a line of einx.
        position: the position encoding: a :class:`RelPosDecomposed`, :class:`RelPosTable`, :class:`AbsPos`,
            :class:`Rope2d`, :class:`ConditionalPos` or :class:`SinCos`; its parameters are ``position.*``.
        key_dim: width of queries and keys per head; ``channels / num_heads`` when None.
        value_dim: width of values per head; ``channels / num_heads`` when None.
        num_kv_heads: heads of keys and values, each shared by consecutive heads of queries: grouped-query attention, or
            multi-query attention with 1. ``num_heads`` when None.
        out_channels: channels of the output; ``channels`` when None.
        context_channels: channels of a second map, which keys and values are then always projected from, by ``q`` and
            ``kv`` instead of ``qkv``.
        groups: groups of the projections, as of a grouped convolution: ``qkv.weight`` is ``(3c, c / groups, 1, 1)``.
        scale: factor on the logits; ``key_dim ** -0.5`` when None, and 1 with ``qk_norm="cosine"``.
        qkv_bias: whether queries, keys and values have a bias.
        proj_bias: whether the output projection has a bias.
        qk_norm: True for layer norm of queries and keys (``q_norm``, ``k_norm``). ``"cosine"`` divides them by their
            length instead, and multiplies the logits of each head by a learned factor ``exp(q_norm.logit_scale)``, 10
            at initialization and at most 100, as in Swin v2. ``"match"`` is for a block that finds similar positions:
            it also subtracts the mean over the map, and initializes queries and keys as one isometric projection in
            each head and the factor as 14.
        kv_stride: side of the squares over which the map of keys and values is averaged, in positions.
        causal: whether no position attends to a later one, in row-major order, in every pattern but a
            :class:`Neighborhood`, which has its own.
        output_gate: whether ``y`` is multiplied by ``sigmoid(gate(x))``, a 1×1 convolution, before the projection.
        attn_drop: probability of dropping an attention weight, in training.
        proj_drop: probability of dropping an element of the output, in training.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: an argument is out of range or does not fit another one; the message names it, with the expected and
            the given value.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762;
    on feature maps: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925;
    shared keys and values: Ainslie et al., *GQA*, 2023, https://arxiv.org/abs/2305.13245; queries and keys minus
    their means: Yin et al., *Disentangled Non-Local Neural Networks*, 2020, https://arxiv.org/abs/2006.06668; tied
    initialization: Trockman and Kolter, *Mimetic Initialization of Self-Attention Layers*, 2023,
    https://arxiv.org/abs/2305.09828

    >>> import torch
    >>> Attention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    rank = 2


class Attention3d(Attention):
    """:class:`Attention2d` for maps with three axes, ``(b, c, t, h, w)``, projected by ``Conv3d``.

    Arguments and errors are those of :class:`Attention2d`.

    >>> import torch
    >>> Attention3d(64, num_heads=4)(torch.randn(2, 64, 4, 6, 5)).shape
    torch.Size([2, 64, 4, 6, 5])
    """

    rank = 3


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Return every :class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d` of a model, by its path.

    >>> list(attention_modules(nn.ModuleDict({"a": Attention2d(8), "b": nn.ReLU()})))
    ['a']
    """
    return {name: block for name, block in blocks_with_impl(model).items() if isinstance(block, Attention)}
