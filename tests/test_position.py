"""Position encodings: parameters, the forms of the decomposed bias, feature maps of another size, and errors."""

import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from impls import CPU_IMPLS
from torch import nn

import vision_attn as va
from vision_attn.attention import dispatch
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.position.relative_table import resize_by_offset

#: The names that the printed code of a position encoding may use.
PUBLIC = {name: getattr(va, name) for name in va.__all__}
DOUBLE = {"dtype": torch.float64}
RELATIVE, TABLE_POS = va.RelPosDecomposed((3, 4)), va.RelPosTable((3, 4))
TABLE = "relative_position_bias_table"
PARAMETERS = [
    (2, {"position": RELATIVE}, {"height_rel": (5, 8), "width_rel": (7, 8)}),
    (2, {"pattern": "rows", "position": RELATIVE}, {"width_rel": (7, 8)}),
    (3, {"position": va.RelPosDecomposed((2, 3, 4))}, {"depth_rel": (3, 8), "height_rel": (5, 8), "width_rel": (7, 8)}),
    (2, {"position": TABLE_POS}, {TABLE: (35, 2)}),
    (2, {"pattern": va.Window((2, 3)), "position": va.RelPosTable()}, {TABLE: (15, 2)}),
    (2, {"position": va.AbsPos((3, 4))}, {"height": (3, 8), "width": (4, 8)}),
    *((2, {"position": position}, {}) for position in (va.Rope2d(), va.SinCos())),
    (2, {"position": va.ConditionalPos(3)}, {"conv.weight": (16, 1, 3, 3), "conv.bias": (16,)}),
]


@pytest.mark.parametrize(("rank", "options", "shapes"), PARAMETERS)
def test_parameters_have_documented_names_and_a_configuration_prints_as_code(rank, options, shapes):
    block, position = getattr(va, f"Attention{rank}d")(16, 2, **options), options["position"]
    state = block.state_dict()
    assert {k.removeprefix("position."): tuple(v.shape) for k, v in state.items() if "position" in k} == shapes
    assert pickle.loads(pickle.dumps(position)) == position
    assert len({position, eval(repr(position), PUBLIC)}) == 1
    assert repr(position) in repr(block)


# --- the decomposed bias: one mask, chunks of queries, and folded -----------------------------------------------------

FORMS = {
    "one mask": {"CHUNK_LOGITS": 2**30, "RECOMPUTE_ABOVE": 2**30},
    "chunks": {"CHUNK_LOGITS": 1, "RECOMPUTE_ABOVE": 2**30},
    "recomputed chunks": {"CHUNK_LOGITS": 1, "RECOMPUTE_ABOVE": 0},
    "folded": {"can_chunk": lambda q: False},
}


def spy_on_kernel(monkeypatch, impl):
    """Record the queries, keys and mask of every call of a kernel."""
    calls, kernel = [], IMPLEMENTATIONS[impl]

    def attend(q, k, v, *, mask, **options):
        calls.append((q, k, mask))
        return kernel.attend(q, k, v, mask=mask, **options)

    monkeypatch.setitem(IMPLEMENTATIONS, impl, replace(kernel, attend=attend))
    return calls


@pytest.mark.parametrize("impl", ["bmm", "sdpa"])
@pytest.mark.parametrize(
    "options",
    [
        {"position": RELATIVE, "num_kv_heads": 1, "qk_norm": True, "scale": 0.3, "causal": True},
        {"position": RELATIVE, "pattern": "rows"},
        {"pattern": va.Window(3, shift=1), "num_kv_heads": 1},
        {"pattern": va.Grid((2, 3))},
        {"pattern": va.Neighborhood((4, 3), dilation=(1, 2)), "value_dim": 3},
        {"position": RELATIVE, "pattern": va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)},
    ],
    ids=str,
)
def test_one_mask_chunks_of_queries_and_the_folded_form_are_equal(options, impl, monkeypatch):
    block = va.Attention2d(16, 2, impl=impl, **{"position": va.RelPosDecomposed(), **options}, **DOUBLE)
    x, mask = torch.randn(2, 16, 5, 7, **DOUBLE), torch.rand(35, 35) < 0.8
    calls, results, queries = spy_on_kernel(monkeypatch, impl), [], {}
    for name, values in FORMS.items():
        calls.clear()
        with monkeypatch.context() as patch:
            for attribute, value in {"MIN_CHUNK_QUERIES": 2, **values}.items():
                patch.setattr(dispatch, attribute, value)
            leaf = x.clone().requires_grad_()
            y = block(leaf, mask)
            results.append((y, *torch.autograd.grad(y.sin().sum(), [leaf, *block.parameters()])))
        queries[name] = [q.shape[2] for q, *_ in calls]
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=1e-11)
    assert results[0][-1].abs().max() > 0
    (count,) = queries["one mask"]
    assert queries["folded"] == [count]
    assert max(queries["chunks"]) == 2
    assert sum(queries["chunks"]) == 2 * count  # of two images, one after the other
    assert sum(queries["recomputed chunks"]) == 2 * sum(queries["chunks"])


