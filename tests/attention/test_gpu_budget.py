"""Kernel launches, moved bytes and attention kernels on a GPU, predicted with meta tensors."""

from functools import partial

import pytest
import torch
from impls import PATTERNS, POSITIONS, make_position
from launches import Record, fake_attention, launch_errors, measure, refusals, selected_kernel

import vision_attn as va

HALF, SINGLE = torch.bfloat16, torch.float32
SIZE = (18, 19)  # for odd head widths after folding, and too many keys for a mask
TOKENS = 18 * 19

RELATIVE, SWIN = va.RelPosDecomposed, {"position": va.RelPosTable()}
#: Layers and input shapes, with the allowed launches and megabytes of a forward pass in training, and of its backward
#: pass.
BUDGETS = {
    "plain, 14×14": ((256, 4), {}, (32, 256, 14, 14), (3, 33), (8, 82)),
    "RelPosDecomposed, 14×14": ((256, 4), {"position": RELATIVE((14, 14))}, (32, 256, 14, 14), (10, 71), (14, 115)),
    "RelPosDecomposed, 64×64": ((256, 4), {"position": RELATIVE((64, 64))}, (2, 256, 64, 64), (13, 204), (17, 266)),
    "Rope, 14×14": ((256, 4), {"position": va.Rope()}, (32, 256, 14, 14), (9, 78), (18, 140)),
    "Window(7), 56×56": ((96, 3), {"pattern": va.Window(7), **SWIN}, (16, 96, 56, 56), (6, 136), (15, 295)),
    "Window(7, shift=3), 56×56": ((96, 3), {"pattern": va.Window(7, 3), **SWIN}, (16, 96, 56, 56), (8, 170), (18, 389)),
    "Neighborhood(7), 56×56": ((64, 2), {"pattern": va.Neighborhood(7)}, (8, 64, 56, 56), (8, 124), (19, 228)),
}

TABLES = (va.RelPosTable(SIZE), RELATIVE(SIZE))
#: Options of a layer with 96 channels in 8 heads, which are 12 wide unless an option says otherwise.
OPTIONS = (
    *({"position": position} for position in (None, *TABLES)),
    *({"pattern": va.Window(4, shift=2)}, {"pattern": va.Neighborhood(3), **SWIN}),
    *({"key_dim": d, "value_dim": e} for d, e in ((16, 24), (24, 16), (16, 12), (6, 10))),
    *({"key_dim": 8, "value_dim": 24, "position": position} for position in TABLES),
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "pattern": va.Window(4, shift=2), "position": RELATIVE()},
    *({"causal": True, **other} for other in ({}, {"scale": -1.0}, {"pattern": "rows"}, {"attn_drop": 0.1})),
    {"kv_stride": 2},
    *({"qk_norm": qk_norm} for qk_norm in (True, "cosine", "match")),
    {"groups": 2, "output_gate": True},
)
#: Masks: leading axes, True if the axes of queries and of keys have all tokens (otherwise 1), and dtype.
MASKS = {
    "bool": ((1, 1), True, True, torch.bool),
    "bool per image": ((2, 1), True, True, torch.bool),
    "bool per head": ((1, 8), True, True, torch.bool),
    "bool of keys": ((2, 1), False, True, torch.bool),
    "bool of queries": ((), True, False, torch.bool),
    "float32 per image and head": ((2, 8), True, True, torch.float32),
    "float of the layer's type": ((1, 8), True, True, None),
}


layer = partial(va.Attention2d, device="meta")


def feature_map(*shape, dtype, train=True, memory_format=torch.channels_last):
    return torch.empty(*shape, dtype=dtype, device="meta").to(memory_format=memory_format).requires_grad_(train)


def make_mask(name, dtype, keys=TOKENS):
    axes, queries, all_keys, mask_dtype = MASKS[name]
    shape = (*axes, TOKENS if queries else 1, keys if all_keys else 1)
    return torch.ones(shape, dtype=mask_dtype or dtype, device="meta")


def problems(block, x, **arguments):
    """Return the calls that select the math kernel, which stores all logits, and errors of fused kernels."""
    with fake_attention(Record()) as record, torch.set_grad_enabled(block.training):
        block(x, **arguments)
    assert record.calls, "scaled_dot_product_attention was not called"
    found = [f"math kernel, because {refusals(call)}" for call in record.calls if selected_kernel(call) == "math"]
    return found + [error for call in record.calls for error in launch_errors(call)]


