"""The blocks: contract, projections, unbatched maps, keys of another map, what is around attention, what is refused."""

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from impls import CPU_IMPLS
from torch import nn

import vision_attn as va
from vision_attn.attention.blocks.projection import POINTWISE
from vision_attn.attention.implementations import IMPLEMENTATIONS

DOUBLE = {"dtype": torch.float64}
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# --- the contract -----------------------------------------------------------------------------------------------------


class PlainBmmAttention(nn.Module):
    """The block as a page of torch would write it: these keys, this order of rows, nothing of ours."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(channels, 3 * channels, kernel_size=1)
        self.proj = nn.Conv2d(channels, channels, kernel_size=1)

    def forward(self, x):
        batch, channels, height, width = x.shape
        width_of_head = channels // self.num_heads
        rows = self.qkv(x).reshape(batch, 3, self.num_heads, width_of_head, height * width)
        q, k, v = (rows[:, part].flatten(0, 1).transpose(1, 2) for part in range(3))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / width_of_head**0.5, dim=2)
        y = torch.bmm(weights, v).transpose(1, 2)
        return self.proj(y.reshape(batch, channels, height, width))


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_the_block_is_a_page_of_torch_with_its_weights_and_its_seed(impl):
    torch.manual_seed(0)
    plain = PlainBmmAttention(16, 4)
    torch.manual_seed(0)
    block = va.Attention2d(16, 4, impl=impl)
    assert list(block.state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    assert all(torch.equal(block.state_dict()[key], value) for key, value in plain.state_dict().items())
    plain.load_state_dict(block.state_dict(), strict=True)
    x = torch.randn(2, 16, 8, 5)
    close(block(x), plain(x), atol=1e-6)
    assert "qkv.bias" not in va.Attention2d(12, 3, qkv_bias=False).state_dict()


def count_calls(function):
    """How many Python functions of the package are called, steps of generators included."""
    package, calls = str(Path(va.__file__).parent), []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 25),
        ({"pattern": va.Window(7, shift=3), "position": va.RelPosTable()}, 45),
        ({"pattern": va.Neighborhood(7)}, 45),
    ],
    ids=str,
)
def test_the_way_of_a_tensor_is_short(options, most):
    block, x = va.Attention2d(16, 2, **options), torch.randn(2, 16, 14, 17)
    block(x)  # what the pattern makes of this size is made once
    calls = count_calls(lambda: block(x))
    assert "Attention.forward" in calls
    assert len(calls) <= most, calls


@pytest.mark.parametrize(
    ("block", "options"),
    [
        *((va.Attention2d, {"impl": impl}) for impl in CPU_IMPLS),
        (va.Attention2d, {"pattern": va.Window(2, shift=1), "position": va.RelPosTable()}),
        (va.Attention2d, {"pattern": va.Neighborhood(3), "out_channels": 4}),
        (va.AttentionBlock2d, {}),
        (va.TransformerBlock2d, {}),
        (va.TransformerBlock2d, {"norm_first": False}),
        (va.LinearAttention2d, {}),
        (va.StridedAttention2d, {"stride": 2}),
    ],
)
def test_memory_format_in_is_memory_format_out(block, options):
    block = block(8, 2, **options)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 8, 5, 3).contiguous(memory_format=memory_format)
        assert block(x).is_contiguous(memory_format=memory_format)
    half_of_the_channels = torch.randn(2, 16, 5, 3).contiguous(memory_format=torch.channels_last)[:, :8]
    assert block(half_of_the_channels).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_have_the_strides_of_their_parameters_in_channels_last(groups):
    """Also of axes of length one, which say nothing: DistributedDataParallel warns of each that differs."""
    block = va.AttentionBlock2d(8, num_heads=2, groups=groups, gate_init=1.0)
    model = nn.Sequential(block, va.LinearAttention2d(8, 2)).to(memory_format=torch.channels_last)
    model(torch.randn(2, 8, 6, 5).contiguous(memory_format=torch.channels_last)).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad.stride() != p.stride()] == []


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_kernel_reads_views_of_one_tensor(monkeypatch, memory_format):
    seen = []

    def spy(q, k, v, **options):
        seen.extend((q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(IMPLEMENTATIONS, "sdpa", dataclasses.replace(IMPLEMENTATIONS["sdpa"], attend=spy))
    va.Attention2d(16, 2, impl="sdpa")(torch.randn(2, 16, 5, 6).contiguous(memory_format=memory_format))
    assert len({x.untyped_storage().data_ptr() for x in seen}) == 1
    assert all(x.stride(-1) == 1 for x in seen)


def test_implementations_are_set_and_given_back_also_after_an_error():
    model = nn.Sequential(va.Attention2d(8, 2), va.AttentionBlock2d(8, 2, impl="bmm"), nn.ReLU())
    assert va.set_impl_(model, "bmm") == 1
    assert va.set_impl_(model, "bmm") == 0
    with pytest.raises(ValueError, match="impl must be one of"):
        va.set_impl_(model, "flash")
    va.set_impl_(model[0], "sdpa")
    with va.use_impl(model, "einsum"):
        assert [model[0].impl, model[1].attn.impl] == ["einsum", "einsum"]
    with pytest.raises(ValueError, match="x must be maps"), va.use_impl(model, "einsum"):
        model(torch.zeros(1))
    assert [model[0].impl, model[1].attn.impl] == ["sdpa", "bmm"]


def test_linear_attention_has_the_state_dict_of_attention_and_its_own_implementations():
    linear, softmax = va.LinearAttention2d(16, 2), va.Attention2d(16, 2)
    softmax.load_state_dict(linear.state_dict(), strict=True)
    model = nn.Sequential(linear, softmax)
    assert va.set_impl_(model, "einx") == 2
    message = r"impl must be one of 'einx', 'bmm' for linear attention; got 'sdpa' \(in 0: LinearAttention2d"
    with pytest.raises(ValueError, match=message):
        va.set_impl_(model, "sdpa")
    assert (linear.impl, softmax.impl) == ("einx", "einx")


def test_device_dtype_and_empty_batches_are_honoured():
    block = va.AttentionBlock2d(8, 2, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in block.parameters()} == {("meta", torch.float16)}
    assert block(torch.empty(2, 8, 3, 3, device="meta", dtype=torch.float16)).shape == (2, 8, 3, 3)
    empty = torch.randn(0, 8, 3, 5)
    assert va.Attention2d(8, 2, **SHIFTED).attention_weights(empty).shape == (0, 2, 15, 15)
    for impl in ("einx", "bmm"):
        assert va.LinearAttention2d(8, 2, impl=impl)(empty).shape == (0, 8, 3, 5)


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_queries_and_keys_of_length_zero_have_a_direction_in_half_precision_too(impl):
    block = va.Attention2d(8, 2, impl=impl, qk_norm="cosine", qkv_bias=False, dtype=torch.float16)
    y = block(torch.zeros(1, 8, 3, 3, dtype=torch.float16))
    close(y, block.proj.bias.view(1, 8, 1, 1).expand_as(y))


class Matching(nn.Module):
    """Attention that matches as a page of torch writes it, on two maps."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, context):
        n, d = self.block.num_heads, self.block.key_dim
        q, k, v = (F.conv2d(y, *part) for y, part in zip((x, context, context), self.parts(n * d), strict=True))
        q, k = (F.normalize((y - y.mean((2, 3), keepdim=True)).unflatten(1, (n, d)).flatten(3), dim=2) for y in (q, k))
        logits = self.block.q_norm.logit_scale.exp() * torch.einsum("bndi,bndj->bnij", q, k)
        y = torch.einsum("bnij,bndj->bndi", logits.softmax(-1), v.unflatten(1, (n, d)).flatten(3))
        return self.block.proj(y.flatten(1, 2).unflatten(2, x.shape[2:]))

    def parts(self, width):
        return zip(self.block.qkv.weight.split(width), self.block.qkv.bias.split(width), strict=True)


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_attention_that_matches_is_a_page_of_torch(impl):
    block = va.Attention2d(8, 2, impl=impl, qk_norm="match", **DOUBLE)
    nn.init.normal_(block.qkv.weight)
    nn.init.normal_(block.qkv.bias)
    x, context = torch.randn(2, 8, 3, 4, **DOUBLE) + 2, torch.randn(2, 8, 5, 2, **DOUBLE) - 1
    close(block(x, context=context), Matching(block)(x, context))
    x, other = torch.randn(2, 8, 6, 6, **DOUBLE), torch.randn(8, 1, 1, **DOUBLE)
    for pattern in ("full", "rows", va.Window(3), va.Neighborhood(3)):
        block = va.Attention2d(8, 2, impl=impl, qk_norm="match", pattern=pattern, **DOUBLE)
        nn.init.normal_(block.qkv.weight)
        # What all positions share is no matter to the weights, and adds the same everywhere.
        added = block(x + other) - block(x)
        close(added, added[:1, :, :1, :1].expand_as(added))


