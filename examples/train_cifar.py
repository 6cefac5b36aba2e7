"""Train a CIFAR ResNet from scratch with attention after its last stage; on a GPU in bfloat16, else on the CPU.

    python examples/train_cifar.py --data ~/data --dataset-download
    python examples/train_cifar.py --data ~/data --compile
    torchrun --nproc-per-node 2 examples/train_cifar.py --data ~/data

The images are decoded once and stay on the device, where they are cropped and flipped. The recipe is written below in
the flags of `vision-attn train`; what is given on the command line overrides it: `--dataset cifar10 --model resnet56`.
"""

import sys

import torch

from vision_attn.tools.cli import main

RECIPE = """
    --dataset cifar100
    --model resnet20 --insert layer3
    --epochs 200 --batch-size 128
    --opt sgd --lr 0.1 --weight-decay 5e-4 --warmup-epochs 5 --label-smoothing 0.1
    --crop-padding 4 --hflip 0.5
    --model-ema
    --output runs/cifar
"""
ON_A_GPU = "--amp --channels-last"

if __name__ == "__main__":
    recipe = RECIPE.split() + (ON_A_GPU.split() if torch.cuda.is_available() else [])
    sys.exit(main(["train", *recipe, *sys.argv[1:]]))
