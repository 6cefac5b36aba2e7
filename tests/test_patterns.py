"""A pattern permutes the tokens of a feature map, equally in einx and in torch; its grouping of a size is cached."""

import copy
import gc
import io
import itertools
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import einx
import pytest
import torch
from hypothesis import given, settings, strategies as st
from impls import CASES, CPU_IMPLS
from torch._subclasses.fake_tensor import FakeTensorMode

import vision_attn as va
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.kernels import from_groups, to_groups
from vision_attn.attention.patterns import Grouping, resolve_pattern

#: The names that the printed code of a pattern may use.
PUBLIC = {name: getattr(va, name) for name in va.__all__}

EXAMPLES = {
    **{name: case.pattern for name, case in CASES.items()},
    "padded, one group": va.Pattern("b n d (h p) w -> b n (h p w) d", p=2),
    "all sizes given": va.Pattern("b n d (y p) (r q) -> (b y) n (p r q) d", p=4, q=3, r=4),
}
PADDED = va.Pattern("b n d  ( h p )  w->b n ( h p w ) d", p=2)
WHOLE = va.Pattern("b n d (y p) w -> (b y) n (p w) d", y=2, p=3)
CPU = torch.device("cpu")


def make_grouping(pattern, size):
    return Grouping(resolve_pattern(pattern).for_rank(len(size)), size, size, CPU)


# --- lines of einx and the same code in torch -------------------------------------------------------------------------


def check_forms(pattern, size):
    """Check that einx and torch cut a map into the same groups, each position once, and put it together again."""
    grouping, x = make_grouping(pattern, size), torch.randn(2, 12 * 5, *size)
    kernels = [IMPLEMENTATIONS[impl] for impl in ("einx", "bmm")]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=memory_format)
        for layout in (grouping.query_layout, grouping.key_layout):
            cut = [to_groups(kernel, layout, x) for kernel in kernels]
            assert torch.equal(*cut)
            assert cut[0].shape == (2 * grouping.groups, 12 * 5, *layout.group_size)
            heads = [kernel.split_heads(maps, 12) for kernel, maps in zip(kernels, cut, strict=True)]
            assert torch.equal(*heads)
            assert heads[0].shape == (2 * grouping.groups, 12, layout.tokens, 5)
            for kernel in kernels if layout is grouping.query_layout else ():
                merged = kernel.merge_heads(heads[0], layout.group_size)
                assert torch.equal(merged, cut[0])
                assert torch.equal(from_groups(kernel, layout, merged), x)
    queries, keys = grouping.query_layout.index(), grouping.key_layout.index()
    assert sorted(queries[queries >= 0].tolist()) == list(range(size[0] * size[1]))
    numbered = torch.arange(size[0] * size[1], dtype=torch.float64).view(1, 1, *size)
    for index, layout in ((queries, grouping.query_layout), (keys, grouping.key_layout)):
        tokens = to_groups(IMPLEMENTATIONS["bmm"], layout, numbered).reshape(index.shape).long()
        assert torch.equal(tokens[index >= 0], index[index >= 0])
    if grouping.mask is not None and not isinstance(pattern, va.Halo):  # no token of the map attends to padding
        assert not (grouping.mask[0, :, 0] & (queries >= 0)[:, :, None] & (keys < 0)[:, None, :]).any()


@pytest.mark.parametrize("pattern", EXAMPLES.values(), ids=list(EXAMPLES))
def test_einx_and_torch_cut_a_map_into_the_same_groups(pattern):
    check_forms(pattern, (5, 7))  # which most of them pad


drawn = given(pattern=st.sampled_from(list(EXAMPLES.values())), size=st.tuples(st.integers(1, 12), st.integers(1, 12)))
test_maps_of_any_size_are_cut_into_the_same_groups = settings(max_examples=12)(drawn(check_forms))
test_many_drawn_maps_are_cut_into_the_same_groups = pytest.mark.thorough(
    settings.get_profile("anew")(drawn(check_forms))
)


def test_the_documented_lines_are_the_code_that_runs():
    x, kernels = torch.randn(2, 3, 4, 12, 12), [IMPLEMENTATIONS[impl] for impl in ("einx", "bmm")]
    found = {}
    for name, pattern in EXAMPLES.items():
        if isinstance(pattern, va.Neighborhood | va.Halo):
            continue
        line = resolve_pattern(pattern).for_rank(2).line
        found[name] = line.einx
        # Without padding and shifts every pattern is the reshape of its line.
        plain = va.Window(pattern.size) if isinstance(pattern, va.Window) else pattern
        layout = make_grouping(plain, (12, 12)).query_layout
        expected = einx.id(line.einx, x, **layout.line.sizes)
        assert torch.equal(eval(line.torch, {"maps": x, "b": 2, "n": 3, "d": 4, **layout.line.sizes}), expected)
        for kernel in kernels:
            assert torch.equal(kernel.split_heads(kernel.partition(x.flatten(1, 2), layout.line), 3), expected)
            merged = kernel.merge_heads(expected, layout.group_size)
            assert torch.equal(kernel.reverse(merged, layout.line), x.flatten(1, 2))
    documented = {
        "full": "b n d h w -> b n (h w) d",
        "rows": "b n d h w -> (b h) n w d",
        "columns": "b n d h w -> (b w) n h d",
        "window": "b n d (gh h) (gw w) -> (b gh gw) n (h w) d",
        "grid": "b n d (h gh) (w gw) -> (b gh gw) n (h w) d",
    }
    assert found | documented == found


