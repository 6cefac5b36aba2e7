"""Three floors: imports point down, which is read off the folders; importing the package loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vision_attn

PACKAGE = Path(vision_attn.__file__).parent
#: From the ground up. Every folder of the package is a floor, and what is no folder lies beneath all of them.
FLOORS = ("attention", "networks", "tools")
BESIDE = {"__init__", "__main__", "checks", "errors", "text", "version"}


def imported(source):
    """The modules of ours that a file imports, wherever in it the import stands, as their parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # What is imported from a floor or from the package itself may be a module.
            whole = node.module.count(".") > 1 or not node.module.startswith("vision_attn")
            names = [node.module] if whole else [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (parts[1:] for parts in (name.split(".") for name in names) if parts[0] == "vision_attn")


def upward(floor, source):
    """What a file on a floor imports from above it, or from the package itself, which is above all."""
    allowed = {*FLOORS[: FLOORS.index(floor) + 1], *BESIDE} if floor in FLOORS else BESIDE
    return sorted({".".join(parts) for parts in imported(source) if not parts or parts[0] not in allowed})


def test_there_are_three_floors_and_little_beside_them():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(FLOORS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == BESIDE


def test_no_import_points_up():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        floor = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if floor != "__main__" and (names := upward(floor, path.read_text())):
            found[str(path.relative_to(PACKAGE))] = names
    assert found == {}


@pytest.mark.parametrize(
    ("floor", "source", "names"),
    [
        ("attention", "from vision_attn.networks import insertion", ["networks.insertion"]),
        ("attention", "import vision_attn.tools.training.loop", ["tools.training.loop"]),
        ("networks", "def f():\n    from vision_attn.tools.cli import main", ["tools.cli"]),
        ("networks", "from vision_attn import capture", ["capture"]),
        ("tools", "import vision_attn", [""]),
        ("errors", "from vision_attn.attention.blocks import Attention2d", ["attention.blocks"]),
        ("tools", "from vision_attn.networks.insertion import insert_", []),
        ("attention", "from vision_attn.checks import check_type", []),
    ],
)
def test_an_import_that_points_up_is_found(floor, source, names):
    assert upward(floor, source) == names


def cycle(needs):
    """Rooms that need each other in a circle, if there are any: ``needs`` has the rooms that each imports."""
    left = {room: set(others) for room, others in needs.items()}
    while free := [room for room, others in left.items() if not others & left.keys()]:
        for room in free:
            del left[room]
    return sorted(left)


@pytest.mark.parametrize("floor", FLOORS)
def test_the_rooms_of_a_floor_import_each_other_one_way(floor):
    needs = {}
    for path in (PACKAGE / floor).rglob("*.py"):
        room = path.relative_to(PACKAGE / floor).parts[0].removesuffix(".py")
        if room != "__init__":
            others = {parts[1] for parts in imported(path.read_text()) if parts[:1] == [floor] and len(parts) > 1}
            needs.setdefault(room, set()).update(others - {room})
    assert cycle(needs) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "d"]


def test_the_ground_floor_needs_torch_alone():
    names = {
        name.split(".")[0]
        for path in (PACKAGE / "attention").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert names - sys.stdlib_module_names <= {"vision_attn", "torch", "numpy", "einx"}


def test_no_function_shares_the_name_of_its_module():
    same = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name == (path.parent.name if path.stem == "__init__" else path.stem)
    ]
    assert same == []


def test_the_package_loads_nothing_heavy_opens_no_connection_and_is_a_program():
    heavy = ("torch", "einx", "timm", "matplotlib", "accelerate", "sklearn", "torchvision", "keras")
    code = f"""
import runpy, sys
sys.addaudithook(lambda event, arguments: print(event) if event.startswith("socket.") else None)
import vision_attn
print([name for name in {heavy} if name in sys.modules])
sys.argv = ["", "--version"]
runpy.run_module("vision_attn", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *events, loaded, version = done.stdout.splitlines()
    assert set(events) <= {"socket.gethostname"}
    assert loaded == "[]"
    assert (version, done.stderr) == (f"vision-attn {vision_attn.__version__}", "")


def test_the_public_names_are_few_and_there():
    assert len(vision_attn.__all__) <= 55
    for name in vision_attn.__all__:
        assert getattr(vision_attn, name) is not None
    with pytest.raises(AttributeError, match="atention"):
        vision_attn.atention  # noqa: B018
