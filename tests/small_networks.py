"""Small networks and comparisons for several test files."""

import copy
import io
import pickle
from itertools import pairwise

import pytest
import timm
import torch
import torchvision
from torch import nn

import vision_attn as va


def convolutions(*widths, **options):
    """Return a sequence of convolutions and ReLUs with reproducible weights; ``convolutions(3, 8, 8)`` has two."""
    torch.manual_seed(0)
    layers = []
    for given, made in pairwise(widths):
        layers += [nn.Conv2d(given, made, 3, padding=1, **options), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def residual(*branch, output=lambda x: x):
    """Return a network with a residual branch, which may change its input in place."""

    def run(net, x):
        x = net.stem(x)
        return output(x + net.branch(x))

    return Net(run, stem=nn.Conv2d(3, 8, 3, padding=1), branch=nn.Sequential(*branch))


def resnet(num_classes=5, **options):
    """Return a narrow ResNet-18 of timm in evaluation mode with reproducible weights."""
    torch.manual_seed(0)
    return timm.create_model("resnet18", channels=(16, 16, 32, 64), num_classes=num_classes, **options).eval()


class Net(nn.Module):
    """A network from named modules or parameters and a function that runs them."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **options):
        return self.run(self, *args, **options)


class NarrowResNet(torchvision.models.ResNet):
    """ResNet-18 of torchvision with an eighth of the channels after the first convolution."""

    def __init__(self):
        super().__init__(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=10)
        self.fc = nn.Linear(64, 10)

    def _make_layer(self, block, planes, *args, **options):
        return super()._make_layer(block, planes // 8, *args, **options)


def randomize_(model):
    """Set random values in every tensor. The constant values of new norms would hide an exchange of two tensors."""
    for value in model.state_dict().values():
        random = torch.randn(value.shape) / 10 if value.dim() > 1 else torch.rand(value.shape) + 0.5
        value.copy_(random if value.is_floating_point() else torch.randint(1, 100, value.shape))
    return model


def copy_by_file(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


#: Functions that copy a network.
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "torch.save": copy_by_file}


def copies(model):
    """Return a deep copy of a network, and copies by pickle and by ``torch.save``."""
    return [make(model) for make in COPIES.values()]


def captured(model, *inputs, **options):
    """Return the attention maps of a forward pass."""
    with va.capture(model, **options) as maps, torch.no_grad():
        model(*inputs)
    return maps


def copied(model):
    """Return a copy of the state dict."""
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same(state, other):
    """Assert that two state dicts have the same keys in the same order and bitwise identical values."""
    assert list(state) == list(other)
    assert all(torch.equal(value, other[key]) for key, value in state.items())


def assert_rejected(load, message, model, path, *, error=va.errors.CheckpointError, **options):
    """Assert that loading a file raises an error with a message, and that the model is unchanged."""
    modules, before = dict(model.named_modules()), copied(model)
    with pytest.raises(error, match=message):
        load(model, path, **options)
    assert dict(model.named_modules()) == modules
    assert_same(model.state_dict(), before)


def results(function, *maps, parameters=()):
    """Return the output, and the gradients of the feature maps and of parameters."""
    maps = [x.clone().requires_grad_() for x in maps]
    torch.manual_seed(0)  # for dropout
    y = function(*maps)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    leaves = [x for x in (*maps, *parameters) if x.requires_grad]
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True)]


def close(found, expected, atol=1e-12):
    """Assert that tensors differ by at most ``atol``."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def assert_same_function(ours, theirs, *maps, atol=1e-12):
    """Assert that two functions of feature maps have the same outputs and gradients."""
    for found, expected in zip(results(ours, *maps), results(theirs, *maps), strict=True):
        assert expected.abs().max() > 0.1  # zeros would be equal for any function
        close(found, expected, atol)