@pytest.mark.parametrize(
    "options",
    [{}, {"key_dim": 16}, {"num_kv_heads": 1}, {"context_channels": 32}, {"groups": 2}, {"pattern": va.Window(4)}],
    ids=str,
)
def test_with_match_every_head_attends_to_equal_positions_at_initialization(options):
    x = torch.randn(2, 32, 8, 8) + 5 * torch.randn(32, 1, 1)  # the mean over the map is most of each position
    order = torch.arange(64) if "pattern" in options else torch.randperm(64)
    context = x.flatten(2)[:, :, order].unflatten(2, (8, 8))
    block = va.AttentionBlock2d(32, 4, qk_norm="match", **options)
    assert torch.equal(block(x, context=context), x)
    for qk_norm in ("match", "cosine"):  # the second with the same weights, but without subtracting the mean
        block.attn.qk_norm = qk_norm
        weights = block.attn.attention_weights(x, context=context)
        found = weights[:, :, torch.arange(64), order.argsort()].mean((0, 2))
        assert (found > 0.5).all() if qk_norm == "match" else (found < 0.25).all(), found


def test_timms_initialization_does_not_undo_that_of_a_block():
    import timm

    model = timm.create_model("resnet18", block_args={"attn_layer": va.timm_layer(qk_norm="match")})
    q, k, _ = model.layer4[1].se.attn.qkv.weight.chunk(3)
    assert torch.equal(q, k)


