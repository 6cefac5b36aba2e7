# %% [markdown]
# # See what a network attends to
#
# The library comes with a small trained network for [recall](../docs/results.md#recall): glyphs lie scattered over a
# canvas, some on colours, some on black, and for each glyph on black it says which colour has its twin.
# This text looks into its one attention block: where does a cell look that asks, do all heads look at the same, and
# does it matter? Afterwards you can look into any network with attention of this library in it,
# whichever implementation runs it; a fused kernel never holds the weights, so they are computed beside it.
#
#     python examples/attention_maps.py
#
# It takes about ten seconds; the glyphs come with scikit-learn, the weights with the library.

# %%
from dataclasses import replace
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

import vision_attn as va
import vision_attn.networks.models  # registers recall_attention and resnet20_attention with timm
from vision_attn.networks.contributions import disabled
from vision_attn.networks.figures import attention_figure, save_figure
from vision_attn.tools.comparison.recall import CELLS, COLOURS, NOTHING, PIXELS, canvases

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.set_grad_enabled(False)

model = timm.create_model("recall_attention", pretrained=True).eval()
images, colours = canvases(1000, 16, train=False, generator=torch.Generator().manual_seed(0))  # glyphs never seen
row, column = 4, 2  # one cell, and the canvases on which it asks
asking = colours[:, row, column] != NOTHING
images, colours = images[asking], colours[asking, row, column]
answers = model(images)[:, :, row, column].argmax(1)
top1 = 100 * (answers == colours).float().mean()
print(f"right about {top1:.1f} % of {len(images)} canvases of {tuple(images.shape[1:])}")
assert top1 > 98

# %% [markdown]
# `capture` records the maps of a forward pass. A query is a point `(y, x)` of the image in pixels; this one lies in the
# cell that asks. For each image, head and query there is one weight for each cell of the block's map, and they sum to
# one.

# %%
query = (PIXELS * (row + 0.5), PIXELS * (column + 0.5))
with va.capture(model, queries=[query]) as maps:
    model(images)
(site, attention), *_ = maps.items()
print(f"{site}: (images, heads, queries, rows, columns) = {tuple(attention.weights.shape)}, cell {attention.cells[0]}")
weights = attention.weights[:, :, 0].flatten(2)  # (b, n, j)
torch.testing.assert_close(weights.sum(2), torch.ones(len(images), 4))

# %% [markdown]
# **Where does it look?** The twin is the cell that has the same glyph on its colour. Attention that did not care would
# give it one of 144 parts, or 0.7 %.

# %%
cells = F.unfold(images, PIXELS, stride=PIXELS).mT  # (b, j, 3·8·8)
glyph = cells[:, CELLS * row + column].view(-1, 3, PIXELS, PIXELS)
twin = glyph + (1 - glyph) * torch.tensor([*COLOURS.values()])[colours][..., None, None]
is_twin = (cells - twin.flatten(1)[:, None]).abs().amax(2) < 1e-6  # (b, j)
assert (is_twin.sum(1) == 1).all()
blank = cells.amax(2) == 0
other = torch.arange(CELLS**2) != CELLS * row + column
kinds = {"its twin": is_twin, "itself": ~other, "other glyphs": other & ~is_twin & ~blank, "blank cells": blank}
for kind, chosen in kinds.items():
    print(f"{kind:<13}{100 * (weights.mean(1) * chosen).sum(1).mean():3.0f} %")
at_twin = (weights * is_twin[:, None]).sum(2).mean(0)  # of each head
assert at_twin.mean() > 0.4

# %%
titles = [f"the twin is on {[*COLOURS][colour]}" for colour in colours[:6].tolist()]
figure = attention_figure(images[:2], replace(attention, weights=attention.weights[:2]), titles=titles[:2], width=7.5)
save_figure(figure, OUTPUT / "attention_maps.png")
print(f"wrote {OUTPUT / 'attention_maps.png'}")
figure

# %% [markdown]
# **Each head** has weights of its own. The picture averages over them; here they are apart. The last one has the twin
# on top on every canvas, and gives it 95 %. The others look at the cell itself as well, which is how they began: this
# block was made with `qk_norm="match"`.

