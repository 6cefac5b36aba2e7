"""Contexts and swapped models in several threads and tasks: each answer equals that of a run alone.

``capture``, ``use_impl`` and ``disabled`` act in the thread or task that entered them, and store nothing on the model.
"""

import asyncio
import copy
import io
import pickle
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import timm
import torch
from torch import nn

import vision_attn as va
from vision_attn.attention.implementations import IMPLEMENTATIONS, attend
from vision_attn.attention.scopes import SCOPES

WORKERS = 4


@pytest.fixture(scope="module", autouse=True)
def negative():
    """An implementation whose result shows that it ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMPLEMENTATIONS, "negative", None)  # so that it is forgotten after the tests
        del IMPLEMENTATIONS["negative"]
        va.register_impl("negative", lambda q, k, v, **options: -attend(q, k, v, impl="bmm", **options))
        yield


@pytest.fixture(autouse=True)
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), va.AttentionBlock2d(8, 2, gate_init=1.0))
    va.insert_(model, names="1", num_heads=2, gate_init=1.0, example_input=(1, 3, 12, 12))
    return model.eval()


def plain(model, x):
    return [model(x)]


def captured(model, x):
    with va.capture(model) as maps:
        y = model(x)
    assert list(maps) == ["1.inserted.attn", "3.attn"]
    return [y, *(one.weights for one in maps.values())]


def disabled(model, x):
    with va.disabled(model):
        return [model(x)]


def one_disabled(model, x):
    with va.disabled(model, "1"):
        return [model(x)]


def by_another_impl(model, x):
    with va.use_impl(model, "negative"):
        return [model(x)]


def all_at_once(model, x):
    with va.use_impl(model, "negative"), va.disabled(model, "3"):
        return captured(model, x)


def images(count=3):
    """Images of different sizes: each needs its own masks and offsets."""
    return [torch.rand(1, 3, 12 + size, 14, generator=torch.Generator().manual_seed(size)) for size in range(count)]


def wrong_answers(model, ways, calls):
    """Serve calls by several threads, each in the next of the ways; return how many answers are not those alone."""
    inputs = images()
    with torch.no_grad():
        alone = {way: [way(model, x) for x in inputs] for way in ways}

    def serve(number):
        way, at = ways[number % len(ways)], number // len(ways) % len(inputs)
        with torch.no_grad():
            answer = way(model, inputs[at])
        expected = alone[way][at]
        return len(answer) == len(expected) and all(map(torch.equal, answer, expected))

    with ThreadPoolExecutor(WORKERS) as server:
        return list(server.map(serve, range(calls))).count(False)


SERVERS = {
    "capture": [captured, plain],
    "disabled": [disabled, plain, one_disabled],
    "use_impl": [by_another_impl, plain],
    "all of them": [all_at_once, plain, captured, disabled, by_another_impl],
}


@pytest.mark.parametrize("calls", [100, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SERVERS)
def test_every_thread_of_a_server_gets_its_own_answer(model, name, calls):
    assert wrong_answers(model, SERVERS[name], calls) == 0
    answers = [way(model, images()[0])[0] for way in (plain, disabled, one_disabled, by_another_impl, all_at_once)]
    assert len({round(y.double().sum().item(), 6) for y in answers}) == len(answers)  # one for another would be seen


@pytest.mark.parametrize("calls", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_thread_of_a_server_runs_a_swapped_model(calls):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", depth=2, img_size=32, embed_dim=16, num_heads=4, num_classes=5).eval()
    inputs = [torch.rand(batch, 3, 32, 32) for batch in (1, 2, 3)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    va.swap_(model)
    with torch.no_grad(), va.capture(model) as maps:
        model(inputs[0])
    weights = maps["blocks.1.attn"].weights

    def serve(number):
        x, y = inputs[number % 3], expected[number % 3]
        with torch.no_grad(), va.capture(model) if number % 3 == 0 else nullcontext() as maps:
            close = torch.allclose(model(x), y, atol=1e-5)
        return close and (maps is None or torch.equal(maps["blocks.1.attn"].weights, weights))

    with ThreadPoolExecutor(WORKERS) as server:
        assert list(server.map(serve, range(calls))).count(False) == 0


def test_tasks_of_one_thread_have_their_own_contexts(model):
    x, alone = images()[0], {way: way(model, images()[0]) for way in (plain, captured, disabled, by_another_impl)}

    async def run(context, expected):
        with context as maps:
            await asyncio.sleep(0.01)  # the other tasks enter theirs
            y = model(x)
            await asyncio.sleep(0.01)
        assert torch.equal(y, alone[expected][0])
        return maps

    async def serve():
        contexts = (va.capture(model), captured), (va.disabled(model), disabled), (nullcontext(), plain)
        impl = (va.use_impl(model, "negative"), by_another_impl)
        return await asyncio.gather(*(run(*each) for each in (*contexts, impl)))

    with torch.no_grad():
        maps, *_ = asyncio.run(serve())
    assert torch.equal(maps["3.attn"].weights, alone[captured][2])


def test_a_task_that_outlives_the_block_leaves_it(model):
    x = images()[0]

    async def later(left):
        inside = model(x)
        await left.wait()
        return inside, model(x)

    async def serve():
        left = asyncio.Event()
        with va.disabled(model):
            task = asyncio.create_task(later(left))
            await asyncio.sleep(0)
            threaded = await asyncio.to_thread(model, x)
        left.set()
        return threaded, *await task

    with torch.no_grad():
        threaded, inside, after = asyncio.run(serve())
        assert torch.equal(inside, disabled(model, x)[0])
        assert torch.equal(threaded, inside)
        assert torch.equal(after, model(x))


def test_contexts_may_end_in_any_order(model):
    x = images()[0]
    with torch.no_grad():
        expected, expected_maps = plain(model, x)[0], captured(model, x)
        first, second = va.capture(model), va.capture(model, sites="3")
        maps, some = first.__enter__(), second.__enter__()
        model(x)
        assert (list(maps), list(some)) == (["1.inserted.attn", "3.attn"], ["3.attn"])
        first.__exit__(None, None, None)
        kept = dict(maps)
        model(images()[1])
        assert dict(maps) == kept
        assert some["3.attn"].map_size == (9, 10)
        second.__exit__(None, None, None)
        outer, inner = va.use_impl(model, "negative"), va.use_impl(model, "bmm")
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert model[3].attn.impl == "bmm"
        inner.__exit__(None, None, None)
        assert torch.equal(model(x), expected)
    assert torch.equal(maps["3.attn"].weights, expected_maps[2])
    assert SCOPES.get() == ()


@contextmanager
def inside_in_another_thread(*contexts):
    """Another thread is inside of contexts for as long as this one is inside of the ``with`` block."""
    entered, left = threading.Event(), threading.Event()

    def other():
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        left.set()
        thread.join()


def test_contexts_of_threads_that_overlap_leave_compiled_models_compiled(model):
    """torch has one stance for all threads: exits in the order of the entries left it at "force_eager"."""
    calls, others, first = [], ExitStack(), va.capture(model)
    compiled = torch.compile(model, backend=lambda graph, inputs: calls.append(1) or graph.forward)
    first.__enter__()
    others.enter_context(inside_in_another_thread(lambda: va.capture(model)))
    first.__exit__(None, None, None)
    others.close()
    with torch.no_grad():
        compiled(images()[0])
    assert calls


def test_a_compiled_model_runs_in_eager_inside_and_compiled_in_another_thread(model):
    runs, stop, errors = [], [], []

    def backend(graph, inputs):
        return lambda *args: runs.append(threading.get_ident()) or graph(*args)

    compiled, x = torch.compile(model, fullgraph=True, backend=backend), images()[0]
    with torch.no_grad():
        expected = compiled(x)
        alone = {way: way(model, x) for way in (captured, disabled, by_another_impl)}

    def other():
        try:
            with torch.no_grad():
                while not stop:
                    assert torch.equal(compiled(x), expected)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        before, others = runs.count(threading.get_ident()), len(runs)
        for way in [*alone] * 20:
            with torch.no_grad():
                assert all(map(torch.allclose, way(compiled, x), alone[way]))
        assert runs.count(threading.get_ident()) == before
    finally:
        stop.append(1)
        thread.join()
    assert not errors
    assert len(runs) > others
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)
    assert runs.count(threading.get_ident()) == before + 1


def test_a_model_is_compiled_and_exported_while_another_thread_is_inside(model):
    x = images()[0]
    with inside_in_another_thread(lambda: va.capture(model), lambda: va.disabled(model)), torch.no_grad():
        expected = model(x)
        for strict in (False, True):
            torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), expected)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    assert not torch.allclose(expected, disabled(model, x)[0])


def test_an_export_inside_has_what_the_context_says(model):
    x = images()[0]
    with torch.no_grad():
        for context, way in ((va.disabled, disabled), (lambda model: va.use_impl(model, "negative"), by_another_impl)):
            with context(model):
                program = torch.export.export(model, (x,)).module()
                with warnings.catch_warnings(action="ignore"):  # it is deprecated
                    traced = torch.jit.trace(model, x)
            torch.testing.assert_close(program(x), way(model, x)[0])
            torch.testing.assert_close(traced(x), way(model, x)[0])
            assert not torch.allclose(program(x), model(x))


CONTEXTS = {
    "capture": lambda model: va.capture(model),
    "disabled": lambda model: va.disabled(model),
    "use_impl": lambda model: va.use_impl(model, "negative"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_copies_and_pickles_made_inside_are_ordinary_networks(model, name):
    x = images()[0]
    state = [(type(module), {**vars(module)}) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with CONTEXTS[name](model) as maps, torch.no_grad():
        assert [(type(module), vars(module)) for module in model.modules()] == state
        assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
        assert not torch.nn.modules.module._has_any_global_hook()
        copied, pickled, file = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        others = copied, pickled, torch.load(file, weights_only=False)
        inside = [other(x) for other in others]
        assert not (name == "capture" and maps)
    with torch.no_grad():
        assert all(torch.equal(y, model(x)) for y in inside)
        assert all(torch.equal(other(x), model(x)) for other in others)
    assert {other[3].attn.impl for other in others} == {"auto"}
    torch.save(copied, io.BytesIO())


def test_an_implementation_that_is_set_inside_stays(model):
    model = copy.deepcopy(model)
    with va.use_impl(model, "einsum"):
        assert va.set_impl_(model, "bmm") == 2
        assert [one.impl for one in (model[3].attn, va.inserted_blocks(model)["1"].attn)] == ["einsum", "einsum"]
    assert [one.impl for one in (model[3].attn, va.inserted_blocks(model)["1"].attn)] == ["bmm", "bmm"]


def test_errors_leave_no_context(model):
    for context in (va.capture(model), va.disabled(model), va.use_impl(model, "bmm")):
        with pytest.raises(RuntimeError, match="on purpose"), context:
            raise RuntimeError("on purpose")
    assert SCOPES.get() == ()


def test_replicas_in_new_threads_are_refused(model):
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]  # as on two GPUs
    for context in (va.capture, va.disabled, lambda parallel: va.use_impl(parallel, "bmm")):
        with pytest.raises(ValueError, match=r"nn.DataParallel on several GPUs. Pass model.module"), context(parallel):
            pass
    with torch.no_grad(), va.capture(nn.DataParallel(model)) as maps:
        nn.DataParallel(model)(images()[0])
    assert len(maps) == 2


def test_a_swapped_module_may_be_called_by_itself_and_by_its_hooks():
    """The inner call has the same weights, the outer call keeps them, and the block has none afterwards."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, y = torch.randn(2, 1, 5, 8)
    expected = attention(x, x, x, need_weights=False)[0]
    va.swap_(attention)
    inner = []

    def call_again(block, args, output):
        if not inner:
            inner.append(1)
            attention(y, y, y, need_weights=False)

    handle = attention.running_block.register_forward_hook(call_again)
    torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], expected)
    handle.remove()
    assert inner
    assert all(parameter.is_meta for parameter in attention.running_block.parameters())
