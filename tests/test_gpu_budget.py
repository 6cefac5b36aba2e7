"""Kernel launches and bytes moved on a GPU, and the attention kernels that torch selects there, on meta tensors."""

import pytest
import torch
from launches import AttentionCall, Record, fake_attention, launch_errors, measure, refusals, selected_kernel

import vision_attn as va

HALF, SINGLE = torch.bfloat16, torch.float32
SIZE = (18, 19)  # folded widths are odd, and there are too many keys for a mask
TOKENS = 18 * 19
GLOBAL = ("full", "rows", "columns")
PATTERNS = (*GLOBAL, va.Window(3), va.Window(7), va.Window(4, shift=2), va.Grid(3), va.Halo(3, 1), va.Neighborhood(3))
POSITIONS = (None, va.RelPosDecomposed, va.RelPosTable, va.AbsPos, va.Rope2d(), va.ConditionalPos(3), va.SinCos())
FORMATS = (torch.contiguous_format, torch.channels_last)

#: Layers, input shapes, and the budget of a forward pass in training: launches and megabytes.
BUDGETS = {
    "plain, 14×14": ((256, 4), {}, (32, 256, 14, 14), 3, 34),
    "RelPosDecomposed, 14×14": ((256, 4), {"position": va.RelPosDecomposed((14, 14))}, (32, 256, 14, 14), 16, 100),
    "RelPosDecomposed, 32×32": ((256, 4), {"position": va.RelPosDecomposed((32, 32))}, (8, 256, 32, 32), 17, 140),
    "RelPosDecomposed, 64×64": ((256, 4), {"position": va.RelPosDecomposed((64, 64))}, (2, 256, 64, 64), 19, 205),
    "Rope2d, 14×14": ((256, 4), {"position": va.Rope2d()}, (32, 256, 14, 14), 10, 110),
    "Window(7), RelPosTable, 56×56": (
        (96, 3),
        {"pattern": va.Window(7), "position": va.RelPosTable()},
        (16, 96, 56, 56),
        14,
        136,
    ),
    "Window(7, shift=3), RelPosTable, 56×56": (
        (96, 3),
        {"pattern": va.Window(7, shift=3), "position": va.RelPosTable()},
        (16, 96, 56, 56),
        20,
        240,
    ),
    "Neighborhood(7), 56×56": ((64, 2), {"pattern": va.Neighborhood(7)}, (8, 64, 56, 56), 15, 190),
}

#: Options of a layer with 96 channels in 8 heads, which are 12 wide unless an option says otherwise.
OPTIONS = {
    "head width 12": {},
    "head width 12, RelPosTable": {"position": va.RelPosTable(SIZE)},
    "head width 12, RelPosDecomposed": {"position": va.RelPosDecomposed(SIZE)},
    "head width 12, shifted windows": {"pattern": va.Window(4, shift=2)},
    "head width 12, Neighborhood": {"pattern": va.Neighborhood(3), "position": va.RelPosTable()},
    "value_dim > key_dim": {"key_dim": 16, "value_dim": 24},
    "value_dim < key_dim": {"key_dim": 24, "value_dim": 16},
    "value_dim is not a multiple of 8": {"key_dim": 16, "value_dim": 12},
    "key_dim is not a multiple of 4": {"key_dim": 6, "value_dim": 10},
    "value_dim > key_dim, RelPosTable": {"key_dim": 8, "value_dim": 24, "position": va.RelPosTable(SIZE)},
    "value_dim > key_dim, RelPosDecomposed": {"key_dim": 8, "value_dim": 24, "position": va.RelPosDecomposed(SIZE)},
    "num_kv_heads": {"num_kv_heads": 2},
    "num_kv_heads, windows": {"num_kv_heads": 1, "pattern": va.Window(4, shift=2), "position": va.RelPosDecomposed()},
    "causal": {"causal": True},
    "causal, negative scale": {"causal": True, "scale": -1.0},
    "causal rows": {"causal": True, "pattern": "rows"},
    "causal, RelPosTable": {"causal": True, "position": va.RelPosTable(SIZE)},
    "causal, attn_drop": {"causal": True, "attn_drop": 0.1},
    "kv_stride": {"kv_stride": 2},
    "qk_norm": {"qk_norm": True},
    "qk_norm='cosine'": {"qk_norm": "cosine"},
    "qk_norm='match'": {"qk_norm": "match"},
    "groups, output_gate": {"groups": 2, "output_gate": True},
}
#: User masks: shape before the axes of queries and keys, length of both axes (True: all tokens), and type.
MASKS = {
    "bool": ((1, 1), True, True, torch.bool),
    "bool, two axes": ((), True, True, torch.bool),
    "bool per image": ((2, 1), True, True, torch.bool),
    "bool per head": ((1, 8), True, True, torch.bool),
    "bool of keys": ((2, 1), False, True, torch.bool),
    "bool of queries": ((), True, False, torch.bool),
    "float32 per image and head": ((2, 8), True, True, torch.float32),
    "float of the layer's type": ((1, 8), True, True, None),
}


