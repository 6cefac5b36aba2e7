from . import blocks as blocks, convert as convert, errors as errors, implementations as implementations
from .attention.blocks import (
    Attention2d as Attention2d,
    AttentionBlock2d as AttentionBlock2d,
)
from .attention.patterns import (
    Grid as Grid,
    Halo as Halo,
    Neighborhood as Neighborhood,
    Pattern as Pattern,
    Window as Window,
)
from .attention.position import (
    AbsPos as AbsPos,
    ConditionalPos as ConditionalPos,
    RelPosDecomposed as RelPosDecomposed,
    RelPosTable as RelPosTable,
    Rope as Rope,
    SinCos as SinCos,
)
from .networks.block_factories import timm_layer as timm_layer
from .networks.capture.recording import capture as capture
from .networks.checkpoints import (
    load_adapter_ as load_adapter_,
    load_checkpoint_ as load_checkpoint_,
    save_adapter as save_adapter,
)
from .networks.checkpoints.folder import load_model as load_model, save_model as save_model
from .networks.contributions import (
    contribution as contribution,
    disabled as disabled,
    measure_blocks as measure_blocks,
)
from .networks.convert.swap import swap_ as swap_, unswap_ as unswap_
from .networks.finetuning import (
    check_optimizer as check_optimizer,
    freeze_backbone_ as freeze_backbone_,
    parameter_groups as parameter_groups,
    unfreeze_backbone_ as unfreeze_backbone_,
)
from .networks.impl_choice import set_impl_ as set_impl_, use_impl as use_impl
from .networks.insertion import (
    insert_ as insert_,
    inserted_blocks as inserted_blocks,
    remove_ as remove_,
    replace_ as replace_,
    stage_names as stage_names,
)
from .networks.insertion.second_map import context as context
from .networks.padded_batches import padded as padded
from .recipes.explore import explore as explore
from .recipes.export import export_model as export_model

__version__: str
