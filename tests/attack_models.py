"""Networks of every make, and failures at every step, of what changes a network in place.

``python tests/attack_models.py`` inserts into and replaces in each network, and lets the first, the second, … call of
torch or of a module fail meanwhile. What comes of it is exact, or refused with every module, hook, parameter and mode
as it was; what a network's own forward writes into it is the network's.
"""

import copy
import sys
import warnings
from collections import Counter, OrderedDict

import torch
from attack_arguments import image, network
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode

import vision_attn as va

warnings.filterwarnings("ignore")

#: What the forward of a network here writes.
WRITTEN = {"calls", "seen", "mean", "weight", "_buffers"}


class FaultError(RuntimeError):
    """The one that is let happen."""


class Failing(TorchFunctionMode):
    """Lets one call of torch fail, by its number; none if that is None."""

    def __init__(self, number=None):
        super().__init__()
        self.number, self.count = number, 0

    def step(self, *_):
        self.count += 1
        if self.count == self.number:
            raise FaultError(f"call {self.number}")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch._C._set_grad_enabled:  # with which contexts are left
            self.step()
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.handle = nn.modules.module.register_module_forward_pre_hook(self.step)
        return super().__enter__()

    def __exit__(self, *error):
        self.handle.remove()
        return super().__exit__(*error)