# --- unbatched maps ---------------------------------------------------------------------------------------------------

SHIFTED = {"pattern": va.Window(2, shift=1), "position": va.RelPosTable()}
UNBATCHED = [
    (va.Attention2d, {}, (3, 5), (2, 4)),
    (va.Attention2d, {"context_channels": 6}, (3, 5), (2, 4)),
    (va.Attention2d, {"kv_stride": 2, "position": va.Rope2d()}, (3, 5), None),
    (va.Attention2d, {"groups": 2, "qk_norm": True, "output_gate": True}, (3, 5), (3, 5)),
    (va.Attention2d, SHIFTED, (3, 5), None),
    (va.Attention2d, {"pattern": va.Halo(2, 1), "qk_norm": "cosine"}, (3, 5), (3, 5)),
    (va.Attention1d, {}, (7,), None),
    (va.Attention3d, {"position": va.RelPosDecomposed(2)}, (2, 3, 4), None),
    (va.LinearAttention2d, {}, (3, 5), None),
    (va.TransformerBlock2d, {}, (3, 5), (2, 4)),
]


@pytest.mark.parametrize(("kind", "options", "size", "context_size"), UNBATCHED)
def test_one_map_without_a_batch_is_taken_as_a_convolution_takes_it(kind, options, size, context_size):
    block, x, seen = kind(8, 2, **options), torch.randn(8, *size), []
    linear = kind is va.LinearAttention2d
    given = {"mask": torch.rand(2, 1, x[0].numel()) < 0.7} if linear else {}
    if context_size is not None:
        given["context"] = torch.randn(options.get("context_channels", 8), *context_size)
    expected = block(x[None], **{name: value[None] for name, value in given.items()})[0]
    block.register_forward_hook(lambda module, args, y: seen.append(y))
    close(block(x, **given), expected, atol=1e-6)
    assert [tuple(y.shape) for y in seen] == [(8, *size)]  # a hook sees it once, as it came
    if not linear and context_size is None:
        mask = torch.rand(x[0].numel(), 1) < 0.7
        close(block(x, mask), block(x[None], mask)[0], atol=1e-6)


