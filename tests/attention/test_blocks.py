"""Blocks: common behavior, unbatched inputs, projections, cross-attention, residual blocks, invalid arguments."""

import math
import re
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from controls import ConvBlock2d, CostVolumeBlock2d, NormBlock2d, SqueezeExciteBlock2d
from impls import CPU_IMPLS
from small_networks import assert_same, assert_same_function, close
from torch import nn

import vision_attn as va
from vision_attn.attention.blocks.projection import POINTWISE

DOUBLE, WIDTHS = {"dtype": torch.float64}, {"num_heads": 2, "key_channels": 8, "value_channels": 4}
SHIFTED = {"pattern": va.Window(2, shift=1), "position": va.RelPosTable()}
BLOCKS = [va.Attention2d, va.AttentionBlock2d, va.blocks.LinearAttention2d, va.blocks.TransformerBlock2d]


def random_map(*shape):
    return torch.randn(shape, dtype=torch.float64)


# --- common behavior --------------------------------------------------------------------------------------------------


def test_state_dict_and_seed_equal_two_convolutions():
    plain = nn.ModuleDict({"qkv": nn.Conv2d(16, 48, 1), "proj": nn.Conv2d(16, 16, 1)}).state_dict()
    torch.manual_seed(0)  # as before every test
    assert_same(va.Attention2d(16, 4).state_dict(), plain)
    assert "qkv.bias" not in va.Attention2d(12, 3, qkv_bias=False).state_dict()
    assert not any("bias" in key for key in va.blocks.TransformerBlock2d(8, 2, bias=False).state_dict())


FORMATS = [*((block, {}) for block in BLOCKS), (va.Attention2d, SHIFTED), (va.blocks.StridedAttention2d, {"stride": 2})]


@pytest.mark.parametrize(("block", "options"), FORMATS)
def test_the_output_has_the_memory_format_of_the_input(block, options):
    block = block(8, 2, **options)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 16, 5, 3).contiguous(memory_format=memory_format)
        assert block(x[:, :8].contiguous(memory_format=memory_format)).is_contiguous(memory_format=memory_format)
    assert block(x[:, :8]).is_contiguous(memory_format=torch.channels_last)  # a slice of the channels


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_have_the_strides_of_their_parameters_in_channels_last(groups):
    """DistributedDataParallel warns about different strides, even along axes of length one."""
    block = va.AttentionBlock2d(8, num_heads=2, groups=groups, gate_init=1.0)
    model = nn.Sequential(block, va.blocks.LinearAttention2d(8, 2)).to(memory_format=torch.channels_last)
    model(torch.randn(2, 8, 6, 5).contiguous(memory_format=torch.channels_last)).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad.stride() != p.stride()] == []


def test_implementations_are_set_and_are_restored_after_an_error():
    model = nn.Sequential(va.Attention2d(8, 2), va.AttentionBlock2d(8, 2, impl="bmm"), nn.ReLU())
    assert [va.set_impl_(model, "bmm"), va.set_impl_(model, "bmm")] == [1, 0]
    with va.use_impl(model, "einsum"):
        assert va.set_impl_(model[0], "einx") == 1  # stays, but has no effect inside
        assert [model[0].impl, model[1].attn.impl] == ["einsum", "einsum"]
    with pytest.raises(ValueError, match=r"^x must"), va.use_impl(model, "einsum"):
        model(torch.zeros(1))
    assert [model[0].impl, model[1].attn.impl] == ["einx", "bmm"]
    va.set_impl_(model[0], "sdpa")
    # Linear attention has the same state dict, but other implementations.
    both = nn.Sequential(va.blocks.LinearAttention2d(8, 2), model[0])
    model[0].load_state_dict(both[0].state_dict(), strict=True)
    assert [va.set_impl_(both, "auto"), va.set_impl_(both, "einx")] == [2, 2]
    for impl, message in (("flash", "impl must"), ("sdpa", r"impl must .*'einx', 'bmm'.*\(in 0: LinearAttention2d")):
        with pytest.raises(ValueError, match=message):
            va.set_impl_(both, impl)
    assert [block.impl for block in both] == ["einx", "einx"]


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_cosine_attention_supports_zero_vectors_in_half_precision(impl):
    block = va.Attention2d(8, 2, impl=impl, qk_norm="cosine", qkv_bias=False, dtype=torch.float16)
    y = block(torch.zeros(1, 8, 3, 3, dtype=torch.float16))
    close(y, block.proj.bias.view(1, 8, 1, 1).expand_as(y))