def test_windows_and_neighborhoods_at_the_border():
    # The first window starts at the shift; there is no shift along an axis that fits into one window.
    assert [int(axis.queries.positions[0, 0]) for axis in make_grouping(va.Window(4, shift=2), (4, 9)).axes] == [0, 2]
    # Large neighborhoods do not copy more keys than the map has.
    assert make_grouping(va.Neighborhood(31, dilation=3), (7, 7)).key_layout.index().numel() <= 15 * 15
    for pattern, keys in ((va.Neighborhood(31), 35), (va.Neighborhood(7, dilation=64), 1), (va.Neighborhood(3), 9)):
        weights = va.Attention2d(8, 2, pattern=pattern).attention_weights(torch.randn(1, 8, 5, 7))
        assert ((weights > 0).sum(-1) == keys).all()
    # Tiles are padded with queries that are dropped afterwards; their gradients must not be NaN.
    causal, x = va.Attention2d(8, 2, pattern=va.Neighborhood(3, causal=True)), torch.randn(1, 8, 5, 7)
    for impl in CPU_IMPLS:
        with va.use_impl(causal, impl):
            gradients = torch.autograd.grad(causal(x).sum(), list(causal.parameters()))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_one_and_three_axes_are_two_with_axes_of_one():
    def copy_weights(module, other):
        shapes = {key: value.shape for key, value in module.state_dict().items()}
        module.load_state_dict({key: value.reshape(shapes[key]) for key, value in other.state_dict().items()})
        return module

    flat, deep = torch.randn(2, 8, 9), torch.randn(2, 8, 3, 4, 5)
    two = va.Attention2d(8, 2, pattern=va.Window((1, 4), shift=(0, 1)))
    one = copy_weights(va.Attention1d(8, 2, pattern=va.Window(4, shift=1)), two)
    torch.testing.assert_close(one(flat), two(flat[:, :, None])[:, :, 0])
    two = va.Attention2d(8, 2, pattern=va.Window(3))
    three = copy_weights(va.Attention3d(8, 2, pattern=va.Window((1, 3, 3))), two)
    expected = two(deep.transpose(1, 2).flatten(0, 1)).unflatten(0, (2, 3)).transpose(1, 2)
    for impl in CPU_IMPLS:
        with va.use_impl(three, impl):
            torch.testing.assert_close(three(deep), expected)


# --- the cache of groupings -------------------------------------------------------------------------------------------

SHIFTED = {"pattern": va.Window(3, shift=1), "position": va.RelPosTable()}
POSITIONS = (va.RelPosTable(), va.RelPosDecomposed(), va.AbsPos(3), va.Rope2d(), va.SinCos())


def kept(block):
    return list(block.groupings.kept.values())


def test_cached_groupings_are_not_saved_with_the_block_and_are_freed_with_it():
    block, x = va.Attention2d(8, 2, **SHIFTED), torch.randn(1, 8, 64, 64)

    def saved():
        torch.save(block, file := io.BytesIO())
        return len(pickle.dumps(block)), len(file.getvalue()), list(block.state_dict()), list(vars(block))

    before = saved()
    expected = block(x).detach()
    assert saved() == before
    (first,) = kept(block)
    block(x.expand(2, -1, -1, -1))
    assert kept(block) == [first]
    other = copy.deepcopy(block)
    assert not kept(other)
    assert torch.equal(other(x), expected)
    assert other.to("meta")(x.to("meta")).shape == x.shape
    for width in range(1, 20):
        block(torch.randn(1, 8, 2, width))
        assert len(kept(block)) <= 4
    mask = weakref.ref(kept(block)[0].mask)
    block = None
    gc.collect()
    assert mask() is None