EACH = [va.Attention2d, va.AttentionBlock2d, va.LinearAttention2d, va.TransformerBlock2d]


@pytest.mark.parametrize("shape", [(2, 7, 4, 4), (7, 4, 4), (8, 4), (1, 2, 8, 4, 4), None])
@pytest.mark.parametrize("block", EACH)
def test_an_input_that_is_no_map_is_refused(block, shape):
    for x in ("a map", 3, None) if shape is None else (torch.zeros(shape),):
        with pytest.raises(ValueError, match=r"x must be maps of shape \(batch, 8, height, width\); got"):
            block(8, 2)(x)


@pytest.mark.parametrize("block", EACH)
@pytest.mark.parametrize("batch", [0, 2])
def test_a_mask_that_a_block_cannot_apply_is_refused_also_by_an_empty_batch(block, batch):
    masks = [torch.ones(7, 7, dtype=torch.bool), torch.ones(15, dtype=torch.long), "no mask"]
    if block is va.LinearAttention2d:  # one key for one query alone, or additive
        masks += [torch.ones(15, 15, dtype=torch.bool), torch.zeros(1, 1, 1, 15)]
    for mask in masks:
        with pytest.raises(ValueError, match=r"mask must (be|broadcast)"):
            block(8, 2)(torch.randn(batch, 8, 3, 5), mask)


# --- projections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_projection_is_a_convolution_in_every_memory_format(rank, dtype):
    x = torch.randn(2, 16, *(6, 5, 4)[:rank], dtype=torch.float64).to(dtype)
    maps = {
        "default": x[:, :8].contiguous(),
        "channels last": x[:, :8].movedim(1, -1).contiguous().movedim(-1, 1),
        "some of the channels": x[:, 4:12],
        "every other position": x[:, :8, ::2],
        "expanded": x[:1, :8].expand(3, *[-1] * (rank + 1)),
        "unbatched": x[0, :8],
        "empty": x[:0, :8],
    }
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    for options in ({}, {"bias": False}, {"groups": 2}):
        conv = POINTWISE[rank](8, 12, 1, dtype=dtype, **options)
        assert isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1])
        for name, map in maps.items():
            leaf = map.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            exact = leaf.detach().double().requires_grad_()
            parameters = [p.detach().double().requires_grad_() for p in conv.parameters()]
            found, expected = conv(leaf), CONVOLVE[rank](exact, *parameters, groups=conv.groups)
            assert found.dtype == dtype
            gradients = torch.autograd.grad(found.sum(), [leaf, *conv.parameters()])
            theirs = torch.autograd.grad(expected.sum(), [exact, *parameters])
            for one, other in zip((found, *gradients), (expected, *theirs), strict=True):
                largest = max([1.0, *other.detach().abs().flatten().tolist()])
                assert one.shape == other.shape, name
                close(one.double(), other, atol=tolerance * largest)


