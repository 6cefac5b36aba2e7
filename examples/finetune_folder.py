"""Fine-tune a pretrained network on a folder of images, with attention inserted: first what is new, then all of it.

    python examples/finetune_folder.py --data ~/flowers --model resnet50
    python examples/finetune_folder.py --data ~/flowers --model resnet20 --weights cifar10_resnet20.pt --adapter-only
    torchrun --nproc-per-node 2 examples/finetune_folder.py --data ~/flowers --model resnet50

The folder holds train/CLASS/IMAGE and val/CLASS/IMAGE. Without --weights timm fetches those that come with the name.
It is a loop of one's own on torchvision and Accelerate, to copy and change; `vision-attn train` is the library's.
"""

import argparse
import sys

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import vision_attn as va
import vision_attn.networks.models  # registers resnet20 and others with timm


def fit(model, groups, epochs):
    steps, optimizer = epochs * len(train_loader), torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(epochs):
        wrapped.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(wrapped(images), labels, label_smoothing=0.1))
            optimizer.step()
            schedule.step()
        score = top1(wrapped)
        accelerator.print(f"  epoch {epoch + 1}/{epochs}: top-1 {score:.2f} %")
    return score


@torch.no_grad()
def top1(wrapped):
    wrapped.eval()
    right = [accelerator.gather_for_metrics(wrapped(images).argmax(1) == labels) for images, labels in val_loader]
    return 100 * torch.cat(right).float().mean().item()


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--data", required=True, help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
parser.add_argument("--model", default="resnet50", help="a name that timm knows")
parser.add_argument("--weights", help="checkpoint to begin from, for any number of classes")
parser.add_argument("--epochs", type=int, nargs=2, default=(3, 10), help="of the new parts alone, and of all")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step of each process")
parser.add_argument("--workers", type=int, default=4, help="processes that decode images")
parser.add_argument("--adapter-only", action="store_true", help="leave the backbone as it is, and save what is new")
parser.add_argument("--output", default="finetuned", help="name of what is written, without its ending")
options = parser.parse_args()

accelerator = Accelerator()
accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device}")
torch.manual_seed(0)
train, val = (ImageFolder(f"{options.data}/{half}") for half in ("train", "val"))
if val.classes != train.classes:
    sys.exit(f"val must have the classes of train, {', '.join(train.classes)}; it has {', '.join(val.classes)}")
most = len(train) // accelerator.num_processes
if options.batch_size > most:
    sys.exit(f"--batch-size must be at most {most}, so that the {len(train)} training images fill one in each process")
with accelerator.main_process_first():  # what is downloaded is downloaded once
    model = timm.create_model(options.model, pretrained=not options.weights, num_classes=len(train.classes))
head = f"{model.pretrained_cfg['classifier']}.*"
if options.weights:
    accelerator.print(va.load_checkpoint(model, options.weights, skip=head))  # a new head, all else from the file
config = timm.data.resolve_data_config(model=model)  # size, mean and standard deviation that it was trained with
accelerator.print(va.insert_(model, stages=-1, example_input=(1, *config["input_size"])))

# Inserted into the plain network first, wrapped for several processes after.
train.transform = timm.data.create_transform(**config, is_training=True)
val.transform = timm.data.create_transform(**config)
common = {"batch_size": options.batch_size, "num_workers": options.workers}
train_loader, val_loader = accelerator.prepare(
    DataLoader(train, shuffle=True, drop_last=True, **common), DataLoader(val, **common)
)
model = model.to(accelerator.device)

accelerator.print("what is new, on the frozen backbone:")
va.freeze_backbone_(model, also_train=head)
score = fit(model, va.parameter_groups(model, lr=3e-3, weight_decay=0.01), options.epochs[0])
if options.adapter_only:
    saved = f"{options.output}.safetensors"
    if accelerator.is_main_process:
        va.save_adapter(model, saved, also=head)
else:
    accelerator.print("all of it, the slower the closer to the image:")
    va.unfreeze_backbone_(model)
    groups = va.parameter_groups(model, lr=1e-3, attention_lr=3e-3, layer_decay=0.8, weight_decay=0.01)
    score = fit(model, groups, options.epochs[1])
    saved = f"{options.output}.pth"
    accelerator.save(model.state_dict(), saved)
accelerator.print(va.contribution(model, next(iter(val_loader))))
accelerator.print(f"top-1 {score:.2f} %, in {saved}")
accelerator.end_training()
