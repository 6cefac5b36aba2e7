"""What ``swap_`` knows of each attention module: exchanged, it gives the same numbers and gradients, in float64."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import timm
import timm.models as tm
import torch
import torch.nn.functional as F
from timm.layers import Attention as TimmAttention
from timm.layers import RelPosBias, RelPosMlp
from timm.layers.attention2d import MultiQueryAttentionV2
from timm.layers.attention_pool2d import AttentionPool2d
from timm.layers.halo_attn import HaloAttn
from timm.layers.non_local_attn import NonLocalAttn
from timm.models.beit import Attention as BeitAttention
from timm.models.efficientformer_v2 import Attention2d as TalkingHeads
from timm.models.eva import EvaAttention
from timm.models.nextvit import EfficientAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import nn
from torchvision.models import SwinTransformer
from torchvision.models.swin_transformer import PatchMergingV2, ShiftedWindowAttentionV2, SwinTransformerBlockV2

import vision_attn as va
from vision_attn.attention.blocks import EXCHANGED
from vision_attn.attention.reference import neighborhood
from vision_attn.networks import convert
from vision_attn.networks.convert.layer import LAYERS
from vision_attn.networks.convert.refusal import REFUSED, path_of

WINDOW = (2, 3)
N = WINDOW[0] * WINDOW[1]


def diffusers_attention(*given, **options):
    """What imports for seconds is imported in a test, not in every process that collects them."""
    from diffusers.models.attention_processor import Attention

    return Attention(*given, **options)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module):
    """In float64 with random numbers for every parameter, in training mode, in which nothing is kept for later."""
    module = module.double()
    module.train()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * randn(*parameter.shape, seed=seed))
    return module


def results(module, arguments):
    """What it gives, and the slopes of that by the arguments and parameters."""
    arguments = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.manual_seed(0)  # the network of a relative position may drop
    y = module(*arguments)
    y = y[0] if isinstance(y, tuple) else y
    inputs = [x for x in (*arguments, *module.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return [y, *torch.autograd.grad(y, inputs, randn(*y.shape, seed=9), allow_unused=True)]


def assert_exchanged(module, *calls, atol=1e-10):
    """By a block that runs once in each call, and gives what the module gave."""
    module = randomised(module)
    expected = [results(module, arguments) for arguments in calls]
    report = va.swap_(module)
    assert len(report) == 1, report
    assert report.swapped[0].difference < 1e-10
    ran = []
    vars(module)[EXCHANGED].block.register_forward_hook(lambda *_: ran.append(1))
    for arguments, before in zip(calls, expected, strict=True):
        for ours, theirs in zip(results(module, arguments), before, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert len(ran) == len(calls)


# --- stand-ins for classes of repositories, of the same parts and names -----------------------------------------------


def of(path):
    """A class with the path of another."""

    def renamed(kind):
        kind.__module__, _, kind.__qualname__ = path.rpartition(".")
        return kind

    return renamed


class QKVAttention(nn.Module):
    """Rows (qkv, heads, width); the legacy one has (heads, qkv, width)."""

    axes = (1, 0, 2)

    def __init__(self, n_heads):
        super().__init__()
        self.n_heads = n_heads

    def forward(self, qkv):
        shape = (3, self.n_heads) if self.axes[0] == 1 else (self.n_heads, 3)
        q, k, v = qkv.unflatten(1, (*shape, -1)).movedim(self.axes[0], 0)  # (b, n, d, tokens)
        root = q.shape[2] ** -0.25
        return (v @ torch.softmax((q * root).mT @ (k * root), dim=-1).mT).flatten(1, 2)


class QKVAttentionLegacy(QKVAttention):
    axes = (2, 0, 1)


@of("guided_diffusion.unet.AttentionBlock")
class Guided(nn.Module):
    def __init__(self, channels, heads, order):
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(4, channels), order(heads)
        self.qkv, self.proj_out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        tokens = x.flatten(2)
        return (tokens + self.proj_out(self.attention(self.qkv(self.norm(tokens))))).view(x.shape)


@of("ldm.modules.diffusionmodules.model.AttnBlock")
class Latent(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (layer(y).flatten(2) for layer in (self.q, self.k, self.v))
        y = v @ torch.softmax(q.mT @ k * q.shape[1] ** -0.5, dim=-1).mT
        return x + self.proj_out(y.view(x.shape))


@of("diffusers.models.attention.AttentionBlock")
class OldDiffusers(nn.Module):
    rescale_output_factor = 2.0

    def __init__(self, channels, num_head_size=None):
        super().__init__()
        self.channels, self.num_head_size = channels, num_head_size
        self.group_norm = nn.GroupNorm(4, channels)
        self.query, self.key, self.value, self.proj_attn = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, hidden_states):
        t = self.group_norm(hidden_states).flatten(2).mT
        heads = self.channels // self.num_head_size
        q, k, v = (layer(t).unflatten(2, (heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = self.proj_attn(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (y.mT.view(hidden_states.shape) + hidden_states) / self.rescale_output_factor


class Sagan(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.query_conv, self.key_conv = (nn.Conv2d(channels, channels // 4, 1) for _ in range(2))
        self.value_conv, self.gamma = nn.Conv2d(channels, channels, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        q, k, v = (layer(x).flatten(2) for layer in (self.query_conv, self.key_conv, self.value_conv))
        weights = torch.softmax(q.mT @ k, dim=-1)
        return self.gamma * (v @ weights.mT).view(x.shape) + x, weights


class Absolute(nn.Module):
    def __init__(self, side, width):
        super().__init__()
        self.height, self.width = (nn.Parameter(torch.randn(side, width)) for _ in range(2))

    def forward(self, q):
        return q @ (self.height[:, None] + self.width[None]).flatten(0, 1).T


class Relative(nn.Module):
    def __init__(self, side, width):
        super().__init__()
        self.rel_height, self.rel_width = (nn.Parameter(torch.randn(2 * side - 1, width)) for _ in range(2))

    def forward(self, q):
        side = (len(self.rel_height) + 1) // 2
        y, x = torch.arange(side**2) // side, torch.arange(side**2) % side
        tables = (table[p[None] - p[:, None] + side - 1] for table, p in ((self.rel_height, y), (self.rel_width, x)))
        return torch.einsum("bnid,ijd->bnij", q, sum(tables))


@of("bottleneck_transformer_pytorch.bottleneck_transformer_pytorch.Attention")
class Lucidrains(nn.Module):
    def __init__(self, channels, side, heads, positions, width=5):
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.to_qkv, self.pos_emb = nn.Conv2d(channels, 3 * heads * width, 1, bias=False), positions(side, width)

    def forward(self, x):
        q, k, v = self.to_qkv(x).flatten(2).unflatten(1, (3, self.heads, -1)).mT.movedim(1, 0)
        q = self.scale * q
        y = torch.softmax(q @ k.mT + self.pos_emb(q), dim=-1) @ v
        return y.mT.flatten(1, 2).unflatten(2, x.shape[2:])


class Natten(nn.Module):
    def __init__(self, embed_dim, num_heads, kernel_size, stride=None, dilation=None, is_causal=None, scale=0.7):
        super().__init__()
        ones = (1,) * len(kernel_size)
        self.num_heads, self.scale, self.kernel_size = num_heads, scale, kernel_size
        self.stride, self.dilation, self.is_causal = stride or ones, dilation or ones, is_causal or (False,) * len(ones)
        self.qkv, self.proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x):
        """Attention with the mask that natten's own reference computes for each pair of positions."""
        allowed = torch.ones(1, 1, dtype=torch.bool)
        for axis in zip(x.shape[1:-1], self.kernel_size, self.dilation, self.stride, self.is_causal, strict=True):
            assert axis[1] * axis[2] <= axis[0], "natten's kernel must fit into its map"
            relation = torch.from_numpy(neighborhood(*axis).allowed)
            allowed = (allowed[:, None, :, None] & relation[:, None, :]).flatten(2).flatten(0, 1)
        q, k, v = self.qkv(x.flatten(1, -2)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2).view(x.shape)))


NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D = (
    of(f"natten.modules.{name}")(type(name, (Natten,), {}))
    for name in (f"NeighborhoodAttention{r}D" for r in (1, 2, 3))
)

# --- exchanged --------------------------------------------------------------------------------------------------------

swin, swin_v2 = tm.swin_transformer.WindowAttention, tm.swin_transformer_v2.WindowAttention
mask = randn(2, N, N, seed=5)
#: A module, and calls of it.
MODULES = {
    "vit, masked": (lambda: TimmAttention(8, 2), [(randn(2, 5, 8), randn(5, 5, seed=1))]),
    "torch, values of their own width": (
        lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True),
        [(randn(2, 4, 8), randn(2, 6, 5, seed=1), randn(2, 6, 3, seed=2), None, False)],
    ),
    "swin": (lambda: swin(8, 2, window_size=WINDOW), [(randn(4, N, 8),), (randn(4, N, 8), mask)]),
    "swin, head width": (lambda: swin(8, 2, head_dim=3, window_size=WINDOW), [(randn(4, N, 8), mask)]),
    "swin v2": (lambda: swin_v2(8, WINDOW, 2), [(randn(4, N, 8),), (randn(4, N, 8), mask)]),
    "swin v2, pretrained": (
        lambda: swin_v2(8, WINDOW, 2, qkv_bias=False, pretrained_window_size=(4, 4)),
        [(randn(2, N, 8),)],
    ),
    "torchvision swin v2": (
        lambda: ShiftedWindowAttentionV2(8, [2, 3], [1, 1], 2),
        [(randn(2, 4, 6, 8),), (randn(2, 5, 7, 8),)],
    ),
    "beit": (lambda: BeitAttention(8, 2, qkv_bias=True, window_size=WINDOW), [(randn(2, N + 1, 8),)]),
    "beit, shared bias": (
        lambda: BeitAttention(8, 2, qkv_bias=True),
        [(randn(2, 5, 8),), (randn(2, 5, 8), randn(1, 2, 5, 5, seed=2))],
    ),
    "vit_srelpos": (
        lambda: RelPosAttention(8, 2, qk_norm=True, rel_pos_cls=partial(RelPosMlp, window_size=WINDOW)),
        [(randn(2, N, 8),)],
    ),
    "vit_relpos, class token": (
        lambda: RelPosAttention(8, 2, rel_pos_cls=partial(RelPosBias, window_size=WINDOW, prefix_tokens=1)),
        [(randn(2, N + 1, 8),)],
    ),
    "vit_srelpos, shared": (
        lambda: RelPosAttention(8, 2),
        [(randn(2, N, 8),), (randn(2, N, 8), randn(1, 2, N, N, seed=2))],
    ),
    "efficientformer": (lambda: tm.efficientformer.Attention(8, 3, 2, 1.5, resolution=(2, 3)), [(randn(2, 6, 8),)]),
    "caformer": (lambda: tm.metaformer.Attention(8, head_dim=4), [(randn(2, 5, 8),)]),
    "nextvit": (lambda: EfficientAttention(8, head_dim=4), [(randn(2, 8, 8),)]),
    "nextvit, strided": (lambda: EfficientAttention(8, head_dim=4, sr_ratio=2), [(randn(2, 8, 8),)]),
    "visformer": (lambda: tm.visformer.Attention(8, 2, head_dim_ratio=0.5), [(randn(2, 8, 3, 4),)]),
    "fastvit": (lambda: tm.fastvit.Attention(8, 4, qkv_bias=True), [(randn(2, 8, 3, 4),)]),
    "halo": (
        lambda: HaloAttn(12, num_heads=3, dim_head=5, block_size=2, halo_size=1, qkv_bias=True),
        [(randn(2, 12, 4, 6),)],
    ),
    "halo, strided": (
        lambda: HaloAttn(8, num_heads=2, block_size=4, stride=2, avg_down=True, scale_pos_embed=True),
        [(randn(2, 8, 4, 8),)],
    ),
    "multi-query v2": (
        lambda: MultiQueryAttentionV2(8, 6, 3, key_dim=5, value_dim=4),
        [(randn(2, 8, 3, 4),), (randn(2, 8, 3, 4), randn(2, 8, 2, 2, seed=1))],
    ),
    "attention pool": (lambda: AttentionPool2d(8, (3, 4), num_heads=2), [(randn(2, 8, 3, 4),)]),
    "attention pool, map": (
        lambda: AttentionPool2d(8, (3, 4), 5, num_heads=2, qkv_separate=True, pool_type="", class_token=True),
        [(randn(2, 8, 3, 4),)],
    ),
    "non-local": (lambda: NonLocalAttn(16), [(randn(2, 16, 3, 4),)]),
    "diffusers": (lambda: diffusers_attention(8, heads=2, dim_head=3), [(randn(2, 5, 8),)]),
    "diffusers, crossing": (
        lambda: diffusers_attention(8, 6, heads=2, dim_head=4, bias=True, scale_qk=False),
        [(randn(2, 5, 8), randn(2, 4, 6, seed=1))],
    ),
    "diffusers, of its VAE": (
        lambda: diffusers_attention(
            8, heads=2, dim_head=4, bias=True, norm_num_groups=4, residual_connection=True, rescale_output_factor=2.0
        ),
        [(randn(2, 8, 3, 4),), (randn(2, 5, 8),)],
    ),
    "diffusers, names of before": (lambda: OldDiffusers(8, 2), [(randn(2, 8, 3, 4),)]),
    "guided diffusion": (lambda: Guided(8, 2, QKVAttention), [(randn(2, 8, 3, 4),)]),
    "guided diffusion, legacy": (lambda: Guided(8, 2, QKVAttentionLegacy), [(randn(2, 8, 3, 4),)]),
    "latent diffusion": (lambda: Latent(8), [(randn(2, 8, 3, 4),)]),
    "lucidrains, relative": (lambda: Lucidrains(8, 3, 2, Relative), [(randn(2, 8, 3, 3),)]),
    "lucidrains, absolute": (lambda: Lucidrains(8, 3, 2, Absolute), [(randn(2, 8, 3, 3),)]),
    "natten 1D": (lambda: NeighborhoodAttention1D(8, 2, (3,)), [(randn(2, 7, 8),)]),
    "natten 2D": (
        lambda: NeighborhoodAttention2D(8, 2, (3, 4), (1, 2), (2, 1), (True, False)),
        [(randn(2, 7, 6, 8),)],
    ),
    "natten 3D": (lambda: NeighborhoodAttention3D(8, 2, (2, 2, 3), (2, 1, 1)), [(randn(2, 4, 3, 5, 8),)]),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_exchanged_module_gives_the_same(name):
    make, calls = MODULES[name]
    torch.manual_seed(0)
    assert_exchanged(make(), *calls)