# %%
figure = attention_figure(images[:3], replace(attention, weights=attention.weights[:3]), reduction="none", width=9)
save_figure(figure, OUTPUT / "attention_heads.png")
print(f"wrote {OUTPUT / 'attention_heads.png'}")
print("at its twin, by head:", ", ".join(f"{100 * share:.0f} %" for share in at_twin))
assert (weights[:, 3].argmax(1) == is_twin.float().argmax(1)).all()
assert at_twin[3] > 0.9
figure

# %% [markdown]
# **Does it matter?** Maps alone do not say so. With the block disabled the same network is left with what each cell
# says by itself, which is nothing: one of eight colours is a guess of 12.5 %.

# %%
with disabled(model):
    closed = 100 * (model(images)[:, :, row, column].argmax(1) == colours).float().mean()
print(f"with the block disabled: {closed:.1f} %")
assert closed < 25

# %% [markdown]
# **In numbers.** The entropy of a head's weights says how widely it looks: its exponential is the number of cells that
# it would look at evenly, 144 at most here. The distance says how far, in pixels. And heads that look at the same cells
# have a similarity of 1, those with no cell in common 0.

# %%
widely, far = attention.entropy().exp().mean((0, 2)), attention.distance().mean((0, 2))
for head, (count, pixels) in enumerate(zip(widely, far, strict=True)):
    print(f"head {head}: as widely as at {count:.1f} of 144 cells evenly, {pixels:.0f} pixels away")
alike = attention.similarity().mean(0)
print("similarity of heads, from", f"{alike.min():.2f} to {alike[~torch.eye(4, dtype=torch.bool)].max():.2f}")
assert (widely < 4).all()

# %% [markdown]
# **To explore.** One page of HTML has all of it: where each head looks from each place, and what the network says with
# its block disabled, here about the one cell that asks on every canvas. Open it in a browser and move the pointer over
# the image. `vision-attn explore` writes such a page of image files.

# %%
hook = model.register_forward_hook(lambda model, images, scores: scores[:, :, row, column])
page = va.explore(
    model,
    images[:6],
    OUTPUT / "attention_explorer.html",
    classes=[*COLOURS],
    titles=titles,
    title=f"Which colour has the twin of the glyph in row {row + 1}, column {column + 1}?",
)
hook.remove()
print(f"wrote {page}, {page.stat().st_size / 1000:.0f} kB")
assert page.stat().st_size < 300_000

# %% [markdown]
# **On photographs.** Another network of the library is a ResNet-20 with three blocks, trained on CIFAR-100. It gets two
# photographs made small, and the maps of its last block are laid over the large ones. A cell that gets no more than an
# even share of the attention stays as it is. The scale says how many shares the others get: from the wall of the tower
# the block looks at its roof, with more than four shares.

# %%
classifier = timm.create_model("resnet20_attention.cifar100", pretrained=True).eval()
photographs = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255
photographs = photographs[..., 106:533]  # the square in the middle
mean, std = (torch.tensor(classifier.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
with va.capture(classifier, queries=[(16, 16)]) as maps:
    classifier((F.interpolate(photographs, (32, 32), mode="area") - mean) / std)
last = maps["layer3.2.inserted.attn"]
figure = attention_figure(photographs, last, width=5)
save_figure(figure, OUTPUT / "attention_photographs.png")
print(f"wrote {OUTPUT / 'attention_photographs.png'}")
roof = last.weights.mean(1)[0, 0, :2, :4]  # of the first photograph and its one query: rows and columns of cells
assert 64 * roof.max() > 4
figure

# %% [markdown]
# **Are these the weights that the kernel used?** It keeps none to compare with. But weights times values,
# projected, have to be the output of the block, in every implementation. `impl="flex"` is left out, since
# FlexAttention does not compute in float64.

# %%
attn = model.double().get_submodule(site)
seen = {}
hook = attn.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], y=output))
impls = [impl for impl in va.IMPLS if impl != "flex"]
for impl in impls:
    with va.use_impl(model, impl), va.capture(model) as maps:  # without queries: from every cell
        model(images[:100].double())
    weights = maps[site].weights.flatten(3)  # (b, n, i, j)
    v = attn.qkv(seen["x"]).view(100, 3, 4, 16, 144)[:, 2]  # (b, n, d, j)
    y = torch.einsum("bnij,bndj->bndi", weights, v).reshape(100, 64, 12, 12)
    torch.testing.assert_close(attn.proj(y), seen["y"])
hook.remove()
print("weights times values are what the block gives out, with", ", ".join(impls))
