# %% [markdown]
# # Insert attention, train it alone, take it out again
#
# A network that reads one handwritten digit is asked something else: are the *two* digits on this canvas of the same
# class? It sees at most 17 of the canvas's 44 columns at a place, then averages over all places, so it cannot compare
# what is at both ends. Attention inserted into it can. Afterwards you can do the same with a network of your own.
#
#     python examples/insert_and_finetune.py
#
# It takes about seven seconds; the images come with scikit-learn.

# %%
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import vision_attn as va
import vision_attn.networks.models  # registers digit_pairs with timm
from vision_attn.tools.training.digits import digit_pairs

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)


def train(model, groups, images, labels, steps):
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], steps)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.inference_mode()
def top1(model, images, labels):
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


# %% [markdown]
# **The backbone**: a small CNN that names the one digit in the middle of its canvas. Any pretrained network would do.

# %%
source = load_digits()
digits = F.pad(torch.tensor(source.images, dtype=torch.float32)[:, None] / 16, (18, 18))  # (1797, 1, 8, 44)
order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))  # as digit_pairs holds digits out
digits, classes = digits[order], torch.tensor(source.target)[order]
model = timm.create_model("digit_pairs", num_classes=10)
train(model, [{"params": model.parameters(), "lr": 6e-3}], digits[:1200], classes[:1200], steps=100)
reads = top1(model, digits[1200:], classes[1200:])
print(f"names a digit it has not seen: {reads:.1f} %")
assert reads > 90

canvas = torch.rand(1, 1, 8, 44, requires_grad=True)
features = model.forward_features(canvas)[0]
columns = [torch.autograd.grad(part.sum(), canvas, retain_graph=True)[0].any(2).sum() for part in features.unbind(2)]
assert max(columns) == 17  # that a place sees

# %% [markdown]
# **The new question**, with the network frozen and a new head: chance, since no sum over places compares two of them.

# %%
images, labels = digit_pairs(train=True)
held_out, answers = (part[:1000] for part in digit_pairs(train=False))  # of digits that the backbone has not seen
images, held_out = images / 255, held_out / 255
model.fc = torch.nn.Linear(model.num_features, 2)
va.freeze_backbone_(model, also_train="fc.*")
train(model, va.parameter_groups(model, lr=0.01), images, labels, steps=50)
without = top1(model, held_out, answers)
print(f"same class or not, a new head alone: {without:.1f} %")
assert 45 < without < 55

# %% [markdown]
# **Insert** a block after the third stage. The network computes what it did before, bit for bit, and
# the names in its state dict stay.

# %%
names = list(model.state_dict())
before = model(held_out)
print(va.insert_(model, stages="stage3", num_heads=4, example_input=held_out[:2]))
assert torch.equal(model(held_out), before)
assert [name for name in model.state_dict() if ".inserted." not in name] == names

# %% [markdown]
# **Train** the block and the head, nothing else, and look at what the block has come to contribute: how large what it
# adds is against the map that it is added to, and how many predictions change when it is disabled.

# %%
va.freeze_backbone_(model, also_train="fc.*")
backbone = [name for name in names if not name.startswith("fc.")]
frozen = {name: model.state_dict()[name].clone() for name in backbone}
train(model, va.parameter_groups(model, lr=0.01), images, labels, steps=250)
with_attention = top1(model, held_out, answers)
worth = va.contribution(model, (held_out, answers))
print(worth)
assert worth.blocks[0].share > 0.1
assert worth.together.changed > 0.2 * worth.predictions
print(f"same class or not, with attention: {with_attention:.1f} %")
assert with_attention > without + 20
assert all(torch.equal(model.state_dict()[name], value) for name, value in frozen.items())

# %% [markdown]
# **Keep** what was trained in a small file of its own, take the block **out** of the network, and load it **in** again.

# %%
file = va.save_adapter(model, OUTPUT / "same_or_not.safetensors", also="fc.*")
after = model(held_out)
va.remove_(model)
assert list(model.state_dict()) == names
model.fc.reset_parameters()  # the head is in the file too
print(va.load_adapter_(model, file))
assert torch.equal(model(held_out), after)
print(f"wrote {file}: {file.stat().st_size / 1e3:.0f} kB")