def timm_model(name, **options):
    return timm.create_model(name, num_classes=5, **options)


def torchvision_swin_v2():
    blocks = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2, "stochastic_depth_prob": 0.0}
    return SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], **blocks)


def shifted(name, window, **options):
    small = {"img_size": 8 * window, "window_size": window, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4)}
    return timm_model(name, **small, strict_img_size=False, **options)


tiny = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
#: A network, its images' sizes, and how many modules are exchanged.
NETWORKS = {
    "swin": (lambda: shifted("swin_tiny_patch4_window7_224", 4), [(32, 32), (40, 52)], 4),
    "swin v2": (lambda: shifted("swinv2_tiny_window8_256", 4), [(32, 32), (40, 52)], 4),
    "torchvision swin v2": (torchvision_swin_v2, [(64, 64), (68, 40)], 4),
    "beit": (lambda: timm_model("beit_base_patch16_224", **tiny), [(32, 32)], 2),
    "vit_srelpos": (lambda: timm_model("vit_srelpos_small_patch16_224", **tiny), [(32, 32)], 2),
    "visformer": (
        lambda: timm_model("visformer_tiny", img_size=64, embed_dim=32, depth=(1, 1, 1), num_heads=2),
        [(64, 64)],
        2,
    ),
}


def diffusion(kind):
    import diffusers

    stages = {
        "AutoencoderKL": {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2},
        "UNet2DModel": {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
            "layers_per_block": 1,
        },
    }
    return getattr(diffusers, kind)(block_out_channels=(16, 32), norm_num_groups=8, sample_size=16, **stages[kind])


