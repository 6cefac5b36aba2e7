"""``impl="flex"``: cost, errors and compiled kernels (slow). ``test_reference.py`` tests the uncompiled functions."""

import copy

import pytest
import torch
from impls import uncompile_flex
from launches import measure
from torch._dynamo.exc import Unsupported
from torch._subclasses import FakeTensorMode

import vision_attn as va
from vision_attn.attention.implementations import attend
from vision_attn.attention.scopes import scope


def test_a_neighborhood_is_a_block_mask_and_copies_no_tokens(monkeypatch):
    uncompile_flex(monkeypatch)
    block, inputs = va.Attention2d(8, 2, impl="flex", pattern=va.Neighborhood(3)), []
    with scope(block, "attention", {block: inputs.append}):
        block(torch.randn(1, 8, 24, 24))
    q, k = torch.randn(2, 2, 10, 4), torch.randn(2, 2, 7, 4)
    found, expected = (attend(q, k, k, impl=impl, mask=torch.ones(10, 7).tril() > 0) for impl in ("flex", "bmm"))
    torch.testing.assert_close(found, expected)
    (given,) = inputs
    assert given.q.shape == given.k.shape == (1, 2, 576, 4)
    mask = given.grouping.cached("block_mask", None)
    assert mask.shape == (1, 1, 576, 576)
    assert mask.sparsity() > 30  # percent of the blocks are skipped
    # Only the kernel and the two projections read and write memory: no tokens are copied.
    kernel = lambda q, k, v, **options: q.new_empty(*q.shape[:3], v.shape[3])  # noqa: E731
    monkeypatch.setattr("vision_attn.attention.flex.compiled", lambda *shapes: kernel)
    monkeypatch.setattr("vision_attn.attention.flex.pattern_mask", lambda *grouping: None)
    block = va.Attention2d(64, 2, impl="flex", pattern=va.Neighborhood(7), device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, 64, 56, 56, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    with torch.no_grad():
        record = measure(lambda: block(x))
    read_and_written = 4 * x.numel() * x.element_size() / 1e6  # queries, keys, values and output of the kernel
    assert record.launches + 1 <= 6
    assert record.megabytes + read_and_written <= 60


@pytest.mark.filterwarnings("ignore")  # warnings of the tracer
def test_errors_for_unsupported_inputs_recommend_another_implementation():
    for options, cause in (
        ({"attn_drop": 0.1}, "attn_drop.*0.1"),
        ({"dtype": torch.float64}, "float64"),
        ({"device": "meta"}, "meta"),
        ({"num_heads": 4, "device": "cuda"}, "16.*got 8"),
    ):
        refused = pytest.raises(ValueError, match=f"impl='flex'.*{cause}.*impl='sdpa'")
        with FakeTensorMode(), torch.no_grad(), refused:
            block = va.Attention2d(32, **{"num_heads": 2, **options}, impl="flex")
            block(torch.empty(1, 32, 4, 4, dtype=options.get("dtype"), device=options.get("device")))
    block, x = va.Attention2d(32, 2, impl="flex"), torch.randn(1, 32, 4, 4)
    masked = copy.deepcopy(block).requires_grad_(False)
    table = va.Attention2d(32, 2, impl="flex", pattern=va.Window(2), position=va.RelPosTable())
    table.qkv.requires_grad_(False)
    for trained in (lambda: block(x), lambda: table(x), lambda: masked(x, torch.zeros(16, 16, requires_grad=True))):
        with pytest.raises(ValueError, match=r"impl='flex'.*gradients.*impl='sdpa'"):
            trained()
    with torch.no_grad(), pytest.raises(ValueError, match=r"impl='flex'.*strict=True.*impl='sdpa'"):
        torch.export.export(va.Attention2d(32, 2, impl="flex", pattern=va.Halo(2, 1)), (x,))
    for run in (lambda: torch.jit.trace(block, x), lambda: torch.func.vmap(block)(x[None])):
        with torch.no_grad(), pytest.raises(ValueError, match=r"impl='flex'.*torch.jit.trace.*torch.func.*impl='sdpa'"):
            run()


def check_compiled(block, x, mask=None):
    with torch.no_grad():
        found = block(x, mask)
        with va.use_impl(block, "bmm"):
            torch.testing.assert_close(found, block(x, mask), rtol=1e-4, atol=4e-5)


COMPILED = [
    {},
    {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
    {"pattern": va.Window(4, shift=2), "position": va.RelPosTable()},
    {"pattern": va.Halo(4, 1)},
    {"pattern": "rows", "position": va.RelPosTable((9, 10)), "num_kv_heads": 1},
    {"causal": True, "value_dim": 8},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_the_compiled_kernel_equals_bmm(options):
    block, mask = va.Attention2d(32, 2, impl="flex", **options).eval(), torch.rand(2, 1, 90, 90) > 0.3
    mask[:, :, 7] = False
    for given in (None, mask):
        check_compiled(block, torch.randn(2, 32, 9, 10), given)


@pytest.mark.slow
def test_many_sizes_compile_and_the_public_function_runs_flex():
    """torch compiles one code object for at most eight shapes, and its kernel is wrong for 24 keys of small width."""
    block = va.Attention2d(32, 2, impl="flex").eval()
    for side in range(3, 13):
        check_compiled(block, torch.randn(1, 32, side, 4))
    block = va.Attention2d(32, 2, pattern=va.Neighborhood(3), impl="flex").eval()
    for rows in (4, 6, 8, 9, 12, 16, 18, 24, 36):  # of the same number of positions
        check_compiled(block, torch.randn(1, 32, rows, 144 // rows))
    q, mask = torch.randn(1, 2, 10, 16), torch.rand(1, 1, 10, 10) > 0.5
    found, expected = (attend(q, q, q, impl=impl, mask=mask, causal=True) for impl in ("flex", "bmm"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=4e-5)
    with pytest.raises(Unsupported, match="flex"):  # the block requires gradients
        torch.compile(block, fullgraph=True, backend="aot_eager")(torch.randn(1, 32, 4, 4))
