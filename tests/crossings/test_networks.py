"""Features in random order on a network with blocks: each step equals the plain network, or is refused by name."""

import copy
import random
import re
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from crossings.plain_network import SITES, Net, Plain, Siamese, StoppedError
from hypothesis import seed, settings, stateful, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from small_networks import COPIES
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

import vision_attn as va

HAS_PEFT, PACKAGE = find_spec("peft") is not None, str(Path(va.__file__).parent)
#: Kinds of with blocks, and the fraction of forward passes that enter another one.
KINDS = {"disabled": 0.1, "capture": 0.2, "padded": 0.5, "context": 0.8, "use_impl": 0.2}
RECOMPUTE = ["", "one segment", "one reentrant segment", "reentrant", "without reentry"]
SIZES = [(32, 32), (32, 48), (42, 39)]
#: Valid sizes of the two padded images in pixels; in positions, multiples of the stride of pooled keys.
VALID = [(30, 32), (15, 22)]


def build(options, from_outside, through=False):
    """Return a network that contains the network with its blocks, in float64."""
    torch.manual_seed(0)
    whole = Siamese(net := Net().double())
    net.norm.running_mean.normal_()
    net.norm.running_var.uniform_(0.5, 2)
    insert_blocks(whole if through else net, options, from_outside)
    for block in va.inserted_blocks(net).values():
        for parameter in block.parameters():
            parameter.data.normal_(std=0.5)
    freeze_part(net)
    return whole


def freeze_part(net):
    """Freeze a layer, but not its block, as users do."""
    net.b.weight.requires_grad_(False)
    net.b.bias.requires_grad_(False)
    return net


def insert_blocks(net, options, from_outside):
    """Insert a block after each of the three convolutions of the network, or of the network in a larger one."""
    x, prefix = torch.randn(2, 3, 32, 32, dtype=torch.float64), "backbone." if isinstance(net, Siamese) else ""

    def insert(site, **options):
        va.insert_(net, names=prefix + site, num_heads=2, example_input=x, **options)

    kind, drop = options["a"]["pattern"], options["a"]["proj_drop"]
    pattern, position = va.Window(3) if kind == "window" else kind, rope(options["a"])
    if options["a"]["table"]:
        position = va.RelPosTable(None if kind == "window" else 8)
    insert("a", pattern=pattern, position=position, proj_drop=drop)
    if options["b"]["transformer"]:
        insert("b", block=va.blocks.TransformerBlock2d, mlp_ratio=1.0)
    else:
        insert("b", block=va.blocks.LinearAttention2d)
    second = {"context_channels": 8} if from_outside else {"context": f"{prefix}stem"}
    insert("c", kv_stride=options["c"]["kv_stride"], position=rope(options["c"]), **second)


def rope(options):
    at = options["temperature"]
    return va.Rope(temperature=at, normalized=options["normalized"]) if at else None


def plain_key(key):
    """Return the key of a tensor, or the path of a module, before layers were wrapped; empty if wrappers add it."""
    if any(part in key for part in ("lora_", "parametrizations", "_mask")):
        return ""
    key = re.sub(r"^inserted_([abc])\b", r"\1.inserted", key)  # inserted through a larger network
    return re.sub(r"\.base_layer|\._checkpoint_wrapped_module|\._orig_mod|(?<=weight)_orig", "", key)


def is_added(key):
    """Return True if a tensor belongs to a block, or to the layer that replaces another one."""
    return "inserted" in key or "head.attn" in key


