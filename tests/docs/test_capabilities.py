"""PyTorch features by implementation, as listed in docs/implementations.md, and by block."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from impls import CPU_IMPLS, OPTIONS
from torch._dynamo.exc import Unsupported, UserError

import vision_attn as va

PAGE = (Path(__file__).resolve().parents[2] / "docs/implementations.md").read_text()

#: Warnings of the compiler, the exporter, vmap and pickle, and about small feature maps.
pytestmark = pytest.mark.filterwarnings("ignore")


# --- a block ----------------------------------------------------------------------------------------------------------


def make_block(impl, **options):
    torch.manual_seed(0)
    return va.Attention2d(16, 2, impl=impl, **options).eval()


def example(batch=2, height=7, width=9):
    return torch.randn(batch, 16, height, width, generator=torch.Generator().manual_seed(1))


def compiled(module, backend="aot_eager", **options):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend=backend, **options)


def output_and_gradient(function):
    x = example().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@torch.no_grad()
def compiles(block):
    torch.testing.assert_close(compiled(block)(example()), block(example()))


def compiles_with_its_backward_pass(block):
    torch.testing.assert_close(output_and_gradient(compiled(block)), output_and_gradient(block))


@torch.no_grad()
def compiles_once_for_all_sizes(block):
    graphs = []
    run = compiled(block, lambda graph, inputs: graphs.append(graph) or graph.forward, dynamic=True)
    for size in ((2, 7, 9), (3, 14, 21), (2, 21, 14), (4, 28, 35)):
        torch.testing.assert_close(run(example(*size)), block(example(*size)))
    assert len(graphs) == 1


@torch.no_grad()
def exports(block):
    torch.testing.assert_close(torch.export.export(block, (example(),)).module()(example()), block(example()))


@torch.no_grad()
def exports_with_any_batch_and_size(block, sizes=((7, 9), (3, 4), (24, 28))):
    # The sizes are the size of the position tables, a smaller one, and one with too many tokens for a dense bias.
    torch.compiler.reset()
    shapes = {"x": dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)}
    exported = torch.export.export(block, (example(2, *sizes[0]),), dynamic_shapes=shapes).module()
    for batch, size in enumerate(sizes, 2):
        torch.testing.assert_close(exported(example(batch, *size)), block(example(batch, *size)))


@torch.no_grad()
def runs_in_vmap(block):
    x = torch.stack([example(), -example(), 2 * example()])
    torch.testing.assert_close(torch.func.vmap(block)(x), torch.stack([block(images) for images in x]))


def has_gradients_by_sample(block):
    parameters = {name: value.detach() for name, value in block.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(block, parameters, (x[None],)).square().sum()

    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, example())
    for name, value in torch.func.grad(loss)(parameters, example()[1]).items():
        torch.testing.assert_close(by_sample[name][1], value)


def has_gradients_of_stacks(block):
    """``vmap`` over stacked parameters, as in torch's tutorial on model ensembling."""
    blocks = [copy.deepcopy(block).double() for _ in range(2)]
    for parameter in blocks[1].parameters():
        parameter.data.mul_(1.5)
    stacked, x = torch.func.stack_module_state(blocks), example().double()

    def loss(parameters, buffers):
        return torch.func.functional_call(block, (parameters, buffers), (x,)).square().sum()

    found = torch.vmap(torch.func.grad(loss))(*stacked)
    for index, one in enumerate(blocks):
        gradients = torch.autograd.grad(one(x).square().sum(), [*one.parameters()])
        torch.testing.assert_close([found[name][index] for name, _ in one.named_parameters()], gradients)


def has_forward_mode_gradients(block):
    _, rounded = torch.func.jvp(block, (example(),), (torch.ones_like(example()),))
    block, x, v = block.double(), example().double(), torch.ones_like(example()).double()
    _, tangent = torch.func.jvp(block, (x,), (v,))
    torch.testing.assert_close(rounded.double(), tangent, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(tangent, (block(x + 1e-6 * v) - block(x - 1e-6 * v)) / 2e-6, rtol=1e-5, atol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        y = block(torch.autograd.forward_ad.make_dual(x, v))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, tangent)


def has_gradients_of_gradients(block):
    x = example().double().requires_grad_()
    (gradient,) = torch.autograd.grad(block.double()(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].abs().sum() > 0


def has_a_hessian(block):
    block, x = block.double(), example(1, 2, 2).double()
    loss = lambda x: block(x).square().sum()  # noqa: E731
    product = (torch.func.hessian(loss)(x) * x).sum((4, 5, 6, 7))
    torch.testing.assert_close(product, torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1])


@torch.no_grad()
def is_copied_and_pickled(block):
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(copied(example()), block(example()))
        assert repr(copied) == repr(block)


def runs_on_the_meta_device(block):
    with torch.device("meta"):
        assert va.Attention2d(16, 2, impl=block.impl)(example().to("meta")).shape == example().shape


@torch.no_grad()
def is_traced_by_fx(block):
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(block))
    assert "call_module" in {node.op for node in traced.graph.nodes}
    torch.testing.assert_close(traced(example()), block(example()))