def known(value):
    """What a module holds, by identity."""
    if type(value) in (dict, OrderedDict):
        return {key: known(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return id(value), value.requires_grad
    return (
        value
        if type(value) in (int, bool, str)
        else list(map(id, value))
        if type(value) in (list, tuple)
        else id(value)
    )


def state_of(model):
    """All that is to be as it was."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    held = {
        (name, id(module)): {key: known(value) for key, value in vars(module).items() if key not in WRITTEN}
        for name, module in model.named_modules(remove_duplicate=False)
    }
    return held, modes, torch.get_default_dtype()


def difference(before, after):
    """What two states differ in, in words."""
    (one, *others), (other, *rest) = before, after
    if others != rest:
        return "modes"
    places = [name for name, _ in one.keys() ^ other.keys()]
    return ", ".join(places + [str(place[0]) for place in one if place in other and one[place] != other[place]])


# --- networks ---------------------------------------------------------------------------------------------------------


def conv(seed=0):
    torch.manual_seed(seed)
    return nn.Conv2d(8, 8, 3, padding=1)


class Around(nn.Module):
    """A container as those that shard and distribute are: the network is its ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Twice(nn.Sequential):
    """A row with a forward of its own."""

    def forward(self, x):
        return super().forward(x) + 1


class Own(nn.Module):
    """With a list beside its children, a counter, a memory, random numbers and a link to its parent."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), conv()
        self.row, self.calls, self.seen = [self.first, self.last], 0, []
        self.register_buffer("mean", torch.zeros(8))
        vars(self.last)["parent"] = self

    def forward(self, x):
        self.calls += 1
        y = self.norm(self.first(x) + 0 * torch.rand(()))
        self.mean = self.mean + y.mean((0, 2, 3)).detach()
        return self.last(torch.relu(y))


def hooked():
    model = network()
    model[0].register_forward_hook(lambda module, args, y: 2 * y)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_forward_hook(lambda module, args, kwargs, y: y - 1, with_kwargs=True, always_call=True)
    model[2].register_full_backward_hook(lambda module, into, out: None)
    model.register_state_dict_post_hook(lambda module, state, prefix, local: None)
    return model


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def changed(change, index=2):
    model = network()
    made = change(model[index])
    model[index] = model[index] if made is None else made
    return model


def shared():
    one = conv()
    return nn.Sequential(nn.Conv2d(3, 8, 1), one, nn.ReLU(), one)


def shared_weight():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), conv(), conv(1))
    model[2].weight = model[1].weight
    return model


def in_half():
    return network().to(torch.bfloat16)


def mixed():
    model = network()
    model[0].weight.requires_grad_(False)
    model[2].eval()
    return model.to(memory_format=torch.channels_last)


NETWORKS = {
    "plain": network, "shared module": shared, "shared weight": shared_weight, "hooks": hooked, "of its own": Own,
    "parametrization": lambda: changed(lambda m: parametrize.register_parametrization(m, "weight", Doubled())),
    "weight norm": lambda: changed(parametrizations.weight_norm),
    "spectral norm": lambda: changed(parametrizations.spectral_norm),
    "old weight norm": lambda: changed(nn.utils.weight_norm),
    "old spectral norm": lambda: changed(nn.utils.spectral_norm),
    "orthogonal": lambda: changed(parametrizations.orthogonal), "pruned": lambda: changed(pruned),
    "DataParallel": lambda: nn.DataParallel(network()), "a container": lambda: Around(network()),
    "containers in containers": lambda: nn.Sequential(Around(Around(network()))),
    "a row of its own": lambda: Twice(*network()), "in a list": lambda: nn.Sequential(*nn.ModuleList(network())),
    "compiled": lambda: torch.compile(network(), backend="eager"),
    "compiled part": lambda: changed(lambda m: torch.compile(m, backend="eager")),
    "bfloat16": in_half, "frozen and mixed": mixed, "meta": lambda: network().to("meta"),
    "dropout": lambda: nn.Sequential(*network(), nn.Dropout2d(0.5), nn.BatchNorm2d(8, momentum=None)),
    "traced": lambda: torch.jit.trace(network(), image()),
    "fx": lambda: torch.fx.symbolic_trace(network()), "deep copy": lambda: copy.deepcopy(hooked()),
}  # fmt: skip


def pruned(module):
    prune.random_unstructured(module, "weight", 0.5)


def output(model, x):
    """What it gives in evaluation, without a trace."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        try:
            return copy.deepcopy(model).eval()(x)
        except Exception:  # it cannot be copied, or not be run
            return None


def attempt(make, change):
    """Change a network and undo that: how it ended, and what is wrong with that."""
    model = make()
    x = image().to(next(model.parameters()).dtype)
    state, right = state_of(model), output(model, x)
    try:
        report = change(model)
    except (ValueError, va.SiteError) as error:
        return f"refused: {error!s:.60}", difference(state, state_of(model))
    found = output(model, x)
    same = (
        right is None or found is None or (right.shape == found.shape and (right.is_meta or torch.equal(right, found)))
    )
    if report.verb == "inserted" and not same:
        return "inserted", "and it computes something else"
    if found is not None and not found.is_meta:
        model(x).float().square().sum().backward()
        if not any(p.grad is not None for block in va.inserted(model).values() for p in block.parameters()):
            return "inserted", "and no block has a gradient"
    va.remove_(model)
    return "inserted and removed", difference(state, state_of(model))


HOW = {"num_heads": 2, "example_input": (1, 3, 8, 8)}

CHANGES = {
    "insert_ 0": lambda model: va.insert_(model, where=first_convolution, **HOW),
    "insert_ before": lambda model: va.insert_(model, where=last_convolution, at="before", **HOW),
    "replace_": lambda model: va.replace_(model, where=last_convolution, **HOW),
    "insert_ what fails": lambda model: va.insert_(model, where=first_convolution, **{**HOW, "num_heads": 7}),
    "insert_ what fails later": lambda model: va.insert_(
        model, Late(), where=lambda name, module: isinstance(module, nn.Conv2d), example_input=(1, 3, 8, 8)
    ),
}


class Late:
    """Makes a block, and then none."""

    def __init__(self):
        self.count = 0

    def __call__(self, channels, **options):
        self.count += 1
        if self.count > 1:
            raise ValueError("block: no more")
        return va.AttentionBlock2d(channels, 2, **options)


def first_convolution(name, module):
    return isinstance(module, nn.Conv2d) and module.in_channels == 3


def last_convolution(name, module):
    return isinstance(module, nn.Conv2d) and module.in_channels == 8


STEPS = {
    "insert_": (Own, lambda model: va.insert_(model, names=["first", "last"], **HOW)),
    "insert_ before": (hooked, lambda model: va.insert_(model, names="2", at="before", **HOW)),
    "replace_": (network, lambda model: va.replace_(model, names="2", **HOW)),
}


def fail_at_every_step(make, change, every=1):
    """How often it fails, and after which calls the network was not as before."""
    with Failing() as counting:
        model = make()
        counting.count = 0
        change(model)
    wrong, done = [], 0
    for number in range(1, counting.count + 1, every):
        model = make()
        state = state_of(model)
        try:
            with Failing(number):
                change(model)
        except (FaultError, ValueError, RuntimeError):
            done += 1
            if found := difference(state, state_of(model)):
                wrong.append((number, found))
    return done, wrong


def attack(every=1, networks=NETWORKS, steps=STEPS):
    """The outcomes, and what was wrong."""
    outcomes, wrong = Counter(), []
    for name, make in networks.items():
        for what, change in CHANGES.items():
            outcome, why = attempt(make, change)
            outcomes[outcome.partition(":")[0]] += 1
            wrong += [(name, what, outcome, why)] if why else []
    for what, step in steps.items():
        done, found = fail_at_every_step(*step, every)
        outcomes[f"failures in {what}"] += done
        wrong += [(what, *one) for one in found]
    return outcomes, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcomes, wrong = attack(int((*sys.argv, 1)[1]))
    print(*wrong, sep="\n")
    for outcome, number in outcomes.items():
        print(f"{outcome:<50} {number:>7,}")
    sys.exit(bool(wrong))
