"""Networks of every make, and failures at every step, of what changes a network in place.

``python tests/attack_models.py`` inserts into, replaces in, exchanges in and loads into each network, and lets the
first, the second, … call of torch or of a module fail in each of these. What comes of it is exact, or refused with the
network, the random numbers to come and torch's modes as they were.
"""

import copy
import random
import sys
import tempfile
import warnings
from collections import Counter, OrderedDict
from pathlib import Path

import torch
from attack_arguments import image, network, with_blocks
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode

import vision_attn as va

warnings.filterwarnings("ignore")


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
    """Something held by a module as what compares; what is in it is known by its identity, numbers by their bytes."""
    if isinstance(value, torch.Tensor):
        numbers = (
            None
            if value.is_meta or isinstance(value, nn.parameter.UninitializedTensorMixin)
            else value.detach().clone()
        )
        return id(value), value.requires_grad, value.dtype, numbers if numbers is None else numbers.tolist()
    if type(value) in (dict, OrderedDict):
        return {key: known(item) for key, item in value.items()}
    return (
        list(map(id, value))
        if type(value) in (list, tuple)
        else value
        if type(value) in (int, bool, str)
        else id(value)
    )


def state_of(model):
    """All that is to be as it was."""
    modules = list(model.named_modules(remove_duplicate=False))
    held = [
        (name, id(module), type(module), {key: known(x) for key, x in vars(module).items()}) for name, module in modules
    ]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return held, torch.get_rng_state().tolist(), random.getstate(), modes, torch.get_default_dtype()


def difference(before, after):
    """The first difference of two states, in words."""
    for what, one, other in zip(
        ("modules", "numbers to come", "Python's numbers", "modes", "type"), before, after, strict=True
    ):
        if one != other and what != "modules":
            return what
    if [x[:3] for x in before[0]] != [x[:3] for x in after[0]]:
        return f"modules: {[x[0] for x in before[0]]} and {[x[0] for x in after[0]]}"
    for (name, _, _, one), (_, _, _, other) in zip(before[0], after[0], strict=True):
        for key in one.keys() | other.keys():
            if one.get(key, 0) != other.get(key, 0):
                return f"{name}.{key}: {one.get(key)!s:.150} and {other.get(key)!s:.150}"
    return ""


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
    from torch.nn.utils import prune

    prune.random_unstructured(module, "weight", 0.5)


