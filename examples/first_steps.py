# %% [markdown]
# # First steps
#
# Attention put into a network, trained, looked at, and taken out again. Each step is one call of `vision_attn`. The
# reports are tables; where the last line of a cell is a name, a notebook shows what it holds.
#
#     python examples/first_steps.py
#
# It takes about five seconds. The photographs come with scikit-learn, and nothing is downloaded.

# %%
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

import vision_attn as va
import vision_attn.networks.models  # registers recall_attention with timm
from vision_attn.networks.figures import attention_figure, save_figure
from vision_attn.tools.comparison.recall import COLOURS, NOTHING, canvases

torch.manual_seed(0)
OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)

# %% [markdown]
# ## Into a network
#
# Any CNN will do. With `pretrained=True` timm would fetch weights; the steps are the same without.

# %%
model = timm.create_model("resnet18", num_classes=2).eval()
photographs = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255
images, labels = F.interpolate(photographs, (224, 224), mode="area"), torch.tensor([0, 1])  # a temple, a flower
before = model(images)

# %% [markdown]
# **Where would a block fit, and what would it cost?**

# %%
found = va.inspect_model(model, batch_size=2)
assert found.sites[-1].tokens == 49
found

# %% [markdown]
# **Insert** one after the last stage. The network computes what it did before, bit for bit, and a new block learns from
# there.

# %%
report = va.insert_(model, stages=-1)
assert torch.equal(model(images), before)
report

# %% [markdown]
# **Train** what is new, the block and a new head, with any loop and optimizer. All else keeps its values.

# %%
va.freeze_backbone_(model, also_train="fc.*")
optimizer = torch.optim.AdamW(va.parameter_groups(model, lr=3e-4))
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = F.cross_entropy(model.train()(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
print("loss:", " ".join(f"{loss:.2f}" for loss in losses))
assert losses[-1] < losses[0]

# %% [markdown]
# **Does the block contribute?** `contribution` says how large what it adds is, against the map that it is added to, and
# what changes when it is disabled. `gates` are numbers that what it adds is multiplied with, one a channel.

# %%
worth = va.contribution(model, (images, labels))
assert worth.blocks[0].share > 0
worth

# %%
gates = va.gates(model)
assert gates["layer4.1"].shape == (512,)
gates

# %% [markdown]
# **Keep** the block and the head in a small file of their own, take the block **out**, and load it **in** again.

# %%
file = va.save_adapter(model, OUTPUT / "first_steps.safetensors", also="fc.*")
trained = model(images)
va.remove_(model)
again = va.load_adapter_(model, file)
assert torch.equal(model(images), trained)
print(f"wrote {file}: {file.stat().st_size / 1e6:.1f} MB")
again

# %% [markdown]
# ## Into what it attends to
#
# The library comes with a small network that sees each cell of a canvas by itself. It was trained to say which colour
# has the twin of every glyph on black. Where does the marked cell look?

# %%
model = timm.create_model("recall_attention", pretrained=True).eval()
images, colours = canvases(64, 12, train=False, generator=torch.Generator().manual_seed(0))
row, column = 4, 2
asks = colours[:, row, column] != NOTHING  # the canvases on which this cell asks
images, colours = images[asks][:3], colours[asks][:3]
with va.capture(model, queries=[(8 * row + 4, 8 * column + 4)]) as maps, torch.inference_mode():
    answers = model(images).argmax(1)
(attention,) = maps.values()
assert torch.equal(answers[:, row, column], colours[:, row, column])
titles = [f"the network says {[*COLOURS][answer]}" for answer in answers[:, row, column]]
figure = attention_figure(images, attention, titles=titles, width=7)
save_figure(figure, OUTPUT / "first_steps.png")
print(f"wrote {OUTPUT / 'first_steps.png'}")
figure

# %% [markdown]
# ## Into how it is computed
#
# The same weights run in several implementations, from readable einx to torch's fused kernel, and they agree.
# `impl="flex"` is left out, since a CPU needs a C++ compiler for it.

# %%
with torch.inference_mode():
    expected = model(images)
    impls = [impl for impl in va.IMPLS if impl != "flex"]
    for impl in impls:
        with va.use_impl(model, impl):
            difference = (model(images) - expected).abs().max()
        print(f"{impl:<8} {difference:.0e}")
        assert difference < 1e-4

# %% [markdown]
# From here: [train a block in earnest](insert_and_finetune.py), [look closer](attention_maps.py), or
# [read how attention is written](einx_vs_bmm.py).
