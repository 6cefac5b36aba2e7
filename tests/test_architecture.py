"""Imports between the layers of the package, imported libraries, and documentation of public names."""

import ast
import inspect
import pickle
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vision_attn
from vision_attn import errors
from vision_attn.networks.capture import figures

PACKAGE = Path(vision_attn.__file__).parent
#: Layers from bottom to top. Every folder of the package is a layer; single modules are below all layers.
LAYERS = ("attention", "networks", "recipes")
MODULES = {"__init__", "__main__", "checks", "cli", "errors", "text", "version"}
#: Modules above all layers, which make names public.
NAMES = {"blocks", "convert", "implementations"}
#: Modules that users import. Recipes import these, each other and the command line.
PUBLIC_MODULES = {*NAMES, "errors", "networks.models"}


def imports(source):
    """Yield all names that a file imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # A name that is imported from a layer or from the package can be a module.
            is_module = node.module.count(".") > 1 or not node.module.startswith("vision_attn")
            yield from [node.module] if is_module else (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of_ours(source):
    return [name.split(".")[1:] for name in imports(source) if name.split(".")[0] == "vision_attn"]


def upward(layer, source):
    """Return imports from the layers above, or from the package itself, which is above all layers."""
    below = MODULES - {"cli", "__main__"}
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], *below} if layer in LAYERS else below
    return sorted({".".join(parts) for parts in imports_of_ours(source) if not parts or parts[0] not in allowed})


def test_layers_import_only_lower_layers():
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(LAYERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == MODULES | NAMES
    found = {}
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer not in {"__main__", "cli", "recipes", *NAMES} and (names := upward(layer, path.read_text())):
            found[str(path.relative_to(PACKAGE))] = names
    assert found == {}
    assert upward("networks", "def f():\n    from vision_attn.recipes.train import train") == ["recipes.train"]


def not_public(source):
    """Return the imports and attributes of the package in a recipe that are not public."""
    found = []
    for parts in imports_of_ours(source):
        path = ".".join(parts)
        allowed = parts[:1] in (["recipes"], ["cli"]) or any(f"{path}.".startswith(f"{m}.") for m in PUBLIC_MODULES)
        if parts and not allowed and path not in vision_attn.__all__:
            found.append(path)
    names = {"vision_attn", "va"}
    for node in ast.walk(ast.parse(source)):
        is_ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
        if is_ours and node.attr not in {*vision_attn.__all__, "__version__"}:
            found.append(node.attr)
    return sorted(found)


def test_recipes_and_the_command_line_use_public_names_only():
    paths = [PACKAGE / "cli.py", *(PACKAGE / "recipes").glob("*.py")]
    assert {path.name: names for path in paths if (names := not_public(path.read_text()))} == {}
    assert not_public("import vision_attn as va\nva.networks") == ["networks"]


@pytest.mark.parametrize("layer", LAYERS)
def test_packages_of_a_layer_have_no_circular_imports(layer):
    needs = {}
    for path in (PACKAGE / layer).rglob("*.py"):
        package = path.relative_to(PACKAGE / layer).parts[0].removesuffix(".py")
        if package != "__init__":
            names = imports_of_ours(path.read_text())
            others = {parts[1] for parts in names if parts[:1] == [layer] and len(parts) > 1}
            needs.setdefault(package, set()).update(others - {package})
    TopologicalSorter(needs).prepare()  # raises an error for circular imports


def test_lowest_layer_requires_only_torch_and_no_function_shadows_its_module():
    sources = [path.read_text() for path in (PACKAGE / "attention").rglob("*.py")]
    names = {name.split(".")[0] for source in sources for name in imports(source)}
    assert names - sys.stdlib_module_names <= {"vision_attn", "torch", "numpy", "einx"}
    for path in (path for path in PACKAGE.rglob("*.py") if path.parent.name != "recipes"):  # named like their commands
        functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert (path.parent.name if path.stem == "__init__" else path.stem) not in functions


OWNERS = [vision_attn, *(getattr(vision_attn, name) for name in sorted(NAMES)), figures]
PUBLIC = {f"{owner.__name__}.{name}": getattr(owner, name) for owner in OWNERS for name in owner.__all__}
#: The public names. A change of this list is a decision.
FLAT = """
    AbsPos Attention2d AttentionBlock2d ConditionalPos Grid Halo Neighborhood Pattern RelPosDecomposed RelPosTable Rope
    SinCos Window blocks capture check_optimizer context contribution convert disabled errors explore export_model
    freeze_backbone_ implementations insert_ inserted_blocks load_adapter_ load_checkpoint_ load_model measure_blocks
    padded parameter_groups remove_ replace_ save_adapter save_model set_impl_ stage_names swap_ timm_layer
    unfreeze_backbone_ unswap_ use_impl
"""
DEEPER = {
    "blocks": "Attention1d Attention2d Attention3d AttentionBlock1d AttentionBlock2d AttentionBlock3d AugmentedConv2d "
    "LinearAttention2d StridedAttention2d TransformerBlock2d",
    "convert": "attention_equations attention_pattern from_layer projection_equation",
    "errors": "CheckpointError ConversionError DataError ExportError Interrupted SiteError TrainingError "
    "VisionAttnError",
    "implementations": "IMPLS register_impl",
}


def test_public_names_are_those_of_the_list():
    assert vision_attn.__all__ == FLAT.split()
    for name, names in DEEPER.items():
        module = getattr(vision_attn, name)
        assert module.__all__ == names.split()
        assert [public for public in module.__all__ if f"`{public}`" not in module.__doc__] == []


SUGGESTIONS = [
    *(("insert", "va.insert_"), ("Attention1d", "va.blocks.Attention1d"), ("rope", "va.Rope")),
    *(("MultiHeadAttention", "va.Attention2d"), ("IMPLS", "va.implementations.IMPLS")),
    *(("train", "vision_attn.recipes.train.train"), ("attention_figure", "AttentionMap.figure")),
    *(("atention2d", "va.Attention2d or"), ("freeze", "va.freeze_backbone_"), ("Attention", "va.Attention2d or")),
]


@pytest.mark.parametrize(("name", "suggestion"), SUGGESTIONS)
def test_other_names_are_answered_by_the_closest_public_names(name, suggestion):
    with pytest.raises(AttributeError, match=f"no attribute {name!r}. Did you mean {suggestion}"):
        getattr(vision_attn, name)


def undocumented(thing):
    """Return the arguments that are missing in the docstring of a function or class, and a missing example."""
    doc = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return [] if doc else ["a docstring"]
    # A docstring can refer to another docstring: "Arguments and errors are those of :class:`Attention2d`."
    elsewhere = "are those of" in doc or "Attributes" in doc or hasattr(thing, "__dataclass_fields__")
    parameters = [] if elsewhere else [name for name in inspect.signature(thing).parameters if not name.startswith("_")]
    missing = [name for name in parameters if f"{name}: " not in doc]
    return missing if ">>>" in doc else [*missing, "an example"]


def test_public_names_are_documented_with_an_example():
    things = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing) or inspect.isclass(thing)}
    assert {name: parts for name, thing in things.items() if (parts := undocumented(thing))} == {}
    assert undocumented(lambda x, y: None) == ["x", "y", "an example"]


def test_errors_share_a_base_class_and_can_be_pickled():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)} - {errors.Interrupted}
    assert all(issubclass(kind, errors.VisionAttnError) for kind in kinds)
    made = [errors.Interrupted(2, "saved"), *(kind("first", "second") for kind in kinds - {errors.VisionAttnError})]
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
