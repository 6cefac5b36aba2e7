# %% [markdown]
# # Insert attention, train it alone, and remove it again
#
# Glyphs are scattered over the cells of a canvas, some on colored cells and some on black cells. For each glyph on
# black, the network has to predict the color of the cell with the same glyph. A pretrained CNN that processes every
# cell separately cannot solve this task. With an inserted attention block it can, because attention compares cells. The
# same steps work for your own network.
#
#     python examples/insert_and_finetune.py
#
# The script takes about six seconds. The images come with scikit-learn.

# %%
import sys
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import vision_attn as va
import vision_attn.networks.models  # registers networks with timm

sys.path += ["examples/experiments", "../experiments"]  # seen from the repository and from a notebook
from recall_task import NOTHING, canvases

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)


def train(model, groups, steps):
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        images, colors = canvases(16, 8, train=True, generator=generator)  # 8 pairs of glyphs on each canvas
        loss = F.cross_entropy(model(images), colors, ignore_index=NOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.inference_mode()
def top1(model, images, colors):
    return 100 * (model(images).argmax(1) == colors)[colors != NOTHING].float().mean().item()


# %% [markdown]
# **Load a backbone**: the convolutions of a pretrained network, without the block that it contains. Any pretrained
# network works in the same way. The assertion shows that a prediction depends only on the 8×8 pixels of its cell.

# %%
model = timm.create_model("recall_attention", pretrained=True)
va.remove_(model)
images, colors = canvases(64, 8, train=False, generator=torch.Generator().manual_seed(1))  # held-out glyphs

canvas = torch.rand(1, 3, 96, 96, requires_grad=True)
(gradient,) = torch.autograd.grad(model.eval()(canvas)[0, :, 0, 0].sum(), canvas)
assert 0 < gradient.count_nonzero() == gradient[..., :8, :8].count_nonzero()  # only the 8×8 pixels of the cell

# %% [markdown]
# **Train without attention**: with the backbone frozen and a new head, the accuracy is at chance, 12.5 %, because no
# position has information about other cells.

# %%
model.fc = torch.nn.Conv2d(model.num_features, 8, 1)
va.freeze_backbone_(model, also_train="fc.*")
train(model, va.parameter_groups(model, lr=0.01), steps=20)
without_attention = top1(model, images, colors)
print(f"top-1 with a new head only: {without_attention:.1f} %")
assert without_attention < 22

# %% [markdown]
# **Insert** a block after the second stage. The output remains bitwise identical, and the keys of the state dict do not
# change.

# %%
names = list(model.state_dict())
before = model(images)
print(va.insert_(model, stages="stage2", num_heads=4, qk_norm="match", example_input=images[:2]))
assert torch.equal(model(images), before)
assert [name for name in model.state_dict() if ".inserted." not in name] == names

# %% [markdown]
# **Train** only the block and the head. Then measure the contribution of the block: the size of its output relative to
# the feature map that it is added to, and the number of predictions that change when it is disabled.

# %%
va.freeze_backbone_(model, also_train="fc.*")
backbone = [name for name in names if not name.startswith("fc.")]
frozen = {name: model.state_dict()[name].clone() for name in backbone}
train(model, va.parameter_groups(model, lr=0.01), steps=60)
with_attention = top1(model, images, colors)
contribution = va.contribution(model, (images, colors))
print(contribution)
assert contribution.blocks[0].ratio > 0.1
assert contribution.all_blocks.predictions_changed > 0.2 * contribution.predictions
print(f"top-1 with attention: {with_attention:.1f} %")
assert with_attention > without_attention + 40
assert all(torch.equal(model.state_dict()[name], value) for name, value in frozen.items())

# %% [markdown]
# **Save** the trained parameters to a small separate file, **remove** the block from the network, and **load** the file
# again.

# %%
file = va.save_adapter(model, OUTPUT / "recall.safetensors", also="fc.*")
after = model(images)
va.remove_(model)
assert list(model.state_dict()) == names
model.fc.reset_parameters()  # the file also contains the head
print(va.load_adapter_(model, file))
assert torch.equal(model(images), after)
print(f"wrote {file}: {file.stat().st_size / 1e3:.0f} kB")