# --- Budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", BUDGETS)
def test_a_pass_stays_within_its_budget(name, backward):
    args, options, shape, *budgets = BUDGETS[name]
    launches, megabytes = budgets[backward]
    block = layer(*args, dtype=HALF, **options).to(memory_format=torch.channels_last)
    x = feature_map(*shape, dtype=HALF)
    record = measure(lambda: block(x), backward=backward)
    summary = f"{record.launches} launches, {record.megabytes:.1f} MB: {[o.name for o in record.operations]}"
    assert record.launches <= launches, summary
    assert record.megabytes <= megabytes, summary


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_no_tensor_holds_all_pairs_of_tokens(dtype):
    block, x = layer(64, 2, position=RELATIVE((64, 64)), dtype=dtype), feature_map(1, 64, 64, 64, dtype=dtype)
    for backward in (False, True):
        operations = measure(lambda: block(x), backward=backward).operations
        assert max(operation.largest for operation in operations) < 4096**2, operations


# --- Kernel selection -------------------------------------------------------------------------------------------------


BOTH = (HALF, SINGLE)
#: Channels, options, masks and types: every pattern and position, the masks with every option, every mask with some
#: patterns. All pairs occur, but not all products: the types alternate between the positions of a pattern, and between
#: the masks of an option.
LAYERS = [
    (64, {"pattern": pattern, "position": make_position(position, pattern, SIZE)}, None, BOTH[(row + column) % 2])
    for row, pattern in enumerate((*PATTERNS, va.Window(7)))
    for column, position in enumerate(POSITIONS)
]
ROTARY = [{"pattern": p, "position": va.Rope()} for p in ("full", "rows", va.Window(4, shift=2), va.Neighborhood(3))]
for width, blocks, masks in ((96, OPTIONS, (None, "bool", "float32 per image and head")), (64, ROTARY, MASKS)):
    for row, options in enumerate(blocks):
        LAYERS += [(width, options, mask, BOTH[(row + column) % 2]) for column, mask in enumerate(masks)]


@pytest.mark.parametrize(("channels", "options", "mask", "dtype"), LAYERS, ids=str)
def test_math_kernel_is_never_selected(channels, options, mask, dtype):
    block, arguments = layer(channels, 8, dtype=dtype, **options), {}
    if mask is not None:
        arguments["mask"] = make_mask(mask, dtype, -(-SIZE[0] // block.kv_stride) * -(-SIZE[1] // block.kv_stride))
    formats = (torch.contiguous_format, torch.channels_last)
    for train, memory_format in zip((True, False), formats[:: (1, -1)[dtype == HALF]], strict=True):
        x = feature_map(2, channels, *SIZE, dtype=dtype, train=train, memory_format=memory_format)
        assert not problems(block.train(train), x, **arguments), (train, memory_format)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_math_kernel_is_never_selected_with_learned_masks_contexts_and_many_masks(dtype):
    x, learned = feature_map(2, 96, *SIZE, dtype=dtype), make_mask("float of the layer's type", dtype).requires_grad_()
    assert not problems(layer(96, 8, dtype=dtype), x, mask=learned)
    context = feature_map(2, 32, 5, 7, dtype=dtype)
    assert not problems(layer(96, 8, context_channels=32, dtype=dtype), x, context=context)
    # 16,384 shifted windows with 4 heads have 65,536 masks, more than the blocks of a CUDA grid.
    for train in (True, False):
        block = layer(32, 4, pattern=va.Window(4, shift=2), dtype=dtype).train(train)
        assert not problems(block, feature_map(1, 32, 512, 512, dtype=dtype, train=train))


MASKED = [{"pattern": va.Window(side, shift), **SWIN} for side, shift in ((7, 0), (4, 2))]
MASKED += [{"pattern": va.Neighborhood(3)}, {"position": va.RelPosTable(SIZE)}]


@pytest.mark.parametrize("mask", [None, "bool", "float32 per image and head"])
@pytest.mark.parametrize("options", MASKED, ids=str)
def test_masks_have_the_dtype_and_alignment_of_the_kernel(options, mask):
    """Otherwise, torch converts a bool mask, and copies a mask whose rows do not start at multiples of 8 elements."""
    block, x = layer(64, 8, dtype=HALF, **options), feature_map(2, 64, *SIZE, dtype=HALF)
    (call,) = measure(lambda: block(x, make_mask(mask, HALF) if mask else None)).calls
    assert call.mask.dtype == HALF
    assert not any(stride % 8 for stride in call.mask.stride()[:-1])
    assert call.mask.stride(-1) == 1


# --- More groups than blocks of a CUDA grid ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("position", [None, va.RelPosTable, va.RelPosDecomposed], ids=str)
@pytest.mark.parametrize("pattern", ["rows", va.Window(2), va.Window(2, shift=1)], ids=str)
def test_many_groups_do_not_exceed_the_grid(pattern, position, dropout, dtype):
    """A grid has at most 65,535 blocks. 64 images of 1,024 windows, and 1,024 images of 64 rows, have 65,536 groups."""
    shape = (1024, 32, 64, 4) if pattern == "rows" else (64, 32, 64, 64)
    options = {"position": make_position(position, pattern, shape[2:]), "attn_drop": dropout, "dtype": dtype}
    assert not problems(layer(32, 2, pattern=pattern, **options), feature_map(*shape, dtype=dtype))
