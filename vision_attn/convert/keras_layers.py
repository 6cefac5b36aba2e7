"""Keras's multi-head attention, whose maps have their channels last and whose kernels keep heads as an axis."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.convert.filling import attention
from vision_attn.convert.proof import SIZES, TOLERANCE, check_equal, proven, random_like
from vision_attn.convert.refusals import check_carried, check_hooks, check_kind
from vision_attn.convert.rows import Rows, input_projections, kernel_rows, output_rows, with_bias
from vision_attn.equations import attention_pattern

__all__ = ["from_keras_gqa", "from_keras_mha"]


def from_keras_mha(layer: Any) -> Attention:
    """The block that computes what a ``keras.layers.MultiHeadAttention`` does.

    ``layer(query, value)`` on ``(batch, <axes>, channels)`` becomes ``block(x)`` on ``(batch, channels, <axes>)``, or
    ``block(x, context=y)`` where values are of other channels than queries. ``attention_axes`` becomes the pattern,
    ``(1,)`` of a map ``"columns"``, ``(2,)`` ``"rows"``, and then both maps must be of one size, whereas Keras's may
    differ along those axes. ``use_gate`` becomes the output gate, with a bias of zeros that is not trained if the layer
    has none. Masks and ``use_causal_mask`` are arguments of Keras's call: give ours ``mask``. Regularizers and
    constraints are of Keras's training and stay there.

    The block is in evaluation mode, as a call of Keras without ``training=True`` is: call ``.train()`` to train it. It
    is proven twice: by a layer of the same configuration in float64, and by this one in the type that it computes in,
    for what its configuration does not say. This one is called in a ``keras.StatelessScope`` with random weights, which
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
    check_kind(
        "layer",
        layer,
        "keras.layers.MultiHeadAttention",
        "keras.src.layers.attention.multi_head_attention.MultiHeadAttention",
    )
    check_layer(layer)
    rank = axes_of(layer._query_dense) - 2
    pattern = attention_pattern(layer.get_config().get("attention_axes"), rank + 2)
    query, value = sizes(layer)
    alike = all(None in pair or pair[0] == pair[1] for pair in zip(query[1:-1], value[1:-1], strict=True))
    remedy = f"with pattern={pattern!r} the block takes both from maps of one size, and query_shape is {query}"
    check_carried(layer, "value_shape", value, pattern == "full" or alike, remedy)
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
    check_kind(
        "layer",
        layer,
        "keras.layers.GroupQueryAttention",
        "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention",
    )
    check_layer(layer)
    query, _ = sizes(layer)
    remedy = "it attends along sequences: build it for (batch, tokens, channels)"
    check_carried(layer, "query_shape", query, len(query) == 3, remedy)
    return converted(layer, 1)


def converted(layer: Any, rank: int, **options: Any) -> Attention:
    convert = partial(keras_attention, rank=rank, **options)
    shape = (layer._query_dense.kernel.shape[0], *SIZES[rank])
    block = proven(layer, convert, run, shape=shape, stand_in=stand_in)
    check_itself(layer, convert, shape)
    return block


def keras_attention(layer: Any, rank: int, **options: Any) -> Attention:
    _, num_heads, key_dim = layer._query_dense.kernel.shape
    _, num_kv_heads, value_dim = layer._value_dense.kernel.shape
    q, k, v = (input_rows(dense) for dense in (layer._query_dense, layer._key_dense, layer._value_dense))
    out = output_rows(kernel_of(layer._output_dense), bias_of(layer._output_dense))
    gate = {"gate": with_bias(input_rows(layer._gate_dense))} if has_gate(layer) else {}
    return attention(
        rank,
        {**input_projections(q, k, v), **gate, "proj": out},
        training=False,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        output_gate=has_gate(layer),
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
    check_hooks(layer)
    remedy = "make the layer without it, and give the block's forward a mask of this band"
    window = layer.get_config().get("sliding_window")
    check_carried(layer, "sliding_window", window, window is None, remedy)
    output = layer._output_dense.kernel.shape[2:]
    check_carried(layer, "output_shape", tuple(output), len(output) == 1, "the block's output has one axis of channels")
    key, value = (dense.kernel.shape[0] for dense in (layer._key_dense, layer._value_dense))
    remedy = f"the block takes keys and values from one map: give keys {value} channels, as values have"
    check_carried(layer, "_key_dense.kernel.shape[0]", key, key == value, remedy)
    for name in ("_query_dense", "_key_dense", "_value_dense", "_output_dense", *["_gate_dense"] * has_gate(layer)):
        dense = getattr(layer, name)
        axes = axes_of(layer._query_dense) + (name == "_output_dense")
        check_carried(layer, f"{name}.equation", dense.equation, axes_of(dense) == axes, "use maps of the same rank")
        mode = getattr(dense, "quantization_mode", None)
        check_carried(layer, f"{name}.quantization_mode", mode, mode is None, "convert before quantizing")
        lora = bool(getattr(dense, "lora_enabled", False))
        check_carried(layer, f"{name}.lora_enabled", lora, not lora, "add the update to the kernel first")


def has_gate(layer: Any) -> bool:
    return bool(layer.get_config().get("use_gate"))


def sizes(layer: Any) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The shapes of queries and values that a layer was built for, with None for what was not known."""
    config = layer.get_build_config() or {}
    remedy = "build it with query_shape and value_shape, as its class does"
    check_carried(layer, "get_build_config()", config, "shapes_dict" in config, remedy)
    shapes = config["shapes_dict"]
    return tuple(shapes["query_shape"]), tuple(shapes["value_shape"])


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
    try:
        twin = type(layer).from_config({**layer.get_config(), "dtype": "float64"})
        twin.build_from_config(layer.get_build_config())
    finally:
        random.setstate(state)
    for variable, value in random_weights(twin):
        variable.assign(value)
    return twin


def check_itself(layer: Any, convert: Any, shape: tuple[int, ...]) -> None:
    """Refuse a layer that does more than its configuration says, which a layer made of the configuration does not."""
    from keras import StatelessScope

    computes = getattr(torch, layer.compute_dtype)
    tolerance = max(TOLERANCE, torch.finfo(computes).eps ** 0.5)
    with torch.inference_mode(False), torch.no_grad(), StatelessScope(state_mapping=random_weights(layer)):
        check_equal(layer, convert(layer).double(), run, shape, tolerance)


def random_weights(layer: Any) -> list[tuple[Any, Tensor]]:
    weights = layer.weights
    return list(zip(weights, random_like([weight.value for weight in weights]), strict=True))


def run(layer: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
    query, value = (y.movedim(1, -1) for y in (x, x if context is None else context))
    y: Tensor = layer(query, value, training=False)
    return y.movedim(-1, 1)