@pytest.mark.parametrize("options", [{}, {"kv_stride": 2}, {"kv_stride": 2, "groups": 2}], ids=str)
def test_hooks_on_projections_fire_once(options):
    block, seen = va.Attention2d(8, 2, **options), []
    expected = block(x := torch.randn(2, 8, 4, 6))
    for name in ("qkv", "proj"):
        getattr(block, name).register_forward_hook(lambda m, args, y, name=name: seen.append((name, tuple(y.shape))))
    close(block(x), expected)
    assert seen == [("qkv", (2, 24, 4, 6)), ("proj", (2, 8, 4, 6))]


class Packed(torch.Tensor):
    """A matrix of fewer bits, as torchao's: it is multiplied by `linear` and not transposed."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is not torch.Tensor.t
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("rank", [1, 2, 3])
@torch.no_grad()
def test_a_projection_takes_its_weights_as_a_matrix_of_fewer_bits(rank):
    block = (va.Attention1d, va.Attention2d, va.Attention3d)[rank - 1](8, 2)
    expected = block(x := torch.randn(2, 8, *(4, 6, 3)[:rank]))
    for layer in (block.qkv, block.proj):
        layer.weight = nn.Parameter(layer.weight.flatten(1).as_subclass(Packed))
    close(block(x).as_subclass(torch.Tensor), expected)


class LowRank(nn.Module):
    """What LoRA puts in the place of a layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Conv2d(base_layer.in_channels, 2, 1, bias=False, **DOUBLE)
        self.up = nn.Conv2d(2, base_layer.out_channels, 1, bias=False, **DOUBLE)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))

    def added(self):
        return (self.up.weight.flatten(1) @ self.down.weight.flatten(1)).detach()[:, :, None, None]


@pytest.mark.parametrize(
    ("options", "context_size"),
    [
        ({"kv_stride": 2}, None),
        ({"num_kv_heads": 1, "value_dim": 3, "qkv_bias": False}, (2, 5)),
        ({"pattern": va.Window(2, shift=1), "position": va.RelPosTable()}, (3, 4)),
    ],
    ids=str,
)
def test_a_low_rank_wrapper_is_the_merged_weights(options, context_size):
    x = torch.randn(2, 8, 3, 4, **DOUBLE)
    context = None if context_size is None else torch.randn(2, 8, *context_size, **DOUBLE)
    block = va.Attention2d(8, 2, **options, **DOUBLE)
    merged, wrapped = copy.deepcopy(block), copy.deepcopy(block)
    wrapped.qkv, wrapped.proj = LowRank(wrapped.qkv), LowRank(wrapped.proj)
    with torch.no_grad():
        merged.qkv.weight += wrapped.qkv.added()
        merged.proj.weight += wrapped.proj.added()
    y = wrapped(x, context=context)
    close(y, merged(x, context=context))
    assert (y - block(x, context=context)).abs().max() > 1e-3
    assert all(g.any() for g in torch.autograd.grad(y.square().sum(), [wrapped.qkv.up.weight, wrapped.qkv.down.weight]))


def in_groups(weight, groups):
    """The weight of a grouped projection as that of a dense one, which is zero between the groups."""
    return torch.block_diag(*(part.flatten(1) for part in weight.chunk(groups)))[:, :, None, None]


@pytest.mark.parametrize(
    "options", [{}, {"kv_stride": 2}, {"qkv_bias": False, "out_channels": 8}, {"key_dim": 4, "value_dim": 4}], ids=str
)
@pytest.mark.parametrize("heads", [2, 4, 1])
def test_grouped_projections_are_dense_ones_with_zeros_between_the_groups(heads, options):
    grouped = va.Attention2d(16, heads, groups=4, **options, **DOUBLE)
    dense = va.Attention2d(16, heads, **options, **DOUBLE)
    weights = dict(grouped.state_dict())
    assert weights["qkv.weight"].shape[1] == 4
    weights["qkv.weight"] = torch.cat([in_groups(part, 4) for part in weights["qkv.weight"].chunk(3)])
    weights["proj.weight"] = in_groups(weights["proj.weight"], 4)
    dense.load_state_dict(weights)
    x, other = torch.randn(2, 16, 5, 6, **DOUBLE), torch.randn(2, 16, 3, 4, **DOUBLE)
    close(grouped(x), dense(x))
    close(grouped(x, context=other), dense(x, context=other))


