"""``impl="flex"``: the functions that it gives FlexAttention against bmm, its refusals, and compiled runs (slow)."""

import copy
import itertools

import pytest
import torch
from launches import measure
from torch._dynamo.exc import Unsupported

import vision_attn as va
from vision_attn.attention import flex
from vision_attn.attention.blocks.attention_maps import attn_hook
from vision_attn.attention.implementations import attend

PATTERNS = (
    *("full", "rows", "columns", va.Window(4), va.Window((3, 5), shift=(1, 0)), va.Window(4, shift=2), va.Grid(3)),
    *(va.Halo(3, 1), va.Halo(4, 0), va.Neighborhood(3), va.Neighborhood(4, dilation=2, stride=2)),
    *(va.Neighborhood(3, causal=True), va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)),
)
POSITIONS = (None, va.RelPosDecomposed, va.RelPosTable, va.AbsPos(5), va.Rope2d(), va.SinCos())
OPTIONS = (
    {},
    {"num_heads": 4, "key_dim": 4, "value_dim": 3, "num_kv_heads": 2},
    {"causal": True},
    {"output_gate": True, "qk_norm": True},
)
MASKS = (
    None,
    lambda tokens: (torch.rand(2, 1, tokens, tokens) > 0.4) & (torch.arange(tokens) % 5 > 0)[:, None],
    lambda tokens: torch.randn(1, 1, tokens, tokens, dtype=torch.float64),
    lambda tokens: torch.rand(2, 1, 1, tokens) > 0.5,
)


