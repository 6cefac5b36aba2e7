"""Other libraries' attention as blocks of ours, with its weights: one table of layers, read by each way to convert.

``from_layer`` finds a layer's row and returns a block; :mod:`.swap` lets blocks compute inside a network. What a block
does not do is refused by name, and what is returned was proven on random weights first.
"""

from vision_attn.errors import ConversionError
from vision_attn.networks.convert.layers import from_layer, to_timm_attention, to_torch_mha

__all__ = ["ConversionError", "from_layer", "to_timm_attention", "to_torch_mha"]