def cosine_attention(block, x, context):
    """Compute cosine attention from ``x`` to ``context`` in plain torch."""
    n, d = block.num_heads, block.key_dim
    parts = zip(block.qkv.weight.split(n * d), block.qkv.bias.split(n * d), strict=True)
    q, k, v = (F.conv2d(y, *part) for y, part in zip((x, context, context), parts, strict=True))
    if block.qk_norm == "match":
        q, k = (y - y.mean((2, 3), keepdim=True) for y in (q, k))
    q, k = (F.normalize(y.unflatten(1, (n, d)).flatten(3), dim=2) for y in (q, k))
    logits = block.q_norm.logit_scale.exp().clamp(max=100) * torch.einsum("bndi,bndj->bnij", q, k)
    y = torch.einsum("bnij,bndj->bndi", logits.softmax(-1), v.unflatten(1, (n, d)).flatten(3))
    return block.proj(y.flatten(1, 2).unflatten(2, x.shape[2:]))


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_cosine_attention_and_match_equal_plain_torch(impl):
    x, context = random_map(2, 8, 3, 4) + 2, random_map(2, 8, 5, 2) - 1
    for qk_norm, initial in (("match", 14), ("cosine", 10)):
        block = va.Attention2d(8, 2, impl=impl, qk_norm=qk_norm, **DOUBLE)
        close(block.q_norm.logit_scale.exp().flatten(), torch.tensor([initial] * 2, **DOUBLE))
        for parameter in (block.qkv.weight, block.qkv.bias):
            nn.init.normal_(parameter)
        for scale in (initial, 300):  # 300 exceeds the maximum
            nn.init.constant_(block.q_norm.logit_scale, math.log(scale))
            plain = partial(cosine_attention, block)
            assert_same_function(lambda x, y, block=block: block(x, None, y), plain, x, context, atol=1e-10)
    x, other = random_map(2, 8, 6, 6), random_map(8, 1, 1)
    for pattern in ("full", "rows", va.Window(3), va.Neighborhood(3)):
        block = va.Attention2d(8, 2, impl=impl, qk_norm="match", pattern=pattern, **DOUBLE)
        nn.init.normal_(block.qkv.weight)
        # A vector that is added to all positions does not change the weights, and adds a constant to the output.
        added = block(x + other) - block(x)
        close(added, added[:1, :, :1, :1].expand_as(added))


MATCHED = [{"qkv_bias": False}, {"num_kv_heads": 1}, {"context_channels": 32}, {"groups": 2}, {"pattern": va.Window(4)}]


@pytest.mark.parametrize("options", MATCHED)
def test_with_match_every_head_attends_to_equal_positions_at_initialization(options):
    x = torch.randn(2, 32, 8, 8) + 5 * torch.randn(32, 1, 1)  # the mean over the feature map dominates every position
    order = torch.arange(64) if "pattern" in options else torch.randperm(64)
    context = x.flatten(2)[:, :, order].unflatten(2, (8, 8))
    block = va.AttentionBlock2d(32, 4, qk_norm="match", **options)
    assert torch.equal(block(x, context=context), x)
    for qk_norm in ("match", "cosine"):  # "cosine" with the same weights does not subtract the mean
        attn = va.Attention2d(32, 4, qk_norm=qk_norm, **options)
        attn.load_state_dict(block.attn.state_dict())
        found = attn.attention_weights(x, context=context)[:, :, torch.arange(64), order.argsort()].mean((0, 2))
        assert (found > 0.5).all() if qk_norm == "match" else (found < 0.25).all(), found


def test_initialization_by_timm_keeps_the_initialization_of_match():
    options = {"block_args": {"attn_layer": va.timm_layer(qk_norm="match")}, "channels": (8, 8, 8, 16)}
    qkv = timm.create_model("resnet18", **options).layer4[1].se.attn.qkv
    assert (torch.equal(*qkv.weight.chunk(3)[:2]), qkv.bias.count_nonzero()) == (True, 0)


# --- unbatched inputs -------------------------------------------------------------------------------------------------


