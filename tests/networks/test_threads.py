"""Contexts and swapped models in several threads and tasks: each result equals that of a single run.

``capture``, ``use_impl`` and ``disabled`` act in the thread or task that entered them, and store nothing on the model.
"""

import asyncio
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import timm
import torch
from torch import nn

import vision_attn as va
from vision_attn.attention.implementations import IMPLEMENTATIONS, attend
from vision_attn.attention.scopes import SCOPES

CONTEXTS = {
    "capture": va.capture,
    "disabled": va.disabled,
    "one disabled": lambda model: va.disabled(model, "1"),
    "other disabled": lambda model: va.disabled(model, "3"),
    "use_impl": lambda model: va.use_impl(model, "negative"),
}
CALLS = [*((name,) for name in CONTEXTS), (), ("use_impl", "other disabled", "capture")]
KINDS = ["capture", "disabled", "use_impl"]


@pytest.fixture(scope="module", autouse=True)
def negative():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMPLEMENTATIONS, "negative", None)  # The registration is removed after the tests.
        del IMPLEMENTATIONS["negative"]
        va.implementations.register_impl("negative", lambda q, k, v, **options: -attend(q, k, v, impl="bmm", **options))
        yield


@pytest.fixture(autouse=True)
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with torch.no_grad():
        yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), va.AttentionBlock2d(8, 2, gate_init=1.0))
    va.insert_(model, names="1", context="0", num_heads=2, gate_init=1.0, example_input=(1, 3, 12, 12))
    return model.eval()


@contextmanager
def entered(model, names, results):
    """Run a model inside contexts, and return the output and the captured maps."""
    with ExitStack() as stack:
        found = [stack.enter_context(CONTEXTS[name](model)) for name in names]
        yield
    results += [one.weights for maps in found if isinstance(maps, dict) for one in maps.values()]


def run(model, x, *names):
    """Return the output inside contexts, and the captured maps."""
    results = []
    with entered(model, names, results):
        results.append(model(x))
    return results


IMAGES = [torch.rand(1, 3, 12 + size, 14, generator=torch.Generator().manual_seed(size)) for size in range(3)]


def assert_served(serve, calls):
    with ThreadPoolExecutor(4) as server:
        assert all(server.map(torch.no_grad()(serve), range(calls)))


