"""Whose attention `va.swap_` runs, and how well it agrees: a model of each family of timm and its neighbours.

    python tests/families.py                      # writes docs/families.md
    python tests/families.py --only maxvit swin   # prints these families' rows

Each row is made by doing it: the model and a copy of it that is swapped run side by side, outputs and all gradients.
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
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import timm
import torch
import torchvision
from reach import as_after_training, tensors
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.convert.swap import SwapReport

TABLE = Path(__file__).parents[1] / "docs/families.md"

HEAD = """# Families

What `va.swap_` swaps in the smallest model of each family, as `python tests/families.py` found it with
{versions}. A cell of *float32* or *float64* is the greatest difference of
the swapped model, relative to the largest number, in evaluation and in training mode with dropout at zero and for
each size of image: of the output, and of all gradients; with how much the model's own numbers in float32 differ from
those in float64 where that is more than 1e-5. YOLO's are compared in evaluation: in training they run themselves.

{table}
"""


@dataclass(frozen=True)
class Entry:
    """The smallest model of a family."""

    library: str
    family: str
    model: str
    #: sides of images
    sizes: tuple[tuple[int, int], ...]
    #: for its maker
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        if self.library == "timm":
            return timm.create_model(self.model, **self.options)
        if self.library == "torchvision":
            return torchvision.models.get_model(self.model, weights=None, **self.options)
        maker = resolve_name(f"{HOMES.get(self.library, self.library)}.{self.model}")
        if self.library == "transformers":
            return maker(maker.config_class(**self.options))
        model = maker(**self.options)
        return Denoiser(model) if self.model.startswith("UNet") else model

    @property
    def modes(self) -> tuple[bool, ...]:
        return (False,) if self.library == "ultralytics" else (False, True)


#: Where the models of a library are, if not in its root.
HOMES = {"monai": "monai.networks.nets", "ultralytics": "ultralytics.nn.tasks"}


class Denoiser(nn.Module):
    """One step of a denoiser, on images alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, 1).sample


#: The second is no multiple of a window, or of other proportions, where the model takes two.
BOTH, SQUARE = ((128, 128), (160, 128)), ((224, 224),)
TOKENS = ((64, 64), (96, 64))
SMALL = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}

#: A transformer of transformers, and one of vit-pytorch.
TWO = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 96}
PYTORCH = {"image_size": 64, "patch_size": 16, "num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 96}
DEPTHS = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}