UNBATCHED = [
    (va.Attention2d, {"context_channels": 6}, (3, 5), (6, 2, 4)),
    (va.blocks.Attention1d, {}, (7,), None),
    (va.blocks.Attention3d, {"position": va.RelPosDecomposed(2)}, (2, 3, 4), None),
    (va.blocks.LinearAttention2d, {}, (3, 5), None),
    (va.blocks.TransformerBlock2d, {}, (3, 5), (8, 2, 4)),
]


@pytest.mark.parametrize(("kind", "options", "size", "context_size"), UNBATCHED)
def test_blocks_accept_unbatched_feature_maps_as_convolutions_do(kind, options, size, context_size):
    block, x, outputs = kind(8, 2, **options), torch.randn(8, *size), []
    mask = torch.rand(1, x[0].numel()) < 0.7 if context_size is None else None
    context = () if context_size is None else (torch.randn(context_size),)
    expected = block(x[None], mask, *(y[None] for y in context))[0]
    block.register_forward_hook(lambda module, args, y: outputs.append(y))
    close(block(x, mask, *context), expected, atol=1e-6)
    assert [tuple(y.shape) for y in outputs] == [(8, *size)]  # a hook is called once, with unbatched tensors


@pytest.mark.parametrize("block", BLOCKS)
def test_invalid_inputs_and_masks_raise_an_error_also_for_an_empty_batch(block):
    for x in (None, *map(torch.zeros, ((2, 7, 4, 4), (7, 4, 4), (8, 4), (1, 2, 8, 4, 4)))):
        with pytest.raises(ValueError, match=r"^x must .*\(batch, 8, height, width\)"):
            block(8, 2)(x)
    masks = [torch.ones(7, 7) > 0, torch.ones(15, dtype=torch.long), torch.ones(3, 1, 15, 15) > 0]
    if block is va.blocks.LinearAttention2d:  # it supports neither masks per query nor additive masks
        masks += [torch.ones(15, 15) > 0, torch.zeros(1, 1, 1, 15)]
    for batch in (0, 2):
        for mask in masks:
            with pytest.raises(ValueError, match=r"^mask must (be|broadcast)"):
                block(8, 2)(torch.randn(batch, 8, 3, 5), mask)


# --- projections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_projection_equals_a_convolution_in_every_memory_format(rank, dtype):
    x = random_map(2, 16, *(6, 5, 4)[:rank]).to(dtype)
    maps = {
        "default": x[:, :8].contiguous(),
        "channels last": x[:, :8].movedim(1, -1).contiguous().movedim(-1, 1),
        "slice of channels": x[:, 4:12],
        "every other position": x[:, :8, ::2],
        "expanded": x[:1, :8].expand(3, *[-1] * (rank + 1)),
        "unbatched": x[0, :8],
        "empty": x[:0, :8],
    }
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2 * 2**-7}[dtype]
    for options in ({}, {"bias": False}, {"groups": 2}):
        ours = POINTWISE[rank](8, 12, 1, dtype=dtype, **options)
        exact = getattr(nn, f"Conv{rank}d")(8, 12, 1, **options, **DOUBLE)
        exact.load_state_dict(ours.state_dict())
        for name, feature_map in maps.items():
            results = []
            for layer in (ours, exact):
                leaf = feature_map.to(layer.weight.dtype).detach().requires_grad_()
                y = layer(leaf)
                assert y.dtype == layer.weight.dtype
                results.append([y, *torch.autograd.grad(y.sum(), [leaf, *layer.parameters()])])
            for one, other in zip(*results, strict=True):
                largest = max([1.0, *other.detach().abs().flatten().tolist()])
                torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * largest, msg=name)


