"""Compatibility of `va.swap_`: swapped modules and differences in the outputs of one small model of each family.

    python benchmarks/families.py                      # writes a section of docs/convert.md
    python benchmarks/families.py --only maxvit swin   # prints the rows of these families

Each row is the result of a test: the outputs and all gradients of a model are compared with those of a swapped copy.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import timm
import torch
import torchvision
from page_sections import DOCS, markdown, write_section
from reach import as_after_training, tensors
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.convert.equivalence import REMEDY


@dataclass(frozen=True)
class Entry:
    """The smallest model of a family."""

    library: str
    family: str
    model: str
    #: Heights and widths of the images.
    sizes: tuple[tuple[int, int], ...]
    #: Arguments of the function or class that builds the model.
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.library == "timm":
            return timm.create_model(self.model, **self.options)
        if self.library == "torchvision":
            return torchvision.models.get_model(self.model, weights=None, **self.options)
        model_class = resolve_name(f"{MODULES.get(self.library, self.library)}.{self.model}")
        if self.library == "transformers":
            return model_class(model_class.config_class(**self.options))
        model = model_class(**self.options)
        return Denoiser(model) if self.model.startswith("UNet") else model

    @property
    def training_modes(self) -> tuple[bool, ...]:
        """Modes of the comparison. In training mode, layers of ultralytics are not swapped."""
        return (False,) if self.library == "ultralytics" else (False, True)


#: Modules with the models of a library, if they are not in its top-level module.
MODULES = {"monai": "monai.networks.nets", "ultralytics": "ultralytics.nn.tasks"}


class Denoiser(nn.Module):
    """One step of a denoising network with images as its only input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, 1).sample


#: Image sizes. The second size is not a multiple of the window size, or has another aspect ratio.
BOTH, SQUARE, LATENTS, TOKENS = ((128, 128), (160, 128)), ((224, 224),), ((32, 32), (48, 32)), ((64, 64), (96, 64))
SMALL = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
VAE_BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
UNET_BLOCKS = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip

#: Options of models of transformers, vit-pytorch and MONAI.
TRANSFORMER = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 96}
PYTORCH = {"image_size": 64, "patch_size": 16, "num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 96}
MONAI = {
    "in_channels": 3, "img_size": (64, 64), "patch_size": (16, 16), "hidden_size": 48, "mlp_dim": 96,
    "num_layers": 2, "num_heads": 3, "spatial_dims": 2, "classification": True,
}  # fmt: skip
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 128}

