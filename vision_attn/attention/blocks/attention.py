"""``Attention1d``, ``Attention2d`` and ``Attention3d``: multi-head attention on feature maps."""

from vision_attn.attention.blocks.attention_nd import Attention


class Attention1d(Attention):
    """:class:`Attention2d` for feature maps with one axis, ``(b, c, w)``, projected by ``Conv1d``.

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

    The state dict is the same for all implementations: ``qkv.weight (3c, c, 1, 1)``, ``qkv.bias (3c)``,
    ``proj.weight (c, c, 1, 1)``, ``proj.bias (c)``. Change the implementation with :func:`set_impl_` or
    :func:`use_impl`. The rows of ``qkv`` are ``[heads·key_dim, kv_heads·key_dim, kv_heads·value_dim]`` if these widths
    differ.

    Args:
        channels: input channels; divisible by ``num_heads``, unless ``key_dim`` and ``value_dim`` are given.
        num_heads: number of heads.
        impl: the implementation: one of ``va.implementations.IMPLS``, ``"auto"`` or a registered name. All of them
            return the same result. The memory of ``"sdpa"`` and ``"flex"`` is linear in the number of tokens if torch
            has a fused kernel for the inputs; the other implementations store every attention weight. ``"auto"``
            selects the faster of ``"sdpa"`` and ``"bmm"`` by device, dtype, number of tokens, gradients, dropout and
            mask. ``"flex"`` compiles FlexAttention on first use.
        pattern: positions that attend to each other: ``"full"``, ``"rows"``, ``"columns"``, a :class:`Window`,
            :class:`Grid`, :class:`Halo`, :class:`Neighborhood` or :class:`Pattern`, or an einx expression.
        position: the position encoding: a :class:`RelPosDecomposed`, :class:`RelPosTable`, :class:`AbsPos`,
            :class:`Rope`, :class:`ConditionalPos` or :class:`SinCos`; its parameters are ``position.*``.
        key_dim: width of queries and keys per head; ``channels / num_heads`` if None.
        value_dim: width of values per head; ``channels / num_heads`` if None.
        num_kv_heads: number of heads of keys and values, each shared by consecutive query heads: grouped-query
            attention, or multi-query attention with 1. ``num_heads`` if None.
        out_channels: output channels; ``channels`` if None.
        context_channels: channels of a second feature map, ``context``, from which keys and values are projected. The
            projections are then ``q`` and ``kv`` instead of ``qkv``, and ``forward`` requires ``context``.
        groups: groups of the projections, as in a grouped convolution: ``qkv.weight`` is ``(3c, c / groups, 1, 1)``.
            Widths must be equal, and heads have separate keys.
        scale: factor on the logits; ``key_dim ** -0.5`` if None, or 1 with ``qk_norm="cosine"`` and ``"match"``.
        qkv_bias: add a bias to queries, keys and values.
        proj_bias: add a bias in the output projection.
        qk_norm: True for layer normalization of queries and keys (``q_norm``, ``k_norm``). ``"cosine"`` normalizes them
            to unit length instead and multiplies the logits of each head by a learned factor,
            ``exp(q_norm.logit_scale)``, which is 10 at initialization and at most 100, as in Swin v2. ``"match"`` is
            intended for finding similar positions: in addition to ``"cosine"``, queries and keys are centered over the
            feature map first, both are initialized as the same isometric projection in each head, and the initial
            factor is 14.
        kv_stride: kernel size and stride of the average pooling of keys and values; 1 for no pooling. It requires full
            attention.
        causal: prevent every position from attending to later positions in row-major order. It excludes ``kv_stride``,
            a context and ``qk_norm="match"``. :class:`Neighborhood` has a separate ``causal`` argument.
        output_gate: multiply ``y`` by ``sigmoid(gate(x))``, with a 1×1 convolution ``gate``, before ``proj``.
        attn_drop: dropout probability of attention weights.
        proj_drop: dropout probability of the output.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: an argument is out of range or contradicts another one; the message names it and states the expected
            and the given value.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762;
    on feature maps: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925;
    shared keys and values: Ainslie et al., *GQA*, 2023, https://arxiv.org/abs/2305.13245; centered queries and
    keys: Yin et al., *Disentangled Non-Local Neural Networks*, 2020, https://arxiv.org/abs/2006.06668; tied
    initialization: Trockman and Kolter, *Mimetic Initialization of Self-Attention Layers*, 2023,
    https://arxiv.org/abs/2305.09828

    >>> import torch
    >>> Attention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    rank = 2


class Attention3d(Attention):
    """:class:`Attention2d` for feature maps with three axes, ``(b, c, t, h, w)``, projected by ``Conv3d``.

    Arguments and errors are those of :class:`Attention2d`.

    >>> import torch
    >>> Attention3d(64, num_heads=4)(torch.randn(2, 64, 4, 6, 5)).shape
    torch.Size([2, 64, 4, 6, 5])
    """

    rank = 3
