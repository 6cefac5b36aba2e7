"""Keras's multi-head attention, whose maps have their channels last and whose kernels keep heads as an axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.equations import attention_pattern
from vision_attn.networks.convert.proof import TOLERANCE, check_outputs, explained, random_like, random_map
from vision_attn.networks.convert.refusal import check_carried, check_kind, check_source, check_without
from vision_attn.networks.convert.weights import (
    Weights,
    attention,
    input_projections,
    kernel_rows,
    output_rows,
    with_bias,
)

__all__ = ["from_keras_gqa", "from_keras_mha", "keras_weights"]


def from_keras_mha(layer: Any) -> Attention:
    """The block that computes what a ``keras.layers.MultiHeadAttention`` does.

    ``layer(query, value)`` on ``(batch, <axes>, channels)`` becomes ``block(x)`` on ``(batch, channels, <axes>)``, or
    ``block(x, context=y)`` where values are of other channels than queries. ``attention_axes`` becomes the pattern,
    ``(1,)`` of a map ``"columns"``, ``(2,)`` ``"rows"``, and then the block takes maps of one size, whereas Keras's may
    differ along those axes. ``use_gate`` becomes the output gate, with a bias of zeros that is not trained if the layer
    has none. Masks and ``use_causal_mask`` are arguments of Keras's call: give ours ``mask``. Regularizers and
    constraints are of Keras's training and stay there.

    The block is in evaluation mode, as a call of Keras without ``training=True`` is: call ``.train()`` to train it. The
    proof calls the layer, in the type that it computes in, in a ``keras.StatelessScope`` with random weights, which
    leaves its own alone.

    Args:
        layer: a layer that is built, in the torch backend of Keras.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`, by the axes of the layer's input, with
        copies of its weights.

    Raises:
        ValueError: it is no such layer, is not built, or does what the block does not; the message says what.
        ConversionError: the block does not compute what the layer does.

    Source: https://keras.io/api/layers/attention_layers/multi_head_attention/

    >>> layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=16, attention_axes=(2,))  # doctest: +SKIP
    >>> layer.build((None, 14, 10, 64), (None, 14, 10, 64))  # doctest: +SKIP
    >>> from_keras_mha(layer)(torch.randn(2, 64, 14, 10)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 10])
    """
    check_kind("layer", layer, "keras.src.layers.attention.multi_head_attention.MultiHeadAttention")
    check_layer(layer)
    rank = axes_of(layer._query_dense) - 2
    pattern = attention_pattern(layer.get_config().get("attention_axes"), rank + 2)
    return converted(layer, rank, pattern=pattern)


def from_keras_gqa(layer: Any) -> Attention:
    """The block that computes what a ``keras.layers.GroupQueryAttention`` does, with shared keys and values.

    Args:
        layer: a layer that is built, in the torch backend of Keras.

    Returns:
        :class:`Attention1d` on ``(batch, channels, width)``, in evaluation mode as that of :func:`from_keras_mha`.

    Raises:
        ValueError: as :func:`from_keras_mha`.
        ConversionError: as :func:`from_keras_mha`.

    Source: https://keras.io/api/layers/attention_layers/group_query_attention/

    >>> layer = keras.layers.GroupQueryAttention(16, num_query_heads=4, num_key_value_heads=2)  # doctest: +SKIP
    >>> layer.build((None, 50, 64), (None, 50, 64))  # doctest: +SKIP
    >>> from_keras_gqa(layer)(torch.randn(2, 64, 50)).shape  # doctest: +SKIP
    torch.Size([2, 64, 50])
    """
    check_kind("layer", layer, "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention")
    check_layer(layer)
    query = layer.get_build_config()["shapes_dict"]["query_shape"]
    if len(query) != 3:
        raise ValueError(
            "layer must be built for (batch, tokens, channels), since it attends along sequences; got "
            f"query_shape={tuple(query)}"
        )
    return converted(layer, 1)


def check_layer(layer: Any) -> None:
    """Refuse a layer that the block here cannot stand for."""
    kind = type(layer).__name__
    if not issubclass(type(layer), nn.Module):
        raise ValueError(
            f"layer must be in the torch backend of Keras; got a {kind} in another: set KERAS_BACKEND=torch before "
            "keras is imported, and load the model or its weights again"
        )
    if not layer.built:
        raise ValueError(f"layer must be built, which its first call does: got a {kind} without weights")
    check_source(layer)
    if window := layer.get_config().get("sliding_window"):
        raise ValueError(
            f"{kind}.sliding_window cannot be carried over: got {window}; make the layer without it, and give the "
            "block's forward a mask of this band"
        )
    one_axis = len(layer._output_dense.kernel.shape) == 3
    check_carried(layer, "_output_dense.kernel.shape", one_axis, "its output_shape must be of one axis, of channels")
    channels = layer._value_dense.kernel.shape[0]
    remedy = f"the block takes keys and values from one map: give keys {channels} channels, as values have"
    check_carried(layer, "_key_dense.kernel.shape", layer._key_dense.kernel.shape[0] == channels, remedy)
    for name in ("_query_dense", "_key_dense", "_value_dense", "_output_dense", *["_gate_dense"] * has_gate(layer)):
        alike = axes_of(getattr(layer, name)) == axes_of(layer._query_dense) + (name == "_output_dense")
        check_carried(layer, f"{name}.equation", alike, "use maps of the same rank")
        quantized, adapted = "convert before quantizing", "add the update to the kernel first"
        check_without(layer, {f"{name}.quantization_mode": quantized, f"{name}.lora_enabled": adapted})


def has_gate(layer: Any) -> bool:
    return bool(layer.get_config().get("use_gate"))


def axes_of(dense: Any) -> int:
    """The axes of what a layer projects: the letters of the first operand of its equation."""
    return len(dense.equation.split(",")[0])


def converted(layer: Any, rank: int, **options: Any) -> Attention:
    """The block, after it was seen to be right on the layer itself, which computes with random weights meanwhile."""
    from keras import StatelessScope

    tolerance = max(TOLERANCE, torch.finfo(getattr(torch, layer.compute_dtype)).eps ** 0.5)
    weights = layer.weights
    numbers = zip(weights, random_like([weight.value for weight in weights]), strict=True)
    with torch.inference_mode(False), torch.enable_grad():
        with StatelessScope(state_mapping=list(numbers)), torch.no_grad():
            block = keras_attention(layer, rank, **options).double()
            channels = (block.channels, block.context_channels)
            device = block.proj.weight.device
            maps = [random_map(1, c, *(2, 3, 4)[:rank]).to(device) for c in channels if c is not None]
            with explained(layer, "run as a layer of its class is"):
                expected = run(layer, *maps)
            check_outputs(layer, expected, block(maps[0], None, *maps[1:]), tolerance)
        return keras_attention(layer, rank, **options)


def keras_attention(layer: Any, rank: int, **options: Any) -> Attention:
    return attention(
        rank,
        keras_weights(partial(kernel_and_bias, layer), has_gate(layer)),
        training=False,
        num_heads=layer._query_dense.kernel.shape[1],
        num_kv_heads=layer._value_dense.kernel.shape[1],
        attn_drop=layer.get_config()["dropout"],
        **options,
    )


def kernel_and_bias(layer: Any, name: str) -> tuple[Tensor, Tensor | None]:
    dense = getattr(layer, f"_{name}_dense")
    return dense.kernel.value, None if dense.bias is None else dense.bias.value


def keras_weights(kernels: Callable[[str], tuple[Tensor, Tensor | None]], gated: bool) -> Weights:
    """The weights of a block, of kernels and biases by the name of the projection."""
    q, k, v = (kernel_rows(*kernels(name)) for name in ("query", "key", "value"))
    gate = {"gate": with_bias(kernel_rows(*kernels("gate")))} if gated else {}
    return {**input_projections(q, k, v), **gate, "proj": output_rows(*kernels("output"))}


def run(layer: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
    query, value = (y.movedim(1, -1) for y in (x, x if context is None else context))
    y: Tensor = layer(query, value, training=False)
    return y.movedim(-1, 1)
