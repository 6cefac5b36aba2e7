"""Blocks learn in training loops of other libraries, within a hundred steps at common learning rates."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import vision_attn as va

pytestmark = pytest.mark.slow

STEPS = 100


def epoch(digits, steps):
    return DataLoader(digits, 64, sampler=RandomSampler(digits, num_samples=steps * 64))


def bare(model, loader, optimizer):
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def accelerates(model, loader, optimizer):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # A process keeps the precision of the first training run.
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for images, labels in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(F.cross_entropy(wrapped(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_after_100_steps_the_branch_exceeds_one_percent_of_its_input():
    from sklearn.datasets import load_digits

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target))
    images = data.tensors[0][:256]
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    bare(network, epoch(data, 200), torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9))  # reads digits
    for loop, optimizer in ((bare, torch.optim.Adam), (accelerates, torch.optim.AdamW)):
        model = copy.deepcopy(network)
        va.insert_(model, names="5", num_heads=4, example_input=(1, 1, 8, 8))
        with torch.no_grad():
            assert va.contribution(model, images).blocks[0].ratio == 0
        loop(model, epoch(data, STEPS), optimizer(model.parameters(), lr=1e-3))
        (block,) = va.contribution(model, images).blocks
        assert block.ratio > 0.01, loop
        assert (block.ratio_per_channel > 0.001).all(), loop  # All channels contribute.
