"""Keras's multi-head attention, whose maps have their channels last and whose kernels keep heads as an axis."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.convert.filling import attention
from vision_attn.convert.proof import SIZES, proven, randomise_
from vision_attn.convert.refusals import check_carried, check_kind
from vision_attn.convert.rows import Rows, kernel_rows, output_rows, side_by_side
from vision_attn.equations import attention_pattern

__all__ = ["from_keras_gqa", "from_keras_mha"]


def from_keras_mha(layer: Any) -> Attention:
    """The block that computes what a ``keras.layers.MultiHeadAttention`` does.

    ``layer(query, value)`` on ``(batch, <axes>, channels)`` becomes ``block(x)`` on ``(batch, channels, <axes>)``, or
    ``block(x, context=y)`` where values are of other channels than queries. ``attention_axes`` becomes the pattern,
    ``(1,)`` of a map ``"columns"``, ``(2,)`` ``"rows"``; ``use_gate`` the output gate, with a bias of zeros that is not
    trained if the layer has none. Masks and ``use_causal_mask`` are arguments of Keras's call: give ours ``mask``.
    Regularizers and constraints are of Keras's training and stay there.

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
    check_kind(
        "layer",
        layer,
        "keras.layers.MultiHeadAttention",
        "keras.src.layers.attention.multi_head_attention.MultiHeadAttention",
    )
    return converted(layer, layer.get_config().get("attention_axes"))


def from_keras_gqa(layer: Any) -> Attention:
    """The block that computes what a ``keras.layers.GroupQueryAttention`` does, with shared keys and values.

    Args:
        layer: a layer that is built, in the torch backend of Keras.

    Returns:
        :class:`Attention1d` on ``(batch, channels, width)``, as :func:`from_keras_mha`.

    Raises:
        ValueError: as :func:`from_keras_mha`.
        ConversionError: as :func:`from_keras_mha`.

    Source: https://keras.io/api/layers/attention_layers/group_query_attention/

    >>> layer = keras.layers.GroupQueryAttention(16, num_query_heads=4, num_key_value_heads=2)  # doctest: +SKIP
    >>> layer.build((None, 50, 64), (None, 50, 64))  # doctest: +SKIP
    >>> from_keras_gqa(layer)(torch.randn(2, 64, 50)).shape  # doctest: +SKIP
    torch.Size([2, 64, 50])
    """
    check_kind(
        "layer",
        layer,
        "keras.layers.GroupQueryAttention",
        "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention",
    )
    return converted(layer, None)


def converted(layer: Any, attention_axes: tuple[int, ...] | None) -> Attention:
    check_layer(layer)
    rank = axes_of(layer._query_dense) - 2
    pattern = attention_pattern(attention_axes, rank + 2)
    channels, context = (dense.kernel.shape[0] for dense in (layer._query_dense, layer._value_dense))
    return proven(
        layer,
        lambda source: keras_attention(source, rank, pattern=pattern),
        run,
        shape=(channels, *SIZES[rank]),
        context=None if context == channels else (context, *SIZES[rank]),
        stand_in=stand_in,
    )


def keras_attention(layer: Any, rank: int, **options: Any) -> Attention:
    kernel = layer._query_dense.kernel
    channels, num_heads, key_dim = kernel.shape
    context, num_kv_heads, value_dim = layer._value_dense.kernel.shape
    q, k, v = (input_rows(dense) for dense in (layer._query_dense, layer._key_dense, layer._value_dense))
    out = output_rows(kernel_of(layer._output_dense), bias_of(layer._output_dense))
    projections = {"proj": out}
    if context == channels:
        projections["qkv"] = side_by_side(query=q, key=k, value=v)
    else:
        projections.update(q=q, kv=side_by_side(key=k, value=v))
        options["context_channels"] = context
    gated = bool(layer.get_config().get("use_gate"))
    if gated:
        gate = input_rows(layer._gate_dense)
        bias = gate.weight.new_zeros(len(gate.weight)) if gate.bias is None else gate.bias
        projections["gate"] = Rows(gate.weight, bias)
    return attention(
        rank,
        projections,
        training=layer.training,
        channels=channels,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        out_channels=len(out.weight),
        qkv_bias=q.bias is not None,
        proj_bias=out.bias is not None,
        output_gate=gated,
        attn_drop=layer.get_config()["dropout"],
        **options,
    )


def check_layer(layer: Any) -> None:
    """Refuse a layer that the block here cannot stand for."""
    if not issubclass(type(layer), nn.Module):
        raise ValueError(
            f"layer must be in the torch backend of Keras; got a {type(layer).__name__} in another: set "
            "KERAS_BACKEND=torch before keras is imported, and load the model or its weights again"
        )
    if not layer.built:
        raise ValueError(
            f"layer must be built, which its first call does: got a {type(layer).__name__} without weights"
        )
    remedy = "make the layer without it, and give the block's forward a mask of this band"
    window = layer.get_config().get("sliding_window")
    check_carried(layer, "sliding_window", window, window is None, remedy)
    output = layer._output_dense.kernel.shape[2:]
    check_carried(layer, "output_shape", tuple(output), len(output) == 1, "the block's output has one axis of channels")
    key, value = (dense.kernel.shape[0] for dense in (layer._key_dense, layer._value_dense))
    remedy = f"the block takes keys and values from one map: give keys {value} channels, as values have"
    check_carried(layer, "key_dense.kernel.shape[0]", key, key == value, remedy)
    for name in ("query", "key", "value", "attention_output"):
        dense = getattr(layer, f"_{name.removeprefix('attention_')}_dense")
        axes = axes_of(dense)
        expected = axes_of(layer._query_dense) + (name == "attention_output")
        check_carried(layer, f"{name}_dense.equation", dense.equation, axes == expected, "use maps of the same rank")
        mode = getattr(dense, "quantization_mode", None)
        check_carried(layer, f"{name}_dense.quantization_mode", mode, mode is None, "convert before quantizing")
        lora = bool(getattr(dense, "lora_enabled", False))
        check_carried(layer, f"{name}_dense.lora_enabled", lora, not lora, "add the update to the kernel first")


def axes_of(dense: Any) -> int:
    """The axes of what a layer projects: the letters of the first operand of its equation."""
    return len(dense.equation.split(",")[0])


def input_rows(dense: Any) -> Rows:
    return kernel_rows(kernel_of(dense), bias_of(dense))


def kernel_of(dense: Any) -> Tensor:
    return dense.kernel.value


def bias_of(dense: Any) -> Tensor | None:
    return None if dense.bias is None else dense.bias.value


def stand_in(layer: Any) -> Any:
    """A layer of the same configuration in float64 with random weights."""
    state = random.getstate()  # from which Keras draws the seeds of what it initialises
    twin = type(layer).from_config({**layer.get_config(), "dtype": "float64"})
    twin.build_from_config(layer.get_build_config())
    random.setstate(state)
    randomise_([variable.value for variable in twin.weights])
    return twin


def run(layer: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
    query, value = (y.movedim(1, -1) for y in (x, x if context is None else context))
    y: Tensor = layer(query, value, training=False)
    return y.movedim(-1, 1)
