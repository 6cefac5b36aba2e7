from .attention.attend import IMPLS as IMPLS
from .attention.attend import register_impl as register_impl
from .attention.blocks import (
    Attention1d as Attention1d,
)
from .attention.blocks import (
    Attention2d as Attention2d,
)
from .attention.blocks import (
    Attention3d as Attention3d,
)
from .attention.blocks import (
    AttentionBlock1d as AttentionBlock1d,
)
from .attention.blocks import (
    AttentionBlock2d as AttentionBlock2d,
)
from .attention.blocks import (
    AttentionBlock3d as AttentionBlock3d,
)
from .attention.blocks import (
    AugmentedConv2d as AugmentedConv2d,
)
from .attention.blocks import (
    LinearAttention2d as LinearAttention2d,
)
from .attention.blocks import (
    StridedAttention2d as StridedAttention2d,
)
from .attention.blocks import (
    TransformerBlock2d as TransformerBlock2d,
)
from .attention.blocks import (
    set_impl_ as set_impl_,
)
from .attention.blocks import (
    use_impl as use_impl,
)
from .attention.patterns import Grid as Grid
from .attention.patterns import Halo as Halo
from .attention.patterns import Neighborhood as Neighborhood
from .attention.patterns import Pattern as Pattern
from .attention.patterns import Window as Window
from .attention.position import AbsPos as AbsPos
from .attention.position import ConditionalPos as ConditionalPos
from .attention.position import RelPosDecomposed as RelPosDecomposed
from .attention.position import RelPosTable as RelPosTable
from .attention.position import Rope2d as Rope2d
from .attention.position import SinCos as SinCos
from .errors import CheckpointError as CheckpointError
from .errors import SiteError as SiteError
from .errors import VisionAttnError as VisionAttnError
from .networks import convert as convert
from .networks import figures as figures
from .networks import models as models
from .networks.capture import AttentionMap as AttentionMap
from .networks.capture import capture as capture
from .networks.capture import rollout as rollout
from .networks.checkpoints import AdapterReport as AdapterReport
from .networks.checkpoints import LoadReport as LoadReport
from .networks.checkpoints import load_adapter_ as load_adapter_
from .networks.checkpoints import load_checkpoint as load_checkpoint
from .networks.checkpoints import save_adapter as save_adapter
from .networks.checkpoints import set_adapter as set_adapter
from .networks.contribution import Contribution as Contribution
from .networks.contribution import closed as closed
from .networks.contribution import contribution as contribution
from .networks.convert.swap import swap_ as swap_
from .networks.convert.swap import swap_back_ as swap_back_
from .networks.insertion import (
    InsertionReport as InsertionReport,
)
from .networks.insertion import (
    check_optimizer as check_optimizer,
)
from .networks.insertion import (
    freeze_backbone_ as freeze_backbone_,
)
from .networks.insertion import (
    freeze_gates_ as freeze_gates_,
)
from .networks.insertion import (
    gates as gates,
)
from .networks.insertion import (
    insert_ as insert_,
)
from .networks.insertion import (
    inserted as inserted,
)
from .networks.insertion import (
    parameter_groups as parameter_groups,
)
from .networks.insertion import (
    print_trainable_parameters as print_trainable_parameters,
)
from .networks.insertion import (
    remove_ as remove_,
)
from .networks.insertion import (
    replace_ as replace_,
)
from .networks.insertion import (
    set_gates_ as set_gates_,
)
from .networks.insertion import (
    stage_names as stage_names,
)
from .networks.insertion import (
    timm_layer as timm_layer,
)
from .networks.inspection import Inspection as Inspection
from .networks.inspection import inspect_model as inspect_model
from .networks.models.folder import load_model as load_model
from .networks.models.folder import save_model as save_model
from .tools import training as training
from .tools.explorer import explore as explore
from .tools.export.classifier import Classifier as Classifier
from .tools.export.classifier import load_run as load_run
