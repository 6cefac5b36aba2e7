"""Position encodings: parameters, computation of the decomposed bias, feature maps of another size, and errors."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from impls import CPU_IMPLS
from torch import nn

import vision_attn as va
from vision_attn.attention.implementations import IMPLEMENTATIONS

DOUBLE, RELATIVE = {"dtype": torch.float64}, va.RelPosDecomposed((3, 4))
TABLE = "relative_position_bias_table"
PARAMETERS = [
    (2, {"position": RELATIVE}, {"height_rel": (5, 8), "width_rel": (7, 8)}),
    (2, {"pattern": "rows", "position": RELATIVE}, {"width_rel": (7, 8)}),
    (3, {"position": va.RelPosDecomposed((2, 3, 4))}, {"depth_rel": (3, 8), "height_rel": (5, 8), "width_rel": (7, 8)}),
    (2, {"position": va.RelPosTable((3, 4))}, {TABLE: (35, 2)}),
    (2, {"pattern": va.Window((2, 3)), "position": va.RelPosTable()}, {TABLE: (15, 2)}),
    (2, {"position": va.AbsPos((3, 4))}, {"height": (3, 8), "width": (4, 8)}),
    *((2, {"position": position}, {}) for position in (va.Rope(), va.SinCos())),
    (2, {"position": va.ConditionalPos()}, {"conv.weight": (16, 1, 3, 3), "conv.bias": (16,)}),
]


@pytest.mark.parametrize(("rank", "options", "shapes"), PARAMETERS)
def test_parameters_have_documented_names_and_the_repr_of_a_configuration_is_code(rank, options, shapes):
    block, position = getattr(va.blocks, f"Attention{rank}d")(16, 2, **options), options["position"]
    state = block.state_dict()
    assert {k.removeprefix("position."): tuple(v.shape) for k, v in state.items() if "position" in k} == shapes
    assert (pickle.loads(pickle.dumps(position)), len({position, eval(f"va.{position!r}")})) == (position, 1)
    assert repr(position) in repr(block)


# --- the decomposed bias (test_reference.py compares its results with the definition) ---------------------------------


@pytest.mark.parametrize("size", [(2, 2), (16, 16), (13, 20)])  # the fewest and many keys
def test_the_bias_is_computed_in_chunks_on_a_cpu_and_folded_on_other_devices(size, monkeypatch):
    block, x = va.Attention2d(16, 2, position=va.RelPosDecomposed(size), impl="bmm"), torch.randn(2, 16, *size)
    kernel, calls = IMPLEMENTATIONS["bmm"], []

    def attend(q, k, v, *, mask, **options):
        calls.append((q, k, mask))
        return kernel.attend(q, k, v, mask=mask, **options)

    monkeypatch.setitem(IMPLEMENTATIONS, "bmm", replace(kernel, attend=attend))
    expected = block(x)
    assert calls
    assert all(q.shape[3] == 8 and mask.shape[3:] == (q.shape[2], k.shape[2]) for q, k, mask in calls)
    count = len(calls)
    monkeypatch.setattr("vision_attn.attention.dispatch.RECOMPUTE_ABOVE", 0)
    block(x).sum().backward()
    assert len(calls) == 3 * count  # one more forward pass, and its recomputation in the backward pass
    calls.clear()
    torch.testing.assert_close(torch.func.vmap(lambda one: block(one[None])[0])(x), expected)
    block.to("meta")(x.to("meta"))
    folded = 8 + sum(size) + -sum(size) % 8
    assert [(q.shape[3], k.shape[3], mask) for q, k, mask in calls] == [(folded, folded, None)] * 2


# --- feature maps of another size -------------------------------------------------------------------------------------


SIZES = [
    (va.RelPosDecomposed, (3, 4), (6, 4), {"height_rel": ((11, 8), (5, 8))}),
    (va.AbsPos, (3, 3), (6, 6), {"height": ((6, 8), (3, 8)), "width": ((6, 8), (3, 8))}),
    (va.RelPosTable, (3, 5), (6, 10), {TABLE: ((209, 2), (45, 2))}),
    (va.RelPosTable, (1, 5), (1, 10), {TABLE: ((19, 2), (9, 2))}),
    (va.RelPosTable, (3, 7), (7, 14), None),
]


@pytest.mark.parametrize(("kind", "old_size", "new_size", "changed"), SIZES)
def test_tables_of_another_size_are_resized_on_load_and_reported(kind, old_size, new_size, changed, tmp_path):
    old, new = (nn.Sequential(va.Attention2d(16, 2, position=kind(size))) for size in (old_size, new_size))
    torch.save(old.state_dict(), tmp_path / "model.pth")
    if changed is None:  # of other proportions
        with pytest.raises(va.errors.CheckpointError, match=f"1 tensor with another shape: 0.position.{TABLE}"):
            va.load_checkpoint_(new, tmp_path / "model.pth")
        return
    report = va.load_checkpoint_(new, tmp_path / "model.pth")
    assert report.converted == {f"0.position.{name}": shapes for name, shapes in changed.items()}
    assert report.mismatched == {}
    assert f"{len(changed)} tensor{'s' * (len(changed) > 1)} converted to the shape in the model: 0.pos" in str(report)
    x = torch.randn(2, 16, *new_size)
    torch.testing.assert_close(new(x), old(x))  # which resizes its tables in the forward pass


@pytest.mark.parametrize("size", [(9,), (3, 4, 5)], ids=str)
@torch.no_grad()
def test_blocks_with_one_and_three_axes_equal_the_definition(size):
    x, options = torch.randn(2, 24, *size, **DOUBLE), {"position": va.Rope(10.0), **DOUBLE}
    windows = [reference.window(length, 4, 1) for length in size]
    for pattern, relations in (("full", None), (va.Window(4, shift=1), windows)):
        block = getattr(va.blocks, f"Attention{len(size)}d")(24, 2, pattern=pattern, **options)
        state = {name: value.numpy() for name, value in block.state_dict().items()}
        known = {"pattern": relations, "position": "rotary", "temperature": 10.0}
        expected = reference.attention_output(x.numpy(), state, 2, **known)
        for impl in CPU_IMPLS:
            with va.use_impl(block, impl):
                np.testing.assert_allclose(block(x), expected, atol=1e-12)


def test_rotated_keys_of_a_pooled_feature_map_are_at_the_centers_of_their_squares():
    x = torch.randn(1, 8, 6, **DOUBLE)
    block = va.blocks.Attention1d(8, 2, position=va.Rope(10.0), kv_stride=2, **DOUBLE)
    q, k, _ = block.qkv(x).detach().numpy().reshape(3, 2, 4, 6)
    q = [reference.rotate(of.T, np.arange(6.0)[None], 10.0) for of in q]
    k = [reference.rotate(of.reshape(4, 3, 2).mean(2).T, np.array([[0.5, 2.5, 4.5]]), 10.0) for of in k]
    expected = [reference.softmax(of @ keys.T / 2) for of, keys in zip(q, k, strict=True)]
    np.testing.assert_allclose(block.attention_weights(x)[0].detach(), expected)


def test_queries_that_share_keys_have_the_causal_keys_of_the_last_one():
    block = va.blocks.Attention1d(4, 1, pattern=va.Neighborhood(4, stride=3, causal=True))
    allowed = block.attention_weights(torch.randn(1, 4, 9))[0, 0] > 0
    np.testing.assert_array_equal(allowed, reference.neighborhood(9, 4, 1, 3, causal=True).allowed)


@pytest.mark.parametrize(("pattern", "size"), [("full", (5, 6)), (va.Window((2, 3)), (3, 4))], ids=str)
def test_absolute_positions_add_the_product_of_query_and_key_position(pattern, size):
    options = {"pattern": pattern, "num_kv_heads": 1, "scale": 0.7, **DOUBLE}
    block, plain = va.Attention2d(8, 2, position=va.AbsPos((3, 4)), **options), va.Attention2d(8, 2, **options)
    plain.load_state_dict(block.state_dict(), strict=False)
    x = torch.randn(2, 8, *size, **DOUBLE)
    tables = zip((block.position.height, block.position.width), size, strict=True)
    height, width = (nn.functional.interpolate(x.T[None], size=length, mode="linear")[0].T for x, length in tables)
    q = block.qkv(x)[:, :8].unflatten(1, (2, 4)).flatten(3)
    expected = plain(x, mask=0.7 * q.mT @ (height[:, None] + width).flatten(0, 1).T)
    for impl in CPU_IMPLS:
        with va.use_impl(block, impl):
            torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-11)
    assert (plain(x) - expected).abs().max() > 1e-3


# --- errors -----------------------------------------------------------------------------------------------------------


INVALID = [
    ({"position": va.Rope(feat_size=(1, 2, 3))}, "Rope: feat_size must"),
    ({"position": va.SinCos(), "context_channels": 8}, "position must not be SinCos"),
    ({"position": va.AbsPos((3, 4, 5))}, "AbsPos: feat_size must"),
    ({"position": va.RelPosTable()}, "RelPosTable: feat_size must be given"),
    ({"pattern": va.Window(7), "position": va.RelPosTable(feat_size=8)}, "RelPosTable: feat_size must"),
    ({"key_dim": 6, "position": va.Rope()}, "Rope: key_dim must"),
    (lambda: va.blocks.Attention3d(16, 2, position=va.Rope()), "Rope: key_dim must be a multiple of 6"),
    (lambda: va.Rope(feat_size=7, normalized=True), "Rope: feat_size must be None"),
    (lambda: va.Attention2d(18, 2, position=va.SinCos()), "SinCos: channels must be a multiple of 4, got 18"),
    ({"position": va.RelPosDecomposed(3), "context_channels": 8}, "position must not be RelPosDecomposed"),
    ({"position": va.RelPosTable(0)}, "RelPosTable: feat_size must be an integer or a tuple, at least 1, got 0"),
    ({"position": va.RelPosDecomposed("7")}, "RelPosDecomposed: feat_size must be an integer or a tuple"),
    ({"position": va.AbsPos([7, 7])}, r"AbsPos: feat_size must be an integer or a tuple, at least 1, got \[7, 7\]"),
    ({"position": va.Rope(feat_size=0)}, "Rope: feat_size must be an integer or a tuple, at least 1, got 0"),
    (lambda: va.Rope(temperature=0), "temperature must be a number above 0, got 0"),
    (lambda: va.Rope(normalized="no"), "normalized must be True or False, got 'no'"),
    (lambda: va.SinCos(temperature=-1), "temperature must be a number above 0, got -1"),
    (lambda: va.ConditionalPos(4), "kernel_size must be odd, got 4"),
]


@pytest.mark.parametrize(("make", "message"), INVALID)
def test_invalid_encodings_raise_an_error_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make() if callable(make) else va.Attention2d(16, 2, **make)


def test_inferring_the_size_of_a_table_takes_few_steps_for_any_number_of_rows():
    """A small file can contain an expanded tensor of any shape."""
    encoding = va.Attention2d(8, 2, position=va.RelPosTable(feat_size=(4, 4))).position
    assert encoding.resize_pos_embed(TABLE, torch.zeros(1, 2).expand(10**12, -1)) is None


def test_a_table_with_an_even_number_of_rows_is_not_resized():
    encoding = va.Attention2d(8, 2, position=va.RelPosDecomposed(feat_size=4)).position
    name = next(name for name, _ in encoding.named_parameters())
    resized = [encoding.resize_pos_embed(name, torch.zeros(rows, 4)) for rows in (4, 5)]
    assert [x if x is None else x.shape for x in resized] == [None, (7, 4)]


#: A position encoding, and the standard deviation of its tables for heads of 16 channels.
SPREADS = [(va.AbsPos(64), 0.25), (va.RelPosDecomposed(64), 0.25), (va.RelPosTable(16), 0.02)]


@pytest.mark.parametrize(("position", "std"), SPREADS)
def test_tables_have_this_standard_deviation_at_initialization(position, std):
    for table in va.Attention2d(64, 4, position=position).position.parameters():
        assert float(table.detach().std()) == pytest.approx(std, rel=0.1)
