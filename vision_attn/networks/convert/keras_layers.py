"""Conversions of the attention layers of Keras, which use channels-last inputs and kernels with an axis for heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vision_attn.networks.convert.conversion import CONVERSIONS, Attend, LayerConversion
from vision_attn.networks.convert.equations import attention_pattern
from vision_attn.networks.convert.equivalence import random_like, random_map
from vision_attn.networks.convert.projection import Projection, input_weights


def get_dense(layer: Any, name: str) -> Any:
    """Return a projection. Only one of the two classes has public names for them."""
    if not layer.built:
        raise ValueError(f"{type(layer).__name__} must be built: call the layer once on an input first")
    return getattr(layer, f"_{name}_dense")


def get_axes(layer: Any) -> Any:
    """Return the axes of the input between batch and channels, as letters of the layer's projection equation."""
    return get_dense(layer, "query").equation.split(",")[0][1:-1]


def read_dense(layer: Any, name: str) -> Projection:
    """Return the projection of a kernel ``(c, n, d)``; the output kernel is ``(n, d, c)``."""
    dense = get_dense(layer, name)
    kernel = dense.kernel.value.flatten(0, 1) if name == "output" else dense.kernel.value.flatten(1)
    return Projection(kernel.T, None if dense.bias is None else dense.bias.value.flatten())


def keras_weights(layer: Any) -> dict[str, Any]:
    if (width := layer.get_config().get("sliding_window")) is not None:
        raise ValueError(f"{type(layer).__name__}.sliding_window is not supported (got {width}): {BAND}")
    inputs = (read_dense(layer, name) for name in ("query", "key", "value"))
    gate = {"gate": read_dense(layer, "gate").with_bias()} if layer.get_config().get("use_gate") else {}
    return {**input_weights(*inputs), "proj": read_dense(layer, "output"), **gate}


@contextmanager
def randomize_keras(layer: Any) -> Iterator[Any]:
    """Yield the layer itself, temporarily in float64 and with random weights."""
    from keras import StatelessScope

    numbers = random_like([weight.value for weight in layer.weights])
    policies = {part: part.dtype_policy for part in layer.modules() if hasattr(part, "dtype_policy")}
    try:
        for part in policies:
            part.dtype_policy = "float64"
        with StatelessScope() as scope:
            for weight, values in zip(layer.weights, numbers, strict=True):
                scope.add_update((weight, values.double()))
            yield layer
    finally:
        for part, policy in policies.items():
            part.dtype_policy = policy


def example_keras(layer: Any) -> tuple[Any, ...]:
    sizes = (5, 3, 2)[: len(get_axes(layer))]
    kernels = [get_dense(layer, name).kernel.value for name in ("query", "value")]
    query, value = (random_map(1, *sizes, len(kernel)).to(kernel.device) for kernel in kernels)
    return query, query if value.shape == query.shape else value


def attend_keras(layer: Any, attend: Attend, query: Tensor, value: Tensor) -> Tensor:
    return attend(query.movedim(-1, 1), None, None if value is query else value.movedim(-1, 1)).movedim(1, -1)


BAND = "create the layer without it, and pass a mask of this band to the forward pass of the block"
KERAS = LayerConversion(
    weights=keras_weights,
    options={
        "rank": lambda layer: len(get_axes(layer)),
        "num_heads": lambda layer: get_dense(layer, "query").kernel.shape[1],
        "num_kv_heads": lambda layer: get_dense(layer, "value").kernel.shape[1],
        "attn_drop": lambda layer: layer.get_config()["dropout"],
        "pattern": lambda layer: attention_pattern(layer.get_config().get("attention_axes"), len(get_axes(layer)) + 2),
    },
    axes="b ... c",
    dropouts=("", ""),
    unsupported={"sliding_window": BAND},
    call=attend_keras,
    example=example_keras,
    make_copy=randomize_keras,
    call_options={"training": False, "return_attention_scores": True},  # the fused kernel rounds to float32
)
for path in ("multi_head_attention.MultiHeadAttention", "grouped_query_attention.GroupedQueryAttention"):
    CONVERSIONS[f"keras.src.layers.attention.{path}"] = KERAS