def run_in_mode(mode, block, x):
    if mode == "inference":
        with torch.inference_mode():
            block(x)
    elif mode == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            block(fake.from_tensor(x))
            block(x)
    elif mode == "vmap":
        torch.func.vmap(block)(torch.stack([x, x]))
    else:
        torch.compiler.reset()
        torch.compile(block, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.filterwarnings("ignore")  # torch about its own parts
@pytest.mark.parametrize(
    ("mode", "position"),
    [*itertools.product(("inference", "fake", "vmap"), POSITIONS), ("compiled", POSITIONS[0])],  # it takes seconds
    ids=str,
)
def test_a_grouping_made_in_another_mode_is_not_used_in_training(mode, position):
    block, x = va.Attention2d(8, 2, pattern=SHIFTED["pattern"], position=position), torch.randn(2, 8, 5, 7)
    x.requires_grad_()
    run_in_mode(mode, block, x.detach())
    found = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    weights = block.attention_weights(x)
    mask = kept(block)[0].mask
    assert type(mask) is torch.Tensor
    assert not torch._C._functorch.is_functorch_wrapped_tensor(mask)  # of a transform that has ended
    block.groupings.kept.clear()
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    torch.testing.assert_close(weights, block.attention_weights(x))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert type(one) is torch.Tensor


def test_several_threads_share_the_cache():
    block = va.Attention2d(8, 2, **SHIFTED)
    maps = [torch.randn(1, 8, 4 + size // 6, 4 + size % 6) for size in range(24)]  # more than are kept
    expected = [block(x).detach() for x in maps]

    def run(number):
        x = maps[7 * number % len(maps)].clone().requires_grad_()
        y = block(x)
        torch.autograd.grad(y.sum(), x)
        return torch.equal(y, expected[7 * number % len(maps)])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(384)))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "Window(size=(7, 5), shift=(3, 0))",
        "Grid(size=7)",
        "Halo(block_size=8, halo_size=3)",
        "Neighborhood(kernel_size=3, dilation=1, stride=2, causal=(True, False))",
        "Pattern('b n d h (w s) -> (b s) n (h w) d', s=2)",
    ],
)
def test_a_pattern_prints_as_code_compares_and_pickles(code):
    pattern = eval(code, PUBLIC)
    assert repr(pattern) == code
    for other in (eval(code, PUBLIC), pickle.loads(pickle.dumps(pattern))):
        assert (other, hash(other), other.for_rank(2)) == (pattern, hash(pattern), pattern.for_rank(2))
    assert pattern != va.Window(2)
    assert va.Pattern("b n d h w -> b n (w h) d") == va.Pattern("b n d h w -> b n (h w) d")  # a set of tokens


STRIPES = "b n d h (w s) -> (b s) n (h w) d"


@pytest.mark.parametrize(
    ("line", "sizes", "message"),
    [
        ("b n d h w", {}, "exactly one '->'"),
        ("b c h w -> b n (h w) d", {}, "left side must be 'b n d'"),
        ("b n d q t h w -> b n (q t h w) d", {}, "one to three axes"),
        ("b n d h w -> b n h w d", {}, "right side must be"),
        ("b n d h w -> b n h d", {}, "'w' occurs 1 and 0 times"),
        ("b n d (h n) w -> b n (h w) d", {}, "'n' is reserved"),
        *((line, {}, "names in parentheses") for line in (")b n d h w( -> b n (h w) d", "b n d gé w -> b n (gé w) d")),
        ("b n d h w -> (b h w) n () d", {}, "names in parentheses"),
        (STRIPES, {}, "give the size of 'w' or 's'"),
        ("b n d h w -> b n (h w) d", {"s": 2}, "the size 2 is for 's'"),
        (STRIPES, {"s": 0}, "the size of 's' must .* at least 1, got 0"),
    ],
)
def test_a_line_that_is_no_pattern_is_refused_at_construction(line, sizes, message):
    with pytest.raises(ValueError, match=f"^pattern must .*{message}"):
        va.Pattern(line, **sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: va.Window(0), "Window: size must"),
        (lambda: va.Window([7, 7]), "Window: size must"),
        (lambda: va.Window((7, 7), shift=(3, 3, 3)), "Window: size and shift must"),
        (lambda: va.Window((4, 2), shift=2), "Window: shift must"),
        (lambda: va.Grid(True), "Grid: size must"),
        (lambda: va.Halo(3, -1), "Halo: halo_size must be"),
        (lambda: va.Neighborhood(3, dilation=0), "Neighborhood: dilation must"),
        (lambda: va.Neighborhood(3, stride=4), "stride must be at most kernel_size, 3; got 4"),
        (lambda: va.Neighborhood(3, causal=1), "causal must"),
        (lambda: va.Pattern(5), "Pattern: line must"),
        (lambda: va.Attention2d(8, pattern=va.Window((7, 7, 7))), r"Window: size must .*2 axes; got \(7, 7, 7\)"),
        (lambda: va.Attention1d(8, pattern="columns"), "'columns' needs a map with 2 axes; got 1"),
        (lambda: va.Attention2d(8, pattern=va.Pattern("b n d w -> b n w d")), "maps with 2 axes; got Pattern.* for 1"),
        (lambda: va.Attention2d(8, pattern=7), "pattern must"),
        (lambda: va.Attention2d(8, pattern=PADDED, kv_stride=2), "pattern must .* kv_stride"),
        (lambda: va.Attention2d(8, pattern=WHOLE)(torch.ones(1, 8, 7, 4)), "x must"),
    ],
)
def test_bad_patterns_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
