"""What of torch works with which implementation: the table in the README is the expectation, cell by cell."""

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch

import vision_attn as va

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def make(impl, **options):
    torch.manual_seed(0)
    return va.Attention2d(16, 2, impl=impl, **options).eval()


def example(batch=2, height=7, width=9):
    return torch.randn(batch, 16, height, width, generator=torch.Generator().manual_seed(1))


def compiled(module, **options):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager", **options)


def compiles(block):
    x = example()
    with torch.no_grad():
        torch.testing.assert_close(compiled(block)(x), block(x))


def has_a_backward_pass(block):
    x = example().requires_grad_()
    other = make("bmm")
    (expected,) = torch.autograd.grad(other(x).sum(), x)
    (found,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(found, expected)


def compiles_with_its_backward_pass(block):
    x = example().requires_grad_()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    (found,) = torch.autograd.grad(compiled(block)(x).sum(), x)
    torch.testing.assert_close(found, expected)


def compiles_once_for_all_sizes(block):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    run = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for size in ((2, 7, 9), (3, 14, 21), (2, 21, 14), (4, 28, 35)):
            torch.testing.assert_close(run(example(*size)), block(example(*size)))
    assert len(graphs) == 1


def exports(block):
    with torch.no_grad():
        exported = torch.export.export(block, (example(),)).module()
        torch.testing.assert_close(exported(example()), block(example()))


def exports_with_any_batch_and_size(block, multiple=1):
    torch.compiler.reset()

    shapes = {"x": dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)}
    with torch.no_grad():
        exported = torch.export.export(block, (example(2, 3 * multiple, 4 * multiple),), dynamic_shapes=shapes).module()
        for batch, height, width in ((2, 3, 4), (5, 6, 2)):
            x = example(batch, height * multiple, width * multiple)
            torch.testing.assert_close(exported(x), block(x))


def maps_over_a_further_axis(block):
    x = torch.stack([example(), -example(), 2 * example()])
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(block)(x), torch.stack([block(one) for one in x]))


def gives_gradients_by_sample(block):
    parameters = {name: value.detach() for name, value in block.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(block, parameters, (x[None],)).square().sum()

    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, example())
    one = torch.func.grad(loss)(parameters, example()[1])
    for name, value in one.items():
        torch.testing.assert_close(by_sample[name][1], value)


def runs_on_parameters_from_outside(block):
    other = make("bmm")
    with torch.no_grad():
        parameters = {name: torch.randn_like(value) for name, value in block.named_parameters()}
        other.load_state_dict(parameters)
        torch.testing.assert_close(torch.func.functional_call(block, parameters, (example(),)), other(example()))


def has_forward_mode_gradients(block):
    _, tangent = torch.func.jvp(block, (example(),), (torch.ones_like(example()),))
    with torch.no_grad():
        difference = block(example() + 1e-2) - block(example() - 1e-2)
    torch.testing.assert_close(tangent, difference / 2e-2, rtol=1e-2, atol=1e-3)


def survives_deepcopy_and_pickle(block):
    with torch.no_grad():
        for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            assert torch.equal(other(example()), block(example()))
            assert repr(other) == repr(block)


def is_made_and_run_on_the_meta_device(block):
    with torch.device("meta"):
        block = va.Attention2d(16, 2, impl=block.impl)
    with torch.no_grad():
        assert block(example().to("meta")).shape == example().shape


def is_traced_by_fx(block):
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(block))
    with torch.no_grad():
        torch.testing.assert_close(traced(example()), block(example()))


def drops_weights(block):
    dropping = va.Attention2d(16, 2, impl=block.impl, attn_drop=0.5).train()
    with torch.no_grad():
        assert not torch.equal(dropping(example()), dropping(example()))


#: By their names in the README.
CAPABILITIES = {
    "gradients on the CPU": has_a_backward_pass,
    "`attn_drop`": drops_weights,
    "`torch.compile(fullgraph=True)`": compiles,
    "… and its gradients on the CPU": compiles_with_its_backward_pass,
    "… one graph for all sizes (`dynamic=True`)": compiles_once_for_all_sizes,
    "`torch.export`, one size": exports,
    "`torch.export`, any batch and size": exports_with_any_batch_and_size,
    "`torch.func.functional_call`": runs_on_parameters_from_outside,
    "`torch.func.vmap`": maps_over_a_further_axis,
    "gradients by sample (`vmap` of `grad`), on the CPU": gives_gradients_by_sample,
    "forward-mode gradients (`jvp`), on the CPU": has_forward_mode_gradients,
    "`deepcopy` and pickle": survives_deepcopy_and_pickle,
    "the meta device": is_made_and_run_on_the_meta_device,
    "`torch.fx`, inside of a network": is_traced_by_fx,
}


def table_of_the_readme():
    """What the README says works: ``{(capability, impl): bool}``."""
    lines = [line for line in README.splitlines() if line.startswith("| ") and line.count("|") == len(va.IMPLS) + 2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = next(row[1:] for row in rows if row[1:] == [f"`{impl}`" for impl in va.IMPLS])
    table = {}
    for name, *cells in rows:
        if name in CAPABILITIES:
            assert set(cells) <= {"yes", "no"}, name
            table.update({(name, impl.strip("`")): cell == "yes" for impl, cell in zip(heads, cells, strict=True)})
    return table


def works(capability, block):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has things to say about its own parts
        try:
            capability(block)
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_table_of_the_readme_is_so(name, impl):
    expected = table_of_the_readme()[name, impl]
    error = works(CAPABILITIES[name], make(impl))
    assert (error is None) == expected, error


def test_the_table_of_the_readme_is_whole():
    assert set(table_of_the_readme()) == {(name, impl) for name in CAPABILITIES for impl in va.IMPLS}


OPTIONS = {
    "shifted window, table": {"pattern": va.Window(7, shift=3), "position": va.RelPosTable()},
    "decomposed": {"position": va.RelPosDecomposed(feat_size=(7, 7))},
    "causal, table": {"position": va.RelPosTable(feat_size=(7, 7)), "causal": True},
    "neighborhood, decomposed": {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
    "rotary, shared heads": {"position": va.Rope2d(), "num_kv_heads": 1, "qk_norm": True},
    "rows, convolution": {"pattern": "rows", "position": va.ConditionalPos(3), "output_gate": True},
    "stripes, waves": {"pattern": va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=7), "position": va.SinCos()},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "capability",
    [
        compiles,
        compiles_with_its_backward_pass,
        maps_over_a_further_axis,
        survives_deepcopy_and_pickle,
        is_traced_by_fx,
    ],
)
def test_the_default_implementation_does_it_with_every_pattern_and_term(capability, options):
    error = works(capability, make("sdpa", **OPTIONS[options]))
    assert error is None, error


@pytest.mark.parametrize("options", OPTIONS)
def test_the_default_implementation_exports_with_every_pattern_and_term(options):
    fixed = "pattern" in OPTIONS[options] and OPTIONS[options]["pattern"] != "rows"
    multiple = 7 if fixed else 1  # whole windows: whether there is padding is a fact of the graph
    error = works(lambda block: exports_with_any_batch_and_size(block, multiple), make("sdpa", **OPTIONS[options]))
    assert error is None, error


@pytest.mark.slow
@pytest.mark.parametrize("impl", va.IMPLS)
def test_compiled_to_code_it_gives_the_same(impl):
    block, x = make(impl), example()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x), rtol=1e-4, atol=1e-5)
