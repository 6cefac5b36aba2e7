"""Stages and layouts from the metadata of a network, and a table of stages for networks without metadata."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vision_attn.networks.inspection.selection import end_of_sequential

#: The children of torchvision's residual networks that are stages.
RESNET = ("relu", "layer1", "layer2", "layer3", "layer4")

#: Stages by class. A tuple lists the paths of the stages: ``"stages.{i}"`` stands for ``stages.0``, ``stages.1``, …,
#: and ``"block{j}"`` for ``block1``, ``block2``, …, as far as they exist. A string such as ``"layers"`` is the path
#: of a part of the network, whose stages are found in a dry run: the last module of each size of feature map. If a
#: network has none of the paths, the part is the complete network. In torchvision's other networks, it is ``features``.
STAGES: dict[str, tuple[str, ...] | str] = {
    "diffusers.models.autoencoders.vae.Encoder": ("down_blocks.{i}", "mid_block"),
    "timm.models.coat.CoaT": ("serial_blocks{j}",),
    "timm.models.gemma4_vit.Gemma4VitClassifier": ("encoder.blocks.{i}",),
    "timm.models.hrnet.HighResolutionNet": ("act1", *(f"incre_modules.{index}" for index in range(4))),
    "timm.models.mobilenetv5.MobileNetV5": ("conv_stem", *(f"blocks.{index}" for index in range(4))),
    "timm.models.mvitv2.MultiScaleVit": ("stages.{i}",),
    "timm.models.twins.Twins": ("blocks.{i}",),
    "torchvision.models.convnext.ConvNeXt": tuple(f"features.{index}" for index in (1, 3, 5, 7)),
    "torchvision.models.googlenet.GoogLeNet": ("conv1", "conv3", "inception3b", "inception4e", "inception5b"),
    "torchvision.models.inception.Inception3": ("Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c"),
    "torchvision.models.maxvit.MaxVit": ("stem", "blocks.{i}"),
    "torchvision.models.mnasnet.MNASNet": "layers",
    "torchvision.models.regnet.RegNet": ("stem", "trunk_output.block{j}"),
    "torchvision.models.resnet.ResNet": RESNET,
    "torchvision.models.shufflenetv2.ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "conv5"),
    "torchvision.models.video.mvit.MViT": ("blocks.{i}",),
    "torchvision.models.video.resnet.VideoResNet": RESNET[1:],
    "torchvision.models.vision_transformer.VisionTransformer": ("encoder.layers.encoder_layer_{i}",),
    "transformers.models.convnext.modeling_convnext.ConvNextEncoder": ("stages.{i}",),
    "transformers.models.regnet.modeling_regnet.RegNetEncoder": ("stages.{i}",),
    "transformers.models.resnet.modeling_resnet.ResNetEncoder": ("stages.{i}",),
    "transformers.models.segformer.modeling_segformer.SegformerModel": ("stages.{i}",),
    "transformers.models.swin.modeling_swin.SwinEncoder": ("layers.{i}.blocks",),
    "transformers.models.vit.modeling_vit.ViTModel": ("layers.{i}",),
}

#: Networks whose tokens are not in raster order, and the reason for error messages.
NON_RASTER = {
    "timm.models.hiera.Hiera": "the tokens of Hiera are in the order of its mask units",
    "torchvision.models.video.mvit.MViT": "the tokens of MViT belong to a video",
}


@dataclass(frozen=True)
class NetworkMetadata:
    """Metadata of a network, or of the only part of it that has metadata."""

    #: the parts that declare stages, if there are several; all other fields are then empty
    parts: tuple[str, ...] = ()
    #: path and channels of each stage
    stages: tuple[tuple[str, int | None], ...] = ()
    #: declared channels, by the path of the last module of a stage
    channels: Mapping[str, int | None] = field(default_factory=dict)
    #: the part in which the last module of each feature map size is a stage; None without metadata
    trunk: str | None = None
    #: number of tokens before a grid
    prefix: int | None = None
    #: True if channels are the last axis
    channels_last: bool = False
    #: reason why the tokens are not a feature map
    non_raster: str = ""
    #: True if the network pads images of different sizes, as detectors of torchvision and DETR do
    pads_images: bool = False


def read_metadata(model: nn.Module) -> NetworkMetadata:
    """Return the metadata of a model, or of the part of it that declares stages."""
    found: dict[str, NetworkMetadata] = {}
    for wrapped in (False, True):  # timm's ``features_only=True`` wraps a network or the parts of one.
        for path, module in model.named_modules():
            inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
            if not inside and (declared := read_module(module, path, wrapped)) is not None:
                found[path] = declared
        if found:
            break
    pads_images = any(type(module).__name__ == "GeneralizedRCNNTransform" for module in model.modules())
    pads_images = pads_images or "pixel_mask" in inspect.signature(model.forward).parameters
    if len(found) != 1:
        return NetworkMetadata(parts=tuple(found), pads_images=pads_images)
    (declared,) = found.values()
    known = dict(model.named_modules(remove_duplicate=False))
    ends = {end_of_sequential(model, path): count for path, count in declared.stages if path in known}
    return replace(declared, channels=ends, pads_images=pads_images)


def read_module(module: nn.Module, path: str, wrapped: bool) -> NetworkMetadata | None:
    """Return the metadata of a module, or None if the declared stages are not in the module.

    With ``wrapped``, the stages may also be in a module inside.
    """
    parent = f"{path}." if path else ""
    stages, entries = get_stages(module), get_feature_info(module)
    if isinstance(stages, str):
        return NetworkMetadata(trunk=parent + stages)
    if not stages and not entries:
        return None
    known = {name for name, _ in module.named_modules(remove_duplicate=False)}
    if stages:
        paths = [stage.format(i=i, j=i + 1) for stage in stages for i in range(len(known) if "{" in stage else 1)]
        paths = [name for name in paths if name in known]
    else:
        names = [entry["module"] for entry in entries]
        if not wrapped and known.isdisjoint([*names, *(name.replace(".", "_") for name in names)]):
            return None
        paths = [find_path(name, known) for name in names]
        while paths and paths[-1] not in known:  # ``features_only=True`` removes the modules after the last feature.
            paths.pop()
    channels = [entry.get("num_chs") for entry in entries] + [None] * len(paths)
    prefix = getattr(module, "num_prefix_tokens", None)
    pairs = zip((parent + name for name in paths), channels, strict=False)  # CrossViT declares stages twice.
    return NetworkMetadata(
        stages=tuple(dict(pairs).items()),
        trunk=None if paths else path,
        prefix=prefix if isinstance(prefix, int) else None,
        channels_last="NHWC" in str(getattr(module, "output_fmt", "")),
        non_raster=get_class_entry(NON_RASTER, module) or "",
    )


def find_path(name: str, known: Collection[str]) -> str:
    """Return the path of a declared module, which ``features_only=True`` may have flattened or wrapped."""
    wrapped = [path for path in known if path.endswith(f".{name}")]
    # ``FeatureHookNet`` flattens only the first parts of a path.
    flat = (name.replace(".", "_", count) for count in range(name.count(".") + 1))
    return next((path for path in (*flat, *wrapped[:1]) if path in known), name)


def get_feature_info(module: nn.Module) -> list[Mapping[str, Any]]:
    """Return the entries of timm's ``feature_info`` that contain the name of a module."""
    info = getattr(module, "feature_info", None)
    entries = getattr(info, "info", info)
    known = entries if isinstance(entries, (list, tuple)) else []
    return [entry for entry in known if isinstance(entry, Mapping) and entry.get("module")]


def get_stages(module: nn.Module) -> Any:
    """Return the entry of :data:`STAGES` for a module."""
    is_torchvision = any(kind.__module__.startswith("torchvision.models.") for kind in type(module).__mro__)
    if (found := get_class_entry(STAGES, module)) or not is_torchvision:
        return found
    if hasattr(module, "return_layers"):  # a backbone for detection or segmentation
        return RESNET
    return "features" if isinstance(getattr(module, "features", None), nn.Module) else None


def get_class_entry(table: Mapping[str, Any], module: nn.Module) -> Any:
    """Return the entry of a table for the class of a module or one of its base classes."""
    kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__)
    return next((table[kind] for kind in kinds if kind in table), None)