# --- keys of another map ----------------------------------------------------------------------------------------------


def test_keys_of_a_context_and_of_an_averaged_map():
    options = {"pattern": va.Window(3, shift=1), "position": va.RelPosTable()}
    block, x = va.Attention2d(16, 2, **options, **DOUBLE), torch.randn(2, 16, 5, 7, **DOUBLE)
    close(block(x, context=x), block(x))
    plain, strided = va.Attention2d(16, 2, **DOUBLE), va.Attention2d(16, 2, kv_stride=2, **DOUBLE)
    plain.load_state_dict(strided.state_dict())
    for size in ((6, 8), (5, 7)):
        x = torch.randn(2, 16, *size, **DOUBLE)
        context = F.avg_pool2d(x, 2, ceil_mode=True)
        mask = torch.rand(x[0, 0].numel(), context[0, 0].numel()) < 0.5
        close(strided(x, mask), plain(x, mask, context))
    volume = va.Attention3d(8, 2, kv_stride=2)
    x = torch.randn(1, 8, 1, 4, 4)
    assert volume(x).shape == x.shape
    assert volume.keys_size(x) == (1, 2, 2)  # an axis shorter than the square is averaged as it is


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        ({"context_channels": 8}, None, "context must be given to a block with context_channels=8"),
        ({"context_channels": 8}, (2, 16, 3, 3), r"context must be maps of shape \(batch, 8, height, width\); got"),
        ({}, (1, 16, 3, 3), "context must have the batch size of x, 2; got 1"),
        ({"pattern": "rows"}, (2, 16, 3, 3), r"context must have the size of x, \(4, 5\), .* got \(3, 3\)"),
        ({"causal": True}, (2, 16, 3, 3), "context must have the size of x"),
        ({"position": va.RelPosTable(4)}, (2, 16, 3, 3), "context must have the size of x"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(options, context, message):
    context = None if context is None else torch.randn(context)
    with pytest.raises(ValueError, match=message):
        va.Attention2d(16, 2, **options)(torch.randn(2, 16, 4, 5), context=context)


@pytest.mark.parametrize("queries", [torch.tensor([-1]), torch.tensor([12]), torch.ones(12).bool(), torch.ones(1), [1]])
def test_queries_that_are_no_tokens_are_refused(queries):
    with pytest.raises(ValueError, match=r"queries must be a tensor \(i,\) of indices of 12 tokens, or None"):
        va.Attention2d(8, 2).attention_weights(torch.randn(1, 8, 3, 4), queries=queries)


# --- around attention -------------------------------------------------------------------------------------------------


def test_a_new_block_is_the_identity_bit_for_bit():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(2, 16, 4, 5, dtype=dtype) * 100
        for gate in (None, 0.0):
            y = va.AttentionBlock2d(16, gate_init=gate, dtype=dtype)(x)
            assert y.dtype == dtype
            assert torch.equal(y, x)
        assert not torch.equal(va.AttentionBlock2d(16, gate_init=0.1, dtype=dtype)(x), x)


def test_a_branch_is_left_as_it_is_where_no_zeros_are_asked_for():
    """As timm calls it, with ``zero_init_last`` of the network."""
    block = va.AttentionBlock2d(8, 2)
    nn.init.ones_(block.attn.proj.weight)
    block.init_weights(zero_init_last=False)
    assert (block.attn.proj.weight == 1).all()
    block.init_weights()
    assert not block.attn.proj.weight.any()


@pytest.mark.parametrize(("gate", "first"), [(None, {"attn.proj.weight", "attn.proj.bias"}), (0.0, {"gate"})])
def test_one_part_of_a_new_block_learns_first_and_all_follow(gate, first):
    module = va.AttentionBlock2d(16, gate_init=gate)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x, target = torch.randn(4, 16, 3, 3), torch.randn(4, 16, 3, 3)
    for expected in (first, set(dict(module.named_parameters()))):
        optimizer.zero_grad()
        (module(x) - target).square().mean().backward()
        assert {name for name, p in module.named_parameters() if p.grad.abs().max() > 0} == expected
        optimizer.step()


OPEN = {"gate_init": 1.0}


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (va.TransformerBlock2d, {"norm_first": False, "position": va.RelPosDecomposed(4)}),
        (va.AttentionBlock2d, {**OPEN, "qk_norm": True, "pattern": va.Window(3), "position": va.RelPosTable()}),
        (va.AttentionBlock2d, {**OPEN, "position": va.Rope2d(), "num_kv_heads": 1}),
        (va.AttentionBlock2d, {**OPEN, "qk_norm": "match", "pattern": "rows"}),
        (va.Attention2d, {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed(), "output_gate": True}),
        (va.LinearAttention2d, {}),
    ],
)
def test_blocks_run_under_autocast_and_stay_near(block, options):
    block, x = block(16, 2, **options), torch.randn(2, 16, 4, 5)
    expected = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block(x)
        gradients = torch.autograd.grad(found.float().sum(), list(block.parameters()), allow_unused=True)
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("stride", "size"), [(1, (5, 7)), (2, (5, 7)), (3, (7, 8)), (5, (1, 1))])
def test_attention_in_the_place_of_a_convolution_gives_a_map_of_its_size(stride, size):
    x = torch.randn(2, 8, *size, **DOUBLE)
    plain = nn.Conv2d(8, 12, 5, stride=stride, padding=2, **DOUBLE)
    augmented = va.AugmentedConv2d(8, 12, 5, stride=stride, num_heads=2, key_channels=8, value_channels=4, **DOUBLE)
    y = augmented(x)
    assert y.shape == plain(x).shape
    close(y[:, :8], augmented.conv(x))
    close(y[:, 8:], augmented.attn(F.avg_pool2d(x, stride, ceil_mode=True)))
    strided = va.StridedAttention2d(8, 2, stride=stride, out_channels=12, feat_size=size, **DOUBLE)
    y = strided(x)
    assert y.shape == plain(x).shape
    # A square over the border is averaged over the positions that there are.
    close(y[:, :, -1, -1], strided.attn(x)[:, :, (y.shape[2] - 1) * stride :, (y.shape[3] - 1) * stride :].mean((2, 3)))


