"""A pattern is a permutation of the map, the same in einx and in torch, and says so in both as code."""

import pickle

import einx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_attn.patterns.heads import heads_apart_bmm, heads_apart_einx

import vision_attn as va
from vision_attn.patterns import PATTERNS, heads_bmm, heads_einx, join_bmm, join_einx, resolve_pattern

EXAMPLES = {
    **{name: name for name in PATTERNS},
    "window": va.Window(3),
    "uneven window": va.Window((2, 4)),
    "shifted window": va.Window(4, shift=2),
    "grid": va.Grid(3),
    "neighborhood": va.Neighborhood(3),
    "even neighborhood": va.Neighborhood(4),
    "dilated neighborhood": va.Neighborhood(3, dilation=(1, 2)),
    "stripes": va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2),
    "all sizes given": va.Pattern("b n d (y p) (r q) -> (b y) n (p r q) d", p=4, q=3, r=4),
}
LINES = [pattern for pattern in EXAMPLES.values() if not isinstance(pattern, va.Neighborhood)]


@settings(max_examples=100, deadline=None)
@given(
    pattern=st.sampled_from(list(EXAMPLES.values())),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    channels_last=st.booleans(),
)
def test_the_einx_form_and_its_twin_are_the_same_and_undo_their_cut(pattern, size, channels_last):
    tiling = resolve_pattern(pattern).tiling(2)
    x = torch.randn(2, 3 * 4, *size)
    x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).unflatten(1, (3, 4))
    for keys in (False, True):
        assert torch.equal(tiling.split(x, einx=True, keys=keys), tiling.split(x, keys=keys))
    tokens = tiling.split(x)
    for einx_form in (False, True):
        assert torch.equal(tiling.merge(tokens, size, einx=einx_form), x)


@settings(max_examples=100, deadline=None)
@given(pattern=st.sampled_from(list(EXAMPLES.values())), size=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_every_position_is_a_query_once_and_the_index_says_where(pattern, size):
    tiling = resolve_pattern(pattern).tiling(2)
    queries, keys = tiling.index(size, torch.device("cpu"))
    real = queries[queries >= 0]
    assert sorted(real.tolist()) == list(range(size[0] * size[1]))
    places = torch.arange(size[0] * size[1], dtype=torch.float64).view(1, 1, 1, *size)
    for index, split in ((queries, tiling.split(places)), (keys, tiling.split(places, keys=True))):
        assert torch.equal(split[:, 0, :, 0].long()[index >= 0], index[index >= 0])
    mask = tiling.mask(size, torch.device("cpu"))
    if mask is not None:  # nothing real looks at padding
        assert not (mask & (queries >= 0)[:, :, None] & (keys < 0)[:, None, :]).any()


@pytest.mark.parametrize("pattern", LINES, ids=str)
def test_the_printed_lines_are_the_code_that_runs(pattern):
    line = resolve_pattern(pattern).tiling(2).line
    size = (12, 12)
    x = torch.randn(2, 3, 4, *size)
    expected = line.split_bmm(x)
    assert torch.equal(einx.id(line.einx, x, **line.sizes), expected)
    names = {"maps": x, "b": 2, "n": 3, "d": 4, **line.lengths(size)}
    assert torch.equal(eval(line.torch, names), expected)


def test_the_lines_are_those_of_the_documentation():
    lines = {name: resolve_pattern(EXAMPLES[name]).tiling(2).line.einx for name in (*PATTERNS, "window", "grid")}
    assert lines == {
        "full": "b n d h w -> b n (h w) d",
        "rows": "b n d h w -> (b h) n w d",
        "columns": "b n d h w -> (b w) n h d",
        "window": "b n d (gh h) (gw w) -> (b gh gw) n (h w) d",
        "grid": "b n d (h gh) (w gw) -> (b gh gw) n (h w) d",
    }


@pytest.mark.parametrize("size", [(6, 8), (5, 7)])
def test_queries_and_keys_of_full_attention_are_views_in_channels_last(size):
    x = torch.randn(2, 3 * 2 * 4, *size).contiguous(memory_format=torch.channels_last)
    q, k, v = heads_bmm(x, 2, 2, 4, 4)
    for part in (q, k, v):
        tokens = resolve_pattern("full").tiling(2).split(part)
        assert tokens.data_ptr() == part.data_ptr()
        assert tokens.stride(-1) == 1


def test_heads_are_the_same_in_both_forms():
    qkv = torch.randn(2, 4 * 3 + 2 * 3 + 2 * 5, 3, 6)
    for ours, twin in zip(heads_einx(qkv, 4, 2, 3, 5), heads_bmm(qkv, 4, 2, 3, 5), strict=True):
        assert torch.equal(ours, twin)
    q, kv = qkv[:, :12], qkv[:, 12:]
    for ours, twin in zip(heads_apart_einx(q, kv, 4, 2, 3, 5), heads_apart_bmm(q, kv, 4, 2, 3, 5), strict=True):
        assert torch.equal(ours, twin)
    y = torch.randn(2, 3, 4, 5, 6)
    assert torch.equal(join_einx(y), join_bmm(y))


def test_swins_shift_leaves_an_axis_alone_that_one_window_holds():
    shifted, plain = va.Window(4, shift=2).tiling(2), va.Window(4).tiling(2)
    assert shifted.mask((4, 4), torch.device("cpu")) is None
    assert shifted.shift_on((4, 9)) == (0, 2)
    x = torch.randn(1, 1, 1, 4, 4)
    assert torch.equal(shifted.split(x), plain.split(x))


def test_a_neighborhood_has_as_many_keys_at_the_border():
    mask = va.Neighborhood(3).tiling(2).mask((7, 5), torch.device("cpu"))
    queries, _ = va.Neighborhood(3).tiling(2).index((7, 5), torch.device("cpu"))
    assert set(mask.sum(-1)[queries >= 0].tolist()) == {9}


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        (va.Window(7), "Window(size=7, shift=0)"),
        (va.Window((7, 5), shift=(3, 0)), "Window(size=(7, 5), shift=(3, 0))"),
        (va.Grid(7), "Grid(size=7)"),
        (va.Neighborhood(7, dilation=2), "Neighborhood(kernel_size=7, dilation=2)"),
        (va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2), "Pattern('b n d h (w s) -> (b s) n (h w) d', s=2)"),
    ],
)
def test_a_pattern_prints_as_code_compares_and_pickles(pattern, code):
    assert repr(pattern) == code
    again = eval(code, {name: getattr(va, name) for name in ("Window", "Grid", "Neighborhood", "Pattern")})
    for other in (again, pickle.loads(pickle.dumps(pattern))):
        assert other == pattern
        assert hash(other) == hash(pattern)
    assert pattern != va.Window(2)


