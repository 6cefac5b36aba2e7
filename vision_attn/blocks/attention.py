"""Attention as a module, for maps with one, two and three axes."""

from vision_attn.blocks.spatial import Attention

__all__ = ["Attention1d", "Attention2d", "Attention3d"]


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
    whatever the implementation, which may be changed at any time with :func:`set_impl` or :func:`use_impl`. With other
    widths the rows are ``[heads·key_dim, kv_heads·key_dim, kv_heads·value_dim]``.

    Args:
        channels: channels of the map; divisible by ``num_heads``, unless ``key_dim`` and ``value_dim`` are given.
        num_heads: number of heads.
        impl: the implementation, one of :data:`vision_attn.IMPLS` or a registered one. They give the same result;
            ``"sdpa"`` is the fastest and, where torch has a fused kernel, needs memory for the tokens only; most others
            hold every attention weight. On the CPU torch has none with dropout or gradients of a bias.
        pattern: which positions attend to each other: ``"full"``, ``"rows"``, ``"columns"``, a :class:`Window`,
            :class:`Grid`, :class:`Neighborhood` or :class:`Pattern`, or a line of einx.
        position: how attention is told where things are: a :class:`RelPosDecomposed`, :class:`RelPosTable`,
            :class:`Rope2d`, :class:`ConditionalPos` or :class:`SinCos`; its parameters are ``position.*``.
        key_dim: width of queries and keys in a head; ``channels / num_heads`` when None.
        value_dim: width of values in a head; ``channels / num_heads`` when None.
        num_kv_heads: heads of keys and values, each shared by as many heads of queries in a row: grouped attention;
            multi-query with 1. ``num_heads`` when None.
        out_channels: channels of the result; ``channels`` when None.
        context_channels: channels of a second map that keys and values are then always taken from, by projections
            ``q`` and ``kv`` in the place of ``qkv``.
        groups: groups of the projections, as of a grouped convolution: a channel of queries, keys, values or output is
            of one group's channels only, and ``qkv.weight`` is ``(3c, c / groups, 1, 1)``.
        scale: factor on the logits; ``key_dim ** -0.5`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        proj_bias: whether the output projection has a bias.
        qk_norm: whether queries and keys are normalised over their width (``q_norm``, ``k_norm``, of layer norm).
        kv_stride: keys and values are taken from the map averaged over squares of this side, in positions.
        causal: whether a position attends to no position that follows it, row by row, in any pattern.
        output_gate: whether ``y`` is multiplied by ``sigmoid(gate(x))``, a 1×1 convolution, before it is projected.
        attn_drop: probability of dropping an attention weight, in training.
        proj_drop: probability of dropping an element of the output, in training.
        device: where the parameters live.
        dtype: type of the parameters.

    Raises:
        ValueError: an argument is out of range or does not go with another; the message says which, what was expected
            and what came.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762;
    on feature maps: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925;
    shared keys and values: Ainslie et al., *GQA*, 2023, https://arxiv.org/abs/2305.13245

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