#: Checks by their names in the table.
CAPABILITIES = {
    "`torch.compile(fullgraph=True)`": compiles,
    "… with gradients on the CPU": compiles_with_its_backward_pass,
    "… with one graph for all sizes (`dynamic=True`)": compiles_once_for_all_sizes,
    "`torch.export`, one size": exports,
    "`torch.export`, dynamic batch and size": exports_with_any_batch_and_size,
    "`torch.func.vmap`": runs_in_vmap,
    "per-sample gradients (`vmap` of `grad`), on the CPU": has_gradients_by_sample,
    "forward-mode gradients (`jvp`), on the CPU": has_forward_mode_gradients,
    "second derivatives, on the CPU": has_gradients_of_gradients,
    "`deepcopy` and pickle": is_copied_and_pickled,
    "the meta device": runs_on_the_meta_device,
    "`torch.fx`, as part of a network": is_traced_by_fx,
}


#: Transforms of ``torch.func``, which blocks with every pattern and position encoding support.
TRANSFORMS = runs_in_vmap, has_gradients_by_sample, has_gradients_of_stacks, has_forward_mode_gradients, has_a_hessian
#: Errors of torch, einx or vision_attn for unsupported features.
ERRORS = {
    ("… with one graph for all sizes (`dynamic=True`)", "einx"): (AssertionError, "4 == 1"),  # one graph per size
    ("`torch.export`, dynamic batch and size", "einx"): (UserError, "specialized it to be a constant"),
    ("forward-mode gradients (`jvp`), on the CPU", "sdpa"): (NotImplementedError, "forward AD with _scaled_dot"),
    ("second derivatives, on the CPU", "sdpa"): (NotImplementedError, "bmm"),
    ("… with gradients on the CPU", "flex"): (Unsupported, "flex"),
    ("`torch.func.vmap`", "flex"): (ValueError, "flex"),
    ("per-sample gradients (`vmap` of `grad`), on the CPU", "flex"): (ValueError, "flex"),
    ("forward-mode gradients (`jvp`), on the CPU", "flex"): (ValueError, "flex"),
    ("second derivatives, on the CPU", "flex"): (ValueError, "flex"),
    ("the meta device", "flex"): (ValueError, "flex"),
}


#: Checks that take seconds, because they compile or export a block.
SLOW = compiles, compiles_with_its_backward_pass, compiles_once_for_all_sizes, exports, exports_with_any_batch_and_size


CELLS = [pytest.param(x, CPU_IMPLS, marks=[pytest.mark.slow] * (CAPABILITIES[x] in SLOW)) for x in CAPABILITIES]
CELLS += [pytest.param(name, ("flex",), marks=pytest.mark.slow) for name in CAPABILITIES]


@pytest.mark.parametrize(("name", "impls"), CELLS)
def test_capabilities_match_the_table(name, impls):
    for impl in impls:
        if (name, impl) in ERRORS:
            error, message = ERRORS[name, impl]
            with pytest.raises(error, match=message):
                CAPABILITIES[name](make_block(impl))
        else:
            CAPABILITIES[name](make_block(impl))


def test_the_table_lists_every_capability():
    assert f"| | {' | '.join(f'`{impl}`' for impl in va.implementations.IMPLS)} |" in PAGE
    for name in CAPABILITIES:
        cells = ["no" if (name, impl) in ERRORS else "yes" for impl in va.implementations.IMPLS]
        assert f"| {' | '.join([name, *cells])} |" in PAGE


NAMES = (*OPTIONS, "AttentionBlock2d", "LinearAttention2d", "TransformerBlock2d", "StridedAttention2d")
#: Blocks that are compiled and exported in the slow tests. The others are tested before a release.
ALWAYS = ("rows, convolution", "TransformerBlock2d", "decomposed")


def block_by_name(name):
    return make_block("auto", **OPTIONS[name]) if name in OPTIONS else getattr(va.blocks, name)(16, 2).eval()


@pytest.mark.parametrize("name", NAMES)
def test_every_pattern_position_and_block_runs_in_transforms_and_is_traced(name):
    for supports in (*TRANSFORMS, is_traced_by_fx):
        supports(block_by_name(name))


MARKS = {name: pytest.mark.slow if name in ALWAYS else pytest.mark.thorough for name in NAMES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def test_every_block_is_compiled_and_exported_with_any_size(name):
    block = block_by_name(name)
    compiles_with_its_backward_pass(block)
    # A graph of windows is exported with or without padding, so all sizes are multiples of the window size.
    multiples = re.match("shift|neigh|str", name)
    exports_with_any_batch_and_size(block, ((21, 28), (42, 14), (28, 35)) if multiples else ((7, 9), (3, 4), (24, 28)))


@pytest.mark.thorough
def test_every_implementation_is_compiled_to_machine_code():
    for block in map(make_block, va.implementations.IMPLS):
        with torch.no_grad():
            torch.testing.assert_close(compiled(block, "inductor")(example()), block(example()), rtol=1e-4, atol=1e-5)