@pytest.mark.parametrize("size", [(2, 2), (16, 16), (13, 20)])  # the fewest and many keys
def test_the_bias_is_a_mask_of_a_chunk_on_a_cpu_and_folded_elsewhere(size, monkeypatch):
    block = va.Attention2d(16, 2, position=va.RelPosDecomposed(feat_size=size), impl="bmm").requires_grad_(False)
    calls, x = spy_on_kernel(monkeypatch, "bmm"), torch.randn(2, 16, *size)
    folded = 8 + sum(size) + -sum(size) % 8
    expected = block(x)
    assert calls
    assert all(q.shape[3] == 8 and mask.shape[3:] == (q.shape[2], k.shape[2]) for q, k, mask in calls)
    calls.clear()
    torch.testing.assert_close(torch.func.vmap(lambda one: block(one[None])[0])(x), expected)
    block.to("meta")(x.to("meta"))
    assert [(q.shape[3], k.shape[3], mask) for q, k, mask in calls] == [(folded, folded, None)] * 2


# --- maps of another size ---------------------------------------------------------------------------------------------


def test_resizing_a_table_is_torchs_linear_interpolation_with_aligned_ends():
    for old in (1, 3, 9, 27):
        for new in (1, 5, 9, 33):
            table = torch.randn(old, 6, dtype=torch.float64)
            found = resize_by_offset(table, new)
            assert torch.equal(found[new // 2], table[old // 2])  # no offset stays no offset
            if new > 1:
                expected = F.interpolate(table.T[None], new, mode="linear", align_corners=True)[0].T
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "old_size", "new_size", "changed"),
    [
        (va.RelPosDecomposed, (3, 4), (6, 4), {"height_rel": ((11, 8), (5, 8))}),
        (va.AbsPos, (3, 3), (6, 6), {"height": ((6, 8), (3, 8)), "width": ((6, 8), (3, 8))}),
        (va.RelPosTable, (2, 2), (7, 7), {TABLE: ((169, 2), (9, 2))}),
        (va.RelPosTable, (3, 5), (6, 10), {TABLE: ((209, 2), (45, 2))}),
        (va.RelPosTable, (2, 5), (7, 7), None),
        (va.RelPosTable, (3, 7), (7, 14), None),
    ],
)
def test_tables_of_another_size_are_resized_on_load_and_the_report_names_them(
    kind, old_size, new_size, changed, tmp_path
):
    old, new = (nn.Sequential(va.Attention2d(16, 2, position=kind(size))) for size in (old_size, new_size))
    torch.save(old.state_dict(), tmp_path / "model.pth")
    if changed is None:  # of other proportions
        with pytest.raises(va.CheckpointError, match=f"1 of another shape: 0.position.{TABLE}"):
            va.load_checkpoint(new, tmp_path / "model.pth")
        return
    report = va.load_checkpoint(new, tmp_path / "model.pth")
    assert report.resampled == {f"0.position.{name}": shapes for name, shapes in changed.items()}
    assert report.mismatched == {}
    assert f"{len(changed)} converted to the model's shape: 0.position." in str(report)
    x = torch.randn(2, 16, *new_size)
    torch.testing.assert_close(new(x), old(x))  # which resizes its tables in the forward pass