def test_the_order_of_tokens_is_that_of_the_map_however_it_is_written():
    assert va.Pattern("b n d h w -> b n (w h) d") == va.Pattern("b n d h w -> b n (h w) d")


@pytest.mark.parametrize(
    ("line", "sizes", "message"),
    [
        ("b n d h w", {}, "it has no single '->'"),
        ("b n d h w -> b n (h w) d -> b", {}, "it has no single '->'"),
        ("b c h w -> b n (h w) d", {}, "its left side is not 'b n d'"),
        ("b n d -> b n d", {}, "its left side is not"),
        ("b n d h w -> (b h w) n () d", {}, "is not names and names in brackets"),
        ("b n d q t h w -> b n (q t h w) d", {}, "one to three axes"),
        ("b n d h w -> b n h w d", {}, "its right side is not"),
        ("b n d h w -> n b (h w) d", {}, "its right side is not"),
        ("b n d h w -> b n h d", {}, "no permutation of the map, since 'w' stands 1 and 0 times"),
        ("b n d h w -> (b h) n (h w) d", {}, "no permutation of the map, since 'h' stands 1 and 2 times"),
        ("b n d h h -> b n (h w) d", {}, "no permutation of the map"),
        ("b n d h h -> b n h d", {}, "no permutation of the map, since 'h' stands 2 and 1 times"),
        ("b n d (h n) w -> b n (h w) d", {}, "'n' has another meaning and cannot name a part of an axis"),
        ("b n d graph w -> b n (graph w) d", {}, "'graph' has another meaning"),
        (")b n d h w( -> b n (h w) d", {}, "is not names and names in brackets"),
        ("b n d h w -> ((b h)) n w d", {}, "is not names and names in brackets"),
        ("b n d gé w -> b n (gé w) d", {}, "is not names and names in brackets"),
        ("b n d h (w s) -> (b s) n (h w) d", {}, "give the size of 'w' or 's'"),
        ("b n d h w -> b n (h w) d", {"s": 2}, "there is no 's' in it to have the size 2"),
        ("b n d h (w s) -> (b s) n (h w) d", {"s": 0}, "the size of 's' must be a whole number of at least 1; got 0"),
        ("b n d h (w s -> (b s) n (h w) d", {"s": 2}, "is not names and names in brackets"),
        ("b n d h 2 -> b n (h 2) d", {}, "is not names and names in brackets"),
    ],
)
def test_a_line_that_is_no_pattern_is_refused_at_construction(line, sizes, message):
    with pytest.raises(ValueError, match="pattern must be a line of einx of the form") as caught:
        va.Pattern(line, **sizes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: va.Window(0),
            r"Window: size must be a whole number of at least 1, or a tuple \(…, …\) of them; got 0",
        ),
        (lambda: va.Window(7.0), "Window: size must be .* got 7.0"),
        (lambda: va.Window(()), r"Window: size must be .* got \(\)"),
        (lambda: va.Window([7, 7]), r"Window: size must be .* a tuple .* got \[7, 7\]"),
        (lambda: va.Window((7, 7), shift=(3, 3, 3)), "Window: size and shift must be for as many axes"),
        (lambda: va.Pattern(5), "Pattern: line must be a line of einx, .* got 5"),
        (lambda: va.Window(4, shift=4), "Window: shift must be smaller than size; got size=4 and shift=4"),
        (lambda: va.Window((4, 2), shift=2), "Window: shift must be smaller than size"),
        (lambda: va.Window(4, shift=-1), "Window: shift must be a whole number of at least 0"),
        (lambda: va.Grid(True), "Grid: size must be .* got True"),
        (lambda: va.Neighborhood(0), "Neighborhood: kernel_size must be .* got 0"),
        (lambda: va.Neighborhood(3, dilation=0), "Neighborhood: dilation must be .* got 0"),
        (lambda: va.Attention2d(8, pattern=va.Window((7, 7, 7))), r"maps with 2 axes; got Window.* is for 3"),
        (lambda: va.Attention1d(8, pattern="columns"), "pattern 'columns' needs a map with 2 axes; got 1"),
        (lambda: va.Attention2d(8, pattern=va.Pattern("b n d w -> b n w d")), "maps with 2 axes; got Pattern.* for 1"),
        (lambda: va.Attention2d(8, pattern=7), r"pattern must be one of 'full', 'rows', 'columns', a Window.* got 7"),
    ],
)
def test_bad_patterns_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("line", ["b n d  ( h p )  w->b n ( h p w ) d", "b n d (h p) w -> b n (h p w) d"])
def test_a_pattern_without_groups_that_pads_is_full_attention(line):
    torch.manual_seed(0)
    block, full = va.Attention2d(8, 2, pattern=va.Pattern(line, p=2)), va.Attention2d(8, 2)
    full.load_state_dict(block.state_dict())
    x, mask = torch.randn(2, 8, 3, 4), torch.rand(12, 12) < 0.7
    torch.testing.assert_close(block(x, mask), full(x, mask))
    torch.testing.assert_close(block.attention_weights(x, mask), full.attention_weights(x, mask))
    with pytest.raises(ValueError, match="pattern must be 'full' with kv_stride=2"):
        va.Attention2d(8, 2, pattern=va.Pattern(line, p=2), kv_stride=2)


