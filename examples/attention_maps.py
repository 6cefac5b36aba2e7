# %% [markdown]
# # Visualize what a network attends to
#
# The experiments include a small trained network for [recall](../docs/results.md#recall). In this task, glyphs are
# scattered over the cells of a canvas, some on colored cells and some on black cells. For each glyph on a black cell,
# the network predicts the color of the cell with the same glyph: the matching cell. This tutorial analyzes the
# attention block of the network: what does it attend to, do the heads differ, and does attention contribute to the
# result? The same steps work for any network with attention of this library and for every implementation. Fused kernels
# do not return weights, so the weights are computed separately.
#
#     python examples/attention_maps.py
#
# The script takes about ten seconds. The glyphs come with scikit-learn, and the weights with the library.

# %%
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

import vision_attn as va
import vision_attn.networks.models  # registers networks with timm
from vision_attn.networks.capture.figures import save_figure
from vision_attn.networks.contributions import disabled

sys.path += ["examples/experiments", "../experiments"]  # seen from the repository and from a notebook
from recall_task import CELLS, COLORS, NOTHING, PIXELS, canvases

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.set_grad_enabled(False)

model = timm.create_model("recall_attention", pretrained=True).eval()
images, colors = canvases(1000, 16, train=False, generator=torch.Generator().manual_seed(0))  # held-out glyphs
row, column = 4, 2  # the query cell: keep the canvases with a glyph on black there
is_query = colors[:, row, column] != NOTHING
images, colors = images[is_query], colors[is_query, row, column]
predictions = model(images)[:, :, row, column].argmax(1)
top1 = 100 * (predictions == colors).float().mean()
print(f"top-1 {top1:.1f} % on {len(images)} canvases of shape {tuple(images.shape[1:])}")
assert top1 > 98

# %% [markdown]
# `capture` records the attention maps of a forward pass. A query is a position `(y, x)` of the image in pixels; here it
# is the center of the query cell. For each image, head and query, there is one weight for each position of the block's
# feature map, which here corresponds to one cell of the canvas. These weights sum to 1.

# %%
query = (PIXELS * (row + 0.5), PIXELS * (column + 0.5))
with va.capture(model, queries=[query]) as maps:
    model(images)
(site, attention), *_ = maps.items()
shape = tuple(attention.weights.shape)
print(f"{site}: (images, heads, queries, rows, columns) = {shape}, query position {attention.query_positions[0]}")
weights = attention.weights[:, :, 0].flatten(2)  # (b, n, j)
torch.testing.assert_close(weights.sum(2), torch.ones(len(images), 4))

# %% [markdown]
# **What does it attend to?** The matching cell contains the same glyph on a color. Uniform attention would give it one
# of 144 parts, or 0.7 %.

# %%
cells = F.unfold(images, PIXELS, stride=PIXELS).mT  # (b, j, 3·8·8)
glyph = cells[:, CELLS * row + column].view(-1, 3, PIXELS, PIXELS)
match = glyph + (1 - glyph) * torch.tensor([*COLORS.values()])[colors][..., None, None]
is_match = (cells - match.flatten(1)[:, None]).abs().amax(2) < 1e-6  # (b, j)
assert (is_match.sum(1) == 1).all()
blank = cells.amax(2) == 0
other = torch.arange(CELLS**2) != CELLS * row + column
kinds = {"matching cell": is_match, "query cell": ~other, "other glyphs": other & ~is_match & ~blank, "blank": blank}
print("sum of the weights, mean over heads and canvases")
for kind, selected in kinds.items():
    print(f"  {kind:<14}{100 * (weights.mean(1) * selected).sum(1).mean():3.0f} %")
match_weight = (weights * is_match[:, None]).sum(2).mean(0)  # (n,)
assert match_weight.mean() > 0.4

# %%
titles = [f"color of the matching cell: {[*COLORS][color]}" for color in colors[:6].tolist()]
figure = replace(attention, weights=attention.weights[:2]).figure(images[:2], titles=titles[:2], width=7.5)
save_figure(figure, OUTPUT / "attention_maps.png")
print(f"wrote {OUTPUT / 'attention_maps.png'}")
figure

# %% [markdown]
# **Heads.** Each head has separate weights. The first figure shows their mean, and this figure shows each head. On
# every canvas, the last head gives the largest weight to the matching cell, 95 % on average. The other heads also
# attend to the query cell itself. This is a consequence of their initialization: the block was created with
# `qk_norm="match"`, and a glyph is most similar to itself.

