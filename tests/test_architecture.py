"""Imports point one way: a room uses only the rooms below it, and importing the package loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import vision_attn

PACKAGE = Path(vision_attn.__file__).parent

#: From the foundation up. A room that is new goes in here, and so decides what it may use.
ROOMS = (
    "reference",
    "version",
    "checks",
    "text",
    "errors",
    "patterns",
    "equations",
    "attend",
    "position",
    "blocks",
    "insertion",
    "checkpoints",
    "convert",
    "models",
    "inspection",
    "capture",
    "contribution",
    "figures",
    "explorer",
    "training",
    "comparison",
    "export",
    "benchmark",
    "cli",
    "__main__",
)


def imported_rooms(source):
    """The rooms that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module] if node.module != "vision_attn" else [f"vision_attn.{a.name}" for a in node.names]
        else:
            continue
        # The package itself, or a name that it makes and that is no room's, stands above every room.
        yield from ((f"{name}.").split(".")[1] for name in names if name.split(".")[0] == "vision_attn")


def test_the_picture_has_the_rooms_in_their_order():
    picture = ElementTree.parse(Path(__file__).resolve().parents[1] / "docs" / "rooms.svg")
    rooms = [element for element in picture.iter("{http://www.w3.org/2000/svg}text") if element.get("class") == "room"]
    rooms.sort(key=lambda element: (-float(element.get("y")), float(element.get("x"))))  # the lowest row first
    assert [element.text for element in rooms] == [x for x in ROOMS if x not in ("reference", "version", "__main__")]


def upward_imports(room, source):
    allowed = ROOMS[: ROOMS.index(room) + 1] if room != "reference" else ()
    return sorted(set(imported_rooms(source)) - set(allowed))


def test_every_room_has_its_place():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == set(ROOMS)


def test_no_import_points_up():
    upward = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__" and (found := upward_imports(room, path.read_text())):
            upward[str(path.relative_to(PACKAGE))] = found
    assert upward == {}


@pytest.mark.parametrize(
    ("room", "source", "upward"),
    [
        ("attend", "from vision_attn.attention.blocks import Attention2d", ["blocks"]),
        ("attend", "import vision_attn.tools.training.loop", ["training"]),
        ("blocks", "def f():\n    from vision_attn import capture", ["capture"]),
        ("reference", "import vision_attn.attention.reference", ["reference"]),
        ("blocks", "from vision_attn.attention.implementations import attend", []),
        ("cli", "import vision_attn", [""]),
        ("cli", "def f():\n    from vision_attn import __version__", ["__version__"]),
    ],
)
def test_an_import_that_points_up_is_found(room, source, upward):
    assert upward_imports(room, source) == upward


def test_the_package_loads_nothing_heavy_opens_no_connection_and_is_a_program():
    """In one process, since importing torch is most of what it does."""
    heavy = ("einx", "timm", "matplotlib", "accelerate", "sklearn", "torchvision", "keras")
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


def test_every_public_name_exists():
    for name in vision_attn.__all__:
        assert getattr(vision_attn, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'atention'"):
        vision_attn.atention  # noqa: B018