def test_strided_attention_hands_on_what_attention_takes():
    block, x, context = va.StridedAttention2d(8, 2, stride=2), torch.randn(1, 8, 4, 4), torch.randn(1, 8, 3, 5)
    mask = torch.rand(16, 15) < 0.5
    assert torch.equal(block(x, mask, context), F.avg_pool2d(block.attn(x, mask, context), 2))
    for options, position in (({}, va.RelPosDecomposed(4)), ({"position": va.Rope2d()}, va.Rope2d())):
        assert va.StridedAttention2d(8, 2, feat_size=4, **options).attn.position.config == position


# --- what is refused, argument by argument ----------------------------------------------------------------------------


SIZES = {"channels": 16, "num_heads": 4}
AUGMENTED = {"in_channels": 8, "out_channels": 8, "num_heads": 2, "key_channels": 8, "value_channels": 4}
#: What is refused, and how the message begins; wrong types are tried in the tests of attacks.
REFUSED = {
    va.Attention2d: [
        ({"num_heads": 3}, "num_heads must"),
        ({"impl": ["bmm"]}, "impl must"),
        ({"attn_drop": 1.5}, "attn_drop must"),
        ({"num_kv_heads": 3}, "num_kv_heads must"),
        ({"kv_stride": 2, "pattern": "rows"}, "pattern must .* kv_stride"),
        ({"kv_stride": 2, "causal": True}, "causal must"),
        ({"context_channels": 8, "causal": True}, "causal must"),
        ({"qk_norm": "layer"}, "qk_norm must"),
        ({"qk_norm": "match", "causal": True}, "qk_norm must .* 'match' .*causal"),
        ({"qk_norm": "match", "context_channels": 8}, "qk_norm must .* context_channels.*8"),
        ({"pattern": va.Neighborhood(3), "causal": True}, "causal must be False with a Neighborhood"),
        ({"groups": 3}, "groups must divide channels"),
        ({"groups": 4, "out_channels": 6}, "groups must divide out_channels"),
        ({"groups": 8, "key_dim": 1, "value_dim": 1}, "groups must divide .* key_dim"),
        ({"groups": 2, "num_kv_heads": 1}, "groups must .* num_kv_heads"),
        ({"groups": 2, "context_channels": 8}, "groups must .* context_channels"),
    ],
    va.AttentionBlock2d: [({"out_channels": 4}, "out_channels must")],
    va.TransformerBlock2d: [
        ({"out_channels": 4}, "out_channels must"),
        ({"activation": "silu"}, "activation must"),
        ({"mlp_drop": 2}, "mlp_drop must"),
        ({"eps": -1.0}, "eps must"),
    ],
    va.LinearAttention2d: [
        ({"num_heads": 3}, "num_heads must"),
        ({"feature_map": "relu"}, "feature_map must be one of 'softmax', 'elu', 'none'; got 'relu'"),
        ({"impl": "sdpa"}, "impl must"),
    ],
    va.AugmentedConv2d: [
        ({"kernel_size": 2}, "kernel_size must"),
        ({"key_channels": 7}, "num_heads must divide key_channels"),
        ({"value_channels": 8}, "value_channels must"),
        ({"key_dim": 3}, "key_dim must"),
    ],
    va.StridedAttention2d: [({"feat_size": (0, 3)}, "feat_size must")],
}


