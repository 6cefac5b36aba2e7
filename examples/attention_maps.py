# %% [markdown]
# # See what a network attends to
#
# The library comes with a small trained network that says whether the two digits on a canvas are of the same class.
# This text looks into its one attention block: where does a cell of the left digit look, do all heads look at the same,
# and does it matter? Afterwards you can look into any network with attention of this library in it,
# whichever implementation runs it; a fused kernel never holds the weights, so they are computed beside it.
#
#     python examples/attention_maps.py
#
# It takes about five seconds; the digits come with scikit-learn, the weights with the library.

# %%
from dataclasses import replace
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

import vision_attn as va
import vision_attn.networks.models  # registers digit_pairs_attention and resnet20_attention with timm
from vision_attn.networks.contributions import disabled
from vision_attn.networks.figures import attention_figure, save_figure
from vision_attn.tools.training.digits import CLASSES, digit_pairs

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.set_grad_enabled(False)

model = timm.create_model("digit_pairs_attention", pretrained=True).eval()
images, labels = (part[:1000] for part in digit_pairs(train=False))  # of digits that it was not trained with
images = images / 255
top1 = 100 * (model(images).argmax(1) == labels).float().mean()
print(f"right about {top1:.1f} % of {len(images):,} canvases of {tuple(images.shape[1:])}")
assert top1 > 98

# %% [markdown]
# `capture` records the maps of a forward pass. A query is a point `(y, x)` of the image in pixels; `(4, 5)` lies in the
# cell of the left digit's lower right. For each image, head and query there is one weight for each cell of the block's
# map, and they sum to one.

# %%
with va.capture(model, queries=[(4, 5)]) as maps:
    answers = model(images).argmax(1)
(site, attention), *_ = maps.items()
print(f"{site}: (images, heads, queries, rows, columns) = {tuple(attention.weights.shape)}, cell {attention.cells[0]}")
torch.testing.assert_close(attention.weights.sum((3, 4)), torch.ones(1000, 4, 1))

# %% [markdown]
# **Where does it look?** Three of the eleven columns of cells hold the left digit, three the right one. Attention that
# did not care would give them 27 % each and the gap between them 45 %.

# %%
by_column = attention.weights.mean((0, 1, 2)).sum(0)
for place, columns in {"left digit": slice(0, 3), "gap": slice(3, 8), "right digit": slice(8, 11)}.items():
    print(f"{place:<12}{100 * by_column[columns].sum():4.0f} %")
assert by_column[3:8].sum() < 0.15
assert by_column[8:].sum() > 0.45

# %%
sure = torch.where(answers == labels, model(images).softmax(1).amax(1), 0)  # of what it gets right
chosen = torch.cat([torch.where(labels == label, sure, 0).topk(3).indices for label in (1, 0)])
titles = [f"{CLASSES[labels[i]]}; the network says {CLASSES[answers[i]]}" for i in chosen]
six = replace(attention, weights=attention.weights[chosen])
figure = attention_figure(images[chosen], six, titles=titles, width=9)
save_figure(figure, OUTPUT / "attention_maps.png")
print(f"wrote {OUTPUT / 'attention_maps.png'}")
figure

# %% [markdown]
# **Each head** has weights of its own. The picture averages over them; here they are apart. All four look at both
# digits and past the gap between them. In the digits they differ: no two have the same cell on top in more than 36 % of
# the canvases.

# %%
figure = attention_figure(images[chosen], six, reduction="none", width=11)
save_figure(figure, OUTPUT / "attention_heads.png")
print(f"wrote {OUTPUT / 'attention_heads.png'}")
assert (attention.weights.mean((0, 2)).sum(1)[:, 3:8].sum(1) < 0.01).all()  # of each head, what the gap gets
top = attention.weights.flatten(3).argmax(3)[:, :, 0]
assert max((top[:, m] == top[:, n]).float().mean() for m in range(4) for n in range(m)) < 0.365
figure

# %% [markdown]
# **Does it matter?** Maps alone do not say so. With the block disabled the same network is left with what each place
# says by itself, which is nothing: half of the canvases are of either kind.

# %%
with disabled(model):
    closed = 100 * (model(images).argmax(1) == labels).float().mean()
print(f"with the block disabled: {closed:.1f} %")
assert 45 < closed < 55

# %% [markdown]
# **In numbers.** The entropy of a head's weights says how widely it looks: its exponential is the number of cells that
# it would look at evenly, 22 at most here. The distance says how far, in pixels. And heads that look at the same cells
# have a similarity of 1, those with no cell in common 0.

# %%
widely, far = attention.entropy().exp().mean((0, 2)), attention.distance().mean((0, 2))
for head, (count, pixels) in enumerate(zip(widely, far, strict=True)):
    print(f"head {head}: as widely as at {count:.1f} of 22 cells evenly, {pixels:.0f} pixels away")
alike = attention.similarity().mean(0)
print("similarity of heads, from", f"{alike.min():.2f} to {alike[~torch.eye(4, dtype=torch.bool)].max():.2f}")
assert (widely < 11).all()

# %% [markdown]
# **To explore.** One page of HTML has all of it: where each head looks from each place, and what the network says with
# its block disabled. Open it in a browser and move the pointer over the image. `vision-attn explore` writes such a page
# of image files.

# %%
page = va.explore(
    model, images[chosen], OUTPUT / "attention_explorer.html", classes=CLASSES, titles=titles, title="Two digits"
)
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
# projected, have to be what the block gave out, whichever implementation ran it.

# %%
attn = model.get_submodule(site)
seen = {}
hook = attn.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], y=output))
for impl in va.IMPLS:
    with va.use_impl(model, impl), va.capture(model) as maps:  # without queries: from every cell
        model(images[:100])
    weights = maps[site].weights.flatten(3)  # (b, n, i, j)
    v = attn.qkv(seen["x"]).view(100, 3, 4, 8, 22)[:, 2]  # (b, n, d, j)
    y = torch.einsum("bnij,bndj->bndi", weights, v).reshape(100, 32, 2, 11)
    torch.testing.assert_close(attn.proj(y), seen["y"])
hook.remove()
print("weights times values are what the block gives out, with", ", ".join(va.IMPLS))