NETWORKS["vae"] = (lambda: diffusion("AutoencoderKL"), [(16, 24)], 2)
NETWORKS["unet2d"] = (lambda: diffusion("UNet2DModel"), [(16, 24)], 4)


def call(network, x):
    arguments = (x, torch.tensor([3])) if type(network).__name__ == "UNet2DModel" else (x,)
    y = network(*arguments)
    return y if isinstance(y, torch.Tensor) else y.sample


@pytest.mark.parametrize("name", NETWORKS)
def test_a_whole_network_gives_the_same(name):
    """As the network calls its attention: with its masks and its words for them, on windows that it pads."""
    make, sizes, exchanged = NETWORKS[name]
    network = randomised(make())
    network.eval()
    images = [randn(2, 3, *size) for size in sizes]
    with torch.no_grad():
        expected = [call(network, x) for x in images]
        assert len(va.swap_(network)) == exchanged
        ran = []
        for module in network.modules():
            if EXCHANGED in vars(module):
                vars(module)[EXCHANGED].block.register_forward_hook(lambda *_: ran.append(1))
        for x, y in zip(images, expected, strict=True):
            assert y.std() > 1e-3
            torch.testing.assert_close(call(network, x), y, rtol=1e-10, atol=1e-10)
    assert len(ran) == len(images) * exchanged


