"""``vision-attn train``: a network trained, fine-tuned or evaluated."""

from __future__ import annotations

import argparse

from vision_attn.attend import IMPLS
from vision_attn.cli.flags import adder, given

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "train, fine-tune or evaluate an image classifier, with attention inserted or not"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.training.settings.Settings`; one that is not given keeps its default there."""
    from vision_attn.training.settings import CHOICES, Settings

    defaults = Settings(data="")
    command.set_defaults(command=run)
    command.argument_default = argparse.SUPPRESS
    add = adder(defaults)

    group = command.add_argument_group("data")
    add(group, "--data", "folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or the folder that CIFAR is in")
    add(group, "--dataset", "kind of data", choices=CHOICES["dataset"])
    add(group, "--dataset-download", "fetch CIFAR into --data if it is not there", action="store_true")
    add(group, "--img-size", "side of the images in pixels", type=int)
    add(group, "--mean", "mean of each channel, of pixels in 0…1", type=float, nargs="+")
    add(group, "--std", "standard deviation of each channel", type=float, nargs="+")
    add(
        group,
        "--train-crop",
        "random crops of the padded image, or of any size, brought to one: for photographs",
        choices=CHOICES["train_crop"],
    )
    add(group, "--crop-padding", "of pad, pixels on each side", type=int)
    add(group, "--crop-scale", "of resized, least share of an image that a crop has", type=float)
    add(group, "--hflip", "probability of a horizontal flip", type=float)
    add(group, "--cutout", "side of a square in each image that is blotted out, in pixels", type=int)
    add(group, "--mixup", "alpha of mixup, such as 0.2: two images laid over each other", type=float)
    add(group, "--cutmix", "alpha of cutmix, such as 1: a box of one image in another", type=float)
    add(group, "--mixup-switch-prob", "probability of cutmix in a batch, where mixup is on too", type=float)

    group = command.add_argument_group("network")
    add(group, "--model", "a name that timm knows, or one of ours: resnet20, resnet20_a, …")
    add(group, "--pretrained", "load the weights that come with the name", action="store_true")
    add(group, "--weights", "checkpoint to begin from: .pth, .pt, .th, .safetensors")
    add(group, "--weights-ema", "take the moving average in that checkpoint", action="store_true")
    add(group, "--reset-head", "begin with a new classifier, for other classes", action="store_true")
    add(group, "--insert", "where blocks go: modules (globs: layer3, 'layer*.1') or stages by index", nargs="+")
    add(group, "--at", "of these sites", choices=CHOICES["at"])
    add(group, "--block", "what is inserted", choices=CHOICES["block"])
    add(group, "--num-heads", "heads of the attention", type=int)
    add(group, "--impl", "implementation of the attention", choices=IMPLS)
    add(
        group,
        "--block-options",
        "further arguments of the block: 'position=Rope2d()' 'pattern=Window(4)' gate_init=0.1",
        nargs="+",
        metavar="NAME=VALUE",
    )
    add(
        group,
        "--freeze-backbone",
        "train the inserted blocks alone (and a new head), and save them as an adapter",
        action="store_true",
    )
    add(group, "--freeze-epochs", "train the inserted blocks (and a new head) alone in so many epochs first", type=int)

    group = command.add_argument_group("recipe")
    add(group, "--epochs", "passes over the training images", type=int)
    add(group, "--batch-size", "images in a step, over all processes together", type=int)
    add(
        group,
        "--grad-accum-steps",
        "parts of the batch that go through the network one after the other for one step, to need less memory",
        type=int,
    )
    add(group, "--opt", "optimiser: sgd (with Nesterov momentum), adamw or any other that timm knows")
    add(
        group,
        "--lr",
        "learning rate (default: sgd 0.1, adamw 0.001; a tenth of it from --weights or --pretrained)",
        type=float,
    )
    add(group, "--attention-lr", "rate of the inserted blocks (default: --lr)", type=float)
    add(group, "--layer-decay", "factor on the rate from a layer to the one before it, such as 0.75", type=float)
    add(group, "--momentum", "of sgd and others that have one", type=float)
    add(group, "--weight-decay", "of all but biases, norms and gates", type=float)
    add(group, "--warmup-epochs", "epochs of linear warm-up before the cosine", type=float)
    add(group, "--min-lr", "rate that the cosine ends at", type=float)
    add(group, "--clip-grad", "norm that gradients are clipped to", type=float)
    add(group, "--label-smoothing", "share of the label spread over all classes", type=float)
    add(group, "--model-ema", "keep a moving average of the weights, evaluate and save it", action="store_true")
    add(group, "--model-ema-decay", "of that average, in each step", type=float)
    add(group, "--seed", "of everything random", type=int)

    group = command.add_argument_group("machine")
    add(group, "--device", "cpu or cuda (default: cuda where there is one)", choices=("cpu", "cuda"))
    add(
        group,
        "--workers",
        "processes that decode a folder's images in every epoch (default: none where all fit into memory, else as many "
        "as cores)",
        type=int,
    )
    add(group, "--amp", "half precision where it is safe", action="store_true")
    add(group, "--amp-dtype", "which; float16 scales the loss, on CUDA only", choices=CHOICES["amp_dtype"])
    add(group, "--sync-bn", "batch norms see the batch of all processes together (on CUDA)", action="store_true")
    add(
        group,
        "--deterministic",
        "the same bits each time on CUDA too, where it is slower; refuses what has no such kernel",
        action="store_true",
    )
    add(group, "--channels-last", "keep maps in the channels-last memory format", action="store_true")
    add(group, "--compile", "compile the network", action="store_true")

    group = command.add_argument_group("run")
    add(group, "--output", "folder of the run (default: runs/train)")
    add(group, "--overwrite", "begin anew in a folder that holds a run", action="store_true")
    add(
        group,
        "--resume",
        "go on with an interrupted run from its last.pth; auto: from the one in --output, or begin if there is none",
        metavar="LAST.PTH",
    )
    add(group, "--tensorboard", "write TensorBoard events too", action="store_true")
    add(group, "--test-only", "evaluate, do not train", action="store_true")


def run(options: argparse.Namespace) -> None:
    from vision_attn.training.settings import Settings
    from vision_attn.training.train import train

    try:
        train(Settings(**given(Settings, options)))
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """A process that ends while its group's threads still run may be aborted by them after its work is done."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