ENTRIES = (
    Entry("timm", "coatnet", "coatnet_pico_rw_224", ((128, 128),), {"img_size": 128}),
    Entry("timm", "coatnext", "coatnext_nano_rw_224", ((128, 128),), {"img_size": 128}),
    Entry("timm", "maxvit", "maxvit_pico_rw_256", ((128, 192),), {"img_size": (128, 192)}),
    Entry("timm", "maxxvit", "maxxvit_rmlp_nano_rw_256", ((128, 128),), {"img_size": 128}),
    Entry("timm", "botnet", "botnet26t_256", ((128, 128),), {"img_size": 128}),
    Entry("timm", "halonet", "halonet_h1", ((256, 256),)),
    Entry("timm", "mobilenetv4_hybrid", "mobilenetv4_hybrid_medium_075", BOTH),
    Entry("timm", "vit", "vit_tiny_patch16_224", TOKENS, {"dynamic_img_size": True, "img_size": 64}),
    Entry("timm", "vit_srelpos", "vit_srelpos_small_patch16_224", TOKENS[:1], {"img_size": 64}),
    Entry("timm", "deit", "deit_tiny_distilled_patch16_224", TOKENS, {"dynamic_img_size": True, "img_size": 64}),
    Entry("timm", "beit", "beit_base_patch16_224", TOKENS[:1], {"img_size": 64, "depth": 2}),
    Entry("timm", "eva", "eva02_tiny_patch14_224", ((70, 70),), {"img_size": 70}),
    Entry("timm", "swin", "swin_tiny_patch4_window7_224", BOTH, {"strict_img_size": False, "img_size": 128}),
    Entry("timm", "swinv2", "swinv2_tiny_window8_256", BOTH, {"strict_img_size": False, "img_size": 128}),
    Entry("timm", "levit", "levit_128s", SQUARE),
    Entry("timm", "efficientformer", "efficientformer_l1", SQUARE),
    Entry("timm", "efficientformer_v2", "efficientformerv2_s0", SQUARE),
    Entry("timm", "edgenext", "edgenext_xx_small", BOTH),
    Entry("timm", "nextvit", "nextvit_small", BOTH),
    Entry("timm", "caformer", "caformer_s18", BOTH),
    Entry("timm", "visformer", "visformer_tiny", SQUARE),
    Entry("timm", "fastvit", "fastvit_sa12", BOTH),
    Entry("timm", "resnet_clip", "resnet50_clip", SQUARE),
    Entry("timm", "cait", "cait_xxs24_224", TOKENS[:1], {"img_size": 64}),
    Entry("timm", "convit", "convit_tiny", TOKENS[:1], {"img_size": 64}),
    Entry("timm", "crossvit", "crossvit_tiny_240", ((240, 240),)),
    Entry("timm", "csatv2", "csatv2", ((128, 128),)),
    Entry("timm", "davit", "davit_tiny", BOTH, {"depths": (1, 1, 1, 1)}),
    Entry("timm", "efficientvit", "efficientvit_b0", BOTH),
    Entry("timm", "efficientvit_msra", "efficientvit_m0", SQUARE),
    Entry("timm", "gcvit", "gcvit_xxtiny", SQUARE),
    Entry("timm", "hiera", "hiera_tiny_224", SQUARE),
    Entry("timm", "hieradet_sam2", "sam2_hiera_tiny", SQUARE),
    Entry("timm", "mobilevit", "mobilevit_xxs", BOTH),
    Entry("timm", "mvitv2", "mvitv2_tiny", SQUARE),
    Entry("timm", "naflexvit", "naflexvit_base_patch16_parfac_gap", TOKENS[:1], {"depth": 2}),
    Entry("timm", "pit", "pit_ti_224", SQUARE),
    Entry("timm", "pvt_v2", "pvt_v2_b0", BOTH),
    Entry("timm", "samvit", "samvit_base_patch16_224", TOKENS[:1], {"img_size": 64, "depth": 3, "embed_dim": 96}),
    Entry("timm", "tiny_vit", "tiny_vit_5m_224", SQUARE),
    Entry("timm", "tnt", "tnt_s_legacy_patch16_224", TOKENS[:1], {"img_size": 64}),
    Entry("timm", "twins", "twins_svt_small", BOTH),
    Entry("timm", "vit_hybrid", "vit_tiny_r_s16_p8_224", TOKENS[:1], {"img_size": 64}),
    Entry("timm", "volo", "volo_d1_224", ((64, 64),), {"img_size": 64}),
    Entry("timm", "xcit", "xcit_nano_12_p8_224", BOTH),
    Entry("torchvision", "swin", "swin_t", BOTH),
    Entry("torchvision", "swin_v2", "swin_v2_t", BOTH),
    Entry("torchvision", "maxvit", "maxvit_t", SQUARE),
    Entry("torchvision", "vit", "vit_b_16", TOKENS[:1], {"image_size": 64}),
    Entry("diffusers", "VAE", "AutoencoderKL", ((32, 32), (48, 32)), {
        **SMALL, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    }),
    Entry("diffusers", "UNet2D", "UNet2DModel", ((32, 32), (48, 32)), {
        **SMALL, "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }),
    Entry("transformers", "ViT", "ViTModel", TOKENS[:1], {**TWO, "image_size": 64}),
    Entry("transformers", "DeiT", "DeiTModel", TOKENS[:1], {**TWO, "image_size": 64}),
    Entry("transformers", "BEiT", "BeitModel", TOKENS[:1], {**TWO, "image_size": 64}),
    Entry("transformers", "DINOv2", "Dinov2Model", ((56, 56), (70, 56)), {**TWO, "image_size": 56}),
    Entry("transformers", "CLIP", "CLIPVisionModel", TOKENS[:1], {**TWO, "image_size": 64}),
    Entry("transformers", "SigLIP", "SiglipVisionModel", TOKENS[:1], {**TWO, "image_size": 64}),
    Entry("transformers", "Swin", "SwinModel", BOTH, {**DEPTHS, "window_size": 4, "image_size": 128}),
    Entry("transformers", "SegFormer", "SegformerModel", BOTH, {"depths": [1, 1, 1, 1]}),
    Entry("transformers", "MaskFormer", "MaskFormerSwinModel", BOTH, {**DEPTHS, "window_size": 4, "image_size": 128}),
    Entry("vit_pytorch", "ViT", "ViT", TOKENS[:1], PYTORCH),
    Entry("vit_pytorch", "SimpleViT", "SimpleViT", TOKENS[:1], PYTORCH),
    Entry("vit_pytorch", "MaxViT", "max_vit.MaxViT", ((112, 112),), {
        "num_classes": 5, "dim_conv_stem": 16, "dim": 32, "depth": (1, 1), "window_size": 7,
    }),
    Entry("monai", "ViT", "ViT", TOKENS[:1], {
        "in_channels": 3, "img_size": (64, 64), "patch_size": (16, 16), "hidden_size": 48, "mlp_dim": 96,
        "num_layers": 2, "num_heads": 3, "spatial_dims": 2, "classification": True,
    }),
    Entry("ultralytics", "C2PSA", "DetectionModel", BOTH, {"cfg": "yolo11n.yaml", "verbose": False}),
    Entry("ultralytics", "A2C2f", "DetectionModel", BOTH, {"cfg": "yolo12n.yaml", "verbose": False}),
)  # fmt: skip

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def limit(dtype: str, rounding: float = 0.0) -> float:
    """The difference that is allowed; more where a model is so ill-conditioned that its own rounding is larger."""
    digits = torch.finfo(DTYPES[dtype]).eps / torch.finfo(torch.float32).eps
    return max({"float32": 1e-5, "float64": 1e-10}[dtype], 10 * rounding * digits)


@dataclass
class Row:
    entry: Entry
    report: SwapReport
    #: of output and gradients, by type
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: likewise what the model itself differs by in the two types, where float32 differs by more than it should
    rounding: float = 0.0
    #: whether every block ran in every forward, and swapping back left every module and key as it was
    served: bool = True
    restored: bool = True

    HEADER = ("library", "family", "model", "sizes", "swapped", "float32", "float64", "left")

    @property
    def agrees(self) -> bool:
        within = (max(found) <= limit(name, self.rounding) for name, found in self.differences.items())
        return self.served and self.restored and all(within)

    def cells(self) -> list[str]:
        sizes = ", ".join(f"{height}×{width}" for height, width in self.entry.sizes)
        single, double = (", ".join(f"{worst:.0e}" for worst in self.differences.get(name, ())) for name in DTYPES)
        own = f"; its own rounding {self.rounding:.0e}" if self.rounding else ""
        why = "; ".join(
            dict.fromkeys(re.sub(r"a tensor of shape \S.*?;", "a tensor;", x.reason) for x in self.report.left)
        )
        count = f"{len(self.report.swapped)} of {len(self.report.modules)}"
        return [self.entry.library, self.entry.family, f"`{self.entry.model}`", sizes, count, single + own, double, why]


def without_drops(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
        elif type(module).__name__.endswith("DropPath"):
            module.drop_prob = 0.0
    return model


def result(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and the gradients of the image and all parameters."""
    images = images.to(next(model.parameters()).dtype, copy=True).requires_grad_()
    torch.manual_seed(0)
    (y, *_) = tensors(vars(out) if hasattr(out := model(images), "__dict__") and not isinstance(out, Tensor) else out)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    leaves = [images, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return y.detach(), list(torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True))


def compared(model: nn.Module, twin: nn.Module, entry: Entry) -> tuple[float, float]:
    """The greatest difference of output and gradients, relative to the largest number."""
    worst = [0.0, 0.0]
    for size in entry.sizes:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        for training in entry.modes:
            (y, grads), (other, others) = (result(one.train(training), images) for one in (model, twin))
            pairs = [(a, b) for a, b in zip(grads, others, strict=True) if a is not None or b is not None]
            worst[0] = max(worst[0], ((y - other).abs().max() / y.abs().max()).item())
            off = max((a - b).abs().max().item() for a, b in pairs)
            worst[1] = max(worst[1], off / max(a.abs().max().item() for a, _ in pairs))
    return worst[0], worst[1]


def measure(entry: Entry, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Row:
    model = without_drops(entry.make())
    as_after_training(model)
    report = va.swap_(twin := copy.deepcopy(model))
    row = Row(entry, report)
    if not report.swapped:
        return row
    calls: list[int] = []
    for one in report.swapped:
        twin.get_submodule(one.path).running_block.register_forward_hook(lambda *_: calls.append(1))
    for name in dtypes:
        pair = (copy.deepcopy(one).to(DTYPES[name]) for one in (model, twin))
        row.differences[name] = compared(*pair, entry)
    if max(row.differences["float32"]) > 1e-5:
        row.rounding = max(compared(copy.deepcopy(model), copy.deepcopy(model).double(), entry))
    row.served = len(calls) == len(entry.modes) * len(report.swapped) * len(entry.sizes) * len(dtypes)
    va.swap_back_(twin)
    now, before = ([[*map(type, one.modules())], list(one.state_dict())] for one in (twin, model))
    row.restored = now == before
    return row


def table(rows: list[Row]) -> str:
    cells = [list(Row.HEADER), ["---"] * len(Row.HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="families to measure; the rows are then printed, not written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # small maps
    rows = []
    for entry in ENTRIES:
        if (not options.only or entry.family in options.only) and find_spec(entry.library):
            rows.append(measure(entry))
            print(*rows[-1].cells(), sep="  ", flush=True)
    if not options.only:
        names = ("torch", *dict.fromkeys(entry.library for entry in ENTRIES))
        versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in names if find_spec(name))
        TABLE.write_text(HEAD.format(versions=versions, table=table(rows)))
    sys.exit(not all(row.agrees for row in rows))


if __name__ == "__main__":
    main()