def is_ours(error):
    """Return True if an error, or a warning that is an error, was raised by a statement of the package."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(PACKAGE) and last.line.startswith(("raise", "warnings.warn"))


def change(**strategies):
    """Make a rule that compares the gradients before the network or a copy of it changes."""

    def decorate(function):
        @wraps(function)
        def compare_and_change(self, **values):
            self.backward()
            function(self, **values)

        return rule(**strategies)(compare_and_change)

    return decorate


class Networks(stateful.RuleBasedStateMachine):
    """A network ``net`` on which features act, and the values ``w`` and settings of the plain network."""

    compiles = False  # seconds in each pass

    @initialize(chance=st.randoms(use_true_random=True))  # other strategies draw the same values in most networks
    def create(self, chance):
        choose, self.chance, self.from_outside = chance.choice, chance, chance.choice([True, False])
        common = {"temperature": choose([0, 0, 100, 10000]), "normalized": choose([True, False]), "proj_drop": 0.0}
        a = {**common, "pattern": choose(["full", "rows", "window"]), "table": common["temperature"] == 0}
        a["proj_drop"] = choose([0.0, 1.0])  # all or nothing, so that training is deterministic
        c = {**common, "pattern": "full", "table": False, "kv_stride": choose([1, 2])}
        self.options = {"a": a, "b": {"transformer": choose([True, False])}, "c": c}
        self.whole = build(self.options, self.from_outside, through=choose([True, False])).eval()
        self.net = self.whole.backbone
        self.w = {plain_key(key): value.detach().clone() for key, value in self.net.state_dict().items()}
        self.live = {plain_key(key) for key, p in self.net.named_parameters() if p.requires_grad}
        self.base_live, self.masks, self.pending, self.scopes = set(self.live), {}, [], {}
        self.blocks, self.replaced, self.swapped, self.frozen = True, False, False, False
        self.synced, self.tuned, self.single = False, False, False
        self.stack, self.count = [], 0

    # --- comparison

    def plain(self, scoped=True, **changes):
        """Return the plain network with the current settings, whose weights are new leaves."""
        values = {key: value.clone() for key, value in self.w.items()}
        leaves = {key: x.requires_grad_(key in self.live) for key, x in values.items()}
        w = dict(leaves) | {key: leaves[key] * mask for key, mask in self.masks.items()}
        if self.tuned:
            delta = self.net.tokens.qkv.get_delta_weight("default")
            w["tokens.qkv.weight"] = w["tokens.qkv.weight"] + delta.detach().double()
        scopes = self.scopes if scoped else {}
        settings = {"blocks": self.blocks, "replaced": self.replaced, "frozen_norm": self.frozen}
        settings |= {"training": self.net.training, "context": scopes.get("context")}
        settings["disabled"] = scopes.get("disabled", ())
        settings["valid"] = [(-(-h // 4), -(-w // 4)) for h, w in VALID] if "padded" in scopes else None
        plain = Plain(w, self.options, **{**settings, **changes})
        if self.from_outside and plain.context is None and self.blocks:
            plain.context = "missing"
        return plain, leaves

    def read_statistics(self):
        """Take the running statistics of the network, which a pass without a comparison may have updated."""
        self.w |= {key: x.detach().double().clone() for key, x in self.net.state_dict().items() if "running" in key}

    def image(self, size):
        self.count += 1
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(self.count), dtype=torch.float64)
        return x.to(self.net.stem.bias.dtype)

    def find_module(self, name):
        """Return the path and the module, or the wrapper around it, with this path before layers were wrapped."""
        return next(found for found in self.net.named_modules() if plain_key(found[0]) == name)

    def is_compiled(self, *names):
        """Return True if one of these modules is compiled."""
        return any(hasattr(self.find_module(name)[1], "_orig_mod") for name in names)

    def attempt(self, function, *args, refusal=""):
        """Return the result of a step in a list; an empty list if it was refused by an error of the package.

        The message of the error must match ``refusal``.
        """
        try:
            return [function(*args)]
        except Exception as error:
            if not is_ours(error) or not re.search(refusal, str(error)):
                raise
            return []

    def equal(self, got, expected, what):
        got, tolerance = got.double(), 5e-4 if self.single else 1e-8
        assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        off = (got - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert off < tolerance, f"{what}: differs by {float(off):.1e}"

    def run(self, function, size, scoped=True, needs_grad=False, **changes):
        """Compare the output of a function of images with the plain network; return both losses and inputs."""
        self.check_state()
        x = self.image(size)
        plain, leaves = self.plain(scoped, **changes)
        x = x.requires_grad_(needs_grad)
        statistics = {key: self.net.state_dict().get(key) for key in ("norm.running_mean", "norm.running_var")}
        before = {key: value.clone() for key, value in statistics.items()}
        missing = isinstance(plain.context, str)
        found = self.attempt(function, x, refusal="" if missing else "va.padded does not support Rope")
        if not found or missing:
            assert not found or "c" in plain.disabled, "a block ran without the second feature map that it requires"
            self.read_statistics()
            return None
        ours = x.detach().double().requires_grad_(needs_grad)
        expected = plain(ours)
        for key, value in before.items():
            if plain.training and not plain.frozen_norm:
                self.w[key] = leaves[key].detach()
            self.equal(statistics[key], self.w[key], key)
            assert plain.training or torch.equal(value, statistics[key]), f"{key} changed in evaluation mode"
        (y,) = found
        parts = [y] if plain.valid is None else [y[i : i + 1, :, :h, :w] for i, (h, w) in enumerate(plain.valid)]
        for part, other in zip(parts, expected, strict=True):
            self.equal(part, other, "output")
        self.check_maps(plain, scoped)
        losses = (sum(y.double().square().sum() for y in outputs) for outputs in (parts, expected))
        return *losses, [(x, ours), *((y.given, y) for y in [plain.context] if y is not None)], leaves

    def check_maps(self, plain, scoped):
        if not scoped or (maps := self.scopes.get("capture")) is None:
            return
        reasons, maps = ({plain_key(path): x for path, x in found.items()} for found in (maps.reasons, maps))
        for path, weights in plain.maps.items():
            if path == "tokens" and not self.swapped:
                continue
            assert path in maps or path in reasons, f"no map and no reason for {path}"
            if path in maps and plain.valid is None:
                self.equal(maps[path].weights.flatten(3), weights, f"map of {path}")

    # --- forward and backward passes

    @invariant()
    def forward_after_each_step(self):
        self.whole = self.whole if self.whole.backbone is self.net else Siamese(self.net)
        recompute = RECOMPUTE[:3] if self.blocks and not self.from_outside else RECOMPUTE  # the context is outside
        inside = [kind for kind, often in KINDS.items() if self.chance.random() < often]
        self.forward(inside, *map(self.chance.choice, (SIZES, recompute, [True, True, False], [self.net, self.whole])))

    def forward(self, inside, size, recompute, grad, network):
        """Run a forward pass with activation checkpointing, in with blocks that end before the backward pass."""
        depth, self.net.recompute = len(self.stack), recompute
        for kind in inside:
            self.enter_block(kind)
        with torch.set_grad_enabled(grad):
            losses = self.run(network, size, needs_grad=grad)
        self.pending += [losses] if losses and grad else []
        self.net.recompute = ""
        self.exit_all(depth)

    @precondition(lambda self: self.pending)
    @rule()
    def backward(self):
        """Compare the gradients of all forward passes since the last change of the network."""
        self.net.zero_grad()
        pending, self.pending = self.pending, []
        if not pending:
            return None
        inputs = {id(x): (x, ours) for *_, pairs, _ in pending for x, ours in pairs}.values()
        passed = self.attempt(lambda: sum(loss for loss, *_ in pending).backward(), refusal="in one segment")
        self.read_statistics()  # segments that ran again updated them
        if not passed:
            for x, _ in inputs:
                x.grad = None
            return self.net.zero_grad()
        sum(loss for _, loss, *_ in pending).backward()
        for x, ours in inputs:
            found, expected = (torch.zeros_like(y) if y.grad is None else y.grad for y in (x, ours))
            self.equal(found, expected, "gradient of an input")
            x.grad = ours.grad = None
        for key, parameter in self.net.named_parameters():
            if (name := plain_key(key)) and name in self.live:
                grads = [leaves[name].grad for *_, leaves in pending if leaves[name].grad is not None]
                expected = sum(grads, torch.zeros_like(self.w[name]))
                found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.equal(found, expected, f"gradient of {key}")
        return self.net.zero_grad()

    @precondition(lambda self: self.compiles)
    @rule(size=st.sampled_from(SIZES))
    def forward_compiled(self, size):
        """Run the network as torch's compiler traces it, without generated code."""
        if self.blocks and self.is_compiled(*(f"{site}.inserted" for site in SITES)):
            return
        torch.compiler.reset()
        if losses := self.run(torch.compile(self.net, backend="eager"), size, needs_grad=True):
            self.pending.append(losses)

    @rule(size=st.sampled_from(SIZES))
    def forward_in_thread(self, size):
        def run(x):
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(torch.no_grad()(self.attempt), self.net, x).result()
            if not found:
                raise StoppedError
            return found[0]

        with torch.no_grad():
            if self.from_outside and self.blocks:
                with pytest.raises(StoppedError):
                    run(self.image(size))
                self.read_statistics()
            else:
                self.run(run, size, scoped=False)

    @rule(site=st.sampled_from(SITES))
    def stop_in_the_middle(self, site):
        self.net.stop = site
        with torch.no_grad(), suppress(StoppedError):
            assert not self.attempt(self.net, self.image((32, 32)))
        self.net.stop = ""
        self.read_statistics()

    @precondition(lambda self: "padded" not in self.scopes)
    @rule(site=st.sampled_from(SITES))
    def call_part(self, site):
        """Call one layer alone: a second feature map from inside the network does not exist then."""
        plain, _ = self.plain()
        x = torch.randn(2, 8 if site == "a" else 16, 8, 8, dtype=torch.float64).to(self.net.stem.bias.dtype)
        with torch.no_grad():
            found = self.attempt(getattr(self.net, site), x)
            needs_context = site == "c" and self.blocks and "c" not in plain.disabled
            if needs_context and not isinstance(plain.context, torch.Tensor):
                assert not found, "the block used a second feature map of an earlier forward pass"
            elif found:
                self.equal(found[0], plain.part(site, x.double(), plain.context), f"layer {site}")

    # --- with blocks

    @rule(kind=st.sampled_from(sorted(KINDS)))
    def enter_block(self, kind):
        features = torch.randn(2, 8, 8, 8, dtype=torch.float64, requires_grad=True)
        features.given = features.detach().to(self.net.stem.bias.dtype).requires_grad_()
        sites = self.chance.choice([SITES, *zip(SITES, strict=True)])
        makers = {
            "disabled": lambda: va.disabled(self.net, sites),
            "capture": lambda: va.capture(self.net),
            "padded": lambda: va.padded(self.net, VALID),
            "context": lambda: va.context(self.net, features.given),
            "use_impl": lambda: va.use_impl(self.net, "einx"),
        }
        for manager in self.attempt(makers[kind]):
            if kind not in self.scopes and (entered := self.attempt(manager.__enter__)):
                self.scopes[kind] = {"context": features, "disabled": sites}.get(kind, entered[0])
                self.stack.append((kind, manager))

    @precondition(lambda self: self.stack)
    @rule()
    def exit_block(self):
        kind, manager = self.stack.pop()
        del self.scopes[kind]
        self.attempt(manager.__exit__, None, None, None)

    def exit_all(self, depth=0):
        while len(self.stack) > depth:
            self.exit_block()

    # --- changes of the network

    @change(training=st.booleans())
    def mode(self, training):
        # The gradients of torch's batch norm use the running statistics of the backward pass.
        self.net.train(training and (self.frozen or not self.synced))

    @change(impl=st.sampled_from(["einx", "bmm", "einsum", "sdpa", "auto"]))
    def implementation(self, impl):
        self.attempt(va.set_impl_, self.net, impl)

    @precondition(lambda self: not self.tuned and not self.frozen)
    @change()
    def freeze(self):
        if self.attempt(lambda: va.freeze_backbone_(self.net, also_train="head.*")):
            self.frozen = True
            self.live = {key for key in self.base_live if "inserted" in key or key.startswith("head")}

    @precondition(lambda self: self.frozen and not self.tuned)
    @change()
    def unfreeze(self):
        if self.attempt(va.unfreeze_backbone_, self.net):
            self.frozen, self.live = False, set(self.base_live)
            self.mode(training=self.net.training)

    @precondition(lambda self: self.frozen and not self.synced)
    @rule()
    def synchronize_norms(self):
        self.exit_all()
        self.backward()
        self.synced = True
        with warnings.catch_warnings(action="error", category=UserWarning):
            if converted := self.attempt(nn.SyncBatchNorm.convert_sync_batchnorm, self.net):
                self.net = converted[0]

    @precondition(lambda self: not self.masks and not self.tuned)
    @change(layer=st.sampled_from(["stem", "b"]))
    def prune(self, layer):
        prune.l1_unstructured(getattr(self.net, layer), "weight", 0.5)
        self.masks[f"{layer}.weight"] = getattr(self.net, layer).weight_mask.double()

    @precondition(lambda self: not self.replaced and "parametrizations" not in self.net.head._modules)
    @change()
    def normalize_weight(self):
        nn.utils.parametrizations.weight_norm(self.net.head)

    @precondition(lambda self: HAS_PEFT and not self.tuned and not self.frozen and not self.scopes)
    @rule()
    def add_lora(self):
        from peft import LoraConfig, get_peft_model

        self.backward()
        with warnings.catch_warnings(action="ignore"):
            config = LoraConfig(target_modules=r"tokens\.qkv", r=2, init_lora_weights=False)
            get_peft_model(self.net, config)  # changes the network in place
        self.net.to(self.net.stem.bias.dtype)
        self.tuned, self.live = True, set()

    @precondition(lambda self: not self.scopes)
    @change(swap=st.booleans())
    def swap(self, swap):
        (report,) = self.attempt(va.swap_ if swap else va.unswap_, self.net)
        self.swapped = bool(report.swapped) if swap and not self.swapped else swap

    @precondition(lambda self: not self.scopes and not self.tuned)
    @change(through=st.booleans())
    def remove_or_insert(self, through):
        if self.blocks:
            va.remove_(self.whole if through else self.net)
            self.blocks = self.replaced = False
            self.base_live = {key for key in self.base_live if not is_added(key)}
            self.w = {key: value for key, value in self.w.items() if not key.startswith("head.attn")}
        elif not self.frozen:
            dtype = self.net.stem.bias.dtype
            self.net.double()
            if not self.attempt(insert_blocks, self.whole if through else self.net, self.options, self.from_outside):
                self.net.to(dtype)
                return None if not va.inserted_blocks(self.net) else self.attempt(va.remove_, self.net)
            state = {plain_key(key): value for key, value in self.net.state_dict().items()}
            with torch.no_grad():
                for key in [key for key in state if "inserted" in key]:
                    state[key].copy_(self.w[key])
            self.base_live |= {key for key in state if "inserted" in key}
            self.net.train(self.net.training).to(dtype)
            self.blocks = True
        added = {key for key in self.w if "inserted" in key and self.blocks}
        self.live = added.union(key for key in self.live if not is_added(key))
        return None

    @precondition(lambda self: self.blocks and not (self.replaced or self.tuned or self.frozen or self.scopes))
    @change()
    def replace_head_by_attention(self):
        if "parametrizations" in self.net.head._modules:
            return
        x = torch.randn(2, 3, 32, 32).to(self.net.stem.bias)
        if self.attempt(lambda: va.replace_(self.net, names="head", num_heads=2, example_input=x)):
            self.replaced, state = True, self.net.head.state_dict(prefix="head.")
            self.w |= {key: value.detach().double().clone() for key, value in state.items()}
            self.live, self.base_live = self.live | set(state), self.base_live | set(state)

    @precondition(lambda self: not self.replaced and "parametrizations" not in self.net.head._modules)
    @change()
    def replace_head(self):
        head = nn.Conv2d(16, 4, 1).to(self.net.stem.bias)
        head.requires_grad_("head.weight" in self.live)
        self.net.head = head
        self.w |= {f"head.{key}": value.detach().double().clone() for key, value in head.state_dict().items()}

    @precondition(lambda self: not self.scopes)
    @change(site=st.sampled_from(["a", "c"]), block=st.booleans(), compiled=st.booleans())
    def wrap(self, site, block, compiled):
        """Wrap a layer or its block in place."""
        path, part = self.find_module(f"{site}.inserted" if block and self.blocks else site)
        # torch cannot compile a module around a compiled block.
        compiled = compiled and self.compiles and not self.is_compiled(*[site, f"{site}.inserted"][: 1 + self.blocks])
        # With a dynamic graph, torch may compute a segment again by another graph (pytorch/pytorch#166926).
        wrapped = torch.compile(part, backend="eager", dynamic=False) if compiled else checkpoint_wrapper(part)
        self.net.set_submodule(path, wrapped)

    @precondition(lambda self: self.blocks and self.options["a"]["temperature"])
    @change()
    def replace_position(self):
        options = {**self.options["a"], "temperature": 10}
        other = va.Attention2d(16, 2, position=rope(options)).position
        if self.attempt(setattr, self.find_module("a.inserted.attn")[1], "position", other):
            self.options["a"] = options

    @rule(single=st.booleans())
    def move_dtype(self, single):
        self.exit_all()
        self.backward()
        self.single |= single  # rounding stays
        self.net.to(torch.float32 if single else torch.float64)
        for key, value in self.w.items():
            self.w[key] = value.float().double() if single and value.is_floating_point() else value

    @precondition(lambda self: self.blocks and self.options["a"]["proj_drop"])
    @rule()
    def monte_carlo_dropout(self):
        modes = [(module, module.training) for module in self.net.modules()]
        self.net.eval()
        for module in self.net.modules():
            if "drop" in type(module).__name__.lower():
                module.train()
        with torch.no_grad():
            self.run(self.net, (32, 32), drop=True)
        for module, training in modes:
            module.training = training

    # --- copies

    @precondition(lambda self: not self.masks)  # torch cannot copy a pruned weight after a forward pass
    @change(kind=st.sampled_from(["deepcopy", "pickle", "torch.save", "EMA"]), keep=st.booleans())
    def copy_network(self, kind, keep):
        makers = {**COPIES, "EMA": lambda net: torch.optim.swa_utils.AveragedModel(net).module}
        if kind in ("pickle", "torch.save") and "parametrizations" in self.net.head._modules:
            return  # torch refuses it
        before = self.net
        for copied in self.attempt(makers[kind], self.net):
            self.net = copied
            with torch.no_grad():  # a copy is outside the with blocks of the original
                self.run(copied, (32, 32), scoped=False)
            if keep:
                self.exit_all()
            else:
                self.net = before
                self.read_statistics()

    @precondition(lambda self: self.blocks and not self.scopes)
    @precondition(lambda self: not (self.tuned or self.masks or self.frozen or self.synced))
    @change(kind=st.sampled_from(["state dict", "adapter", "folder"]))
    def save_and_load(self, kind):
        if "parametrizations" in self.net.head._modules:
            return
        training, dtype = self.net.training, self.net.stem.bias.dtype
        path, example = Path(tempfile.mkdtemp()), torch.randn(2, 3, 32, 32, dtype=dtype)
        if kind == "state dict":
            torch.save(self.net.state_dict(), path / "net.pth")
            through = any(key.startswith("inserted_") for key in self.net.state_dict())
            net = build(self.options, self.from_outside, through).backbone.to(dtype)
            if self.replaced:
                va.replace_(net, names="head", num_heads=2, example_input=example)
            va.load_checkpoint_(net, path / "net.pth")
        elif kind == "adapter":
            state = {plain_key(key): value for key, value in self.net.state_dict().items()}
            base = {key: value for key, value in (self.w | state).items() if not is_added(key)}
            saved = self.attempt(va.save_adapter, self.net, path / "adapter.safetensors")
            net = Net().to(dtype)
            net.load_state_dict(base)
            if not saved:
                return
            va.load_adapter_(net, path / "adapter.safetensors")
        else:
            if not self.attempt(lambda: va.save_model(self.net, path, network=Net, example_input=example)):
                return
            net = va.load_model(path, network=Net).to(dtype)
        if self.replaced:  # files do not contain the layer that attention replaced
            va.remove_(original := copy.deepcopy(net))
            self.w |= {f"head.{key}": value.double() for key, value in original.head.state_dict().items()}
        self.net, self.swapped = freeze_part(net).train(training), False

    # --- functions of the network

    @precondition(lambda self: "padded" not in self.scopes and not self.net.training)
    @rule(kind=st.sampled_from(["functional_call", "vmap", "grad", "jvp"]))
    def functional(self, kind):
        parameters = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}

        def call(x):
            return torch.func.functional_call(self.net, parameters, (x,))

        if kind == "functional_call":
            self.run(call, (32, 32))
        elif kind == "vmap" and "context" not in self.scopes and "capture" not in self.scopes:
            with torch.no_grad():
                self.run(torch.func.vmap(lambda x: call(x[None])[0]), (32, 32))
        plain, _ = self.plain()
        # torch refuses checkpoints and its fused kernel there, and its compiler fails there for compiled layers.
        wrapped = re.search("_wrapped|_orig_mod" + "|impl='sdpa'" * (kind == "jvp"), repr(self.net)) is not None
        if kind not in ("grad", "jvp") or isinstance(plain.context, str) or wrapped:
            return
        direction, x = torch.randn(2, 3, 32, 32, dtype=torch.float64), self.image((32, 32))

        def differentiate(f, x):
            return torch.func.grad(f)(x) if kind == "grad" else torch.func.jvp(f, (x,), (direction.to(x),))[1]

        with warnings.catch_warnings(action="ignore"):  # torch compiles rules with a deprecated compiler
            for found in self.attempt(differentiate, lambda x: call(x).sum(), x):
                self.equal(found, differentiate(lambda x: plain(x)[0].sum(), x.double()), "derivative")

    # --- keys and frozen parameters

    def check_state(self):
        """Check that no tensor has another key, and that no parameter was frozen or trained by itself."""
        keys = [name for key in self.net.state_dict() if (name := plain_key(key))]
        expected = [key for key in self.w if self.blocks or not is_added(key)]
        if self.replaced:
            expected = [key for key in expected if key not in ("head.weight", "head.bias")]
        if "parametrizations" in self.net.head._modules:
            expected.remove("head.weight")
        assert sorted(keys) == sorted(expected)
        for key, parameter in self.net.named_parameters():
            if name := plain_key(key):
                assert parameter.requires_grad == (name in self.live), f"requires_grad of {key}"

    def teardown(self):
        if hasattr(self, "net"):
            self.exit_all()
            self.backward()
            self.check_state()


#: Numbers of networks, and of steps for each: the setup of a network takes as long as four steps.
@pytest.mark.parametrize(("networks", "steps"), [(20, 25), pytest.param(60, 30, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of torch, about functions that it runs slowly or compiles
def test_features_in_random_order(networks, steps):
    stateful.run_state_machine_as_test(Networks, settings=settings(max_examples=networks, stateful_step_count=steps))


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore")
# At these limits, torch stops compiling: what runs again may then run otherwise than at first.
@torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20)
def test_features_in_random_order_for_half_an_hour():
    end = time.monotonic() + 1800
    while time.monotonic() < end:
        print(f"seed {(number := random.SystemRandom().randrange(2**32))}")
        fresh = seed(number)(type("Networks", (Networks,), {"compiles": True}))
        profile = settings(max_examples=40, stateful_step_count=30, derandomize=False)
        stateful.run_state_machine_as_test(fresh, settings=profile)