def test_a_neighborhood_beyond_the_map_is_all_of_it_and_costs_no_more():
    tiling = va.Neighborhood(31, dilation=3).tiling(2)
    assert tiling.split(torch.randn(1, 1, 2, 7, 7)).numel() <= 2 * 9 * 9
    for pattern in (va.Neighborhood(31), va.Neighborhood(7, dilation=64)):
        block = va.Attention2d(8, 2, pattern=pattern)
        x = torch.randn(1, 8, 5, 7)
        weights = block.attention_weights(x)
        seen = 35 if pattern.dilation == 1 else 1
        assert ((weights > 0).sum(-1) == seen).all()


def test_a_map_larger_than_a_line_with_every_size_given_is_refused():
    block = va.Attention2d(8, 2, pattern=va.Pattern("b n d (y p) w -> (b y) n (p w) d", y=2, p=3))
    assert block(torch.randn(1, 8, 5, 4)).shape == (1, 8, 5, 4)
    with pytest.raises(ValueError, match=r"x must have at most 6 places along y p .* got a map of 7×4"):
        block(torch.randn(1, 8, 7, 4))


def test_one_and_three_axes_are_two_with_axes_of_one():
    torch.manual_seed(0)
    flat, deep = torch.randn(2, 8, 9), torch.randn(2, 8, 3, 4, 5)
    for pattern, pattern2 in ((va.Window(4, shift=1), va.Window((1, 4), shift=(0, 1))), ("full", "full")):
        one, two = va.Attention1d(8, 2, pattern=pattern), va.Attention2d(8, 2, pattern=pattern2)
        one.load_state_dict(
            {key: value.reshape(one.state_dict()[key].shape) for key, value in two.state_dict().items()}
        )
        torch.testing.assert_close(one(flat), two(flat[:, :, None])[:, :, 0])
    three, two = va.Attention3d(8, 2, pattern=va.Window((1, 3, 3))), va.Attention2d(8, 2, pattern=va.Window(3))
    three.load_state_dict(
        {key: value.reshape(three.state_dict()[key].shape) for key, value in two.state_dict().items()}
    )
    frames = deep.transpose(1, 2).flatten(0, 1)
    expected = two(frames).unflatten(0, (2, 3)).transpose(1, 2)
    for impl in ("sdpa", "einx", "bmm"):
        with va.use_impl(three, impl):
            torch.testing.assert_close(three(deep), expected)