# %%
figure = replace(attention, weights=attention.weights[:3]).figure(images[:3], reduction="none", width=9)
save_figure(figure, OUTPUT / "attention_heads.png")
print(f"wrote {OUTPUT / 'attention_heads.png'}")
print("weight of the matching cell, by head:", ", ".join(f"{100 * weight:.0f} %" for weight in match_weight))
assert (weights[:, 3].argmax(1) == is_match.float().argmax(1)).all()
assert match_weight[3] > 0.9
figure

# %% [markdown]
# **Does attention contribute to the result?** Attention maps alone cannot show this. If the block is disabled, each
# prediction depends on one cell only, which contains no information about the color: the accuracy is at chance, 12.5 %
# for eight colors.

# %%
with disabled(model):
    ablated = 100 * (model(images)[:, :, row, column].argmax(1) == colors).float().mean()
print(f"top-1 with the block disabled: {ablated:.1f} %")
assert ablated < 25

# %% [markdown]
# **Statistics.** The exponential of the entropy of a head's weights is an effective number of positions: the number of
# positions with equal weights that have the same entropy, at most 144 here. The distance is the mean distance of the
# attended positions in pixels. The similarity of two heads is 1 if they attend to the same positions and 0 if they have
# no position in common.

# %%
effective, distance = attention.entropy().exp().mean((0, 2)), attention.distance().mean((0, 2))
for head, (count, pixels) in enumerate(zip(effective, distance, strict=True)):
    print(f"head {head}: {count:.1f} effective positions of 144, mean distance {pixels:.0f} pixels")
similarity = attention.similarity().mean(0)
largest = similarity[~torch.eye(4, dtype=torch.bool)].max()
print(f"similarity of two heads: {similarity.min():.2f} to {largest:.2f}")
assert (effective < 4).all()

# %% [markdown]
# **Explore.** `va.explore` writes one HTML page that shows the attention of each head from every position, and the
# prediction with the block disabled; here it shows the prediction for the query cell. Open the page in a browser and
# move the pointer over the image. `vision-attn explore` writes such a page for image files.

# %%
hook = model.register_forward_hook(lambda model, images, scores: scores[:, :, row, column])
page = va.explore(
    model,
    images[:6],
    OUTPUT / "attention_explorer.html",
    classes=[*COLORS],
    titles=titles,
    title=f"What is the color of the cell with the same glyph as row {row + 1}, column {column + 1}?",
)
hook.remove()
print(f"wrote {page}, {page.stat().st_size / 1000:.0f} kB")
assert page.stat().st_size < 300_000

# %% [markdown]
# **Photographs.** Another network of the library is a ResNet-20 with three blocks, trained on CIFAR-100. Its input is
# two downscaled photographs, and the attention maps of its last block are drawn over the large photographs. Positions
# with at most the weight of uniform attention are left uncolored, and the scale shows multiples of uniform attention.
# From the wall of the tower, the block attends to the roof with more than 4× uniform attention.

# %%
classifier = timm.create_model("resnet20_attention.cifar100", pretrained=True).eval()
photographs = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255
photographs = photographs[..., 106:533]  # center crop to a square
mean, std = (torch.tensor(classifier.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
with va.capture(classifier, queries=[(16, 16)]) as maps:
    classifier((F.interpolate(photographs, (32, 32), mode="area") - mean) / std)
last = maps["layer3.2.inserted.attn"]
figure = last.figure(photographs, width=5)
save_figure(figure, OUTPUT / "attention_photographs.png")
print(f"wrote {OUTPUT / 'attention_photographs.png'}")
roof = last.weights.mean(1)[0, 0, :2, :4]  # first photograph, its only query, top left positions
assert 64 * roof.max() > 4
figure

# %% [markdown]
# **Are these the weights that the kernel used?** A fused kernel does not return weights to compare with. However, the
# captured weights, multiplied by the values and projected, must equal the output of the block in every implementation.
# `impl="flex"` is left out because FlexAttention does not support float64.

# %%
attn = model.double().get_submodule(site)
recorded = {}
hook = attn.register_forward_hook(lambda module, inputs, output: recorded.update(x=inputs[0], y=output))
impls = [impl for impl in va.implementations.IMPLS if impl != "flex"]
for impl in impls:
    with va.use_impl(model, impl), va.capture(model) as maps:  # without queries=, every position is a query
        model(images[:100].double())
    weights = maps[site].weights.flatten(3)  # (b, n, i, j)
    v = attn.qkv(recorded["x"]).view(100, 3, 4, 16, 144)[:, 2]  # (b, n, d, j)
    y = torch.einsum("bnij,bndj->bndi", weights, v).reshape(100, 64, 12, 12)  # (b, c, h, w)
    torch.testing.assert_close(attn.proj(y), recorded["y"])
hook.remove()
print("weights times values equal the output of the block with impl =", ", ".join(impls))
