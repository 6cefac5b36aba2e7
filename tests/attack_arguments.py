"""Wrong arguments in great number: of the blocks, patterns, position terms and of attention itself.

``python tests/attack_arguments.py 10000`` tries as many calls. What comes of one is a result, or a ``ValueError`` or
``TypeError`` that names the argument.
"""

import inspect
import random
import re
import resource
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import conftest  # noqa: F401  the profiles of draws, as a script, too
import numpy as np
import torch
from test_reference import PATTERNS, POSITIONS
from torch import nn

import vision_attn as va
from vision_attn.attention.implementations import IMPLS, attend

#: What is handed over in the place of any argument.
ANYTHING = (
    None, True, False, 0, 1, 2, 3, -1, 2**31, 2**63, 10**30, 0.0, 0.5, -1.0, 1e300, float("nan"), float("inf"), "",
    "full",
    "0", "2", "layer3", "all", "a\x1b[2J\nb", "\ud800", "\0", b"0", (), [], {}, (2, 3), [1], (1, 2, 3, 4), [None],
    {"a": 1},
    {1: 2}, {0}, object(), int, len, lambda *given, **named: None, range(2), iter([0]), np.int64(2), np.float32(0.5),
    np.ones(2), torch.tensor(2), torch.ones(2), torch.ones(1, 8, 4, 5), torch.float16, torch.int64,
    torch.device("meta"),
    "cpu", "meta", "cuda:99", "einx", nn.ReLU(), nn.Conv2d(3, 8, 1), re.compile("2"), Path("nothing"), va.Window(2),
    va.RelPosTable(), ValueError, va.Attention2d, "mean", "softmax", "after",
)  # fmt: skip
#: What may be right, by the name of the argument.
FITTING = {
    "pattern": [one.pattern for one in PATTERNS.values()],
    "position": [make((3, 3)) for make in POSITIONS.values()],
    "dtype": [torch.float64, torch.float32, torch.bfloat16], "impl": IMPLS, "qk_norm": ["cosine", True],
    "queries": [torch.tensor([0]), torch.tensor([99])],
    "feat_size": [(4, 5), 3], "size": [(4, 3), 2], "kernel_size": [(3, 5), 3],
}  # fmt: skip


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def with_blocks():
    model = network()
    va.insert_(model, names=["0", "2"], num_heads=2, example_input=(1, 3, 8, 8))
    return model


def image():
    return torch.rand(2, 3, 8, 8)


#: Every kind of block with parameters of its own.
MAKERS = (
    partial(va.Attention2d, 8, 2), partial(va.AttentionBlock2d, 8, 2), partial(va.LinearAttention2d, 8, 2),
    partial(va.TransformerBlock2d, 8, 2),
    partial(va.AugmentedConv2d, 8, 8, num_heads=2, key_channels=4, value_channels=4),
)  # fmt: skip


#: Terms that are made with a size.
SIZED = (va.RelPosDecomposed, va.RelPosTable, va.AbsPos)


def block_run(kind, rank):
    """Make a block and run it."""

    def run(**options):
        block = kind(**options)
        like = next(block.parameters())
        x = torch.randn(2, int(options.get("channels", 8)), *(4, 5, 3)[:rank], device=like.device, dtype=like.dtype)
        with torch.no_grad():
            block.eval()(x)

    return with_signature(run, kind)


def specified(name, make):
    """Make a pattern or a position term and run a block with it."""
    return with_signature(
        lambda **options: va.Attention2d(8, 2, **{name: make(**options)})(torch.randn(1, 8, 4, 5)), make
    )


def with_signature(function, of):
    function.__signature__ = inspect.signature(of)
    return function


def honest():
    """Each function, and what makes arguments that it takes."""
    sizes = {"channels": 8, "num_heads": 2}
    calls = {
        kind.__name__: (block_run(kind, rank), sizes.copy)
        for kind, rank in (
            *((va.Attention1d, 1), (va.Attention2d, 2), (va.Attention3d, 3)),
            *((va.AttentionBlock1d, 1), (va.AttentionBlock2d, 2), (va.AttentionBlock3d, 3)),
            *((va.LinearAttention2d, 2), (va.StridedAttention2d, 2), (va.TransformerBlock2d, 2)),
        )
    }
    augmented = {"in_channels": 8, "out_channels": 8, "num_heads": 2, "key_channels": 4, "value_channels": 4}
    calls["AugmentedConv2d"] = block_run(va.AugmentedConv2d, 2), augmented.copy
    for make, options in (
        *((va.Window, {"size": 2}), (va.Grid, {"size": 2}), (va.Halo, {"block_size": 2, "halo_size": 1})),
        *((va.Neighborhood, {"kernel_size": 3}), (partial(va.Pattern, "b n d h (w s) -> (b s) n (h w) d"), {"s": 2})),
    ):
        calls[f"pattern {make}"] = specified("pattern", make), options.copy
    for make in (va.RelPosDecomposed, va.RelPosTable, va.AbsPos, va.Rope2d, va.SinCos, va.ConditionalPos):
        calls[f"position {make}"] = specified("position", make), {"feat_size": (4, 5)}.copy if make in SIZED else dict
    block = va.Attention2d(8, 2)
    calls["forward"] = block.forward, lambda: {"x": torch.randn(2, 8, 4, 5)}
    calls["attention_weights"] = block.attention_weights, lambda: {"x": torch.randn(2, 8, 4, 5)}
    calls["attend"] = attend, lambda: {name: torch.randn(2, 2, 6, 4) for name in "qkv"}
    return calls


def attempt(calls, rng):
    """One call with one wrong argument or two: what it was, how it ended, and what is wrong with that."""
    name = rng.choice(sorted(calls))
    function, make = calls[name]
    given = make()
    signature = inspect.signature(function).parameters.values()
    takes = [one.name for one in signature if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    takes += [*given.keys() - set(takes)]
    if any(one.kind == one.VAR_KEYWORD for one in signature) and rng.random() < 0.3:
        takes = ["pattern", "position", "num_heads", "key_dim", "dtype", "device", "gate_init", "nothing", "channels"]
    changed = rng.sample(takes, min(len(takes), rng.choice((1, 1, 1, 2))))
    for one in changed:
        given[one] = rng.choice(FITTING[one] if one in FITTING and rng.random() < 0.4 else ANYTHING)
    what = f"{name}({', '.join(f'{one}={given[one]!r:.160}' for one in changed)})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**given)
        return what, "result", None
    except (ValueError, TypeError) as error:
        words = {*changed, *given, *(type(given[one]).__name__ for one in changed)}
        named = any(re.search(rf"\b{re.escape(word.split('_')[0])}", str(error)) for word in words)
        return what, type(error).__name__, None if named else f"names no argument: {error!s:.200}"
    except Exception as error:
        lack = any(words in str(error) for words in ("allocate memory", "Storage size", "overflow"))
        return what, "no memory" if lack else type(error).__name__, None if lack else f"{error!r:.200}"


def attack(count, seed=0):
    """So many calls: how they ended, and those that ended wrongly."""
    outcomes, wrong, calls = Counter(), [], honest()
    for number in range(count):
        what, outcome, why = attempt(calls, random.Random(f"{seed} {number}"))
        outcomes[outcome] += 1
        if why:
            wrong.append((number, what, outcome, why))
    return outcomes, wrong


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30,) * 2)
    torch.set_num_threads(1)
    outcomes, wrong = attack(*map(int, sys.argv[1:]))
    print(*wrong, outcomes, sep="\n")
    sys.exit(bool(wrong))
