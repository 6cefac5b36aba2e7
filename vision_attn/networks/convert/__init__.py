"""Other libraries' attention as blocks of ours, with its weights: ``from_<library>_<layer>``.

A converter gives a block with copies of the layer's weights, in its type, on its device, in its mode, trained where it
is trained; a layer of Keras has no mode of its own, and its block is in evaluation mode. It refuses by name what the
block does not do, and proves itself on random weights before it returns.
"""

from vision_attn.errors import ConversionError
from vision_attn.networks.convert.diffusers_layers import from_diffusers_attention
from vision_attn.networks.convert.files import convert_file, read_keras_weights
from vision_attn.networks.convert.keras_layers import from_keras_gqa, from_keras_mha
from vision_attn.networks.convert.maxvit import from_timm_maxxvit_attention, from_torchvision_maxvit
from vision_attn.networks.convert.projections import from_linear_projections
from vision_attn.networks.convert.repositories import (
    from_guided_diffusion_attention,
    from_latent_diffusion_attention,
    from_lucidrains_attention,
    from_natten,
    from_sagan_attention,
)
from vision_attn.networks.convert.swin import from_timm_swin, from_torchvision_swin
from vision_attn.networks.convert.timm_maps import (
    from_timm_attention2d,
    from_timm_bottleneck_attn,
    from_timm_halo_attn,
    from_timm_multi_query_attention2d,
    from_timm_non_local_attn,
)
from vision_attn.networks.convert.timm_tokens import from_timm_attention
from vision_attn.networks.convert.to_layers import to_diffusers_attention, to_timm_attention, to_torch_mha
from vision_attn.networks.convert.torch_layers import from_torch_encoder_layer, from_torch_mha

__all__ = [
    "ConversionError",
    "convert_file",
    "from_diffusers_attention",
    "from_guided_diffusion_attention",
    "from_keras_gqa",
    "from_keras_mha",
    "from_latent_diffusion_attention",
    "from_linear_projections",
    "from_lucidrains_attention",
    "from_natten",
    "from_sagan_attention",
    "from_timm_attention",
    "from_timm_attention2d",
    "from_timm_bottleneck_attn",
    "from_timm_halo_attn",
    "from_timm_maxxvit_attention",
    "from_timm_multi_query_attention2d",
    "from_timm_non_local_attn",
    "from_timm_swin",
    "from_torch_encoder_layer",
    "from_torch_mha",
    "from_torchvision_maxvit",
    "from_torchvision_swin",
    "read_keras_weights",
    "to_diffusers_attention",
    "to_timm_attention",
    "to_torch_mha",
]
