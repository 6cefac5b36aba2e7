"""Blocks on a GPU: outputs and gradients of every implementation, selected kernels, and captured graphs."""

from collections import Counter

import pytest
import torch
from impls import CASES, CPU_IMPLS, POSITIONS, make_position
from test_gpu_budget import BUDGETS
from torch.profiler import ProfilerActivity, profile

import vision_attn as va

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # raised by torch's compiler and profiler

SIZE = (9, 10)
#: Every pattern with every position encoding, for implementations that do not compile a kernel.
PAIRS = [(impl, name, position) for impl in CPU_IMPLS for name in CASES for position in POSITIONS]
PAIRS += [("flex", name, None) for name in CASES]
PAIRS += [("flex", name, position) for name in ("full", "shifted window", "neighborhood") for position in POSITIONS[1:]]


@pytest.fixture(autouse=True)
def float32_without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def run(block, x, dtype, mask=None):
    """Return the output, and the gradients of the input and of all parameters."""
    block, x = block.to(x.device, dtype), x.to(dtype).requires_grad_()
    y = block(x, None if mask is None else mask.to(x.device))
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view(y.shape)
    return [y, *torch.autograd.grad((y.double() * weights).sum(), [x, *block.parameters()])]


def assert_equal_to_a_cpu(block, x, impl, mask=None):
    """Compare the output and the gradients on a GPU with a CPU in float64."""
    expected = run(block, x, torch.float64, mask)
    va.set_impl_(block, impl)
    tolerance = 1e-4 if x.dtype == torch.float32 else 0.04
    for found, exact in zip(run(block, x.cuda(), x.dtype, mask), expected, strict=True):
        # The scale is at least 1, because some gradients are zero, as for a position that all keys of a group share.
        assert (found.double().cpu() - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("impl", "name", "position"), PAIRS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_outputs_and_gradients_equal_those_of_a_cpu_in_float64(impl, name, position, dtype):
    position = make_position(position, pattern := CASES[name].pattern, SIZE)
    block = va.Attention2d(64, 2, pattern=pattern, position=position, impl="bmm")
    assert_equal_to_a_cpu(block.to(dtype), torch.randn(3, 64, *SIZE).to(dtype), impl)


OPTIONS = [
    {"qk_norm": True, "num_kv_heads": 1},
    {"position": va.RelPosDecomposed(feat_size=8), "causal": True},
    {"position": va.Rope(), "output_gate": True, "kv_stride": 2},
    {"pattern": va.Window(5, shift=2), "position": va.RelPosTable()},
    {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
]


@pytest.mark.parametrize("impl", CPU_IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masked_blocks_equal_those_of_a_cpu_in_float64(options, dtype, impl):
    """With 8×8 tokens and a mask in bfloat16, cuDNN's kernel returned NaN gradients (pytorch/pytorch#196678)."""
    block, x = va.Attention2d(64, 4, impl="bmm", **options).to(dtype), torch.randn(2, 64, 8, 8).to(dtype)
    mask = torch.rand(64, (8 // block.kv_stride) ** 2) < 0.5
    mask[0] = False
    assert_equal_to_a_cpu(block, x, impl, mask)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-8])
@pytest.mark.parametrize("impl", ["auto", "flex"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"position": va.RelPosDecomposed(8)}])
def test_scales_that_are_not_positive_equal_those_of_a_cpu_in_float64(options, masked, impl, scale):
    """cuDNN and flash attention multiply their -inf by the scale: the control ``averaging`` was NaN."""
    mask = torch.rand(1, 1, 64, 64) > 0.5 if masked else None
    block = va.Attention2d(64, 2, impl="bmm", scale=scale, **options).to(torch.bfloat16)
    assert_equal_to_a_cpu(block, torch.randn(3, 64, 8, 8).to(torch.bfloat16), impl, mask)


def count_kernels(function):
    """Count the kernels that a GPU runs in a call after the first one, which fills the caches."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    return Counter(event.name for event in trace.events() if "CUDA" in str(event.device_type))


@pytest.mark.parametrize("name", BUDGETS)
def test_a_gpu_runs_a_fused_kernel_within_the_budget_of_launches(name):
    args, options, shape, (launches, _), _ = BUDGETS[name]
    block = va.Attention2d(*args, **options, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
    kernels = count_kernels(lambda: block(x))
    assert any(word in kernel.lower() for kernel in kernels for word in ("flash", "fmha", "sdpa", "cudnn")), kernels
    assert not any("softmax" in kernel.lower() for kernel in kernels), kernels
    assert sum(kernels.values()) <= launches + 2, kernels  # a library may split a product in two


@pytest.mark.parametrize("impl", ["bmm", "sdpa"])
@pytest.mark.parametrize("pattern", ["full", va.Window(4, shift=2), va.Neighborhood(3)], ids=str)
def test_a_captured_graph_replays_new_inputs(impl, pattern):
    block = va.Attention2d(64, 2, pattern=pattern, impl=impl, device="cuda").eval()
    x = torch.randn(2, 64, *SIZE, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            block(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        for _ in range(2):
            new = torch.randn_like(x)
            x.copy_(new)
            graph.replay()
            torch.testing.assert_close(y, block(new), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "shifted window", "neighborhood"])
def test_compiled_training_equals_eager_training(name):
    block = va.AttentionBlock2d(64, 2, pattern=CASES[name].pattern, gate_init=1.0, device="cuda")
    compiled = torch.compile(block, fullgraph=True)
    x = torch.randn(2, 64, *SIZE, device="cuda", requires_grad=True)
    for found, expected in zip(*(torch.autograd.grad(f(x).square().sum(), [x, *block.parameters()])
                                 for f in (compiled, block)), strict=True):  # fmt: skip
        assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_a_network_with_a_block_trains_in_mixed_precision_and_memory_stays_linear():
    block = va.Attention2d(64, 2, position=va.RelPosDecomposed((96, 96)), device="cuda")
    x = torch.randn(1, 64, 96, 96, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        block(x).float().square().mean().backward()
    assert x.grad.isfinite().all()
    logits = 2 * 9216**2 * 2  # bytes of the logits of two heads in bfloat16
    assert torch.cuda.max_memory_allocated() - before < logits / 2
