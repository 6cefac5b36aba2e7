# %% [markdown]
# # Insert attention, train it alone, take it out again
#
# Glyphs lie on colored cells and on black ones: which color has the twin of each black glyph? A pretrained CNN that
# processes every cell separately cannot answer. Attention inserted into it can, since it compares cells. Afterwards you
# can do the same with a network of your own.
#
#     python examples/insert_and_finetune.py
#
# It takes about six seconds; the images come with scikit-learn.

# %%
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import vision_attn as va
import vision_attn.networks.models  # registers the networks with timm
from vision_attn.tools.comparison.recall import NOTHING, canvases

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)


def train(model, groups, steps):
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], steps)
    draw = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        images, colors = canvases(16, 8, train=True, generator=draw)  # 8 pairs on each canvas
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
# **The backbone**: the convolutions of a pretrained network, without its own block. Any pretrained network would do.

# %%
model = timm.create_model("recall_attention", pretrained=True)
va.remove_(model)
held_out, answers = canvases(64, 8, train=False, generator=torch.Generator().manual_seed(1))  # glyphs not in training

canvas = torch.rand(1, 3, 96, 96, requires_grad=True)
(gradient,) = torch.autograd.grad(model.eval()(canvas)[0, :, 0, 0].sum(), canvas)
assert 0 < gradient.count_nonzero() == gradient[..., :8, :8].count_nonzero()  # only the cell's 8×8 pixels

# %% [markdown]
# **Without attention**, with the backbone frozen and a new head: chance, 12.5 %, since no cell has information about
# another.

# %%
model.fc = torch.nn.Conv2d(model.num_features, 8, 1)
va.freeze_backbone_(model, also_train="fc.*")
train(model, va.parameter_groups(model, lr=0.01), steps=20)
without = top1(model, held_out, answers)
print(f"color of the twin, a new head alone: {without:.1f} %")
assert without < 22

# %% [markdown]
# **Insert** a block after the second stage. The output stays bitwise identical, and the names in the state dict stay.

# %%
names = list(model.state_dict())
before = model(held_out)
print(va.insert_(model, stages="stage2", num_heads=4, qk_norm="match", example_input=held_out[:2]))
assert torch.equal(model(held_out), before)
assert [name for name in model.state_dict() if ".inserted." not in name] == names

# %% [markdown]
# **Train** the block and the head, nothing else. Then measure the contribution of the block: how large its output is
# against the feature map that it is added to, and how many predictions change when it is disabled.

# %%
va.freeze_backbone_(model, also_train="fc.*")
backbone = [name for name in names if not name.startswith("fc.")]
frozen = {name: model.state_dict()[name].clone() for name in backbone}
train(model, va.parameter_groups(model, lr=0.01), steps=60)
with_attention = top1(model, held_out, answers)
worth = va.contribution(model, (held_out, answers))
print(worth)
assert worth.blocks[0].share > 0.1
assert worth.together.changed > 0.2 * worth.predictions
print(f"color of the twin, with attention: {with_attention:.1f} %")
assert with_attention > without + 40
assert all(torch.equal(model.state_dict()[name], value) for name, value in frozen.items())

# %% [markdown]
# **Keep** what was trained in a small file of its own, take the block **out** of the network, and load it **in** again.

# %%
file = va.save_adapter(model, OUTPUT / "recall.safetensors", also="fc.*")
after = model(held_out)
va.remove_(model)
assert list(model.state_dict()) == names
model.fc.reset_parameters()  # the head is in the file too
print(va.load_adapter_(model, file))
assert torch.equal(model(held_out), after)
print(f"wrote {file}: {file.stat().st_size / 1e3:.0f} kB")