def test_a_processor_of_its_own_is_refused_and_set_later_serves_itself():
    layer = diffusers_attention(8, heads=2, dim_head=4)
    va.swap_(layer)
    x = torch.randn(1, 3, 8)
    layer.set_processor(lambda attn, hidden_states, **others: 2 * hidden_states)
    torch.testing.assert_close(layer(x), 2 * x)
    va.swap_back_(layer)
    with pytest.raises(
        ValueError, match=r"Attention.processor cannot be carried over: .*; set the one that it is made"
    ):
        convert.from_diffusers_attention(layer)
    for options, name in (
        ({"qk_norm": "layer_norm"}, "norm_q"),
        ({"cross_attention_norm": "layer_norm"}, "norm_cross"),
    ):
        with pytest.raises(ValueError, match=rf"Attention.{name} cannot be carried over"):
            convert.from_diffusers_attention(diffusers_attention(8, heads=2, dim_head=4, **options))


REFUSALS = {
    "timm.models.levit.Attention": lambda: tm.levit.Attention(8, 4, 2, resolution=3),
    "timm.models.efficientformer_v2.Attention2d": lambda: TalkingHeads(8, 4, 2, resolution=3),
    "timm.models.edgenext.CrossCovarianceAttn": lambda: tm.edgenext.CrossCovarianceAttn(8, 2),
    "timm.models.eva.EvaAttention": lambda: EvaAttention(8, 2, scale_norm=False),
}


@pytest.mark.parametrize("path", REFUSALS)
def test_what_no_block_stands_for_is_left_with_a_reason(path):
    report = va.swap_(nn.Sequential(REFUSALS[path]()))
    assert [one.reason for one in report.left] == [REFUSED[path]]
    with pytest.raises(ValueError, match=f"^module must be .*; got {path}: {REFUSED[path][:40]}"):
        convert.from_timm_attention(REFUSALS[path]())


def test_every_path_is_that_of_a_class():
    import importlib

    for path in LAYERS:
        module, _, name = path.rpartition(".")
        if module.startswith(("timm.", "torch", "diffusers.")) and path not in MISSING:
            assert isinstance(getattr(importlib.import_module(module), name), type), path


#: Of versions before the ones that are tested with.
MISSING = ("timm.models.vision_transformer.Attention", "diffusers.models.attention.AttentionBlock")