class Packed(torch.Tensor):
    """A quantized matrix, as in torchao, which supports ``linear`` but not ``t``."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is not torch.Tensor.t
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def test_a_projection_supports_a_quantized_weight():
    block, x = va.Attention2d(8, 2), torch.randn(2, 8, 4, 6)
    expected = block(x)
    for layer in (block.qkv, block.proj):
        layer.weight = nn.Parameter(layer.weight.flatten(1).as_subclass(Packed))
    close(block(x).as_subclass(torch.Tensor), expected)


def test_a_wrapped_projection_is_called_once_as_with_lora():
    """Wrappers such as LoRA of PEFT do not have the attributes of the convolution; the last batch is empty."""
    block, calls = va.Attention2d(8, 2, num_kv_heads=1, value_dim=3, qkv_bias=False), []
    inputs = [(torch.randn(2, 8, 3, 4), None, context) for context in (None, torch.randn(2, 8, 2, 5))]
    inputs.append((torch.randn(0, 8, 3, 5), None, None))
    expected = [block(*given) for given in inputs]
    for name in ("qkv", "proj"):
        setattr(block, name, nn.Sequential(getattr(block, name)))  # nn.Sequential has no weight
        getattr(block, name).register_forward_hook(lambda *call, name=name: calls.append(name))
    assert all(torch.equal(block(*given), y) for given, y in zip(inputs, expected, strict=True))
    assert calls == ["qkv", "proj", "qkv", "qkv", "proj", "proj"]


@pytest.mark.parametrize("name", ["AttentionBlock2d", "LinearAttention2d", "TransformerBlock2d", "StridedAttention2d"])
def test_all_gradients_of_an_empty_batch_are_zero(name):
    """DistributedDataParallel waits for the gradients of all parameters, also in a step without regions of interest."""
    options = {} if name == "LinearAttention2d" else {"qk_norm": True, "position": va.ConditionalPos(3)}
    block, x = getattr(va.blocks, name)(8, 2, **options), torch.randn(0, 8, 4, 4, requires_grad=True)
    for grad in torch.autograd.grad(block(x).sum(), [x, *block.parameters()]):
        assert not grad.any()


GROUPED = [{"kv_stride": 2}, {"qkv_bias": False, "out_channels": 8}, {"key_dim": 4, "value_dim": 4}]


@pytest.mark.parametrize("options", GROUPED)
@pytest.mark.parametrize("heads", [2, 4, pytest.param(1, marks=pytest.mark.slow)])
def test_grouped_projections_equal_block_diagonal_projections(heads, options):
    grouped, dense = (va.Attention2d(16, heads, groups=groups, **options, **DOUBLE) for groups in (4, 1))
    weights = dict(grouped.state_dict())
    assert weights["qkv.weight"].shape[1] == 4
    for name, projections in (("qkv.weight", 3), ("proj.weight", 1)):
        parts = [part.flatten(1).chunk(4) for part in weights[name].chunk(projections)]
        weights[name] = torch.cat([torch.block_diag(*groups) for groups in parts])[:, :, None, None]
    dense.load_state_dict(weights)
    x, other = random_map(2, 16, 5, 6), random_map(2, 16, 3, 4)
    for impl in CPU_IMPLS:
        va.set_impl_(grouped, impl)
        assert_same_function(grouped, dense, x)
        assert_same_function(lambda x, y: grouped(x, context=y), lambda x, y: dense(x, context=y), x, other)


# --- keys of another feature map --------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_keys_of_a_context_and_of_a_pooled_feature_map(impl):
    shifted = {"pattern": va.Window(3, shift=1), "position": va.RelPosTable()}
    block, x = va.Attention2d(16, 2, impl=impl, **shifted, **DOUBLE), random_map(2, 16, 5, 7)
    close(block(x, context=x), block(x))
    plain, strided = (va.Attention2d(16, 2, kv_stride=stride, scale=0.9, impl=impl, **DOUBLE) for stride in (1, 2))
    plain.load_state_dict(strided.state_dict())
    for size in ((6, 8), (5, 7)):
        keys = -(-size[0] // 2) * -(-size[1] // 2)
        for mask in (torch.rand(size[0] * size[1], keys) < 0.5, random_map(2, 2, 1, keys)):

            def pooled(x, mask=mask):
                return plain(x, mask, F.avg_pool2d(x, 2, ceil_mode=True))

            assert_same_function(partial(strided, mask=mask), pooled, random_map(2, 16, *size), atol=1e-11)
    volume, x = va.blocks.Attention3d(8, 2, kv_stride=2, impl=impl), torch.randn(1, 8, 1, 4, 4)
    assert volume(x).shape == x.shape
    assert volume.attention_weights(x).shape[-1] == 1 * 2 * 2  # an axis shorter than kv_stride is averaged completely


INVALID_CONTEXTS = [
    ({"context_channels": 8}, None, "must .*context_channels=8"),
    ({"context_channels": 8}, (2, 16, 3, 3), r"must .*\(batch, 8, height, width\)"),
    ({}, (2, 16, 3), r"must .*\(batch, 16, height, width\), got \(2, 16, 3\)"),
    ({}, (1, 16, 3, 3), "must .*batch size of x, 2, got 1"),
    ({"pattern": "rows"}, (2, 16, 3, 3), r"must .*size of x .*3, 3.* and .*4, 5"),
    ({"causal": True}, (2, 16, 3, 3), "must .*size of x"),
    ({"position": va.RelPosTable(4)}, (2, 16, 3, 3), "must .*size of x"),
]


@pytest.mark.parametrize(("options", "context", "message"), INVALID_CONTEXTS)
def test_an_invalid_context_raises_an_error(options, context, message):
    context = None if context is None else torch.randn(context)
    with pytest.raises(ValueError, match=f"^context {message}"):
        va.Attention2d(16, 2, **options)(torch.randn(2, 16, 4, 5), context=context)


# --- residual blocks and blocks that replace convolutions -------------------------------------------------------------


def test_a_new_block_is_bitwise_an_identity():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(2, 16, 4, 5, dtype=dtype) * 100
        for gate in (None, 0.0, 0.1):
            y = va.AttentionBlock2d(16, gate_init=gate, dtype=dtype)(x)
            assert y.dtype == dtype
            assert torch.equal(y, x) == (gate != 0.1)
    block = va.AttentionBlock2d(8, 2)
    nn.init.ones_(block.attn.proj.weight)
    block.init_weights(zero_init_last=False)  # as timm calls it
    assert (block.attn.proj.weight == 1).all()
    block.init_weights()
    assert not block.attn.proj.weight.any()


#: New blocks, and the parameters that receive a gradient before the first update.
FIRST = [
    (va.AttentionBlock2d, {"attn.proj.weight", "attn.proj.bias"}),
    (partial(va.AttentionBlock2d, gate_init=0), {"gate"}),
    (ConvBlock2d, {"project.weight", "project.bias"}),
    (NormBlock2d, {"gate"}),
    (SqueezeExciteBlock2d, {"gate"}),
    (CostVolumeBlock2d, {"proj.weight", "proj.bias"}),
]


@pytest.mark.parametrize(("make", "first"), FIRST)
def test_only_the_gate_or_the_last_projection_of_a_new_block_learns_before_the_first_update(make, first):
    module, x, target = make(16), torch.randn(4, 16, 3, 3), torch.randn(4, 16, 3, 3)
    assert torch.equal(module(x), x)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for expected in (first, set(dict(module.named_parameters()))):
        optimizer.zero_grad()
        (module(x) - target).square().mean().backward()
        moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert moved == expected
        optimizer.step()


UNDER_AUTOCAST = [
    (va.blocks.TransformerBlock2d, {"norm_first": False, "position": va.RelPosDecomposed(4)}),
    (va.Attention2d, {"qk_norm": True, "pattern": va.Window(3), "position": va.RelPosTable()}),
    (va.AttentionBlock2d, {"gate_init": 1.0, "position": va.Rope(), "num_kv_heads": 1}),
    (va.Attention2d, {"qk_norm": "match", "pattern": va.Neighborhood(3), "output_gate": True}),
    (va.blocks.LinearAttention2d, {}),
]


@pytest.mark.parametrize(("block", "options"), UNDER_AUTOCAST)
def test_blocks_under_autocast_are_close_to_float32(block, options):
    block, x = block(16, 2, **options), torch.randn(2, 16, 4, 5)
    expected = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block(x)
        gradients = torch.autograd.grad(found.float().sum(), list(block.parameters()), allow_unused=True)
        assert block(x.bfloat16()).dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_logits_are_not_computed_in_half_precision_under_autocast(impl):
    """The logits of the first query are 9217 and 9220, which bfloat16 rounds to the same number."""
    block = va.Attention2d(2, 1, impl=impl, scale=1.0, qkv_bias=False, proj_bias=False)
    block.qkv.weight.data.copy_(torch.eye(2).repeat(3, 1)[..., None, None])
    block.proj.weight.data.copy_(torch.eye(2)[..., None, None])
    x = torch.tensor([[96.0, 96.0], [1.0, 4.0]]).view(1, 2, 1, 2)  # exact in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block(x).float()
    torch.testing.assert_close(found, block(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("norm_first", "activation"), [(True, "gelu"), (False, "relu")])
def test_a_transformer_block_equals_the_encoder_layer_of_torch(norm_first, activation):
    options, x = {"norm_first": norm_first, "activation": activation}, random_map(2, 8, 3, 4)
    theirs = nn.TransformerEncoderLayer(8, 2, 32, layer_norm_eps=0.5, batch_first=True, **options, **DOUBLE).eval()
    ours = va.blocks.TransformerBlock2d(8, 2, eps=0.5, **options, **DOUBLE)
    weights = [nn.init.normal_(parameter).detach() for parameter in theirs.parameters()]
    order = (8, 9, 0, 1, 2, 3, 10, 11, 4, 5, 6, 7)  # norm1, attention, norm2 and the linear layers
    for parameter, index in zip(ours.parameters(), order, strict=True):
        parameter.data = weights[index].view_as(parameter)
    close(ours(x), theirs(x.flatten(2).mT).mT.unflatten(2, (3, 4)))


@pytest.mark.parametrize(("stride", "size"), [(1, (5, 7)), (2, (5, 7)), (3, (7, 8)), (5, (1, 1))])
def test_attention_that_replaces_a_convolution_has_the_same_output_size(stride, size):
    x, context, mask = random_map(2, 8, *size), random_map(2, 8, 3, 5), torch.rand(size[0] * size[1], 15) < 0.5
    plain = nn.Conv2d(8, 12, 5, stride=stride, padding=2, **DOUBLE)
    augmented = va.blocks.AugmentedConv2d(8, 12, 5, stride=stride, **WIDTHS, **DOUBLE)
    y = augmented(x)
    assert y.shape == plain(x).shape
    close(y, torch.cat([augmented.conv(x), augmented.attn(F.avg_pool2d(x, stride, ceil_mode=True))], 1))
    strided = va.blocks.StridedAttention2d(8, 2, stride=stride, out_channels=12, position=va.Rope(), **DOUBLE)
    y, attended = strided(x, mask, context), strided.attn(x, mask, context)
    assert y.shape == plain(x).shape
    # At the border, the average covers only positions inside the feature map.
    close(y[:, :, -1, -1], attended[:, :, (y.shape[2] - 1) * stride :, (y.shape[3] - 1) * stride :].mean((2, 3)))
    for options, position in (({}, va.RelPosDecomposed(4)), ({"position": va.Rope()}, va.Rope())):
        assert va.blocks.StridedAttention2d(8, 2, feat_size=4, **options).attn.position.config == position


# --- invalid arguments ------------------------------------------------------------------------------------------------


MATCH, CROSS = {"qk_norm": "match"}, {"context_channels": 8}
AUGMENTED = {"in_channels": 8, "out_channels": 8, **WIDTHS}
FLAGS, LENGTHS = ("causal", "qkv_bias", "output_gate"), ("num_heads", "kv_stride", "out_channels", "context_channels")
#: Invalid arguments and the start of the error message.
INVALID = [
    (va.Attention2d, {"num_heads": 3, "key_dim": 4}, "num_heads must"),  # value_dim is channels / num_heads
    (va.Attention2d, {"impl": "fast"}, "impl must"),
    (va.Attention2d, {"num_kv_heads": 3}, "num_kv_heads must"),
    (va.Attention2d, {"kv_stride": 2, "pattern": "rows"}, "pattern must .* kv_stride"),
    (va.Attention2d, {"causal": True, "kv_stride": 2}, "causal must"),
    (va.Attention2d, {"causal": True, **CROSS}, "causal must"),
    (va.Attention2d, {"pattern": va.Neighborhood(3), "causal": True}, "causal must .* Neighborhood"),
    (va.Attention2d, {"qk_norm": "layer"}, "qk_norm must"),
    (va.Attention2d, {**MATCH, "causal": True}, "causal must be False with qk_norm='match'"),
    (va.Attention2d, {**MATCH, **CROSS}, "qk_norm must .* context_channels.*8"),
    (va.Attention2d, {"groups": 3}, "groups must divide channels"),
    (va.Attention2d, {"groups": 4, "out_channels": 6}, "groups must divide out_channels"),
    (va.Attention2d, {"groups": 8, "key_dim": 3, "value_dim": 3}, "groups must divide .* key_dim"),
    (va.Attention2d, {"groups": 2, "num_kv_heads": 1}, "groups must .* num_kv_heads"),
    (va.Attention2d, {"groups": 2, **CROSS}, "groups must .* num_kv_heads"),
    (va.AttentionBlock2d, {"out_channels": 4}, "out_channels must"),
    (va.blocks.TransformerBlock2d, {"out_channels": 4}, "out_channels must"),
    (va.blocks.TransformerBlock2d, {"activation": "silu"}, "activation must"),
    (va.blocks.LinearAttention2d, {"num_heads": 3}, "num_heads must"),
    (va.blocks.LinearAttention2d, {"feature_map": "gelu"}, "feature_map must"),
    (va.blocks.LinearAttention2d, {"impl": "sdpa"}, "impl must"),
    (va.blocks.AugmentedConv2d, {"key_channels": 7}, "num_heads must divide key_channels"),
    (va.blocks.AugmentedConv2d, {"kernel_size": 4}, "kernel_size must be odd, got 4"),
    (va.blocks.AugmentedConv2d, {"out_channels": 4}, "value_channels must be less than out_channels=4"),
    (va.blocks.AugmentedConv2d, {"kernel_size": 0}, "kernel_size must be an integer above 0, got 0"),
    (va.blocks.AugmentedConv2d, {"stride": 0}, "stride must be an integer above 0, got 0"),
    (va.blocks.AugmentedConv2d, {"bias": "no"}, "bias must be True or False, got 'no'"),
    (va.blocks.AugmentedConv2d, {"num_heads": 0}, "num_heads must be an integer above 0, got 0"),
    (va.blocks.StridedAttention2d, {"stride": 1.5}, "stride must be an integer above 0, got 1.5"),
    (va.blocks.LinearAttention2d, {"num_heads": 2.0}, "num_heads must be an integer above 0, got 2.0"),
    (va.Attention2d, {"num_heads": True}, "num_heads must be an integer above 0, got True"),
    (va.blocks.LinearAttention2d, {"qkv_bias": "no"}, "qkv_bias must be True or False, got 'no'"),
    (va.blocks.TransformerBlock2d, {"mlp_ratio": 0}, "mlp_ratio must be a number above 0, got 0"),
    (va.blocks.TransformerBlock2d, {"norm_first": "no"}, "norm_first must be True or False, got 'no'"),
    (va.AttentionBlock2d, {"channels": 2.5}, "channels must be an integer above 0, got 2.5"),
    (va.Attention2d, {"scale": "1"}, "scale must be a number, got scale='1'"),
    *((va.Attention2d, {name: "no"}, f"{name} must be True or False, got 'no'") for name in FLAGS),
    *((va.Attention2d, {name: 0}, f"{name} must be an integer above 0") for name in LENGTHS),
    *((va.Attention2d, {name: "4"}, f"{name} must be an integer above 0, got '4'") for name in ("channels", "key_dim")),
]


def test_invalid_arguments_raise_an_error_at_construction():
    for block, options, message in INVALID:
        given = AUGMENTED if block is va.blocks.AugmentedConv2d else {"channels": 16, "num_heads": 4}
        with pytest.raises(ValueError, match=f"^{message}"):
            block(**{**given, **options})
    block = va.Attention2d(8, 2)
    for shape in ((), (1, 1, 1, 9, 9), (9, 8)):
        with pytest.raises(ValueError, match=rf"^mask must broadcast .* = \(1, 2, 9, 9\), got {re.escape(str(shape))}"):
            block(torch.zeros(1, 8, 3, 3), torch.ones(shape))
    with pytest.raises(ValueError, match=r"^x must be feature maps of shape \(batch, 8,.* got \(8, 4, 3, 3\)"):
        block.attention_weights(torch.zeros(8, 4, 3, 3))


@pytest.mark.parametrize("options", [{"kv_stride": 2}, {"qk_norm": "match"}, {"pattern": va.Neighborhood(3)}, {}])
def test_a_block_that_would_read_later_positions_cannot_become_causal(options):
    block = va.Attention2d(8, 2, **options)
    block.causal = True if options else "no"
    with pytest.raises(ValueError, match="causal must be"):
        block(torch.zeros(1, 8, 4, 4))
    for change in (lambda: setattr(block, "impl", "fast"), lambda: va.set_impl_(nn.ReLU(), "fast")):
        with pytest.raises(ValueError, match="impl must be one of"):
            change()


RESET = {
    "decomposed": {"position": va.RelPosDecomposed(4), "qk_norm": "cosine"},
    "table": {"position": va.RelPosTable(4), "qk_norm": True},
    "absolute": {"position": va.AbsPos(4), "gate_init": 0.5, "output_gate": True},
    "match": {"qk_norm": "match"},
}


@pytest.mark.parametrize("name", RESET)
def test_reset_parameters_initializes_every_parameter_as_a_new_block(name):
    """FSDP creates a model on the meta device, allocates its parameters, and calls this method of each module."""
    block = va.AttentionBlock2d(64, 4, **RESET[name], device="meta").to_empty(device="cpu")
    for parameter in block.parameters():
        parameter.data.fill_(torch.nan)
    block.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
    new = va.AttentionBlock2d(64, 4, **RESET[name])
    for (key, found), expected in zip(block.state_dict().items(), new.state_dict().values(), strict=True):
        torch.testing.assert_close(found.std(), expected.std(), rtol=0.25, atol=1e-6, msg=key)
        torch.testing.assert_close(found.mean(), expected.mean(), rtol=0.01, atol=0.4 * float(expected.std()) + 1e-6)
    x = torch.randn(2, 64, 4, 4)
    assert torch.equal(block(x), x) == torch.equal(new(x), x)
    for module in block.modules():  # the layers of the block after it
        getattr(module, "reset_parameters", lambda: None)()
    assert torch.equal(block(x), x) == torch.equal(new(x), x)


@pytest.mark.parametrize("kind", [va.AttentionBlock2d, ConvBlock2d])
def test_an_initialization_of_all_modules_keeps_a_new_block_an_identity(kind):
    block, x = kind(8), torch.randn(2, 8, 4, 4)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), block)

    def init(module):
        if hasattr(module, "weight"):
            nn.init.normal_(module.weight)

    first = next(p for p in block.parameters() if p.dim() == 4)
    before = first.clone()
    assert model.apply(init) is model
    assert not torch.equal(first, before)
    assert torch.equal(model(x), model[0](x))
    nn.init.ones_(block.last_projection().weight)  # a trained block
    model.apply(init)
    assert not torch.equal(model(x), model[0](x))
    match = va.AttentionBlock2d(8, 2, qk_norm="match")
    for trained in (False, True):
        match.apply(init)
        queries, keys, _ = match.attn.qkv.weight.chunk(3)
        assert torch.equal(queries, keys) != trained
        nn.init.ones_(queries.data)
    for other in (NormBlock2d(8), SqueezeExciteBlock2d(8)):  # without a projection of zeros
        assert other.apply(init) is other


@pytest.mark.parametrize("options", [{"attn_drop": 0.5}, {"proj_drop": 0.5}], ids=str)
def test_monte_carlo_dropout(options):
    """In evaluation mode, dropout modules in training mode are random."""
    block, x = va.Attention2d(16, 2, **options).eval(), torch.randn(1, 16, 4, 4)
    assert torch.equal(block(x), block(x))
    for module in block.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    assert not torch.equal(block(x), block(x))
    block.attn_drop = block.proj_drop = torch.nn.Identity()  # as tools that remove dropout do
    assert torch.equal(block.train()(x), block.eval()(x))


def test_gradients_in_torch_func_with_a_trained_bias_need_another_implementation_than_sdpa():
    """On a CPU, torch's fused kernel has no derivative for a mask that is a parameter outside the transform."""
    block, x = va.Attention2d(8, 2, position=va.RelPosTable(4)), torch.randn(1, 8, 4, 4)

    def gradient(impl):
        block.impl = impl
        return torch.func.grad(lambda x: block(x).sum())(x)

    torch.testing.assert_close(gradient("auto"), gradient("bmm"))
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'attn_mask'"):
        gradient("sdpa")


def test_tables_of_a_pattern_and_a_dtensor_are_refused_by_name(monkeypatch):
    block, x = va.Attention2d(16, 2, pattern=va.Window(4, shift=2)), torch.randn(1, 16, 8, 8)

    def fail(*args):
        raise RuntimeError("aten.index_select.default got mixed torch.Tensor and DTensor, need to convert all")

    monkeypatch.setattr(block, "encode", fail)
    with pytest.raises(RuntimeError, match=r"Attention2d adds tensors of its pattern.*implicit_replication\(\)"):
        block(x)


def test_defaults_are_not_shown_and_not_saved():
    block, x = va.Attention2d(8, 2), torch.randn(8, 3, 4)
    assert block.get_config() == {"num_heads": 2, "pattern": "full"}
    assert va.blocks.LinearAttention2d(8, 2, feature_map="elu").get_config()["feature_map"] == "elu"
    assert block.extra_repr() == "8, num_heads=2, impl='auto', pattern='full'"
    assert torch.equal(block.attention_weights(x), block.attention_weights(x[None]))