#: Library, families with their models, image sizes and options.
MODELS = (
    ("timm", "coatnet=coatnet_pico_rw_224 coatnext=coatnext_nano_rw_224 maxxvit=maxxvit_rmlp_nano_rw_256 "
             "botnet=botnet26t_256", BOTH[:1], {"img_size": 128}),
    ("timm", "maxvit=maxvit_pico_rw_256", ((128, 192),), {"img_size": (128, 192)}),
    ("timm", "halonet=halonet_h1", ((256, 256),), {}),
    ("timm", "vit=vit_tiny_patch16_224 deit=deit_tiny_distilled_patch16_224", TOKENS,
     {"dynamic_img_size": True, "img_size": 64}),
    ("timm", "beit=beit_base_patch16_224", TOKENS[:1], {"img_size": 64, "depth": 2}),
    ("timm", "eva=eva02_tiny_patch14_224", ((70, 70),), {"img_size": 70}),
    ("timm", "dinov3=vit_small_patch16_dinov3 rope_mixed=vit_small_patch16_rope_mixed_224", TOKENS,
     {"dynamic_img_size": True, "img_size": 64, "depth": 2}),
    ("timm", "swin=swin_tiny_patch4_window7_224 swinv2=swinv2_tiny_window8_256", BOTH,
     {"strict_img_size": False, "img_size": 128}),
    ("timm", "levit=levit_128s efficientformer=efficientformer_l1 visformer=visformer_tiny pit=pit_ti_224 "
             "efficientformer_v2=efficientformerv2_s0 resnet_clip=resnet50_clip gcvit=gcvit_xxtiny "
             "hiera=hiera_tiny_224 efficientvit_msra=efficientvit_m0 hieradet_sam2=sam2_hiera_tiny "
             "mvitv2=mvitv2_tiny tiny_vit=tiny_vit_5m_224", SQUARE, {}),
    ("timm", "mobilenetv4_hybrid=mobilenetv4_hybrid_medium_075 edgenext=edgenext_xx_small nextvit=nextvit_small "
             "caformer=caformer_s18 fastvit=fastvit_sa12 efficientvit=efficientvit_b0 mobilevit=mobilevit_xxs "
             "pvt_v2=pvt_v2_b0 twins=twins_svt_small xcit=xcit_nano_12_p8_224", BOTH, {}),
    ("timm", "csatv2=csatv2", BOTH[:1], {}),
    ("timm", "crossvit=crossvit_tiny_240", ((240, 240),), {}),
    ("timm", "davit=davit_tiny", BOTH, {"depths": (1, 1, 1, 1)}),
    ("timm", "naflexvit=naflexvit_base_patch16_parfac_gap", TOKENS[:1], {"depth": 2}),
    ("timm", "samvit=samvit_base_patch16_224", TOKENS[:1], {"img_size": 64, "depth": 3, "embed_dim": 96}),
    ("timm", "vit_srelpos=vit_srelpos_small_patch16_224 cait=cait_xxs24_224 convit=convit_tiny volo=volo_d1_224 "
             "tnt=tnt_s_legacy_patch16_224 vit_hybrid=vit_tiny_r_s16_p8_224", TOKENS[:1], {"img_size": 64}),
    ("torchvision", "swin=swin_t swin_v2=swin_v2_t", BOTH, {}),
    ("torchvision", "maxvit=maxvit_t", SQUARE, {}),
    ("torchvision", "vit=vit_b_16", TOKENS[:1], {"image_size": 64}),
    ("diffusers", "VAE=AutoencoderKL", LATENTS, SMALL | VAE_BLOCKS),
    ("diffusers", "UNet2D=UNet2DModel", LATENTS, SMALL | UNET_BLOCKS | {"attention_head_dim": 8}),
    ("transformers", "ViT=ViTModel DeiT=DeiTModel BEiT=BeitModel CLIP=CLIPVisionModel SigLIP=SiglipVisionModel",
     TOKENS[:1], TRANSFORMER | {"image_size": 64}),
    ("transformers", "DINOv2=Dinov2Model", ((56, 56), (70, 56)), TRANSFORMER | {"image_size": 56}),
    ("transformers", "DINOv3=DINOv3ViTModel", TOKENS, TRANSFORMER | {"image_size": 64, "num_register_tokens": 4}),
    ("transformers", "Swin=SwinModel", BOTH, SWIN),
    ("transformers", "SegFormer=SegformerModel", BOTH, {"depths": [1, 1, 1, 1]}),
    ("vit_pytorch", "ViT=ViT SimpleViT=SimpleViT", TOKENS[:1], PYTORCH),
    ("monai", "ViT=ViT", TOKENS[:1], MONAI),
    ("ultralytics", "C2PSA=DetectionModel", BOTH, {"cfg": "yolo11n.yaml", "verbose": False}),
    ("ultralytics", "A2C2f=DetectionModel", BOTH, {"cfg": "yolo12n.yaml", "verbose": False}),
)  # fmt: skip
ENTRIES = [Entry(library, *item.split("="), *others) for library, items, *others in MODELS for item in items.split()]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Columns of the table and their meaning.
COLUMNS = {
    "library": "",
    "family": "",
    "model": "",
    "image sizes": "",
    "swapped": "The number of swapped modules, and of all attention modules.",
    "float32": "The largest difference in the output, and in the gradients of images and parameters, relative to the "
    "largest value: for all image sizes, in evaluation mode and in training mode without dropout. Ultralytics "
    "models are compared only in evaluation mode, because their original layers run in training mode. If a difference "
    "is above 1e-5, *rounding* is the difference between the original model in float32 and in float64.",
    "float64": "The same differences in float64.",
    "not swapped": "Reasons for modules that are not swapped.",
}


def tolerance(dtype: str, rounding: float) -> float:
    """Return the largest allowed difference. It is larger for a model whose rounding error in float32 is larger."""
    digits = torch.finfo(DTYPES[dtype]).eps / torch.finfo(torch.float32).eps
    return max({"float32": 1e-5, "float64": 1e-10}[dtype], 10 * rounding * digits)


def disable_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
        elif type(module).__name__.endswith("DropPath"):
            module.drop_prob = 0.0
    return model