def test_keys_of_a_coarser_map_are_rotated_by_their_position_on_the_queries_map():
    block = va.Attention2d(16, 2, position=va.Rope2d(temperature=10.0), kv_stride=2, **DOUBLE)
    x = torch.randn(1, 16, 4, 6, **DOUBLE)
    q, k, v = (y.unflatten(1, (2, 8)) for y in block.qkv(x).chunk(3, 1))
    k, v = (F.avg_pool2d(y.flatten(1, 2), 2).unflatten(1, (2, 8)) for y in (k, v))

    def rotate(y, rows, columns):
        frequency = 10.0 ** -(torch.arange(2, **DOUBLE) / 2)
        angles = [frequency[:, None, None] * rows[:, None], frequency[:, None, None] * columns]
        angle = torch.cat([angle.expand(-1, len(rows), len(columns)) for angle in angles])
        pairs = torch.view_as_complex(y.unflatten(2, (4, 2)).movedim(3, -1).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).movedim(-1, 3).flatten(2, 3)

    positions = [torch.arange(n, **DOUBLE) for n in (4, 6)]
    k = rotate(k, *(position.view(-1, 2).mean(1) for position in positions))
    tokens = [y.flatten(3).mT for y in (rotate(q, *positions), k, v)]
    expected = block.proj(F.scaled_dot_product_attention(*tokens).mT.reshape(1, 16, 4, 6))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "size"), [("full", (5, 6)), ("rows", (3, 4)), (va.Window((2, 3)), (3, 4))], ids=str
)
def test_absolute_positions_are_products_of_the_query_and_the_position_of_the_key(pattern, size):
    options = {"pattern": pattern, "num_kv_heads": 1, "scale": 0.7, **DOUBLE}
    block, plain = va.Attention2d(8, 2, position=va.AbsPos((3, 4)), **options), va.Attention2d(8, 2, **options)
    plain.load_state_dict(block.state_dict(), strict=False)
    x = torch.randn(2, 8, *size, **DOUBLE)
    height, width = (
        F.interpolate(table.T[None], size=length, mode="linear")[0].T
        for table, length in zip((block.position.height, block.position.width), size, strict=True)
    )
    q = block.qkv(x)[:, :8].unflatten(1, (2, 4)).flatten(3)
    expected = plain(x, mask=0.7 * q.mT @ (height[:, None] + width).flatten(0, 1).T)
    for impl in CPU_IMPLS:
        with va.use_impl(block, impl):
            torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-11)
    assert (plain(x) - expected).abs().max() > 1e-3


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: va.Rope2d(temperature=0.5), "Rope2d: temperature must"),
        (lambda: va.Rope2d(feat_size=(1, 2, 3)), "Rope2d: feat_size must"),
        (lambda: va.Rope2d(feat_size=(None, 14)), "Rope2d: feat_size must"),
        (lambda: va.AbsPos(None), "AbsPos: feat_size must"),
        (lambda: va.AbsPos((14, None)), "AbsPos: feat_size must"),
        (lambda: va.RelPosDecomposed(-3), "RelPosDecomposed: feat_size must"),
        (lambda: va.RelPosTable([7, 7]), "RelPosTable: feat_size must"),
        (lambda: va.ConditionalPos(2), "ConditionalPos: kernel_size must"),
        (lambda: va.ConditionalPos(-1), "ConditionalPos: kernel_size must"),
        ({"position": va.Rope2d}, "position must"),
        ({"position": va.SinCos(), "context_channels": 8}, "position must not be SinCos"),
        ({"position": va.AbsPos((3, 4, 5))}, "AbsPos: feat_size must"),
        ({"position": va.RelPosTable()}, "RelPosTable: feat_size must be given"),
        ({"pattern": va.Window(7), "position": va.RelPosTable(feat_size=8)}, "RelPosTable: feat_size must"),
        ({"position": va.RelPosDecomposed(feat_size=(3, 4, 5))}, "RelPosDecomposed: feat_size must"),
        ({"key_dim": 6, "position": va.Rope2d()}, "Rope2d: key_dim must"),
        (lambda: va.Attention1d(16, 2, position=va.Rope2d()), "Rope2d: position must"),
        (lambda: va.Attention2d(18, 2, position=va.SinCos()), "SinCos: channels must"),
        ({"position": va.RelPosTable(3), "kv_stride": 2}, "position must not be RelPosTable"),
        ({"position": va.RelPosDecomposed(3), "context_channels": 8}, "position must not be RelPosDecomposed"),
    ],
)
def test_bad_encodings_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make() if callable(make) else va.Attention2d(16, 2, **make)


def test_the_sides_of_a_table_with_any_number_of_rows_are_found_in_few_steps():
    """A few numbers in a file can be expanded to a table of any shape."""
    encoding = va.Attention2d(8, 2, position=va.RelPosTable(feat_size=(4, 4))).position
    assert encoding.resize_pos_embed(TABLE, torch.zeros(1, 2).expand(10**12, -1)) is None
