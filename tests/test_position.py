"""Position terms: their parameters, both forms of the decomposed one, maps of another size, and what is refused."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vision_attn as va
from vision_attn.attention.position import relative
from vision_attn.attention.position.relative import resample

TERMS = {
    "decomposed": va.RelPosDecomposed(feat_size=(3, 4)),
    "table": va.RelPosTable(feat_size=(3, 4)),
    "rotary": va.Rope2d(),
    "convolution": va.ConditionalPos(3),
    "waves": va.SinCos(),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("block", "shapes"),
    [
        (lambda: va.Attention2d(16, 2, position=TERMS["decomposed"]), {"height_rel": (5, 8), "width_rel": (7, 8)}),
        (lambda: va.Attention2d(16, 2, pattern="rows", position=TERMS["decomposed"]), {"width_rel": (7, 8)}),
        (
            lambda: va.Attention3d(16, 2, position=va.RelPosDecomposed(feat_size=(2, 3, 4))),
            {"depth_rel": (3, 8), "height_rel": (5, 8), "width_rel": (7, 8)},
        ),
        (lambda: va.Attention2d(16, 2, position=TERMS["table"]), {"relative_position_bias_table": (35, 2)}),
        (
            lambda: va.Attention2d(16, 2, pattern=va.Window((2, 3)), position=va.RelPosTable()),
            {"relative_position_bias_table": (15, 2)},
        ),
        (lambda: va.Attention2d(16, 2, position=TERMS["rotary"]), {}),
        (lambda: va.Attention2d(16, 2, position=TERMS["waves"]), {}),
        (
            lambda: va.Attention2d(16, 2, position=TERMS["convolution"]),
            {"conv.weight": (16, 1, 3, 3), "conv.bias": (16,)},
        ),
    ],
)
def test_the_names_and_shapes_of_parameters_are_the_contract(block, shapes):
    state = block().state_dict()
    assert {k.removeprefix("position."): tuple(v.shape) for k, v in state.items() if "position" in k} == shapes


@pytest.mark.parametrize("term", TERMS)
def test_a_specification_prints_as_code_compares_and_pickles(term):
    position = TERMS[term]
    assert eval(repr(position), vars(va)) == position
    assert pickle.loads(pickle.dumps(position)) == position
    assert len({position, eval(repr(position), vars(va))}) == 1
    assert repr(position) in repr(va.Attention2d(16, 2, position=position))


# --- the decomposed term, as a dense bias and folded ------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["bmm", "sdpa"])
@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (5, 7)),
        ({"num_kv_heads": 1, "qk_norm": True, "scale": 0.3, "causal": True}, (3, 4)),
        ({"pattern": "rows"}, (5, 7)),
        ({"pattern": va.Window(3, shift=1), "num_kv_heads": 1}, (5, 7)),
        ({"pattern": va.Grid((2, 3))}, (6, 9)),
        ({"pattern": va.Neighborhood(3)}, (5, 7)),
        ({"pattern": va.Neighborhood((4, 3), dilation=(1, 2)), "value_dim": 3}, (6, 7)),
        ({"pattern": va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)}, (5, 7)),
    ],
    ids=str,
)
def test_the_dense_bias_and_the_folded_form_are_equal_forward_and_backward(options, size, impl, monkeypatch):
    feat_size = None if isinstance(options.get("pattern"), va.Window | va.Grid | va.Neighborhood) else (3, 4)
    position = va.RelPosDecomposed(feat_size)
    block = va.Attention2d(16, 2, position=position, impl=impl, dtype=torch.float64, **options)
    x, mask = torch.randn(2, 16, *size, dtype=torch.float64), torch.rand(size[0] * size[1], size[0] * size[1]) < 0.8
    results, seen = [], []
    block.position.register_forward_hook(lambda module, args, output: seen.append(output[3] is None))
    for most in (0, 10**9):
        monkeypatch.setattr(relative, "DENSE_KEYS", most)
        leaf = x.clone().requires_grad_()
        y = block(leaf, mask)
        results.append((y, *torch.autograd.grad(y.sin().sum(), [leaf, *block.parameters()])))
    assert seen == [True, False]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert results[0][-1].abs().max() > 0


def test_a_conditional_position_is_convolved_once_a_map():
    for options, maps in (({}, 1), ({"kv_stride": 2}, 1), ({"context_channels": 8}, 2)):
        block, seen = va.Attention2d(8, 2, position=va.ConditionalPos(3), **options), []
        block.position.conv.register_forward_hook(lambda *call, seen=seen: seen.append(call))
        x = torch.randn(1, 8, 4, 4)
        block(x, context=x if "context_channels" in options else None)
        assert len(seen) == maps


def test_the_form_is_chosen_by_the_keys_of_a_group():
    seen = []
    for block, size in (
        (va.Attention2d(16, 2, position=va.RelPosDecomposed(4)), (16, 16)),
        (va.Attention2d(16, 2, position=va.RelPosDecomposed(4)), (13, 20)),
        (va.Attention2d(16, 2, position=va.RelPosDecomposed(), pattern=va.Window(8)), (64, 64)),
    ):
        block.position.register_forward_hook(lambda module, args, output: seen.append(output[3] is None))
        block(torch.randn(1, 16, *size))
    assert seen == [False, True, False]


# --- maps of another size ---------------------------------------------------------------------------------------------


def test_resampling_is_torchs_linear_interpolation_with_ends_on_ends():
    for old in (1, 3, 9, 27):
        for new in (1, 5, 9, 33):
            table = torch.randn(old, 6, dtype=torch.float64)
            found = resample(table, new)
            assert torch.equal(found[new // 2], table[old // 2])  # no offset stays no offset
            if new > 1:
                expected = F.interpolate(table.T[None], new, mode="linear", align_corners=True)[0].T
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def saved(tmp_path, position, **options):
    model = nn.Sequential(va.Attention2d(16, 2, position=position, **options))
    torch.save(model.state_dict(), tmp_path / "model.pth")
    return model


def test_tables_of_another_size_are_resampled_on_load_and_the_report_says_so(tmp_path):
    old = saved(tmp_path, va.RelPosDecomposed(feat_size=(3, 4)))
    new = nn.Sequential(va.Attention2d(16, 2, position=va.RelPosDecomposed(feat_size=(6, 4))))
    report = va.load_checkpoint(new, tmp_path / "model.pth")
    key = "0.position.height_rel"
    assert report.resampled == {key: ((11, 8), (5, 8))}
    assert key in report.loaded
    assert report.mismatched == {}
    assert f"1 resampled for the model's size of map: {key} (model (11, 8), checkpoint (5, 8))" in str(report)
    x = torch.randn(2, 16, 6, 4)
    torch.testing.assert_close(new(x), old(x))  # which stretches its own tables to that map
    torch.save(
        {**old.state_dict(), **{key.replace("0.", "1."): p for key, p in old.state_dict().items()}},
        tmp_path / "two.pth",
    )
    twice = nn.Sequential(new[0], new[0])
    assert va.load_checkpoint(twice, tmp_path / "two.pth").resampled.keys() == {key, key.replace("0.", "1.")}


@pytest.mark.parametrize("sides", [(2, 2), (3, 5), (12, 20)])
def test_a_swin_table_is_resampled_by_the_proportions_of_the_map(tmp_path, sides):
    old = saved(tmp_path, va.RelPosTable(feat_size=sides))
    feat_size = (6, 10) if sides != (2, 2) else (7, 7)
    new = nn.Sequential(va.Attention2d(16, 2, position=va.RelPosTable(feat_size=feat_size)))
    assert len(va.load_checkpoint(new, tmp_path / "model.pth").resampled) == 1
    if sides != (12, 20):  # which loses detail
        x = torch.randn(2, 16, *feat_size)
        torch.testing.assert_close(new(x), old(x))


@pytest.mark.parametrize(
    ("position", "options", "feat_size", "message"),
    [
        (va.RelPosTable((2, 5)), {}, (7, 7), r"1 of another shape: 0\.position\.relative_position_bias_table"),
        (va.RelPosTable((3, 7)), {}, (7, 14), "Its tables of positions are for groups of other proportions"),
        (va.RelPosDecomposed((3, 4)), {"key_dim": 4}, (3, 4), "of another shape"),
    ],
)
def test_a_table_that_cannot_be_resampled_is_a_mismatch(tmp_path, position, options, feat_size, message):
    saved(tmp_path, position, **options)
    model = nn.Sequential(va.Attention2d(16, 2, position=type(position)(feat_size)))
    with pytest.raises(va.CheckpointError, match=message):
        va.load_checkpoint(model, tmp_path / "model.pth")


def test_keys_of_a_coarser_map_are_rotated_by_their_position_on_the_queries_map():
    block = va.Attention2d(16, 2, position=va.Rope2d(temperature=10.0), kv_stride=2, dtype=torch.float64)
    x = torch.randn(1, 16, 4, 6, dtype=torch.float64)
    q, k, v = (y.unflatten(1, (2, 8)) for y in block.qkv(x).chunk(3, 1))
    k, v = (F.avg_pool2d(y.flatten(1, 2), 2).unflatten(1, (2, 8)) for y in (k, v))

    def rotated(y, rows, columns):
        speed = 10.0 ** -(torch.arange(2, dtype=torch.float64) / 2)
        angles = [speed[:, None, None] * rows[:, None], speed[:, None, None] * columns]
        angle = torch.cat([angle.expand(-1, len(rows), len(columns)) for angle in angles])
        pairs = torch.view_as_complex(y.unflatten(2, (4, 2)).movedim(3, -1).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).movedim(-1, 3).flatten(2, 3)

    positions = [torch.arange(n, dtype=torch.float64) for n in (4, 6)]
    k = rotated(k, *(position.view(-1, 2).mean(1) for position in positions))
    tokens = [y.flatten(3).mT for y in (rotated(q, *positions), k, v)]
    expected = block.proj(F.scaled_dot_product_attention(*tokens).mT.reshape(1, 16, 4, 6))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: va.Rope2d(temperature=0.5), "Rope2d: temperature must"),
        (lambda: va.Rope2d(feat_size=(1, 2, 3)), "Rope2d: feat_size must"),
        (lambda: va.Rope2d(feat_size=(None, 14)), "Rope2d: feat_size must"),
        (lambda: va.AbsPos(None), "AbsPos: feat_size must"),
        (lambda: va.AbsPos((14, None)), "AbsPos: feat_size must"),
        (lambda: va.SinCos(temperature=True), "SinCos: temperature must"),
        (lambda: va.RelPosDecomposed(-3), "RelPosDecomposed: feat_size must"),
        (lambda: va.RelPosTable([7, 7]), "RelPosTable: feat_size must"),
        (lambda: va.ConditionalPos(2), "ConditionalPos: kernel_size must"),
        (lambda: va.ConditionalPos(-1), "ConditionalPos: kernel_size must"),
        ({"position": va.Rope2d}, "position must"),
        ({"position": "rope"}, "position must"),
        (
            {"position": va.SinCos(), "context_channels": 8},
            "position must not be SinCos",
        ),
        ({"position": va.RelPosTable()}, "RelPosTable: feat_size must be given"),
        (
            {"pattern": va.Window(7), "position": va.RelPosTable(feat_size=8)},
            "RelPosTable: feat_size must",
        ),
        (
            {"position": va.RelPosDecomposed(feat_size=(3, 4, 5))},
            "RelPosDecomposed: feat_size must",
        ),
        ({"key_dim": 6, "position": va.Rope2d()}, "Rope2d: key_dim must"),
        (lambda: va.Attention1d(16, 2, position=va.Rope2d()), "Rope2d: position must"),
        (lambda: va.Attention2d(18, 2, position=va.SinCos()), "SinCos: channels must"),
        (
            {"position": va.RelPosTable(3), "kv_stride": 2},
            "position must not be RelPosTable",
        ),
        (
            {"position": va.RelPosDecomposed(3), "context_channels": 8},
            "position must not be RelPosDecomposed",
        ),
    ],
)
def test_bad_terms_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make() if callable(make) else va.Attention2d(16, 2, **make)


def test_a_table_of_any_number_of_rows_is_measured_in_few_steps():
    """As few numbers, expanded, may claim to be."""
    term = va.Attention2d(8, 2, position=va.RelPosTable(feat_size=(4, 4))).position
    assert term.resampled("relative_position_bias_table", torch.zeros(1, 2).expand(10**12, -1)) is None


@pytest.mark.parametrize(
    ("pattern", "size"), [("full", (3, 4)), ("full", (5, 6)), ("rows", (3, 4)), (va.Window((2, 3)), (3, 4))], ids=str
)
def test_absolute_positions_are_a_product_with_the_keys_place(pattern, size):
    options = {"pattern": pattern, "num_kv_heads": 1, "scale": 0.7, "dtype": torch.float64}
    block = va.Attention2d(8, 2, position=va.AbsPos((3, 4)), **options)
    plain = va.Attention2d(8, 2, **options)
    plain.load_state_dict(block.state_dict(), strict=False)
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    height, width = (
        torch.nn.functional.interpolate(table.T[None], size=length, mode="linear")[0].T
        for table, length in zip((block.position.height, block.position.width), size, strict=True)
    )
    q = block.qkv(x)[:, :8].unflatten(1, (2, 4)).flatten(3)
    places = (height[:, None] + width).flatten(0, 1)
    expected = plain(x, mask=0.7 * q.mT @ places.T)
    for impl in va.IMPLS:
        with va.use_impl(block, impl):
            torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-11)
    assert (plain(x) - expected).abs().max() > 1e-3


def test_absolute_positions_are_for_a_size_and_their_tables_are_stretched(tmp_path):
    small, large = (va.Attention2d(8, 2, position=va.AbsPos(side)) for side in (3, 6))
    torch.save(small.state_dict(), tmp_path / "small.pth")
    va.load_checkpoint(large, tmp_path / "small.pth")
    x = torch.randn(1, 8, 6, 6)
    torch.testing.assert_close(large(x), small(x))
    for size in (None, (None, 14), (3, 4, 5)):
        with pytest.raises(ValueError, match="AbsPos: feat_size must be"):
            va.Attention2d(8, 2, position=va.AbsPos(size))
