"""A small network for features that meet, and the same network without modules, hooks, masks or caches.

Every layer after the first block computes each position separately, and blocks do not attend to padding. So the output
of a padded image at its positions is the output of the image without padding.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from torch import nn
from torch.utils.checkpoint import checkpoint

#: Layers that are followed by a block.
SITES = ("a", "b", "c")


class StoppedError(Exception):
    """Raised by a network in the middle of a forward pass."""


class Net(nn.Module):
    """Convolutions with blocks, and attention of timm in front of them."""

    num_prefix_tokens = 0

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.tokens = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), Attention(8, 2, qkv_bias=True)
        self.a, self.b, self.c, self.head = nn.Conv2d(8, 16, 1), *(nn.Conv2d(16, n, 1) for n in (16, 16, 4))
        self.tokens.fused_attn = False  # torch's fused kernel has no derivatives in forward mode
        self.recompute, self.stop = "", ""

    def forward(self, x):
        one = self.recompute.startswith("one")
        return checkpoint(self.steps, x, use_reentrant="reentrant" in self.recompute) if one else self.steps(x)

    def steps(self, x):
        x = self.norm(self.stem(x))
        x = x + self.tokens(x.flatten(2).mT).mT.reshape(x.shape)
        for site in SITES:
            if self.stop == site:
                raise StoppedError
            x = self.call(getattr(self, site), x)
        return self.call(self.head, x)

    def call(self, layer, x):
        separate = self.recompute in ("reentrant", "without reentry")
        return checkpoint(layer, x, use_reentrant=self.recompute == "reentrant") if separate else layer(x)


class Siamese(nn.Module):
    """A network that runs another one on two inputs, and returns the output of the second."""

    def __init__(self, net):
        super().__init__()
        self.backbone = net

    def forward(self, x):
        if self.backbone.training:  # batch normalization would be updated twice
            return self.backbone(x)
        return 0 * self.backbone(x.flip(0)) + self.backbone(x)


def split_heads(x):
    """Return ``(b, heads, tokens, width)`` for a feature map or tokens ``(b, c, tokens)``."""
    return x.flatten(2).unflatten(1, (2, -1)).mT


@dataclass
class Plain:
    """The same network as an equation of its state dict ``w``, and of the values that ``with`` blocks and calls set."""

    w: dict
    #: options of the blocks: pattern, temperature (0 for no rotation), normalized, kv_stride, proj_drop; True if the
    #: first block has a table of relative positions, and if the second is a transformer block
    options: dict
    blocks: bool = True
    #: the last layer is replaced by attention
    replaced: bool = False
    training: bool = False
    frozen_norm: bool = False
    #: dropouts in training mode although the network is in evaluation mode
    drop: bool = False
    #: layers whose blocks are disabled
    disabled: tuple = ()
    #: second feature map from outside; by default, the output of the first layer
    context: torch.Tensor | None = None
    #: valid size of each image in positions
    valid: list | None = None
    #: size of the feature map to which tables of relative positions are interpolated
    table_size: tuple = (8, 8)
    #: attention weights by layer
    maps: dict = field(default_factory=dict)

    def __call__(self, x):
        """Return the outputs of the images, each with its valid size."""
        first = y = F.conv2d(x, self.w["stem.weight"], self.w["stem.bias"], stride=4)
        self.table_size = y.shape[2:]
        y = self.batch_norm(y)
        y = y + self.attend_tokens(y)
        context = first if self.context is None else self.context
        if self.valid is None:
            return [self.after_tokens(y, context)]
        parts = [(slice(image, image + 1), slice(None), slice(h), slice(w)) for image, (h, w) in enumerate(self.valid)]
        inside = self.context is None  # features from outside are not padded
        return [self.after_tokens(y[part], context[part if inside else part[0]]) for part in parts]

    def after_tokens(self, x, context):
        for site in SITES:
            x = self.part(site, x, context)
        if not self.replaced:
            return self.conv("head", x)
        q, k, v = (split_heads(y) for y in self.conv("head.attn.qkv", x).chunk(3, 1))
        y = self.softmax_attention("head.attn", q, k, v)
        return self.conv("head.attn.proj", y.mT.unflatten(2, x.shape[2:]))

    def part(self, site, x, context):
        """Return the output of a layer and its block."""
        x = self.conv(site, x)
        if not self.blocks or site in self.disabled:
            return x
        if site == "b" and self.options["b"]["transformer"]:
            return self.transformer("b.inserted", x)
        gate = self.w[f"{site}.inserted.gate"].view(-1, 1, 1)
        if site == "b":
            return x + gate * (self.linear("b.inserted.block", x) - x)
        normed = self.norm(f"{site}.inserted.norm", x)
        return x + gate * self.attention(site, normed, normed if site == "a" else context)

    def batch_norm(self, x):
        mean, variance = self.w["norm.running_mean"], self.w["norm.running_var"]
        if self.training and not self.frozen_norm:
            new, count = (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)), x.numel() / x.shape[1]
            with torch.no_grad():
                mean.lerp_(new[0].detach(), 0.1)
                variance.lerp_(new[1].detach() * count / (count - 1), 0.1)
            mean, variance = new
        vectors = mean, variance, self.w["norm.weight"], self.w["norm.bias"]
        mean, variance, weight, bias = (y.view(-1, 1, 1) for y in vectors)
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    def attend_tokens(self, x):
        q, k, v = F.linear(x.flatten(2).mT, self.w["tokens.qkv.weight"], self.w["tokens.qkv.bias"]).chunk(3, -1)
        y = self.softmax_attention("tokens", *(split_heads(y.mT) for y in (q, k, v)))
        return F.linear(y, self.w["tokens.proj.weight"], self.w["tokens.proj.bias"]).mT.reshape(x.shape)

    def softmax_attention(self, name, q, k, v, allowed=None, bias=0):
        """Return ``(b, i, heads · width)`` for queries ``(b, heads, i, width)``."""
        logits = q @ k.mT / math.sqrt(q.shape[-1]) + bias
        weights = (logits if allowed is None else logits.masked_fill(~allowed, -math.inf)).softmax(-1)
        self.maps[name] = weights.detach()
        return (weights @ v).transpose(1, 2).flatten(2)

    def attention(self, site, x, context):
        path, options, (h, w), stride = f"{site}.inserted.attn", self.options[site], x.shape[2:], 1
        if site == "a":
            q, k, v = self.conv(f"{path}.qkv", x).chunk(3, 1)
        else:
            q, (k, v) = self.conv(f"{path}.q", x), self.conv(f"{path}.kv", context).chunk(2, 1)
            stride = options["kv_stride"]
        if stride > 1:
            k, v = (F.avg_pool2d(y, stride, ceil_mode=True) for y in (k, v))
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        groups = {"full": 0 * rows, "rows": rows, "window": rows // 3 * 1000 + columns // 3}
        groups = groups[options["pattern"]].flatten()
        allowed = groups[:, None] == groups if site == "a" else None
        q, k, v = map(split_heads, (q, k, v))
        if options["temperature"]:
            q = self.rotate(q, (h, w), (h, w), options)
            source = x if site == "a" else context
            k = self.rotate(k, [math.ceil(length / stride) for length in source.shape[2:]], (h, w), options)
        bias = self.relative_bias(f"{path}.position", options["pattern"], rows, columns) if options["table"] else 0
        y = self.softmax_attention(path, q, k, v, allowed, bias).mT.reshape(len(x), 16, h, w)
        y = self.conv(f"{path}.proj", y)
        return y * (1 - options["proj_drop"]) if self.training or self.drop else y

    def relative_bias(self, path, pattern, rows, columns):
        """Return the element of the table, ``(heads, 2h - 1, 2w - 1)``, for each query and key."""
        h, w = {"full": (8, 8), "rows": (1, 8), "window": (3, 3)}[pattern]
        table = self.w[f"{path}.relative_position_bias_table"].mT.view(1, 2, 2 * h - 1, 2 * w - 1)
        if pattern == "window":
            rows, columns = rows % 3, columns % 3
        else:  # keys of other rows are masked, wherever the index points
            h, w = (self.table_size[0] if h > 1 else 1), self.table_size[1]
            table = F.interpolate(table, size=(2 * h - 1, 2 * w - 1), mode="bilinear", align_corners=True)
        dy, dx = (at.flatten()[:, None] - at.flatten() for at in (rows * (h > 1), columns))
        return table[0][:, dy + h - 1, dx + w - 1]

    def transformer(self, path, x):
        """Return attention, then an MLP, each with a normalized input and a residual connection."""
        q, k, v = (split_heads(y) for y in self.conv(f"{path}.attn.qkv", self.norm(f"{path}.norm1", x)).chunk(3, 1))
        y = self.softmax_attention(f"{path}.attn", q, k, v).mT.reshape(x.shape)
        x = x + self.conv(f"{path}.attn.proj", y)
        return x + self.conv(f"{path}.fc2", F.gelu(self.conv(f"{path}.fc1", self.norm(f"{path}.norm2", x))))

    def norm(self, name, x):
        weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return F.layer_norm(x.movedim(1, -1), (16,), weight, bias).movedim(-1, 1)

    def rotate(self, x, size, reference, options):
        """Rotate pairs of channels as complex numbers, by rows in the first half and by columns in the second."""
        halves = []
        for axis, (length, queries) in enumerate(zip(size, reference, strict=True)):
            center = torch.arange(length, dtype=torch.float64) + 0.5
            at = 2 * math.pi * (2 * center / length - 1) if options["normalized"] else center * queries / length - 0.5
            angles = at[:, None] * options["temperature"] ** -(torch.arange(2, dtype=torch.float64) / 2)
            halves.append(angles.view(*(length if one == axis else 1 for one in range(2)), 2).expand(*size, 2))
        angles = torch.cat(halves, -1).flatten(0, 1)
        even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def linear(self, path, x):
        q, k, v = (y.flatten(2).unflatten(1, (2, -1)) for y in self.conv(f"{path}.qkv", x).chunk(3, 1))
        y = (v @ k.softmax(-1).mT) @ q.softmax(-2)
        return self.conv(f"{path}.proj", y.flatten(1, 2).view(x.shape))

    def conv(self, name, x):
        return F.conv2d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])
