"""Random attention by every implementation against a float64 computation of its own, forward and gradients.

``python tests/attack_numbers.py 10000`` tries as many and prints the worst error of each implementation and type, as a
share of the largest number that is right, and of gradients of the largest that they are made of.
"""

import itertools
import math
import random
import sys
from collections import defaultdict

import torch

from vision_attn.attention.implementations import IMPLS, attend

#: The errors that rounding explains, by type, as a share of the largest number.
BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
MASKS = ("none", "bool", "additive", "large", "closed rows", "finfo.min", "causal", "bool and causal")


def drawn(rng):
    """One way of attending: sizes, type, layout, mask, how large the logits are."""
    heads = rng.choice((1, 2, 4))
    return {
        "sizes": [rng.choice(some) for some in ((0, 1, 2, 3), (heads,), (1, heads), (1, 2, 5, 16), (1, 3, 33))],
        "widths": (rng.choice((1, 4, 8)), rng.choice((1, 4, 8, 12))),
        "dtype": rng.choice(list(BOUNDS)),
        "strided": rng.choice((False, True)),
        "mask": rng.choice(MASKS),
        "size": rng.choice((1e-30, 1.0, 1.0, 1.0, 30.0, 300.0)),
        "scale": rng.choice((None, None, 1.0, 0.0, -0.5)),
        "seed": rng.randrange(2**31),
    }


def mask_of(kind, shape, generator):
    """A mask for the logits, and whether it is causal besides."""
    shape = tuple(size if torch.rand((), generator=generator) < 0.7 else 1 for size in shape[:2]) + shape[2:]
    causal = "causal" in kind
    if kind in ("none", "causal"):
        return None, causal
    if "bool" in kind:
        return torch.rand(shape, generator=generator) < 0.7, causal
    mask = torch.randn(shape, generator=generator)
    if kind == "large":
        mask *= 1e5
    if kind in ("closed rows", "finfo.min"):
        rows = torch.rand(shape[:3], generator=generator) < 0.5
        mask[rows] = -torch.inf if kind == "closed rows" else torch.finfo(torch.float32).min
    return mask, causal


def in_float64(q, k, v, *, scale, mask, causal):
    """Attention as it is defined, in float64: by nothing of the library."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        logits = torch.where(mask, logits, -torch.inf)
    elif mask is not None:
        row = mask.double()  # less its largest value, which softmax does not see: beyond 1e15 float64 holds no logit
        logits = logits + (row - torch.where(row.amax(-1, keepdim=True).isinf(), 0.0, row.amax(-1, keepdim=True)))
    if causal:
        later = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]
        logits = logits.masked_fill(later, -torch.inf)
    largest = logits.detach().amax(-1, keepdim=True)
    shares = torch.where(largest == -torch.inf, 0.0, (logits - torch.where(largest == -torch.inf, 0.0, largest)).exp())
    total = shares.sum(-1, keepdim=True)
    return (shares / torch.where(total == 0, 1.0, total)) @ v


def error(found, right, size=0.0):
    """The largest difference, as a share of the largest number that is right or of a size; nothing may be NaN."""
    found, right = found.detach(), right.detach()
    if found.shape != right.shape or not bool(found.isfinite().all()):
        return math.inf
    return float((found.double() - right).abs().max()) / max(largest(right), size, 1e-30) if right.numel() else 0.0


def largest(x):
    return float(x.detach().abs().max()) if x.numel() else 0.0


def attempt(case):
    """The error of each implementation: of what comes out, and of the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(case["seed"])
    (b, n, m, i, j), (d, e), dtype = case["sizes"], case["widths"], case["dtype"]

    def numbers(heads, tokens, width, size=1.0):
        x = math.sqrt(size) * torch.randn(b, heads, tokens, 2 * width, generator=generator)
        return (x[..., ::2] if case["strided"] else x[..., :width].contiguous()).to(dtype)

    q, k, v = numbers(n, i, d, case["size"]), numbers(m, j, d, case["size"]), numbers(m, j, e)
    mask, causal = mask_of(case["mask"], (b, n, i, j), generator)
    if mask is not None and mask.dtype != torch.bool and dtype == torch.float64:
        mask = mask.double()
    weights = numbers(n, i, e)
    options = {"scale": case["scale"], "mask": mask, "causal": causal}

    def run(function, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        found = function(*inputs)
        return [found, *torch.autograd.grad((found * weights.to(found.dtype)).sum(), inputs)]

    right = run(lambda *inputs: in_float64(*inputs, **options), [q.double(), k.double(), v.double()])
    # Where a row attends to one key alone, its gradients are what is left of numbers of these sizes.
    scale = abs(d**-0.5 if case["scale"] is None else case["scale"]) * largest(weights) * largest(v)
    sizes = (scale * largest(k), scale * largest(q), largest(weights))
    for impl in IMPLS:
        found = run(lambda *inputs, impl=impl: attend(*inputs, impl=impl, **options), [q, k, v])
        yield impl, error(found[0], right[0]), max(map(error, found[1:], right[1:], sizes))


def attack(count, seed=0):
    """The worst errors by implementation and type, and the cases that are worse than rounding explains."""
    rng, worst, wrong = random.Random(seed), defaultdict(lambda: [0.0, 0.0]), []
    for number in range(count):
        case = drawn(rng)
        for impl, *errors in attempt(case):
            held = worst[impl, case["dtype"]]
            held[:] = map(max, held, errors)
            if not max(errors) <= BOUNDS[case["dtype"]]:
                wrong.append((number, impl, errors, case))
    return worst, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    worst, wrong = attack(number)
    print(f"{number} cases, {len(wrong)} worse than rounding explains")
    for impl, dtype in itertools.product(IMPLS, BOUNDS):
        forward, backward = worst[impl, dtype]
        print(f"{impl:<8} {str(dtype)[6:]:<10} forward {forward:.1e}  gradients {backward:.1e}")
    print(*wrong[:10], sep="\n")
    sys.exit(bool(wrong))
