"""Exported, traced, compiled and captured graphs of a block: dynamic batch, portable operations, memory of graphs."""

import gc
import io
import weakref

import onnx
import onnxruntime
import pytest
import torch
from impls import PATTERNS, make_position
from launches import Operations

import vision_attn as va

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the exporter, the tracer and the compiler


def layer(pattern, position=None, **options):
    torch.manual_seed(0)
    position = make_position(position, pattern, (8, 8))
    return va.AttentionBlock2d(16, 4, pattern=pattern, position=position, gate_init=1.0, **options).eval()


def images(batch, side=8):
    return torch.randn(batch, 16, side, side, generator=torch.Generator().manual_seed(batch))


OTHERS = [pytest.param(pattern, marks=pytest.mark.slow) for pattern in PATTERNS]


@pytest.mark.parametrize("pattern", [va.Window(4), *OTHERS], ids=str)
def test_exports_and_traces_run_at_other_batch_sizes_with_operations_that_converters_support(pattern):
    """Gradients are enabled. Converters of traces support permute and logical_and, but not movedim and &."""
    block = layer(pattern)
    exported = torch.export.export(block, (images(2),), dynamic_shapes={"x": {0: torch.export.Dim("b")}}).module()
    assert not any("empty" in str(node.target) for node in exported.graph.nodes)
    traced = [(block, torch.jit.trace(block, images(2)))]
    traced.append((relative := layer(pattern, va.RelPosDecomposed), torch.jit.trace(relative, images(2))))
    with torch.no_grad():
        for batch in (1, 3, 9):
            for eager, graph in ((block, exported), *traced):
                torch.testing.assert_close(graph(images(batch)), eager(images(batch)))
    for _, graph in traced:
        assert not {node.kind() for node in graph.inlined_graph.nodes()} & {"aten::movedim", "aten::__and__"}


@torch.no_grad()
def test_traces_run_with_masks_and_at_sizes_of_one_shifted_window():
    block, rows = layer(va.Window(4, shift=2)), layer("rows")
    traced = torch.jit.trace(block, images(2))
    for side in (4, 8, 12):
        torch.testing.assert_close(traced(images(1, side)), block(images(1, side)))
    given = images(2), torch.rand(64, 64) < 0.5
    torch.testing.assert_close(torch.jit.trace(rows, given)(*given), rows(*given))


SHIFTED = {"pattern": va.Window(3, shift=1), "position": va.RelPosTable}


@pytest.mark.parametrize("options", [{"impl": "bmm"}, {"impl": "einx"}, SHIFTED], ids=str)
@torch.no_grad()
def test_the_trace_based_onnx_exporter_reproduces_the_block_without_dropout(options):
    """With ``dynamo=False``, an axis counted from the last one can abort the process."""
    block, file = layer(**{"pattern": "full", "attn_drop": 0.1, **options}), io.BytesIO()
    torch.onnx.export(block, (images(2),), file, dynamo=False)
    assert "Dropout" not in {node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node}
    session = onnxruntime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: images(2).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), block(images(2)), rtol=0, atol=1e-5)


def pointer(x):
    return x.untyped_storage().data_ptr()


def capture(patch):
    """Make torch report that a CUDA graph is being captured."""
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


CACHED = [(va.Window(4, shift=2), va.RelPosTable), (va.Neighborhood(3), None), ("full", va.Rope()), ("rows", None)]


@pytest.mark.parametrize("batch", [1, 2])  # of the call before the capture
@pytest.mark.parametrize(("pattern", "position"), CACHED)
@torch.no_grad()
def test_memory_that_a_cuda_graph_reads_is_never_freed(monkeypatch, pattern, position, batch):
    """A replay reads the same memory as the capture, regardless of the sizes that were used in between."""
    block, x = layer(pattern, position, causal=pattern == "rows"), images(1)
    owned = set(map(pointer, (x, *block.parameters())))
    block(images(batch))
    kept, read = [one for one in gc.get_objects() if type(one) is torch.Tensor], set()
    with monkeypatch.context() as patch, Operations(lambda func, inputs, outputs: read.update(map(pointer, inputs))):
        capture(patch)
        block(x)
    references = [weakref.ref(one) for one in kept if pointer(one) in read - owned]
    del kept
    assert references
    for side in range(9, 20):
        block(images(1, side))
    gc.collect()
    assert all(reference() is not None for reference in references)
    assert len(block.attn.plans.groupings) <= 4
    other = layer(pattern, position)
    capture(monkeypatch)
    other(x)  # a grouping created during the capture is in the memory of the graph
    assert not any(getattr(other.attn.plans, name) for name in ("groupings", "recent", "captured"))


def test_match_has_finite_second_derivatives_for_one_position_and_initializes_in_half_precision():
    block = va.Attention2d(8, 2, qk_norm="match", impl="bmm", dtype=torch.float64)
    x = torch.randn(1, 8, 1, 1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
    second = torch.autograd.grad(gradient.sum(), [x, *block.parameters()], allow_unused=True)
    assert all(one.isfinite().all() for one in (gradient, *second) if one is not None)
    for dtype in (torch.bfloat16, torch.float16):
        block = va.Attention2d(16, 2, qk_norm="match", dtype=dtype)
        rows = block.qkv.weight[:8].flatten(1).float()
        torch.testing.assert_close(rows @ rows.mT, torch.eye(8), rtol=0, atol=0.03)
        torch.testing.assert_close(block.qkv.weight[:16], block.qkv.weight[16:32])
