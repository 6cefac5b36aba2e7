"""``insert_`` keeps the state of a network and the random states, calls no hooks, and reports what it verified."""

import contextlib
import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_networks import Net, residual
from timm.layers.attention import Attention as TimmAttention
from torch import nn

import vision_attn as va


def initialize(layer, x):
    """Run a layer with data-dependent initialization by the first batch, as in ActNorm, and a running mean."""
    if not layer.initialized:
        with torch.no_grad():
            layer.loc.copy_(-x.mean((0, 2, 3))[:, None, None])
            layer.initialized.fill_(1)
    layer.mean.lerp_(x.mean((0, 2, 3)).detach(), 0.1)
    return x + layer.loc - layer.mean[:, None, None]


def test_insertion_does_not_change_parameters_and_buffers_that_forward_writes():
    parts = {"loc": nn.Parameter(torch.zeros(8, 1, 1)), "initialized": nn.Buffer(torch.tensor(0))}
    layer = Net(initialize, **parts, mean=nn.Buffer(torch.zeros(8)))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.BatchNorm2d(8), nn.ReLU()).eval()
    twin, x = copy.deepcopy(model), 5 + torch.randn(2, 3, 16, 16)
    va.insert_(model, names="3", num_heads=2, example_input=(1, 3, 16, 16))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in twin.state_dict().items())
    assert torch.equal(model(x), twin(x))


def test_insertion_does_not_call_hooks_or_advance_random_states():
    noise = Net(lambda net, x: x + random.random() + float(np.random.rand()) + torch.rand(1))
    model, calls = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), noise, nn.ReLU()), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    python_state, numpy_position, state = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    va.stage_names(model, (1, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    va.insert_(model, names="2", num_heads=2, example_input=(1, 3, 8, 8))
    assert not calls
    assert (python_state, numpy_position) == (random.getstate(), np.random.get_state()[2])
    model(torch.rand(1, 3, 8, 8))
    assert calls == [1]


OUTPUTS = [lambda x: SimpleNamespace(logits=x), lambda x: x.detach().numpy(), lambda x: [SimpleNamespace(t=x)]]
#: Networks that change the feature map in place after the site, and the message of the error.
IN_PLACE = [(residual(nn.ReLU(inplace=True), output=output), "changes this tensor in place") for output in OUTPUTS]
IN_PLACE += [(residual(nn.Dropout(0.5, inplace=True)), "in place in training mode")]


@pytest.mark.parametrize(("model", "message"), IN_PLACE)
def test_outputs_in_objects_and_arrays_and_in_training_mode_are_compared(model, message):
    with pytest.raises(va.errors.SiteError, match=message):
        va.insert_(model, names="branch.0", at="before", example_input=(1, 3, 32, 32))


INCOMPARABLE = [
    (lambda x: x + float(np.random.default_rng().random()), "the output of the network varies from run to run"),
    (lambda x: None, "the output of the network contains no tensors with values"),
    (lambda x: x[x > 1e9], "the output of the network contains no tensors with values"),  # a detector finds nothing
]


@pytest.mark.parametrize(("output", "reason"), INCOMPARABLE)
def test_a_report_states_that_an_output_was_not_verified(output, reason):
    report = va.insert_(residual(nn.ReLU(), output=output), names="branch.0", num_heads=2, example_input=(1, 3, 32, 32))
    assert report.verified == f"not verified: {reason}"


def test_an_output_of_zeros_that_becomes_nan_is_changed():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)).eval()
    nn.init.constant_(model[0].bias, -50.0)
    for parameter in model[1].parameters():
        nn.init.zeros_(parameter)
    root = lambda channels: Net(lambda net, x: x + net.conv((x + 20).sqrt()), conv=nn.Conv2d(8, 8, 1))  # noqa: E731
    with pytest.raises(va.errors.SiteError, match="makes the network's output NaN or infinite"):
        va.insert_(model, root, names="0", example_input=(1, 3, 8, 8))


@pytest.mark.parametrize("shared", [True, False])
def test_a_layer_that_is_shared_with_the_network_or_frozen_is_not_set_to_zero(shared):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)), torch.rand(1, 3, 8, 8)
    layer, expected = model[1] if shared else nn.Conv2d(8, 8, 1).requires_grad_(False), model(x)
    with contextlib.suppress(va.errors.SiteError) if shared else contextlib.nullcontext():
        va.insert_(model, lambda _: Net(lambda net, x: x + net.conv(x), conv=layer), names="0", example_input=x)
    assert layer.weight.all()
    assert torch.equal(model(x), expected)


def attend(net, x):
    """Run attention between the positions of a feature map."""
    x = net.stem(x)
    return net.attn(x.flatten(2).mT).mT.view(x.shape).mean((2, 3))


@pytest.mark.parametrize("site", ["stem", "attn", "attn.proj"])
def test_blocks_are_inserted_into_swapped_networks(site):
    """A swapped module with a hook inside, as in a dry run, runs its original code, whose rounding differs."""
    model = Net(attend, stem=nn.Conv2d(3, 16, 4, 4), attn=TimmAttention(16, 2)).double().eval()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    expected = model(x)
    va.swap_(model)
    report = va.insert_(model, names=site, num_heads=2, example_input=x)
    assert (report.output_change, report.verified) == (0.0, "verified in evaluation and training mode")
    torch.testing.assert_close(model(x), expected)
    assert not any(hooks for hooks in (model.attn.qkv._forward_hooks, model.attn.qkv._forward_pre_hooks))


class Lazy(nn.Module):
    """A counter with two names, a table that is empty until the first call, and one that does not exist before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", None)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("count", self.calls)

    def forward(self, x):
        self.count += 1
        if self.table is None:
            self.table = torch.ones(x.shape[2:])
        if not hasattr(self, "other"):
            self.register_buffer("other", torch.ones(x.shape[2:]))
        return x * self.table * self.other


def test_a_table_that_a_forward_pass_creates_is_empty_again():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Lazy(), nn.ReLU())
    va.insert_(model, names="2", num_heads=2, example_input=(1, 3, 8, 8))
    assert model[1].table is None
    assert model[1].calls is model[1].count
    assert model[1].calls == 0
    assert model(torch.rand(1, 3, 8, 8)).shape == (1, 8, 8, 8)
    assert isinstance(model[1].table, torch.Tensor)
