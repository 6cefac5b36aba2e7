"""Documented expressions of patterns, the cache of groupings, and errors for invalid patterns.

``test_reference.py`` compares every pattern with its NumPy definition, in every implementation.
"""

import copy
import gc
import io
import itertools
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import einx
import pytest
import torch
from impls import PATTERNS
from torch._subclasses.fake_tensor import FakeTensorMode

import vision_attn as va
from vision_attn.attention.patterns import Grouping, resolve_pattern


def test_documented_expressions_match_the_code():
    """``test_readme.py`` compares them with the page."""
    x = torch.randn(2, 3, 4, 12, 12)
    for pattern in PATTERNS:
        if isinstance(pattern, va.Neighborhood | va.Halo):
            continue
        line = resolve_pattern(pattern).expand_to_rank(2).rearrangement
        # Without padding and shifts, every pattern is a plain reshape.
        plain = va.Window(pattern.size) if isinstance(pattern, va.Window) else pattern
        grouping = Grouping(resolve_pattern(plain).expand_to_rank(2), (12, 12), (12, 12), torch.device("cpu"))
        sizes = grouping.query_layout.rearrangement.sizes
        names = {"maps": x, "b": 2, "n": 3, "d": 4, **sizes}
        assert torch.equal(eval(line.torch, names), einx.id(line.einx, x, **sizes))


def test_neighborhoods_and_blocks_at_the_border():
    large = Grouping(va.Neighborhood(31, dilation=3).expand_to_rank(2), (7, 7), (7, 7), torch.device("cpu"))
    assert large.key_layout.index().numel() <= 15 * 15  # few more keys than positions on the feature map
    assert Grouping(va.Halo(4, 1).expand_to_rank(2), (8, 5), (8, 5), torch.device("cpu")).groups == 2 * 2
    for pattern, keys in ((va.Neighborhood(31), 35), (va.Neighborhood(7, dilation=64), 1), (va.Neighborhood(3), 9)):
        weights = va.Attention2d(8, 2, pattern=pattern).attention_weights(torch.randn(1, 8, 5, 7))
        assert ((weights > 0).sum(-1) == keys).all()


# --- the cache of groupings -------------------------------------------------------------------------------------------

POSITIONS = (va.RelPosTable(), va.RelPosDecomposed(), va.AbsPos(3), va.Rope(), va.SinCos())
SHIFTED = {"pattern": va.Window(3, shift=1), "position": va.RelPosTable()}


def test_cached_groupings_are_not_saved_with_the_block_and_are_freed_with_the_block():
    block, x = va.Attention2d(8, 2, **SHIFTED), torch.randn(1, 8, 64, 64)

    def saved():
        torch.save(block, file := io.BytesIO())
        return len(pickle.dumps(block)), len(file.getvalue()), list(block.state_dict()), list(vars(block))

    before, expected = saved(), block(x).detach()
    assert saved() == before
    recent = block.plans.groupings
    (first,) = recent.values()
    block(x.expand(2, -1, -1, -1))
    assert [*recent.values()] == [first]
    other = copy.deepcopy(block)
    assert not other.plans.groupings
    assert not other.plans.recent
    assert torch.equal(other(x), expected)
    assert other.to("meta")(x.to("meta")).shape == x.shape
    for width in range(1, 20):
        block(torch.randn(1, 8, 2, width))
        assert len(recent) <= 4
    mask = weakref.ref(next(iter(recent.values())).allowed())
    block = recent = first = None
    gc.collect()
    assert mask() is None


