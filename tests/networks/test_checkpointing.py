"""Activation checkpointing in ``with`` blocks: gradients of the network without it, or an error that names both.

Each situation runs in each ``with`` block, with both kinds of ``torch.utils.checkpoint``.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from crossings.plain_network import Net
from torch import nn

import vision_attn as va
from vision_attn.attention.scopes import RECORDED

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the teacher


def image(number, side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(number)).requires_grad_()


OPTIONS = {"context": {"context_channels": 6}, "use_impl": {"attn_drop": 0.3}}
OPTIONS |= {"context= in the segment": {"context": "a"}, "context= outside": {"context": "stem"}}


@cache
def build(kind, seed):
    torch.manual_seed(seed)
    net, names = Net(), "c" if "segment" in kind else "a"
    va.insert_(net, names=names, num_heads=2, example_input=image(0), **OPTIONS.get(kind, {}))
    (block,) = va.inserted_blocks(net).values()
    nn.init.normal_(block.attn.proj.weight, std=0.5)
    return net.train()


#: A function of a model and a number, 0 or 1, that returns a context, for each kind.
KINDS = {
    "padded": lambda net, k: va.padded(net, [[(32, 32), (20, 12)], [(10, 32), (32, 24)]][k]),
    "context": lambda net, k: va.context(net, torch.full((2, 6, 4, 5), 0.5 * k).double().cumsum(3).sin()),
    "disabled": lambda net, k: nullcontext() if k else va.disabled(net),
    "use_impl": lambda net, k: va.use_impl(net, ("sdpa", "bmm")[k]),
    "capture": lambda net, k: nullcontext() if k else va.capture(net),
    "context= in the segment": lambda net, k: nullcontext(),
    "context= outside": lambda net, k: nullcontext(),
}


def loss(y):
    return y.square().sum()


def two_sizes(net, other, enter):
    """Multi-scale training: one ``with`` block for batches of two sizes."""
    with enter(net, 0):
        y, z = net(image(1)), net(image(2, 64))
    (loss(y) + loss(z)).backward()


def two_models(net, other, enter):
    with enter(net, 0):
        y = net(image(1))
    with enter(other, 1):
        loss(y + other(image(2))).backward()


def nested(net, other, enter):
    with enter(net, 1):
        with enter(net, 0):
            y = net(image(1))
        loss(y + net(image(2))).backward()


def twice(net, other, enter):
    with enter(net, 0):
        y = loss(net(image(1)))
    y.backward(retain_graph=True)
    with enter(net, 1):
        y.backward()


def in_a_thread(net, other, enter):
    with enter(net, 0), ThreadPoolExecutor(1) as pool:
        pool.submit(loss(net(image(1))).backward).result()


def ordinary_pass_inside(net, other, enter):
    y = net(image(1))
    with enter(net, 0):
        loss(y).backward()


def teacher_inside(net, other, enter):
    y = net(image(1))
    with enter(net, 0), torch.no_grad():
        z = net(image(1))
    loss(y - z).backward()


CELLS = [(kind, run) for kind in KINDS for run in (two_sizes, two_models, nested, twice, in_a_thread)]
# In these kinds, the network also runs outside the ``with`` block.
OPTIONAL = ("capture", "disabled", "padded", "use_impl")
CELLS += [(kind, run) for kind in OPTIONAL for run in (ordinary_pass_inside, teacher_inside)]


def gradients(kind, run, recompute):
    net, other = (copy.deepcopy(build(kind, seed)) for seed in (0, 1))
    net.recompute = other.recompute = recompute
    torch.manual_seed(5)
    run(net, other, KINDS[kind])
    assert not RECORDED  # the values are freed with the graphs
    return [parameter.grad for parameter in (*net.parameters(), *other.parameters())]


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("kind", "run"), CELLS, ids=lambda x: getattr(x, "__name__", x))
def test_gradients_equal_those_without_checkpointing(kind, run):
    expected, in_one = gradients(kind, run, ""), kind == "context= in the segment"
    for recompute in ("one segment", "one reentrant segment") if in_one else ("without reentry", "reentrant"):
        if kind == "context= outside":
            with pytest.raises(va.errors.SiteError, match="checkpoint both modules in one segment"):
                gradients(kind, run, recompute)
            continue
        for found, gradient in zip(gradients(kind, run, recompute), expected, strict=True):
            found, gradient = (torch.zeros(()) if x is None else x for x in (found, gradient))
            torch.testing.assert_close(found.expand_as(gradient), gradient)