@pytest.mark.parametrize("name", MODULES)
def test_rows_in_a_wrong_order_are_found_out(name, monkeypatch):
    make, _ = MODULES[name]
    torch.manual_seed(0)
    module = nn.Sequential(make())
    path = next(path_of(kind) for kind in type(module[0]).__mro__ if path_of(kind) in LAYERS)
    family = LAYERS[path]

    def wrong(module):
        return {name: backwards(x) if name in ("qkv", "kv") else x for name, x in family.weights(module).items()}

    monkeypatch.setitem(LAYERS, path, replace(family, weights=wrong))
    (left,) = va.swap_(module).left
    assert "does not compute what it does: outputs have a difference of" in left.reason


# --- converted --------------------------------------------------------------------------------------------------------

ROWS = ["height_rel", "width_rel"]
#: A converter, a layer, and a map; how it is run where it is not called with the map.
CONVERTED = {
    "halo": ("from_timm_halo_attn", MODULES["halo"][0], randn(2, 12, 4, 6)),
    "multi-query v2": ("from_timm_multi_query_attention2d", MODULES["multi-query v2"][0], randn(2, 8, 3, 4)),
    "non-local": ("from_timm_non_local_attn", MODULES["non-local"][0], randn(2, 16, 3, 4)),
    "guided": ("from_guided_diffusion_attention", MODULES["guided diffusion"][0], randn(2, 8, 3, 4)),
    "guided, legacy": ("from_guided_diffusion_attention", MODULES["guided diffusion, legacy"][0], randn(2, 8, 3, 4)),
    "latent": ("from_latent_diffusion_attention", MODULES["latent diffusion"][0], randn(2, 8, 3, 4)),
    "sagan": ("from_sagan_attention", lambda: Sagan(8), randn(2, 8, 3, 4)),
    "relative": ("from_lucidrains_attention", MODULES["lucidrains, relative"][0], randn(2, 8, 3, 3)),
    "absolute": ("from_lucidrains_attention", MODULES["lucidrains, absolute"][0], randn(2, 8, 3, 3)),
    "diffusers": (
        "from_diffusers_attention",
        lambda: diffusers_attention(8, heads=2, dim_head=4, norm_num_groups=4, residual_connection=True),
        randn(2, 8, 3, 4),
    ),
    **{f"natten {axes}D": ("from_natten", *MODULES[f"natten {axes}D"]) for axes in (1, 2, 3)},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_layer_gives_the_same_and_is_trained_where_it_was(name):
    converter, make, x = CONVERTED[name]
    torch.manual_seed(0)
    layer = randomised(make()).eval()
    x = x[0][0].movedim(-1, 1) if isinstance(x, list) else x
    block = getattr(convert, converter)(layer)
    x = x.clone().requires_grad_()
    got, expected = block(x), layer(x.movedim(1, -1)) if "natten" in name else layer(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected = expected.movedim(-1, 1) if "natten" in name else expected
    slope = randn(*expected.shape, seed=3)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    for ours, theirs in zip(torch.autograd.grad(got, x, slope), torch.autograd.grad(expected, x, slope), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"^module must be"):
        getattr(convert, converter)(nn.Linear(8, 8))
    frozen = {key for key, p in block.named_parameters() if not p.requires_grad}
    assert frozen <= {"gate", "proj.weight", "attn.proj.weight"}
    assert not block.training


@pytest.mark.parametrize("name", [name for name in CONVERTED if name != "multi-query v2"])  # whose rows are kernels
def test_a_converter_finds_out_a_wrong_order(name, monkeypatch):
    converter, make, _ = CONVERTED[name]
    for room in ("repositories", "diffusers_layers", "timm_maps", "timm_tokens"):
        module = sys.modules[f"vision_attn.networks.convert.{room}"]
        rows_of = module.rows_of
        monkeypatch.setattr(module, "rows_of", lambda layer, rows_of=rows_of: backwards(rows_of(layer)))
    with pytest.raises(convert.ConversionError, match="does not compute what it does: outputs have a difference of"):
        getattr(convert, converter)(make().eval())


def backwards(rows):
    return rows._replace(weight=rows.weight.flip(0), bias=None if rows.bias is None else rows.bias.flip(0))