def run_fake(block, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        block(fake.from_tensor(x))
        block(x)


MODES = {
    "inference": torch.inference_mode()(lambda block, x: block(x)),
    "fake": run_fake,
    "vmap": lambda block, x: torch.func.vmap(block)(torch.stack([x, x])),
    "compiled": lambda block, x: torch.compile(block, fullgraph=True, backend="aot_eager")(x),
}


IN_MODES = [*itertools.product(("inference", "fake", "vmap"), POSITIONS)]
IN_MODES += [pytest.param("compiled", va.RelPosTable(), marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore")  # warnings of torch about its own modules
@pytest.mark.parametrize(("mode", "position"), IN_MODES, ids=str)
def test_a_grouping_created_in_another_mode_is_not_used_in_training(mode, position):
    block, x = va.Attention2d(8, 2, pattern=SHIFTED["pattern"], position=position), torch.randn(2, 8, 5, 7)
    x.requires_grad_()
    MODES[mode](block, x.detach())
    found, weights = torch.autograd.grad(block(x).sum(), [x, *block.parameters()]), block.attention_weights(x)
    mask = next(iter(block.plans.groupings.values())).allowed()
    assert type(mask) is torch.Tensor
    assert not torch._C._functorch.is_functorch_wrapped_tensor(mask)  # the transform has ended
    new = copy.deepcopy(block)  # without cached groupings
    expected = torch.autograd.grad(new(x).sum(), [x, *new.parameters()])
    torch.testing.assert_close((weights, found), (new.attention_weights(x), expected))
    assert {type(one) for one in found} == {torch.Tensor}


def test_several_threads_share_the_cache():
    block = va.Attention2d(8, 2, **SHIFTED)
    maps = [torch.randn(1, 8, 4 + size // 6, 4 + size % 6) for size in range(24)]  # more sizes than the cache holds
    expected = [block(x).detach() for x in maps]

    def run(number):
        x = maps[7 * number % len(maps)].clone().requires_grad_()
        y = block(x)
        torch.autograd.grad(y.sum(), x)
        return torch.equal(y, expected[7 * number % len(maps)])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(120)))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if not isinstance(pattern, str)], ids=str)
def test_patterns_have_a_repr_that_is_code_and_support_equality_hash_and_pickle(pattern):
    for other in (eval(f"va.{pattern!r}"), pickle.loads(pickle.dumps(pattern))):
        assert (other, hash(other), other.expand_to_rank(2)) == (pattern, hash(pattern), pattern.expand_to_rank(2))
    # The order of tokens is irrelevant.
    assert va.Pattern("b n d h w -> b n (w h) d") == va.Pattern("b n d h w -> b n (h w) d")
    rows, text = (va.Attention2d(8, pattern=name) for name in ("rows", "b n d h w -> (b h) n w d"))
    assert text.resolved_pattern == rows.resolved_pattern


FIXED_HEIGHT = va.Pattern("b n d (y p) w -> (b y) n (p w) d", y=2, p=3)
STRIPES = "b n d h (w s) -> (b s) n (h w) d"

OTHER_FORMS = [
    "b n d h w", "b c h w -> b n (h w) d", "b n d h w -> b n h w d", "b n d h w -> b n (h w) d x",
    "b n d h w -> b x (h w) d", "b n d h w -> n (h w) d", "b n d -> b n h d", "b n d u t h w -> b n (u t h w) d",
    ")b n d h w( -> b n (h w) d", "b n d h w -> b n (h w) d -> b n d h w", "b n d(h) w -> b n (h w) d",
]  # fmt: skip


INVALID = [
    *((partial(va.Pattern, text), f"the form 'b n d <axes>.* got {re.escape(repr(text))}$") for text in OTHER_FORMS),
    (lambda: va.Pattern("b n d h w -> b n h d"), "'w' occurs 1 and 0 times"),
    (lambda: va.Pattern("b n d (h n) w -> b n (h w) d"), "'n' is a reserved name"),
    (lambda: va.Pattern(STRIPES), "pass the size of 'w' or 's'"),
    (lambda: va.Pattern(STRIPES, h=2, q=2), "sizes must be .* names in the expression, got q=2"),
    (lambda: va.Pattern(STRIPES, s=0), "sizes must be positive integers .*, got s=0"),
    (lambda: va.Pattern(STRIPES, s=2.0), "sizes must be positive integers .*, got s=2.0"),
    (lambda: va.Window(0), "Window: size must"),
    (lambda: va.Window(7.0), "Window: size must be an integer or a tuple, at least 1, got 7.0"),
    (lambda: va.Window((7, 7), shift=(3, 3, 3)), "Window: shift must have the length of size"),
    (lambda: va.Window((4, 2), shift=2), "Window: shift must"),
    (lambda: va.Grid((7, 0)), "Grid: size must"),
    (lambda: va.Halo(3, -1), "Halo: halo_size must be"),
    (lambda: va.Neighborhood(3, dilation=0), "Neighborhood: dilation must"),
    (lambda: va.Neighborhood(3, causal=(False, "no")), "causal must be True or False, got 'no'"),
    (lambda: va.Neighborhood(3, stride=4), "stride must be at most kernel_size=3, got 4"),
    (lambda: va.Attention2d(8, pattern=va.Window((7, 7, 7))), r"Window: size must .*2 axes, got \(7, 7, 7\)"),
    (lambda: va.blocks.Attention1d(8, pattern="columns"), "'columns' requires a feature map with 2 axes, got 1"),
    (lambda: va.Attention2d(8, pattern=va.Pattern("b n d w -> b n w d")), "maps with 2 axes, got Pattern.* for 1"),
    (lambda: va.Attention2d(8, pattern=7), "pattern must"),
    (lambda: va.Attention2d(8, pattern=FIXED_HEIGHT)(torch.ones(1, 8, 7, 4)), "x must"),
]


@pytest.mark.parametrize(("make", "message"), INVALID)
def test_invalid_patterns_raise_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()
