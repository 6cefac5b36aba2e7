"""Conversion of the attention of other libraries to blocks with the same weights.

``from_layer`` returns a block for a layer; :mod:`.swap` lets blocks compute the attention inside a network. Both read
one table of layers. Options that a block does not support are refused by name, and each block is compared with its
layer on random weights first.
"""

from vision_attn.errors import ConversionError
from vision_attn.networks.convert import keras_layers, other_layers, timm_layers  # noqa: F401 - they fill the table
from vision_attn.networks.convert.layers import from_layer, to_timm_attention, to_torch_mha

__all__ = ["ConversionError", "from_layer", "to_timm_attention", "to_torch_mha"]