def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa):
    """FlexAttention as torch documents it, with every score in memory."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = scale * q @ k.mT
    index = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *index)
    if block_mask is not None:
        scores = torch.where(block_mask.mask_mod(*index), scores, -torch.inf)
    weights = torch.where((scores > -torch.inf).any(-1, keepdim=True), scores, 0.0).softmax(-1)
    return torch.where(scores > -torch.inf, weights, 0.0) @ v


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(flex, "compiled", lambda *shapes: dense)
    monkeypatch.setattr(flex, "check_flex", lambda *inputs: None)


def layers(pattern, position, **options):
    if isinstance(position, type):  # the size of a window is known; any other table is resized
        fixed = not isinstance(pattern, str | va.Pattern)
        position = position(None if fixed else (6, 7))
    try:
        made = {"num_heads": 2, "impl": "bmm", "dtype": torch.float64, **options}
        theirs = va.Attention2d(8, pattern=pattern, position=position, **made)
    except ValueError:
        return None
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = copy.deepcopy(theirs)
    va.set_impl_(ours, "flex")
    return ours, theirs


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_flex_equals_bmm_forward_and_backward_with_every_position_option_and_mask(uncompiled, pattern):
    torch.manual_seed(0)
    crossed = [
        *itertools.product(POSITIONS, OPTIONS[:1], MASKS[:1], [(7, 9), (8, 12)]),
        *itertools.product(POSITIONS[1:3], OPTIONS[1:], MASKS[:2], [(7, 9)]),
        *itertools.product(POSITIONS[:1], OPTIONS, MASKS[1:], [(7, 9), (1, 1)]),
    ]
    compared = 0
    for position, options, mask, size in crossed:
        if (pair := layers(pattern, position, **options)) is None:
            continue
        ours, theirs = pair
        x = torch.randn(2, 8, *size, dtype=torch.float64, requires_grad=True)
        mask = None if mask is None else mask(size[0] * size[1])
        results = []
        for block in (ours, theirs):
            y = block(x, mask)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{position}, {options}, {size}")
        torch.testing.assert_close(ours.attention_weights(x, mask), theirs.attention_weights(x, mask))
        compared += 1
    assert compared >= 24


def test_a_neighborhood_is_masked_block_by_block_on_the_map_and_copies_no_tokens(uncompiled):
    block = va.Attention2d(8, 2, impl="flex", pattern=va.Neighborhood(3))
    inputs = []
    with attn_hook(block, inputs.append):
        block(torch.randn(1, 8, 24, 24))
    (given,) = inputs
    assert given.q.shape == given.k.shape == (1, 2, 576, 4)
    mask = given.grouping.cached(("block_mask", False), None)
    assert mask.shape == (1, 1, 576, 576)
    assert mask.sparsity() > 30  # percent of the blocks are skipped


def test_flex_stays_within_its_budget(monkeypatch):
    """The kernel and the two projections: three launches, and no bytes for tokens that are copied."""

    def kernel(q, k, v, **options):
        return q.new_empty(*q.shape[:2], q.shape[2], v.shape[3])

    monkeypatch.setattr(flex, "compiled", lambda *shapes: kernel)
    monkeypatch.setattr(flex, "check_flex", lambda *inputs: None)
    monkeypatch.setattr(flex, "pattern_mask", lambda *grouping: None)
    block = va.Attention2d(64, 2, impl="flex", pattern=va.Neighborhood(7), device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, 64, 56, 56, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    with torch.no_grad():
        record = measure(lambda: block(x))
    read_and_written = 4 * x.numel() * x.element_size() / 1e6  # queries, keys, values and output of the kernel
    assert record.launches + 1 <= 6
    assert record.megabytes + read_and_written <= 60


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({"attn_drop": 0.1}, torch.float32, "attn_drop.*0.1"),
        ({}, torch.float64, "float64"),
        ({"device": "meta"}, torch.float32, "meta"),
    ],
)
def test_unsupported_options_are_refused_by_name(options, dtype, words):
    block = va.Attention2d(32, 2, impl="flex", dtype=dtype, **options)
    x = torch.randn(1, 32, 4, 4, dtype=dtype, device=options.get("device"))
    with torch.no_grad(), pytest.raises(ValueError, match=f"impl='flex'.*{words}.*impl='sdpa'"):
        block(x)


@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_gradients_on_a_cpu_traces_and_transforms_are_refused_by_name():
    block, x = va.Attention2d(32, 2, impl="flex"), torch.randn(1, 32, 4, 4)
    with pytest.raises(ValueError, match=r"impl='flex'.*gradients.*impl='sdpa'"):
        block(x)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"impl='flex'.*torch.jit.trace.*impl='sdpa'"):
            torch.jit.trace(block, x)
        with pytest.raises(ValueError, match=r"impl='flex'.*torch.func.*impl='sdpa'"):
            torch.func.vmap(block)(x[None])


def test_narrow_heads_on_cuda_are_refused_by_name():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        block, x = va.Attention2d(32, 4, impl="flex"), torch.empty(1, 32, 4, 4)
        with pytest.raises(ValueError, match=r"impl='flex'.*16.*got 8.*impl='sdpa'"):
            block(x)


def test_auto_never_selects_flex(monkeypatch):
    def refuse(*inputs):
        raise AssertionError("flex was selected")

    monkeypatch.setattr(flex, "run_flex", refuse)
    for device in ("cpu", "meta"):
        block = va.Attention2d(32, 2, pattern=va.Neighborhood(3), device=device)
        block(torch.randn(2, 32, 24, 24, device=device))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
        {"pattern": va.Window(4, shift=2), "position": va.RelPosTable()},
        {"pattern": va.Halo(4, 1)},
        {"pattern": "rows", "position": va.RelPosTable((9, 10)), "num_kv_heads": 1},
        {"causal": True, "value_dim": 8},
    ],
    ids=str,
)
def test_the_compiled_kernel_equals_bmm(options):
    torch.manual_seed(0)
    block = va.Attention2d(32, 2, impl="flex", **options).eval()
    mask = torch.rand(2, 1, 90, 90) > 0.3
    mask[:, :, 7] = False
    with torch.no_grad():
        for x, given in ((torch.randn(2, 32, 9, 10), None), (torch.randn(2, 32, 9, 10), mask)):
            found = block(x, given)
            with va.use_impl(block, "bmm"):
                torch.testing.assert_close(found, block(x, given), rtol=1e-4, atol=4e-5)


@pytest.mark.slow
def test_many_sizes_compile_and_the_public_function_runs_flex():
    """Torch compiles the code of one function for eight shapes at most, and its kernel is wrong for 24 narrow keys."""
    block = va.Attention2d(32, 2, impl="flex").eval()
    with torch.no_grad():
        for side in range(3, 13):
            x = torch.randn(1, 32, side, 4)
            found = block(x)
            with va.use_impl(block, "bmm"):
                torch.testing.assert_close(found, block(x), rtol=1e-4, atol=4e-5)
        q = torch.randn(1, 2, 10, 16)
        mask = torch.rand(1, 1, 10, 10) > 0.5
        found, expected = (attend(q, q, q, impl=impl, mask=mask, causal=True) for impl in ("flex", "bmm"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=4e-5)


@pytest.mark.slow
def test_a_graph_with_gradients_on_a_cpu_is_refused():
    block = torch.compile(va.Attention2d(32, 2, impl="flex"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Unsupported, match="flex"):
        block(torch.randn(1, 32, 4, 4))