def run(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Return the output, and the gradients of the images and of all parameters."""
    images = images.to(next(model.parameters()).dtype, copy=True).requires_grad_()
    torch.manual_seed(0)
    (y, *_) = tensors(vars(out) if hasattr(out := model(images), "__dict__") and not isinstance(out, Tensor) else out)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    leaves = [images, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return y.detach(), list(torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True))


def compare(model: nn.Module, other: nn.Module, entry: Entry) -> tuple[float, float]:
    """Return the largest differences of outputs and of gradients, relative to the largest value."""
    largest = [0.0, 0.0]
    for size in entry.sizes:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        for training in entry.training_modes:
            (y, grads), (z, other_grads) = (run(module.train(training), images) for module in (model, other))
            pairs = [(a, b) for a, b in zip(grads, other_grads, strict=True) if a is not None or b is not None]
            largest[0] = max(largest[0], ((y - z).abs().max() / y.abs().max()).item())
            difference = max((a - b).abs().max().item() for a, b in pairs)
            largest[1] = max(largest[1], difference / max(a.abs().max().item() for a, _ in pairs))
    return largest[0], largest[1]


def measure(entry: Entry, dtypes: tuple[str, ...] = tuple(DTYPES)) -> tuple[list[str], bool]:
    """Return a row of the table, and True if the swapped model agrees, runs all its blocks, and is restored."""
    model = disable_dropout(entry.build())
    as_after_training(model)
    report = va.swap_(swapped := copy.deepcopy(model))
    differences, rounding, agrees, calls = {}, 0.0, True, []
    if report.swapped:
        for line in report.swapped:
            swapped.get_submodule(line.site).running_block.register_forward_hook(lambda *_: calls.append(1))
        for name in dtypes:
            differences[name] = compare(*(copy.deepcopy(net).to(DTYPES[name]) for net in (model, swapped)), entry)
        if max(differences["float32"]) > 1e-5:  # compare with the rounding error of the original model
            rounding = max(compare(copy.deepcopy(model), copy.deepcopy(model).double(), entry))
        agrees = all(max(pair) <= tolerance(name, rounding) for name, pair in differences.items())
        agrees &= len(calls) == len(entry.training_modes) * len(report.swapped) * len(entry.sizes) * len(dtypes)
        va.unswap_(swapped)
        restored, original = ([[*map(type, net.modules())], list(net.state_dict())] for net in (swapped, model))
        agrees &= restored == original
    sizes = ", ".join(f"{height}×{width}" for height, width in entry.sizes)
    cells = {name: ", ".join(f"{difference:.0e}" for difference in differences.get(name, ())) for name in DTYPES}
    if rounding:
        cells["float32"] += f"; rounding {rounding:.0e}"
    reasons = dict.fromkeys(f"`{line.kind}`: {shorten_reason(line.kind, line.reason)}" for line in report.skipped)
    count = f"{len(report.swapped)} of {len(report.modules)}"
    row = [entry.library, entry.family, f"`{entry.model}`", sizes, count, *cells.values(), "; ".join(reasons)]
    return row, agrees


def shorten_reason(kind: str, reason: str) -> str:
    """Return the reason for which a module is not swapped, without the name of its class and without shapes.

    >>> shorten_reason("GPSA", "timm.models.convit.GPSA is not supported: it adds two softmaxes")
    'it adds two softmaxes'
    """
    reason = reason.replace(REMEDY, "").splitlines()[0].rstrip(" .:")
    reason = re.sub(rf"^[\w.]*\b{kind}(?: is not supported: | is |\.| )", "", reason)
    return re.sub(r"(a tensor) of shape \([\d, ]*\)|(MaxPool2d)\(.*?False\)", r"\1\2", reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="print the rows of these families, and do not write the page")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")  # warnings about small feature maps
    rows = []
    for entry in ENTRIES:
        if (not only or entry.family in only) and find_spec(entry.library):
            rows.append(measure(entry))
            print(*rows[-1][0], sep="  ", flush=True)
    if not only:
        libraries = ("torch", *dict.fromkeys(entry.library for entry in ENTRIES))
        versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in libraries if find_spec(name))
        write_section(DOCS / "convert.md", "families", format_section([cells for cells, _ in rows], versions))
    sys.exit(not all(agrees for _, agrees in rows))


def format_section(rows: list[list[str]], versions: str) -> str:
    columns = markdown([("column", "meaning"), *((name, text) for name, text in COLUMNS.items() if text)], left=(0, 1))
    table = markdown([list(COLUMNS), *rows], left=range(len(COLUMNS)))
    return f"Tested with {versions}.\n\n{columns}\n\n{table}"


if __name__ == "__main__":
    main()
