"""Conversion of layers of other libraries: ``from_layer``, conversion back, and ``swap_`` of each layer.

All results are compared with the other library in float64, on feature maps that are not square.
"""

import inspect
import itertools
import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm.layers as tl
import timm.models as tm
import torch
import torchvision.models.maxvit as torchvision_maxvit
import torchvision.models.swin_transformer as torchvision_swin
from page_sections import markdown
from small_networks import assert_same as assert_same_state, close, results
from stand_ins import diffusers_attention, layer_of, transformers_layer
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

import vision_attn as va
from vision_attn.networks import convert
from vision_attn.networks.convert import other_layers
from vision_attn.networks.convert.conversion import CONVERSIONS, find_conversion
from vision_attn.networks.convert.window_layers import PaddedAttention

BLOCKS = {1: va.blocks.Attention1d, 2: va.Attention2d, 3: va.blocks.Attention3d}
#: Gated attention requires a recent version of timm.
GATED = {"gated": True} if "gated" in inspect.signature(tl.Attention).parameters else {}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomized(module):
    """Convert a module to float64 and evaluation mode, with random parameters."""
    module.double().eval()  # not chained: in some libraries, eval() returns None
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * randn(*parameter.shape, seed=seed))
    return module


def on_map(layer, x):
    return layer(x)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def on_tokens(layer, x, *others):
    y = layer(tokens(x), *others)
    return (y[0] if isinstance(y, tuple) else y).mT.unflatten(2, x.shape[2:])


def sized(layer, x):
    return on_tokens(layer, x, x.shape[2:])


def channels_last(layer, x):
    y = layer(x.movedim(1, -1))
    return (y[0] if isinstance(y, tuple) else y).movedim(-1, 1)