def output(model, x):
    """What it gives in evaluation, without a trace."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        try:
            return copy.deepcopy(model).eval()(x)
        except Exception:  # it cannot be copied, or not be run
            return None


def attempt_network(make, change):
    """Change a network and undo that: how it ended, and what is wrong with that."""
    model = make()
    x = image() if not any(p.dtype == torch.bfloat16 for p in model.parameters()) else image().to(torch.bfloat16)
    state, right = state_of(model), output(model, x)
    try:
        report = change(model)
    except (ValueError, va.VisionAttnError) as error:
        return f"refused: {error!s:.60}", difference(state, state_of(model))
    except Exception as error:
        return "raised", repr(error)[:300]
    found = output(model, x)
    same = right is None or found is None or (right.shape == found.shape and torch.equal(right, found))
    if report.verb == "inserted" and not same:
        return "inserted", "and it computes something else"
    if report.verb == "inserted" and not hasattr(model, "code"):
        learns = [p for block in va.inserted(model).values() for p in block.parameters()]
        if found is not None and not found.is_meta and learns:
            try:
                model(x).float().square().sum().backward()
            except Exception as error:
                return "inserted", f"and has no gradients: {error!r:.200}"
            if not any(p.grad is not None for p in learns):
                return "inserted", "and no block has a gradient"
    numbers = torch.get_rng_state()
    try:
        va.remove_(model)
    except Exception as error:
        return "inserted", f"and does not come out: {error!r:.200}"
    after = state_of(model)
    if not torch.equal(numbers, torch.get_rng_state()):
        return "removed", "and random numbers were drawn"
    ran = {"calls", "seen", "mean", "grad", "weight"}  # what the forward of above, which is the network's own, has left
    before, after = (
        [(*x[:3], {k: v for k, v in x[3].items() if k not in ran and k != "_buffers"}) for x in held]
        for held, *_ in (state, after)
    )
    return "inserted and removed", difference((before, 0, 0, 0, 0), (after, 0, 0, 0, 0))


CHANGES = {
    "insert_ 0": lambda model: va.insert_(model, where=first_convolution(model), num_heads=2,
    example_input=example(model)),
    "insert_ all": lambda model: va.insert_(model, names="**", num_heads=2, example_input=example(model)),
    "insert_ before": lambda model: va.insert_(model, where=last_convolution(model), at="before", num_heads=2,
    example_input=example(model)),
    "replace_": lambda model: va.replace_(model, where=last_convolution(model), num_heads=2,
    example_input=example(model)),
    "insert_ none": lambda model: va.insert_(model, names="nothing", example_input=example(model)),
    "insert_ what fails": lambda model: va.insert_(model, where=first_convolution(model), num_heads=7,
    example_input=example(model)),
    "insert_ what fails later": lambda model: va.insert_(model, Late(), where=any_convolution,
    example_input=example(model)),
}  # fmt: skip


class Late:
    """Makes a block, and then none."""

    def __init__(self):
        self.count = 0

    def __call__(self, channels, **options):
        self.count += 1
        if self.count > 1:
            raise ValueError("block: no more")
        return va.AttentionBlock2d(channels, 2, **options)


def any_convolution(name, module):
    return isinstance(module, nn.Conv2d)


def convolutions(model):
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Conv2d) and module.out_channels == 8
    ]


def first_convolution(model):
    return lambda name, module: (
        isinstance(module, nn.Conv2d) and module.kernel_size != (9, 9) and module.in_channels == 3
    )


def last_convolution(model):
    return lambda name, module: isinstance(module, nn.Conv2d) and module.in_channels == 8


def example(model):
    return (1, 3, 8, 8)


# --- failures at every step -------------------------------------------------------------------------------------------


def replaced():
    model = network()
    va.replace_(model, names="2", num_heads=2, example_input=(1, 3, 8, 8))
    va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 8, 8))
    return model


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True), nn.TransformerEncoderLayer(8, 2))


def exchanged(**options):
    model = encoder()
    va.swap_(model, **options)
    return model


def steps_in(folder):
    """Each call that changes a network, and what makes the network."""
    weights, adapter = folder / "w.pth", folder / "a.safetensors"
    other = network()
    torch.save({key: value + 1 for key, value in other.state_dict().items()}, weights)
    blocks = with_blocks()
    with torch.no_grad():
        blocks[2].bias += 1
    va.save_adapter(blocks, adapter, also="2.bias")

    how = {"num_heads": 2, "example_input": (1, 3, 8, 8)}
    return {
        "insert_": (Own, lambda m: va.insert_(m, names=["first", "last"], **how)),
        "insert_ before": (hooked, lambda m: va.insert_(m, names="2", at="before", **how)),
        "replace_": (network, lambda m: va.replace_(m, names="2", **how)), "remove_": (replaced, va.remove_),
        "swap_": (encoder, va.swap_), "swap_ copy": (encoder, lambda m: va.swap_(m, copy=True)),
        "swap_back_": (exchanged, va.swap_back_), "swap_back_ copy": (lambda: exchanged(copy=True), va.swap_back_),
        "load_checkpoint": (network, lambda m: va.load_checkpoint(m, weights)),
        "load_adapter_": (network, lambda m: va.load_adapter_(m, adapter, strict=False)),
        "set_gates_": (with_blocks, lambda m: va.set_gates_(m, 0.5)), "set_impl_": (with_blocks,
        lambda m: va.set_impl_(m, "bmm")),
        "freeze_backbone_": (with_blocks, va.freeze_backbone_), "contribution": (with_blocks,
        lambda m: va.contribution(m, torch.ones(2, 3, 8, 8))),
        "save_adapter": (with_blocks, lambda m: va.save_adapter(m, folder / "b.safetensors")),
        "stage_names": (Own, lambda m: va.stage_names(m, (1, 3, 8, 8))), "capture": (with_blocks, looked_into),
    }  # fmt: skip


def looked_into(model):
    with torch.no_grad(), va.capture(model):
        model(torch.ones(2, 3, 8, 8))


def fail_at_every_step(make, change, every=1):
    """How often it fails, and after which calls the network was not as before."""
    with Failing() as counting:
        model = make()
        counting.count = 0
        change(model)
    wrong, done = [], 0
    for number in range(1, counting.count + 1, every):
        model = make()
        torch.manual_seed(number)
        state = state_of(model)
        try:
            with Failing(number):
                change(model)
        except (FaultError, ValueError, va.VisionAttnError, RuntimeError):
            done += 1
            found = difference(state, state_of(model))
            if found:
                wrong.append((number, found))
    return counting.count, done, wrong


def attack(every=1, networks=NETWORKS, steps=None):
    """The outcomes, and what was wrong."""
    outcomes, wrong = Counter(), []
    for name, make in networks.items():
        for what, change in CHANGES.items():
            outcome, why = attempt_network(make, change)
            outcomes[outcome.partition(":")[0]] += 1
            if why:
                wrong.append((name, what, outcome, why))
    with tempfile.TemporaryDirectory() as folder:
        for what, (make, change) in (steps_in(Path(folder)) if steps is None else steps).items():
            calls, done, found = fail_at_every_step(make, change, every)
            outcomes[f"failures in {what} ({calls} calls)"] += done
            wrong += [(what, *one) for one in found[:2]] + [(what, f"{len(found)} calls")] * bool(found)
    return outcomes, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcomes, wrong = attack(int((*sys.argv, 1)[1]) if len(sys.argv) > 1 else 1)
    print(*wrong, sep="\n")
    for outcome, number in outcomes.items():
        print(f"{outcome:<50} {number:>7,}")
    sys.exit(bool(wrong))
