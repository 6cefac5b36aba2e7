"""Position terms: what they do to the logits, on maps of any size, in memory, and when they are loaded."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vision_attn as va
from vision_attn.position import resample

TERMS = {
    "decomposed": va.RelPosDecomposed(feat_size=(3, 4)),
    "table": va.RelPosTable(feat_size=(3, 4)),
    "rotary": va.Rope2d(),
    "convolution": va.ConditionalPos(3),
    "waves": va.SinCos(),
}
DIFFERENTIABLE = tuple(impl for impl in va.IMPLS if impl != "flex")


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
@pytest.mark.parametrize("pattern", ["full", va.Window(3, shift=1), va.Neighborhood(3)], ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_gradients_are_those_of_finite_differences(term, pattern, impl):
    torch.manual_seed(0)
    position = TERMS[term]
    if pattern != "full" and term in ("decomposed", "table"):
        position = type(position)()
    block = va.Attention2d(4, 1, impl=impl, pattern=pattern, position=position, dtype=torch.float64)
    x = torch.randn(1, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*block.named_parameters(), strict=True)
    parameters = tuple(p.detach().clone().requires_grad_() for p in parameters)

    def output(x, *parameters):
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (x, *parameters))


@pytest.mark.parametrize("term", TERMS)
def test_a_term_makes_attention_see_where_things_are(term):
    # Without it, moving the tokens of a map about moves the result about in the same way.
    torch.manual_seed(0)
    block, plain = va.Attention2d(16, 2, position=TERMS[term]), va.Attention2d(16, 2)
    plain.load_state_dict(block.state_dict(), strict=False)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(1, 16, 4, 5)
    torch.testing.assert_close(plain(x.flip(3)), plain(x).flip(3))
    assert not torch.allclose(block(x.flip(3)), block(x).flip(3), atol=1e-3)


@pytest.mark.parametrize("old", [1, 3, 9, 27])
@pytest.mark.parametrize("new", [1, 5, 9, 33])
def test_resampling_is_torchs_linear_interpolation_with_ends_on_ends(old, new):
    torch.manual_seed(0)
    table = torch.randn(old, 6, dtype=torch.float64)
    found = resample(table, new)
    assert torch.equal(found[new // 2], table[old // 2])  # no offset stays no offset
    if new > 1:
        expected = F.interpolate(table.T[None], new, mode="linear", align_corners=True)[0].T
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if new == old:
        assert torch.equal(found, table)


def test_the_names_and_shapes_of_tables_are_the_contract():
    def shapes(block):
        return {k.removeprefix("position."): tuple(v.shape) for k, v in block.state_dict().items() if "position" in k}

    assert shapes(va.Attention2d(16, 2, position=TERMS["decomposed"])) == {"height_rel": (5, 8), "width_rel": (7, 8)}
    assert shapes(va.Attention2d(16, 2, pattern="rows", position=TERMS["decomposed"])) == {"width_rel": (7, 8)}
    assert shapes(va.Attention2d(16, 2, position=TERMS["table"])) == {"relative_position_bias_table": (35, 2)}
    window = va.Attention2d(16, 2, pattern=va.Window((2, 3)), position=va.RelPosTable())
    assert shapes(window) == {"relative_position_bias_table": (15, 2)}
    three = va.Attention3d(16, 2, position=va.RelPosDecomposed(feat_size=(2, 3, 4)))
    assert shapes(three) == {"depth_rel": (3, 8), "height_rel": (5, 8), "width_rel": (7, 8)}
    assert shapes(va.Attention2d(16, 2, position=TERMS["rotary"])) == {}
    assert shapes(va.Attention2d(16, 2, position=TERMS["waves"])) == {}
    assert shapes(va.Attention2d(16, 2, position=TERMS["convolution"])) == {
        "conv.weight": (16, 1, 3, 3),
        "conv.bias": (16,),
    }


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most elements that any tensor had which an operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(
    "options",
    [
        *({"position": TERMS[term]} for term in ("decomposed", "rotary", "convolution", "waves")),
        {},
        {"qk_norm": True, "output_gate": True},
        {"num_kv_heads": 1, "key_dim": 4, "value_dim": 12},
        {"causal": True},
        {"pattern": va.Window(8, shift=4), "position": va.RelPosTable()},
        {"pattern": va.Neighborhood(5), "position": va.RelPosDecomposed()},
    ],
    ids=str,
)
def test_no_tensor_of_queries_by_keys_is_made_forward_or_backward(options):
    block = va.Attention2d(16, 2, **options)
    x = torch.randn(1, 16, 32, 32, requires_grad=True)
    for impl, quadratic in (("sdpa", False), ("bmm", block.tiling.whole)):
        with va.use_impl(block, impl), LargestTensor() as largest:
            block(x).sum().backward()
        assert (largest.elements >= (32 * 32) ** 2) == quadratic, impl


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("block", [va.Attention1d, va.Attention3d])
def test_maps_of_one_and_three_axes_get_the_fused_kernel_too(block, channels_last):
    x = torch.randn(1, 16, 1024) if block is va.Attention1d else torch.randn(1, 16, 4, 16, 16)
    x = (x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x).requires_grad_()
    with LargestTensor() as largest:
        block(16, 2)(x).sum().backward()
    assert largest.elements < 1024**2


@pytest.mark.parametrize("term", TERMS)
def test_a_specification_prints_as_code_compares_and_pickles(term):
    position = TERMS[term]
    assert eval(repr(position), vars(va)) == position
    assert pickle.loads(pickle.dumps(position)) == position
    assert len({position, eval(repr(position), vars(va))}) == 1
    assert repr(position) in repr(va.Attention2d(16, 2, position=position))


def saved(tmp_path, position, **options):
    torch.manual_seed(0)
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
    assert "1 resampled for the model's size of map: 0.position.height_rel (model (11, 8), checkpoint (5, 8))" in str(
        report
    )
    x = torch.randn(2, 16, 6, 4)
    torch.testing.assert_close(new(x), old(x))  # which stretches its own tables to that map


@pytest.mark.parametrize("sides", [(2, 2), (3, 5), (12, 20)])
def test_a_swin_table_is_resampled_by_the_proportions_of_the_map(tmp_path, sides):
    old = saved(tmp_path, va.RelPosTable(feat_size=sides))
    feat_size = (6, 10) if sides != (2, 2) else (7, 7)
    new = nn.Sequential(va.Attention2d(16, 2, position=va.RelPosTable(feat_size=feat_size)))
    assert len(va.load_checkpoint(new, tmp_path / "model.pth").resampled) == 1
    if sides != (12, 20):  # which loses detail
        x = torch.randn(2, 16, *feat_size)
        torch.testing.assert_close(new(x), old(x))


def test_a_table_that_cannot_be_resampled_is_a_mismatch(tmp_path):
    saved(tmp_path, va.RelPosTable(feat_size=(2, 5)))
    model = nn.Sequential(va.Attention2d(16, 2, position=va.RelPosTable(feat_size=(7, 7))))
    with pytest.raises(va.CheckpointError, match=r"1 of another shape: 0\.position\.relative_position_bias_table"):
        va.load_checkpoint(model, tmp_path / "model.pth")
    saved(tmp_path, va.RelPosDecomposed(feat_size=(3, 4)), key_dim=4)
    model = nn.Sequential(va.Attention2d(16, 2, position=va.RelPosDecomposed(feat_size=(3, 4))))
    with pytest.raises(va.CheckpointError, match="of another shape"):
        va.load_checkpoint(model, tmp_path / "model.pth")


def test_a_table_of_other_proportions_is_not_taken_for_a_classifier(tmp_path):
    saved(tmp_path, va.RelPosTable(feat_size=(3, 7)))
    model = nn.Sequential(va.Attention2d(16, 2, position=va.RelPosTable(feat_size=(7, 14))))
    with pytest.raises(va.CheckpointError, match="Its tables of positions are for groups of other proportions"):
        va.load_checkpoint(model, tmp_path / "model.pth")


def test_keys_of_a_coarser_map_are_turned_by_their_place_on_the_queries_map():
    # Averaging pairs of equal columns leaves the same keys as taking every other one, at the pairs' centres.
    torch.manual_seed(0)
    block = va.Attention2d(16, 2, position=va.Rope2d(temperature=10.0), kv_stride=2, dtype=torch.float64)
    x = torch.randn(1, 16, 4, 6, dtype=torch.float64)
    q, k, v = (y.unflatten(1, (2, 8)) for y in block.qkv(x).chunk(3, 1))
    k, v = (F.avg_pool2d(y.flatten(1, 2), 2).unflatten(1, (2, 8)) for y in (k, v))

    def turned(y, rows, columns):
        speed = 10.0 ** -(torch.arange(2, dtype=torch.float64) / 2)
        angle = torch.cat(
            [
                (speed[:, None, None] * rows[:, None]).expand(-1, -1, len(columns)),
                (speed[:, None, None] * columns).expand(-1, len(rows), -1),
            ]
        )
        pairs = torch.view_as_complex(y.unflatten(2, (4, 2)).movedim(3, -1).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).movedim(-1, 3).flatten(2, 3)

    places = [torch.arange(n, dtype=torch.float64) for n in (4, 6)]
    q = turned(q, *places)
    k = turned(k, *(place.view(-1, 2).mean(1) for place in places))
    tokens = [y.flatten(3).mT for y in (q, k, v)]
    expected = block.proj(F.scaled_dot_product_attention(*tokens).mT.reshape(1, 16, 4, 6))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: va.Rope2d(temperature=0.5), "Rope2d: temperature must be a finite number above 1; got 0.5"),
        (lambda: va.Rope2d(feat_size=0), "Rope2d: feat_size must be a whole number of at least 1, .* got 0"),
        (lambda: va.Rope2d(feat_size=(1, 2, 3)), "Rope2d: feat_size must be for two axes; got"),
        (lambda: va.Rope2d(temperature=float("inf")), "Rope2d: temperature must be a finite number above 1; got inf"),
        (lambda: va.RelPosDecomposed(-3), "RelPosDecomposed: feat_size must be .* got -3"),
        (lambda: va.RelPosTable([7, 7]), r"RelPosTable: feat_size must be .* a tuple \(…, …\) of them; got \[7, 7\]"),
        (lambda: va.Attention2d(16, 2, position=va.Rope2d), r"position must be None or .* Rope2d\(\).* got <class"),
        (
            lambda: va.Attention2d(16, 2, position=va.SinCos(), context_channels=8),
            r"position must not be SinCos.* with context_channels=8: use Rope2d\(\)",
        ),
        (lambda: va.SinCos(temperature=True), "SinCos: temperature must be a finite number above 1; got True"),
        (lambda: va.ConditionalPos(2), "ConditionalPos: kernel_size must be an odd whole number; got 2"),
        (lambda: va.ConditionalPos(-1), "ConditionalPos: kernel_size must be at least 1; got -1"),
        (
            lambda: va.Attention2d(16, 2, position=va.RelPosTable()),
            "RelPosTable: feat_size must be given with a pattern",
        ),
        (
            lambda: va.Attention2d(16, 2, pattern=va.Window(7), position=va.RelPosTable(feat_size=8)),
            r"RelPosTable: feat_size must be that of the pattern's groups, \(7, 7\); got 8: leave it out",
        ),
        (
            lambda: va.Attention2d(16, 2, position=va.RelPosDecomposed(feat_size=(3, 4, 5))),
            r"RelPosDecomposed: feat_size must be a whole number .* for each of 2 axes; got \(3, 4, 5\)",
        ),
        (lambda: va.Attention2d(16, 2, position=va.RelPosDecomposed(feat_size=0)), "feat_size must be .* got 0"),
        (lambda: va.Attention2d(18, 3, position=va.Rope2d()), "Rope2d: key_dim must be a multiple of 4, .* got 6"),
        (lambda: va.Attention1d(16, 2, position=va.Rope2d()), "Rope2d: position must be for maps with two axes"),
        (lambda: va.Attention2d(18, 2, position=va.SinCos()), "SinCos: channels must be a multiple of 4, .* got 18"),
        (
            lambda: va.Attention2d(16, 2, position="rope"),
            r"position must be None or a RelPosDecomposed\(…\), .* got 'rope'",
        ),
        (
            lambda: va.Attention2d(16, 2, position=va.RelPosTable(3), kv_stride=2),
            r"position must not be RelPosTable\(feat_size=3\) where keys are not of the queries' map",
        ),
        (
            lambda: va.Attention2d(16, 2, position=va.RelPosDecomposed(3), context_channels=8),
            r"position must not be RelPosDecomposed\(feat_size=3\) where keys",
        ),
    ],
)
def test_bad_terms_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()
