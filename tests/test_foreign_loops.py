"""Blocks learn in loops that are not ours: after a hundred steps at usual rates they weigh in the network's maps."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import vision_attn as va

pytestmark = pytest.mark.slow

BATCH, STEPS = 64, 20
#: Epochs: a hundred steps.
MADE = 5


@pytest.fixture
def digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    return TensorDataset(torch.tensor(found.images).float()[:, None] / 8 - 1, torch.tensor(found.target))


@pytest.fixture
def loader(digits):
    return DataLoader(digits, BATCH, sampler=RandomSampler(digits, num_samples=STEPS * BATCH))


@pytest.fixture
def model(digits):
    """A small network that reads digits already."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in DataLoader(digits, BATCH, sampler=RandomSampler(digits, num_samples=200 * BATCH)):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture
def forget_accelerators():
    """A process keeps the precision of its first one."""
    from accelerate.state import AcceleratorState

    yield partial(AcceleratorState._reset_state, reset_partial_state=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def bare(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(MADE):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()


def accelerates(model, loader):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(MADE):
        for images, labels in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(F.cross_entropy(wrapped(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)


def test_after_a_hundred_steps_a_block_weighs_more_than_a_hundredth_of_its_map(
    model, loader, digits, forget_accelerators
):
    images, loops = digits.tensors[0][:256], (bare, accelerates)
    for loop in loops:
        with_block = copy.deepcopy(model)
        va.insert_(with_block, names="5", num_heads=4, example_input=(1, 1, 8, 8))
        with torch.no_grad():
            assert va.contribution(with_block, images).blocks[0].share == 0
        forget_accelerators()
        loop(with_block, loader)
        (block,) = va.contribution(with_block, images).blocks
        assert block.share > 0.01, loop
        assert (block.by_channel > 0.001).all(), loop  # not a few channels alone