def layer(*args, dtype, train=True, **options):
    """A layer on the meta device."""
    return va.Attention2d(*args, device="meta", dtype=dtype, **options).train(train)


def feature_map(*shape, dtype, train=True, memory_format=torch.channels_last):
    x = torch.empty(*shape, dtype=dtype, device="meta")
    return x.to(memory_format=memory_format).requires_grad_(train)


def mask_of(name, dtype, keys=TOKENS):
    axes, queries, all_keys, mask_dtype = MASKS[name]
    shape = (*axes, TOKENS if queries else 1, keys if all_keys else 1)
    return torch.ones(shape, dtype=mask_dtype or dtype, device="meta")


def problems(made, x, **given):
    """Calls of the math kernel, which materializes all logits, and calls on which a fused kernel raises an error."""
    with fake_attention(Record()) as record, torch.set_grad_enabled(made.training):
        made(x, **given)
    assert record.calls, "scaled_dot_product_attention was not called"
    found = [f"math kernel, because {refusals(call)}" for call in record.calls if selected_kernel(call) == "math"]
    return found + [error for call in record.calls for error in launch_errors(call)]


def problems_by_mode(args, options, dtypes, formats=(torch.channels_last,), mask=None):
    """The problems of a layer in training and evaluation, by type and mode."""
    found = {}
    for dtype in dtypes:
        made, given = layer(*args, dtype=dtype, **options), {}
        if mask is not None:
            given["mask"] = mask_of(mask, dtype, -(-SIZE[0] // made.kv_stride) * -(-SIZE[1] // made.kv_stride))
        for train in (True, False):
            for memory_format in formats:
                x = feature_map(2, args[0], *SIZE, dtype=dtype, train=train, memory_format=memory_format)
                if reasons := problems(made.train(train), x, **given):
                    found[str(dtype), "train" if train else "eval", str(memory_format)] = reasons
    return found


# --- Budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUDGETS)
def test_forward_pass_stays_within_its_budget(name):
    args, options, shape, launches, megabytes = BUDGETS[name]
    made = layer(*args, dtype=HALF, **options).to(memory_format=torch.channels_last)
    x = feature_map(*shape, dtype=HALF)
    record = measure(lambda: made(x))
    found = f"{record.launches} launches, {record.megabytes:.1f} MB: {[o.name for o in record.operations]}"
    assert record.launches <= launches, found
    assert record.megabytes <= megabytes, found


@pytest.mark.parametrize("dtype", [HALF, torch.float16, SINGLE], ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_no_tensor_holds_all_pairs_of_tokens(dtype, train):
    made = layer(64, 2, position=va.RelPosDecomposed((64, 64)), dtype=dtype, train=train)
    x = feature_map(1, 64, 64, 64, dtype=dtype, train=train)
    for backward in (False, True)[: 1 + train]:
        with torch.set_grad_enabled(train):
            largest = measure(lambda: made(x), backward=backward).largest
        assert largest.largest < 4096**2, largest


# --- Kernel selection -------------------------------------------------------------------------------------------------


def call_of(q=16, k=16, v=16, dtype=HALF, mask=None, heads=(4, 4, 4), keys=49, causal=False):
    query, key, value = (
        torch.empty(2, n, length, width, dtype=dtype, device="meta")
        for n, length, width in zip(heads, (49, keys, keys), (q, k, v), strict=True)
    )
    mask = None if mask is None else torch.empty(1, 1, 49, keys, dtype=mask, device="meta")
    return AttentionCall(query, key, value, mask, 0.0, causal)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "flash"),
        ({"q": 12, "k": 12, "v": 12}, "flash"),  # padded to 16 by torch
        ({"q": 256, "k": 256, "v": 256}, "flash"),
        ({"q": 264, "k": 264, "v": 264}, "efficient"),
        ({"v": 24}, "efficient"),
        ({"v": 12}, "math"),
        ({"q": 12, "k": 12, "v": 12, "mask": torch.bool}, "math"),
        ({"mask": torch.bool}, "efficient"),
        ({"mask": HALF}, "efficient"),
        ({"dtype": SINGLE}, "efficient"),
        ({"dtype": SINGLE, "q": 12, "k": 12, "v": 20, "mask": SINGLE}, "efficient"),
        ({"dtype": SINGLE, "q": 6, "k": 6, "v": 6}, "math"),
        ({"dtype": torch.float64}, "math"),
        ({"causal": True}, "flash"),
        ({"causal": True, "keys": 50}, "efficient"),
        ({"heads": (4, 2, 2)}, "math"),
    ],
    ids=str,
)
def test_kernel_selection_follows_the_rules_of_torch(options, kernel):
    call = call_of(**options)
    assert selected_kernel(call) == kernel, refusals(call)


