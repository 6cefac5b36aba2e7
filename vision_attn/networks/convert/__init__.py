"""Convert attention layers of other libraries to blocks with the same weights.

``from_layer`` returns a block for a layer. :mod:`.swap` runs the attention modules of a network through blocks. Both
use the same table of layers. Unsupported options raise an error that names the option, and each block is first compared
with its layer on random weights.
"""

from vision_attn.networks.convert import keras_layers, other_layers, timm_layers, window_layers  # these fill the table
from vision_attn.networks.convert.layers import from_layer
