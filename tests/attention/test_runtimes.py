"""Blocks on inference runtimes: outputs equal to those of torch, and graphs without computed masks and indices."""

from importlib.util import find_spec

import page_sections
import pytest
import runtimes
import torch
from runtime_cases import NETWORKS, RUNTIMES, measure

from vision_attn.recipes.export import export_program

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by converters

#: A pattern with reshapes, one with gathered positions and a mask for each group, and one with overlapping keys.
BLOCKS = "Window(4)", "Window(4, shift=2)", "Neighborhood(3)"
#: Runtimes to test. Those that are not installed are skipped.
TESTED = "torch-export", "trace", "onnxruntime", "openvino", "openvino-trace", "executorch", "litert", "core-ml"


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_the_output_depends_on_queries_and_keys(name):
    network, (images, *_) = NETWORKS[name].make(), NETWORKS[name].images("batch")
    expected = network(images)
    for key, weight in network.named_parameters():
        if key.endswith("qkv.weight"):
            weight[: 2 * len(weight) // 3].zero_()
    assert (network(images) - expected).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("runtime", TESTED)
def test_a_runtime_returns_the_output_of_torch(runtime, name):
    if not find_spec(RUNTIMES[runtime].package.replace("-", "_")):
        pytest.skip(f"{RUNTIMES[runtime].package} is not installed")
    network = NETWORKS[name].make()
    for mode in RUNTIMES[runtime].modes[: 1 if runtime == "core-ml" else 2]:
        example, *others = NETWORKS[name].images(mode)
        difference = measure(runtime, network, example, others, mode)
        assert difference is None if runtime == "core-ml" else difference < runtimes.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BLOCKS[1:], "Halo(4, 1)", "RelPosTable, Window(4)", "Rope"])
def test_graphs_for_one_size_contain_masks_and_indices_as_constants(name):
    network, (images, *others) = NETWORKS[name].make(), NETWORKS[name].images("batch")
    with torch.no_grad():
        program = export_program(network, images, ("batch",))
        for batch in others:
            torch.testing.assert_close(program.module()(batch), network(batch))
    used = {node.target for node in program.run_decompositions({}).graph.nodes if node.op == "call_function"}
    names = {target.name().removeprefix("aten::").partition(".")[0] for target in used if hasattr(target, "name")}
    assert "index_select" in names or name == "Rope"
    # Some runtimes do not support these operators: see apple/coremltools#2517 for alias.
    assert not names & {"alias", "arange", "scatter", "index_put", "index", "logical_and", "eq", "lt", "ge", "cos"}


@pytest.mark.slow
def test_a_graph_for_any_size_pads_and_shifts_windows_if_necessary():
    windows = NETWORKS["Window(4, shift=2)"]
    network, (example, *others) = windows.make(), windows.images("size")
    one_window_high = torch.rand(2, 3, 16, 56, generator=torch.Generator().manual_seed(2))
    assert measure("onnxruntime", network, example, [*others, example, one_window_high], "size") < runtimes.TOLERANCE


def test_the_tables_contain_every_network_and_no_wrong_output():
    section = page_sections.read_section(runtimes.PAGE, "runtimes")
    assert "**wrong" not in section
    assert all(section.count(f"| `{name}` |") == len(runtimes.TABLES) for name in NETWORKS)