@pytest.mark.parametrize("block", REFUSED)
def test_bad_arguments_are_refused_at_construction(block):
    for options, message in REFUSED[block]:
        with pytest.raises(ValueError, match=message):
            block(**{**(AUGMENTED if block is va.AugmentedConv2d else SIZES), **options})


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("impl", CPU_IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "num_kv_heads": 1},
        {"position": va.RelPosDecomposed(feat_size=8), "causal": True},
        {"position": va.Rope2d(), "output_gate": True, "kv_stride": 2},
        {"pattern": va.Window(5, shift=2), "position": va.RelPosTable()},
        {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
    ],
    ids=str,
)
def test_on_a_gpu_the_block_gives_what_it_gives_on_the_cpu(impl, dtype, options):
    # 8×8 tokens and a mask in bfloat16 is where cuDNN's kernel has given NaN gradients (pytorch/pytorch#196678).
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    kind = torch.float32 if dtype == "autocast" else dtype
    for masked in (False, True):
        block = va.Attention2d(64, 4, impl=impl, **options)
        mask = torch.rand(64, block.keys_size(x)[0] ** 2) < 0.5 if masked else None
        if mask is not None:
            mask[0] = False
        expected = block(x, mask)
        (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
        moved, there = block.to("cuda", kind), x.detach().to("cuda", kind).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == "autocast"):
            found = moved(there, None if mask is None else mask.cuda())
        (gradient,) = torch.autograd.grad(found.float().sum(), there)
        tolerance = 2e-3 if dtype == torch.float32 else 8 * 2**-8
        for ours, theirs in ((found, expected), (gradient, expected_gradient)):
            assert (ours.float().cpu() - theirs).abs().max() <= tolerance * theirs.abs().max()