@pytest.mark.parametrize("calls", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_every_thread_of_a_server_gets_its_own_result(model, calls):
    requests = list(itertools.product(CALLS, range(len(IMAGES))))
    alone = {(names, at): run(model, IMAGES[at], *names) for names, at in requests}
    assert {names: len(alone[names, 0]) for names in CALLS} == {names: 1 + 2 * ("capture" in names) for names in CALLS}
    # Capturing does not change the output.
    assert len({round(alone[names, 0][0].double().sum().item(), 6) for names in CALLS}) == 6

    def serve(number):
        names, at = requests[number % len(requests)]
        answer = run(model, IMAGES[at], *names)
        return len(answer) == len(alone[names, at]) and all(map(torch.equal, answer, alone[names, at]))

    assert_served(serve, calls)


@pytest.mark.parametrize("calls", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_thread_of_a_server_runs_a_swapped_model(calls):
    model = timm.create_model("test_vit", depth=2, img_size=32, embed_dim=16, num_heads=4, num_classes=5).eval()
    inputs = [torch.rand(batch, 3, 32, 32) for batch in (1, 2, 3)]
    expected = [model(x) for x in inputs]
    va.swap_(model)
    weights = run(model, inputs[0], "capture")[-1]

    def serve(number):
        y, *maps = run(model, inputs[number % 3], *["capture"] * (number % 3 == 0))
        return torch.allclose(y, expected[number % 3], atol=1e-5) and all(torch.equal(x, weights) for x in maps[-1:])

    assert_served(serve, calls)


def test_a_task_that_outlives_the_with_block_exits_its_context(model):
    async def serve():
        left = asyncio.Event()

        async def later():
            inside = model(IMAGES[0])
            await left.wait()
            return inside, model(IMAGES[0])

        with va.disabled(model):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
            threaded = await asyncio.to_thread(model, IMAGES[0])
        left.set()
        return threaded, *await task

    threaded, inside, after = asyncio.run(serve())
    assert torch.equal(inside, run(model, IMAGES[0], "disabled")[0])
    assert torch.equal(threaded, inside)
    assert torch.equal(after, model(IMAGES[0]))


def test_contexts_may_end_in_any_order_and_by_errors(model):
    expected, *weights = run(model, IMAGES[0], "capture")
    first, second = va.capture(model), va.capture(model, names="3")
    maps, some = first.__enter__(), second.__enter__()
    model(IMAGES[0])
    assert (list(maps), list(some)) == (["1.inserted.attn", "3.attn"], ["3.attn"])
    first.__exit__(None, None, None)
    kept = dict(maps)
    model(IMAGES[1])
    assert (dict(maps), some["3.attn"].map_size) == (kept, (9, 10))
    second.__exit__(None, None, None)
    assert torch.equal(model(IMAGES[0]), expected)
    assert torch.equal(maps["3.attn"].weights, weights[1])
    for context in CONTEXTS.values():
        with pytest.raises(RuntimeError, match="on purpose"), context(model):
            raise RuntimeError("on purpose")
    assert SCOPES.get() == ()


@contextmanager
def in_another_thread(model, *names):
    """Keep another thread inside contexts while this thread is inside the ``with`` block."""
    inside, left = threading.Event(), threading.Event()

    def other():
        with entered(model, names, []):
            inside.set()
            left.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(other)
        inside.wait()
        try:
            yield
        finally:
            left.set()


@pytest.mark.slow
def test_a_compiled_model_runs_in_eager_inside_and_compiled_in_another_thread(model):
    runs, stop = [], threading.Event()

    def backend(graph, inputs):
        return lambda *args: runs.append(threading.get_ident()) or graph(*args)

    # Without fullgraph=True, for which torch counts frames of all threads together: pytorch/pytorch#185138.
    compiled, x = torch.compile(model, backend=backend), IMAGES[0]
    expected, alone = compiled(x), {name: run(model, x, name) for name in KINDS}

    @torch.no_grad()
    def other():
        while not stop.is_set():
            assert torch.equal(compiled(x), expected)

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(other)
        try:
            before, others = runs.count(threading.get_ident()), len(runs)
            for name in KINDS * 20:
                assert all(map(torch.allclose, run(compiled, x, name), alone[name]))
            assert runs.count(threading.get_ident()) == before
        finally:
            stop.set()
        served.result()
    assert len(runs) > others
    assert torch.equal(compiled(x), expected)
    assert runs.count(threading.get_ident()) == before + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*side effects happened")  # of the exporter
def test_a_model_is_compiled_and_exported_while_another_thread_is_inside(model):
    x = IMAGES[0]
    with in_another_thread(model, "capture", "disabled"):
        expected = model(x)
        for strict in (False, True):
            torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), expected)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    assert not torch.allclose(expected, run(model, x, "disabled")[0])


@pytest.mark.parametrize("others", [(), ("disabled",)])
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.slow
def test_a_context_in_a_compiled_function_is_refused(model, others):
    @torch.compile(backend="eager")
    def function(x, enter):
        with enter(model):
            return model(x)

    with in_another_thread(model, *others):
        for enter in (va.disabled, lambda model: va.padded(model, [(12, 12)])):
            with pytest.raises(RuntimeError, match="set_stance"):
                function(IMAGES[0], enter)
    assert (SCOPES.get(), type(torch._dynamo.eval_frame._stance.stance)) == ((), str)


@pytest.mark.parametrize("name", ["disabled", pytest.param("use_impl", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of torch.jit
def test_an_export_inside_keeps_the_context(model, name):
    with CONTEXTS[name](model):
        program, traced = torch.export.export(model, (IMAGES[0],)).module(), torch.jit.trace(model, IMAGES[0])
    for exported in (program, traced):
        torch.testing.assert_close(exported(IMAGES[0]), run(model, IMAGES[0], name)[0])
        assert not torch.allclose(exported(IMAGES[0]), model(IMAGES[0]))


def test_replicas_in_new_threads_are_rejected(model):
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]  # This simulates two GPUs.
    for context in CONTEXTS.values():
        with pytest.raises(ValueError, match=r"nn\.DataParallel.*model\.module"), context(parallel):
            pass
    assert len(run(nn.DataParallel(model), IMAGES[0], "capture")) == 3


def test_a_swapped_module_may_be_called_by_its_hooks():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, y = torch.randn(2, 1, 5, 8)
    expected = attention(x, x, x, need_weights=False)[0]
    va.swap_(attention)
    inner = []

    def call_again(block, args, output):
        if not inner:
            inner.append(1)
            attention(y, y, y, need_weights=False)

    attention.running_block.register_forward_hook(call_again)
    torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], expected)
    assert inner
    assert all(parameter.is_meta for parameter in attention.running_block.parameters())