def random_maps(shapes):
    return [randn(2, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def assert_same(block, theirs, *shapes, atol=1e-11):
    maps = random_maps(shapes)
    run = block if len(maps) == 1 else (lambda x, context: block(x, context=context))
    close(results(run, *maps), results(theirs, *maps), atol)


def with_parts(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def drops(block):
    return block.attn_drop.p, block.proj_drop.p


def multihead(layer, x, context=None):
    order = (0, 1, 2) if layer.batch_first else (1, 0, 2)
    query = tokens(x).permute(order)
    key = query if context is None else tokens(context).permute(order)
    y, _ = layer(query, key, key, need_weights=False)
    return y.permute(order).mT.unflatten(2, x.shape[2:])


def maxvit_partition(kind, partition, rel_pos):
    return kind(8, partition, tm.maxxvit.MaxxVitTransformerCfg(4, rel_pos_type=rel_pos, window_size=(3, 5)))


def run_maxvit(layer, x):
    run = channels_last if type(layer).__name__.endswith("Cl") else on_map
    return run(getattr(layer, "_partition_attn", layer), x)


def run_torchvision(layer, x):
    y = layer.partition_swap(layer.partition_op(x, layer.p))
    y = layer.departition_swap(layer.attn_layer[1](y))
    return layer.departition_op(y, layer.p, 6 // layer.p, 6 // layer.p)


def each(**options):
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


#: Constructors of layers, their options, the path of the attention layer, functions that run them, shapes of feature
#: maps, and options of from_layer (None if only swap_ supports the layer).
CASES = []


def add(make, run, *variants, shapes=((8, 3, 5),), part="", swap_only=False, **options):
    CASES.extend((make, variant, part, run, shapes, None if swap_only else options) for variant in variants or [{}])


yes_no, mha = [True, False], partial(nn.MultiheadAttention, 8, 2)
add(mha, multihead, {}, {"bias": False, "batch_first": True})
add(mha, multihead, shapes=[(8, 7)], rank=1)
add(mha, multihead, *each(kdim=[6], vdim=[6], bias=yes_no), shapes=[(8, 3, 5), (6, 6, 10)])
add(mha, multihead, {"kdim": 6, "vdim": 6}, shapes=[(8, 2, 3, 4), (6, 4, 6, 8)], rank=3)

vit = partial(tl.Attention, 8, num_heads=2)
add(vit, on_tokens, {}, {"qkv_bias": True}, {"proj_bias": False}, {"attn_head_dim": 3}, GATED)
add(vit, on_tokens, {"qk_norm": True, "norm_layer": partial(nn.LayerNorm, eps=0.1)}, {"qkv_bias": True, **GATED})
add(vit, on_tokens, {"qk_norm": True, "norm_layer": partial(tl.RmsNorm, eps=0.1)})
add(vit, on_tokens, {"qk_norm": True, "norm_layer": lambda width, **_: nn.LayerNorm(width, bias=False)})
add(partial(tm.beit.Attention, 8, 2), on_tokens, *each(qkv_bias=yes_no))
add(partial(tm.vision_transformer_relpos.RelPosAttention, 8, 2, qk_norm=True), on_tokens)
add(partial(tm.metaformer.Attention, 8, head_dim=4), on_tokens)
add(partial(tm.visformer.Attention, 8, 2, head_dim_ratio=0.5), on_map)
add(partial(tm.fastvit.Attention, 8, 4, qkv_bias=True), on_map)
add(partial(tl.Attention2d, 8, 12, num_heads=4), on_map, *each(head_first=yes_no, expand_first=yes_no, bias=yes_no))
queries = partial(tl.MultiQueryAttention2d, 8, num_heads=4)
add(queries, on_map, {"use_bias": True}, {"key_dim": 3, "value_dim": 5, "dim_out": 6})
bottleneck = partial(tl.bottleneck_attn.BottleneckAttn, 8, feat_size=(3, 5), num_heads=2)
add(bottleneck, on_map, {"qkv_bias": True}, {"scale_pos_embed": True}, {"dim_out": 12, "dim_head": 5})
add(partial(tl.halo_attn.HaloAttn, 12, num_heads=3, dim_head=5, block_size=2, halo_size=1), on_map, shapes=[(12, 4, 6)])

BIAS, BIAS_TF, MLP = (partial(kind, window_size=(3, 5)) for kind in (tl.RelPosBias, tl.RelPosBiasTf, tl.RelPosMlp))
maxvit = partial(tm.maxxvit.Attention2d, 8, 12, dim_head=4)
for kind in ("Attention2d", "AttentionCl"):
    make = partial(getattr(tm.maxxvit, kind), *maxvit.args, **maxvit.keywords)
    add(make, run_maxvit, *each(head_first=yes_no, rel_pos_cls=[None, BIAS, BIAS_TF]))
    for partition, pattern in (("block", va.Window((3, 5))), ("grid", va.Grid((3, 5)))):
        inside = {"part": "attn", "shapes": [(8, 9, 10)], "pattern": pattern}
        make = partial(maxvit_partition, getattr(tm.maxxvit, f"Partition{kind}"), partition)
        add(make, run_maxvit, *each(rel_pos=["bias", "bias_tf", ""]), **inside)
for kind, pattern in (("window", va.Window(2)), ("grid", va.Grid(2))):
    inside = {"part": "attn_layer.1", "shapes": [(8, 6, 6)], "pattern": pattern}
    args = (8, 2, 2, kind, (6, 6), 1, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0)
    add(partial(torchvision_maxvit.PartitionAttentionLayer, *args), run_torchvision, **inside)

swin = partial(torchvision_swin.ShiftedWindowAttention, 8, [2, 3], num_heads=2)
for size, bias in (((2, 9), False), ((8, 3), True)):
    add(swin, channels_last, *each(shift_size=[[0, 0], [1, 2]], qkv_bias=[bias], proj_bias=[bias]), shapes=[(8, *size)])
swin_v2 = partial(torchvision_swin.ShiftedWindowAttentionV2, 8, [2, 3], num_heads=2)
add(swin_v2, channels_last, *each(shift_size=[[0, 0], [1, 1]], qkv_bias=yes_no), shapes=[(8, 5, 7)])
timm_swin, timm_swin_v2 = tm.swin_transformer, tm.swin_transformer_v2
for make in (timm_swin.SwinTransformerBlock, timm_swin_v2.SwinTransformerV2Block):
    make = partial(make, 8, (9, 10), 2, window_size=(3, 5))
    run = lambda layer, x: channels_last(layer._attn, x)  # noqa: E731
    add(make, run, part="attn", shapes=[(8, 8, 11)])
    shifted = {"shapes": [(8, 9, 10)], "pattern": va.Window((3, 5), shift=(1, 2))}
    add(make, run, {"shift_size": (1, 2)}, part="attn", **shifted)

window = partial(tm.davit.WindowAttention, window_size=(3, 5))
for kind in (tm.convit.MHSA, window, partial(tm.tnt.Attention, hidden_dim=12)):
    add(partial(kind, 8, num_heads=2), on_tokens)
for kind in (partial(tm.volo.Attention, 8, 2), partial(tm.hieradet_sam2.MultiScaleAttention, 8, 12, 2)):
    add(kind, channels_last)
add(partial(tm.twins.LocallyGroupedAttn, 8, 2, ws=2), sized)
hugging = partial(transformers_layer, hidden_size=8, num_attention_heads=2)
for path, row in CONVERSIONS.items():
    if row in (other_layers.TRANSFORMERS, other_layers.CLIP) and "swin" not in path:
        add(partial(hugging, path.removeprefix("transformers.models.")), on_tokens)
monai = partial(layer_of, "monai.networks.blocks.selfattention.SABlock", 8, 2)
add(monai, on_tokens, {"qkv_bias": True}, {"use_combined_linear": False, "dim_head": 3}, {"use_flash_attention": True})
diffusers = partial(diffusers_attention, 8, heads=2, dim_head=4)
add(diffusers, on_tokens, {"dim_head": 3})
crossing = partial(diffusers, cross_attention_dim=6, bias=True, scale_qk=False)
add(crossing, lambda layer, x, context: on_tokens(layer, x, tokens(context)), shapes=[(8, 3, 5), (6, 2, 2)])

only = partial(add, swap_only=True)
MASKS = randn(2, 15, 15)
only(partial(diffusers, norm_num_groups=4, residual_connection=True), on_map, {}, {"rescale_output_factor": 2.0})
only(maxvit, on_map, {"rel_pos_cls": MLP})
for mask in (randn(15, 15), randn(2, 1, 15, 15) > -1):
    only(vit, lambda layer, x, mask=mask: on_tokens(layer, x, mask))
shared, masks = (lambda layer, x, y=y: on_tokens(layer, x, y) for y in (randn(1, 2, 15, 15), MASKS))
only(vit, on_tokens, {"scale_norm": True, "norm_layer": partial(nn.LayerNorm, eps=0.1)})
only(partial(tm.beit.Attention, 8, 2), shared)
only(partial(tm.beit.Attention, 8, 2, window_size=(2, 3)), on_tokens, shapes=[(8, 7)])
relative = partial(tm.vision_transformer_relpos.RelPosAttention, 8, 2)
only(relative, shared)
only(relative, on_tokens, {"qk_norm": True, "rel_pos_cls": MLP})
only(relative, on_tokens, {"rel_pos_cls": partial(tl.RelPosBias, window_size=(2, 3), prefix_tokens=1)}, shapes=[(8, 7)])
only(partial(timm_swin.WindowAttention, 8, 2, head_dim=3, window_size=(3, 5)), masks)
only(partial(timm_swin_v2.WindowAttention, 8, (3, 5), 2, qkv_bias=False, pretrained_window_size=(4, 4)), masks)
for side in ((3, 5), (2, 3, 2)):
    monai = partial(layer_of, "monai.networks.nets.swin_unetr.WindowAttention", 8, 2, side)
    for mask in (None, MASKS[:, : math.prod(side), : math.prod(side)]):
        only(monai, lambda layer, x, mask=mask: on_tokens(layer, x, mask), {"qkv_bias": True}, shapes=[(8, *side)])
only(partial(tm.efficientformer.Attention, 8, 3, 2, 1.5, resolution=(2, 3)), on_tokens, shapes=[(8, 2, 3)])
halo = partial(tl.halo_attn.HaloAttn, 8, num_heads=2, block_size=4, stride=2)
only(halo, on_map, {"avg_down": True, "scale_pos_embed": True}, shapes=[(8, 4, 8)])
only(partial(tm.pvt_v2.Attention, 8, 2), sized, {}, {"sr_ratio": 2}, {"linear_attn": True}, shapes=[(8, 4, 6)])
only(partial(tm.twins.GlobalSubSampleAttn, 8, 2, sr_ratio=2), sized, shapes=[(8, 4, 6)])
only(partial(tm.gcvit.WindowAttentionGlobal, 8, 2, (3, 5), use_global=False), on_tokens)
only(partial(tm.tiny_vit.Attention, 8, 3, 2, 2, resolution=(3, 5)), on_tokens)
windows = partial(transformers_layer, "swin.modeling_swin.SwinAttention", 8, 2, 3)
only(windows, lambda layer, x: on_tokens(layer, x, MASKS[:, :9, :9]), shapes=[(8, 3, 3)])
for ratio in (1, 2):
    segformer = partial(transformers_layer, "segformer.modeling_segformer.SegformerAttention", 8, 2, ratio)
    only(segformer, lambda layer, x: layer(tokens(x), *x.shape[2:])[0], shapes=[(8, 4, 6)])
for kind in ("vit", "simple_vit"):
    only(partial(layer_of, f"vit_pytorch.{kind}.Attention", 8, 2, 4), on_tokens)


def swap(layer):
    return va.swap_(layer, where=lambda name, module: True)


@pytest.mark.parametrize(("make", "variant", "part", "run", "shapes", "options"), CASES)
def test_parity_and_detection_of_a_wrong_order(make, variant, part, run, shapes, options, monkeypatch):
    layer, other = (randomized(make(**variant)) for _ in range(2))
    source = layer.get_submodule(part)
    if options is not None:
        block = convert.from_layer(source, **options)
        name, kind = type(source).__name__, BLOCKS[options.get("rank", len(shapes[0]) - 1)]
        if name.startswith(("Shifted", "LocallyGrouped")) or (part and "Window" in name):
            assert isinstance(block, PaddedAttention)
        else:
            assert type(block) is kind
        assert_same(block, partial(run, layer), *shapes, atol=1e-10 if shapes[0][0] > 8 else 1e-11)
    layer.train()
    maps, ran = random_maps(shapes), []
    expected = results(partial(run, layer), *maps, parameters=layer.parameters())
    assert expected[0].std() > 1e-3
    (swapped,) = swap(layer).swapped
    assert swapped.difference < 1e-10
    source.running_block.register_forward_hook(lambda *_: ran.append(1))
    close(results(partial(run, layer), *maps, parameters=layer.parameters()), expected, 1e-10)
    assert ran == [1]
    reverse_rows(monkeypatch, other.get_submodule(part))
    (left,) = swap(other).skipped
    assert "has different outputs: a difference of" in left.reason


def reverse_rows(monkeypatch, layer):
    """Reverse the rows of the weights that are read from a class of layers, without a change of shape."""
    path, _, row = find_conversion(layer)

    def weights(layer):
        found = row.weights(layer)
        return {n: x._replace(weight=x.weight.flip(0)) if n in ("q", "qkv", "kv") else x for n, x in found.items()}

    monkeypatch.setitem(CONVERSIONS, path, replace(row, weights=weights))


@pytest.mark.slow
def test_every_row_of_the_table_is_tested():
    rotary = "timm.layers.attention.AttentionRope", "timm.models.eva.", "transformers.models.dinov3_vit."
    tried, elsewhere = set(), ("keras.", "ultralytics.", *rotary)  # tested below and in test_swap.py
    for make, variant, part, *_ in CASES:
        with suppress(pytest.skip.Exception):  # the library is not installed
            tried.add(find_conversion(make(**variant).get_submodule(part))[0])
    known = {path for path in CONVERSIONS if find_spec(path.partition(".")[0])}
    assert tried == {path for path in known if not path.startswith(elsewhere)}


@pytest.mark.parametrize(("kind", "options"), [("Attention", {}), ("AAttn", {"area": 1}), ("AAttn", {"area": 2})])
def test_attention_of_yolo_is_swapped_in_evaluation(kind, options, monkeypatch):
    make = partial(layer_of, f"ultralytics.nn.modules.block.{kind}", 16, 2, **options)
    layer, other, x = randomized(make()), randomized(make()), randn(2, 16, 3, 4)
    for norm in (part for part in layer.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.running_mean.copy_(randn(len(norm.running_mean)))
    expected, ran = results(partial(on_map, layer), x, parameters=layer.parameters()), []
    assert len(swap(layer).swapped) == 1
    layer.running_block.register_forward_hook(lambda *_: ran.append(1))
    close(results(partial(on_map, layer), x, parameters=layer.parameters()), expected, 1e-10)
    layer.train()(x)  # with batch statistics
    assert ran == [1]
    reverse_rows(monkeypatch, other)
    assert not swap(other).swapped


def test_a_batch_norm_is_folded_with_its_eps():
    layer = nn.Module()
    layer.conv, layer.bn = nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6, eps=0.1)  # structure of YOLO
    randomized(layer).bn.running_mean.copy_(randn(6))
    layer.bn.running_var.copy_(randn(6, seed=1).square())
    fused = fuse_conv_bn_eval(layer.conv, layer.bn)
    close(other_layers.fold_batch_norm(layer), (fused.weight.flatten(1), fused.bias), 1e-12)
    del layer.bn  # ultralytics removes a fused norm
    assert torch.equal(other_layers.fold_batch_norm(layer).weight, layer.conv.weight.flatten(1))


def test_the_documented_table_matches_the_code():
    lines = {}
    for path, row in sorted(CONVERSIONS.items()):
        refused = ", ".join(f"`{name}`" for name in (*row.unsupported, *row.swap_only)) or "—"
        refused = f"all: {row.only_swap}" if row.only_swap else refused
        lines.setdefault(refused, []).append(f"`{path}`")
    rows = [(", ".join(paths), refused) for refused, paths in lines.items()]
    expected = markdown([("layer", "unsupported options"), *rows], left=(0, 1))
    page = (Path(__file__).parents[3] / "docs/convert.md").read_text()
    table = page.partition("<!-- table of layers -->\n")[2].partition("\n<!-- end of the table -->")[0]
    assert table == expected, f"write this between the markers:\n{expected}"


def test_the_block_attends_to_padding_like_swin():
    block, x = convert.from_layer(randomized(swin(shift_size=[1, 2]))), randn(2, 8, 5, 7)
    y, last = block(x), x.to(memory_format=torch.channels_last)
    assert block(last).is_contiguous(memory_format=torch.channels_last)
    close(block(x[0]), y[0])
    assert torch.equal(block.attention_weights(x), block.attention_weights(nn.functional.pad(x, (0, 2, 0, 1))))
    rolled_first = convert.from_layer(SOURCES["timm_swin"](), pattern=va.Window((3, 5), shift=1))
    for kind, options in ((block, {"mask": torch.ones(35, 35) > 0}), (block, {"context": x}), (rolled_first, {})):
        with pytest.raises(ValueError, match=r"x must .*, got \(5, 7\)"):
            kind(x, **options)


def built(layer, query, value=None, key=None):
    layer.build(*((None, *shape) for shape in (query, value or query, key) if shape))
    for seed, variable in enumerate(layer.weights):
        variable.assign(0.4 * randn(*variable.shape, seed=seed))
    return layer


def run_keras(layer, x, context=None):
    query, value = (y.movedim(1, -1) for y in (x, x if context is None else context))
    # Keras computes in float64 if it returns the weights; its fused kernel rounds to float32.
    y, _ = layer(query, value, training=False, return_attention_scores=True)
    return y.movedim(-1, 1)


#: Options of a layer of Keras, the size of its feature map, and the pattern of the block.
KERAS = [
    ({"output_shape": (4,), "value_dim": 1}, (7,), "full"),
    ({"attention_axes": (-2,), "dropout": 0.3}, (3, 5), "rows"),
    ({"attention_axes": (1, 3)}, (2, 3, 4), va.Pattern("b n d t h w -> (b h) n (t w) d")),
    ({"use_gate": True}, (3, 5), "full"),
    ({"use_gate": True, "num_heads": 4, "use_bias": False, "value_dim": 2}, (3, 5), "full"),
]


@pytest.mark.parametrize(("options", "size", "pattern"), KERAS, ids=str)
def test_keras_multihead_attention(keras, options, size, pattern):
    layer = keras.layers.MultiHeadAttention(**{"num_heads": 2, "key_dim": 3, "dtype": "float64", **options})
    block = convert.from_layer(built(layer, (*size, 6)))
    assert (type(block), block.pattern) == (BLOCKS[len(size)], pattern)
    assert drops(block) == (options.get("dropout", 0.0), 0.0)
    frozen = {name for name, p in block.named_parameters() if not p.requires_grad}
    assert frozen == ({"gate.bias"} if "use_gate" in options and "use_bias" in options else set())
    assert_same(block, partial(run_keras, layer), (6, *size))


@pytest.mark.parametrize(("options", "value"), [({}, ()), ({"use_bias": False, "use_gate": True}, (9, 5))])
def test_keras_grouped_query_attention(keras, options, value):
    layer = built(keras.layers.GroupQueryAttention(3, 6, 2, dtype="float64", **options), (7, 8), value)
    block = convert.from_layer(layer)
    assert (type(block), block.num_heads, block.num_kv_heads) == (va.blocks.Attention1d, 6, 2)
    assert_same(block, partial(run_keras, layer), (8, 7), *([value[::-1]] if value else []))


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_keras_layer_is_not_changed_and_its_attributes_are_converted(keras, dtype):
    layer = built(keras.layers.MultiHeadAttention(2, 3, dtype=dtype, dropout=0.5, activity_regularizer="l2"), (3, 5, 6))
    layer.trainable = False
    seed = keras.src.random.seed_generator.global_seed_generator().state
    before, block = [variable.value.clone() for variable in (*layer.variables, seed)], convert.from_layer(layer)
    assert {dense.dtype_policy.name for dense in (layer, layer._query_dense)} == {dtype}
    assert (layer.losses, layer.training, any(module.training for module in block.modules())) == ([], True, False)
    assert {(p.dtype, p.requires_grad) for p in block.parameters()} == {(torch.float32, False)}
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    after = [variable.value for variable in (*layer.variables, seed)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_unsupported_keras_layers_are_rejected(keras):
    mha, gqa, shape = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention, (3, 5, 6)
    for layer, message in (
        (mha(2, 3), "MultiHeadAttention must be built"),
        (built(mha(2, 3, sliding_window=2), (7, 6)), "sliding_window is not supported .got 2"),
        (built(mha(2, 3), (5, 6), (4, 7), (4, 6)), "cannot be compared"),
        (built(mha(2, 3), (2, 2, 2, 2, 6)), "cannot be compared|incompatible"),
        (built(gqa(3, 4, 2), shape), "cannot be compared|incompatible"),
    ):
        with pytest.raises((ValueError, va.errors.ConversionError), match=message):
            convert.from_layer(layer)


def test_a_keras_layer_with_a_changed_part_is_detected(keras):
    layer = built(keras.layers.MultiHeadAttention(2, 9, use_bias=False, dtype="bfloat16"), (3, 5, 6))
    layer._output_dense.set_weights([torch.zeros(2, 9, 6)])  # zero weights would hide any difference
    assert isinstance(convert.from_layer(layer), va.Attention2d)
    layer._output_dense.activation = torch.tanh
    with pytest.raises(va.errors.ConversionError, match="the converted MultiHeadAttention has different outputs"):
        convert.from_layer(layer)


SOURCES = {
    "torch_mha": mha,
    "timm_attention": partial(vit, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm, **GATED),
    "timm_multi_query_attention2d": queries,
    "timm_bottleneck_attn": bottleneck,
    "timm_maxxvit_attention": partial(maxvit, rel_pos_cls=BIAS_TF),
    "timm_swin": partial(timm_swin.WindowAttention, 8, 2, window_size=(3, 5)),
    "torchvision_swin": partial(swin, shift_size=[1, 1]),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("training", yes_no)
def test_dtype_mode_and_requires_grad_are_kept_and_the_layer_does_not_change(name, training):
    source = SOURCES[name]().to(torch.bfloat16).train(training)
    before = {key: x.clone() for key, x in source.state_dict().items()}
    with torch.inference_mode():
        block = convert.from_layer(source)
    assert {module.training for module in (*block.modules(), *source.modules())} == {training}
    assert {(p.dtype, p.device.type, p.is_contiguous()) for p in block.parameters()} == {(torch.bfloat16, "cpu", True)}
    own = {"proj.weight"} if name == "timm_bottleneck_attn" else set()
    assert {key for key, p in block.named_parameters() if not p.requires_grad} == own
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(7.0)
    assert_same_state(source.state_dict(), before)
    assert not any(p.requires_grad for p in convert.from_layer(source.requires_grad_(False)).parameters())


def test_a_layer_with_a_frozen_part_of_a_projection_is_refused():
    layer = nn.MultiheadAttention(16, 2, kdim=8, vdim=8)
    layer.k_proj_weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"the layer has frozen and trainable parameters"):
        convert.from_layer(layer)


def test_dropout_rates_are_converted():
    both = {"attn_drop": 0.1, "proj_drop": 0.2}
    for layer, expected in (
        (mha(dropout=0.3), (0.3, 0.0)),
        (swin(shift_size=[0, 0], attention_dropout=0.1, dropout=0.2), (0.1, 0.2)),
        (queries(**both), (0.1, 0.2)),
        (with_parts(vit(**both), attn_drop=nn.Identity()), (0.0, 0.2)),
    ):
        assert drops(convert.from_layer(layer)) == expected


WINDOWS = partial(torchvision_maxvit.RelativePositionalMultiHeadAttention, 8, 4, 9)
#: The message of the error, and a function that creates or converts a layer.
REFUSED = [
    ("attn_drop", lambda: with_parts(vit(), attn_drop=nn.AlphaDropout(0.1))),
    ("rel_pos.mlp", partial(maxvit, rel_pos_cls=MLP)),
    (r"group_norm is not .*va\.swap_", partial(diffusers, norm_num_groups=4)),
    (r"residual_connection is not .*va\.swap_", partial(diffusers, residual_connection=True)),
    ("torch.nn.modules.linear.Linear", lambda: nn.Linear(8, 8)),
    (r"Attention\.norm is not supported .*va\.swap_", partial(vit, scale_norm=True, norm_layer=nn.LayerNorm)),
    ("EvaAttention is supported only by va.swap_", lambda: tm.eva.EvaAttention(8, 2, scale_norm=False)),
    # Only a run of the layer detects a token before the feature map, a single norm, and another processor.
    ("cannot be compared with a block", partial(maxvit, rel_pos_cls=partial(BIAS, prefix_tokens=1))),
    ("cannot be compared with a block", lambda: with_parts(SOURCES["timm_attention"](), q_norm=nn.Identity())),
    ("cannot be compared with a block", lambda: with_parts(diffusers(), processor=lambda attn, x, **others: x)),
    # It has the attributes of timm's layers, but unpacks the shape of a video.
    ("3d cannot be compared with a block", lambda: ShiftedWindowAttention3d(6, [2, 2, 2], [0, 0, 0], 2)),
    ("rank", lambda: convert.from_layer(mha(), rank=4)),
    ("rank", lambda: convert.from_layer(SOURCES["torchvision_swin"](), rank=2)),
    ("pattern", lambda: convert.from_layer(mha(), pattern=va.Window(7))),
    ("pattern", lambda: convert.from_layer(WINDOWS(), pattern=va.Neighborhood(3))),
    ("feat_size", lambda: convert.from_layer(WINDOWS(), pattern=va.Window(7))),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_an_unsupported_layer_is_rejected_by_name_or_after_a_run(message, make):
    with pytest.raises((ValueError, va.errors.ConversionError), match=message):
        convert.from_layer(make())


def test_hooks_parametrizations_and_mixed_modes_are_rejected():
    source = queries()
    *_, part = source.children()
    for register in (part.register_forward_pre_hook, part.register_forward_hook, part.register_full_backward_hook):
        hook = register(lambda *_: None)
        with pytest.raises(ValueError, match="has hooks"):
            convert.from_layer(source)
        hook.remove()
    source.output.drop.eval()
    with pytest.raises(ValueError, match=r"(\w+) with training=True and \1.output.drop with training=F"):
        convert.from_layer(source)
    assert not convert.from_layer(with_parts(vit().eval(), proj=nn.Linear(8, 8))).training
    nn.utils.parametrizations.spectral_norm(source.query.proj)
    with pytest.raises(ValueError, match="has parametrizations"):
        convert.from_layer(source)


#: A function of the input and the output, and the message of the error.
ALTERED = [
    (lambda x, y: (1 + 1e-8) * y, "Altered .* a difference of"),
    (lambda x, y: float("nan") * y, "nan"),
    (lambda x, y: torch.cat([y, y], -1), r"expected shape \(2, 8, 16\)"),
    (lambda x, y: y.nothing, "Altered .*AttributeError"),
    (lambda x, y: y * (1 if x.abs().max() > 0.1 else 2), "a difference of"),  # only for small inputs
]


@pytest.mark.parametrize(("change", "message"), ALTERED)
def test_a_subclass_with_another_computation_is_detected(change, message):
    kind = type("Altered", (tl.Attention,), {"forward": lambda self, x: change(x, tl.Attention.forward(self, x))})
    with pytest.raises(va.errors.ConversionError, match=f"(?s){message}"):
        convert.from_layer(kind(8, 2))