def test_kernel_selection_reads_strides_and_offsets():
    x = torch.empty(2, 4, 16, 49, dtype=HALF, device="meta")
    channels_first = x.mT  # tokens lie beside each other, not the channels of a head
    assert selected_kernel(AttentionCall(*[channels_first] * 3, None, 0.0, False)) == "math"
    shifted = torch.empty(2, 4, 49, 20, dtype=HALF, device="meta")[..., 4:]
    call = AttentionCall(*[shifted] * 3, call_of(mask=torch.bool).mask, 0.0, False)
    assert "storage offset" in refusals(call)["efficient"][0]
    expanded = torch.empty(49, 1, dtype=torch.bool, device="meta").expand(49, 49)
    assert selected_kernel(call_of()._replace(mask=expanded)) == "math"


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: getattr(position, "__name__", str(position)))
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_math_kernel_is_never_selected(pattern, position):
    if isinstance(position, type):  # a table of the feature map, or of the window's size
        position = position(SIZE if pattern in GLOBAL or position is va.AbsPos else None)
    dtypes = (HALF, torch.float16, SINGLE)
    found = problems_by_mode((64, 4), {"pattern": pattern, "position": position}, dtypes, FORMATS)
    assert not found, f"pattern={pattern}, position={position}: {found}"


@pytest.mark.parametrize("mask", [None, "bool", "float32 per image and head"])
@pytest.mark.parametrize("name", OPTIONS)
def test_math_kernel_is_never_selected_with_options(name, mask):
    found = problems_by_mode((96, 8), OPTIONS[name], (HALF, SINGLE), mask=mask)
    assert not found, f"{OPTIONS[name]}, mask={mask}: {found}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pattern", ["full", "rows", va.Window(4, shift=2), va.Neighborhood(3)], ids=str)
def test_math_kernel_is_never_selected_with_masks(pattern, mask):
    found = problems_by_mode((64, 8), {"pattern": pattern, "position": va.Rope2d()}, (HALF, SINGLE), mask=mask)
    assert not found, f"pattern={pattern}, mask={mask}: {found}"


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("channels", [64, 96])
def test_math_kernel_is_never_selected_with_learned_masks_and_contexts(channels, dtype):
    x = feature_map(2, channels, *SIZE, dtype=dtype)
    learned = mask_of("float of the layer's type", dtype).requires_grad_()
    assert not problems(layer(channels, 8, dtype=dtype), x, mask=learned)
    context = feature_map(2, 32, 5, 7, dtype=dtype)
    assert not problems(layer(channels, 8, context_channels=32, dtype=dtype), x, context=context)


@pytest.mark.parametrize("mask", [None, "bool", "float32 per image and head"])
@pytest.mark.parametrize(
    "options",
    [
        {"pattern": va.Window(7), "position": va.RelPosTable()},
        {"pattern": va.Window(4, shift=2), "position": va.RelPosTable()},
        {"pattern": va.Neighborhood(3)},
        {"position": va.RelPosTable(SIZE)},
    ],
    ids=str,
)
def test_masks_are_passed_as_the_kernel_reads_them(options, mask):
    """Otherwise torch converts a bool mask, and copies a mask whose rows do not start at multiples of 8 elements."""
    block, x = layer(64, 8, dtype=HALF, **options), feature_map(2, 64, *SIZE, dtype=HALF)
    (call,) = measure(lambda: block(x, mask_of(mask, HALF) if mask else None)).calls
    assert call.mask.dtype == HALF
    assert not any(stride % 8 for stride in call.mask.stride()[:-1])
    assert call.mask.stride(-1) == 1


# --- More groups than a CUDA grid has blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("position", [None, va.RelPosTable(), va.RelPosDecomposed()], ids=str)
@pytest.mark.parametrize("pattern", ["rows", va.Window(2), va.Window(2, shift=1)], ids=str)
def test_many_groups_do_not_exceed_the_grid(pattern, position, dropout, dtype):
    """64 images of 1,024 windows, or 1,024 of 64 rows, are 65,536 groups, where a grid has at most 65,535 blocks."""
    shape = (1024, 32, 64, 4) if pattern == "rows" else (64, 32, 64, 64)
    if pattern == "rows" and position is not None:
        position = type(position)(shape[2:])
    made = layer(32, 2, pattern=pattern, position=position, attn_drop=dropout, dtype=dtype)
    assert not problems(made, feature_map(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_many_groups_with_masks_of_their_own_do_not_exceed_the_grid(train, dtype):
    """One feature map of 16,384 windows and 4 heads has 65,536 masks, where a grid has at most 65,535 blocks."""
    made = layer(32, 4, pattern=va.Window(4, shift=2), dtype=dtype, train=train)
    assert not problems(made, feature_map(1, 32, 512, 512, dtype=dtype, train=train))
