"""What the documentation says is so: its code runs, its output is the output, its links and commands lead somewhere."""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import speed
import tyro

import vision_attn
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.patterns import resolve_pattern
from vision_attn.networks import convert, figures
from vision_attn.networks.convert import equations
from vision_attn.networks.convert.row import TABLE
from vision_attn.tools import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for folder in ("docs", "examples", "weights") for page in (ROOT / folder).rglob("*.md")),
]
WEIGHTS = sorted((ROOT / "weights").rglob("*.safetensors"))
#: Imports from the extra `integrations`. Some of these packages change global state: such a page runs in a new process.
INTEGRATIONS = r"^(?:from|import) (diffusers|segmentation_models_pytorch|torchao|transformers|ultralytics)\b"
#: There nothing is fetched or installed, and little said.
QUIET = dict.fromkeys(("HF_HUB_OFFLINE", "YOLO_OFFLINE", "OMP_NUM_THREADS"), "1")
QUIET |= dict.fromkeys(("YOLO_AUTOINSTALL", "YOLO_VERBOSE"), "0")


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def relative(path):
    return str(path.relative_to(ROOT))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_and_output(text):
    """The blocks marked python, and of each what it prints: a block marked text that follows with nothing between."""
    return re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, flags=re.MULTILINE | re.DOTALL)


def numbers_apart(text):
    """A text without its decimal fractions, and these: the last digit may be another on another machine."""
    fraction = r"[+-]?\d+\.\d+"
    return re.sub(fraction, "…", text), [float(number) for number in re.findall(fraction, text)]


def integrations(path):
    return set(re.findall(INTEGRATIONS, "".join(blocks(path.read_text(), "python")), flags=re.MULTILINE))


def run_here(codes):
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, vars(sys.modules["page"]))
        yield out.getvalue()


def run_apart(codes):
    between = "— the next block —"
    program = f"\nprint({between!r})\n".join(["import socket; socket.getaddrinfo = None  # no network", *codes])
    environment = os.environ | QUIET | {"YOLO_CONFIG_DIR": os.getcwd()}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split(between + "\n")[1:]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.name == "README.md" else [pytest.mark.slow], id=relative(path))
        for path in DOCS
        if blocks(path.read_text(), "python") and path.name != "recipes.md"  # tests/test_recipes.py
    ],
)
def test_the_code_runs_and_prints_what_is_shown(path, tmp_path, monkeypatch):
    if missing := [name for name in integrations(path) if importlib.util.find_spec(name) is None]:
        pytest.skip(f'{" and ".join(missing)} not installed: pip install ".[integrations]"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))
    for table in (IMPLEMENTATIONS, TABLE):  # which the page for contributors adds to
        for name in ("matmul", "page.Theirs"):
            monkeypatch.setitem(table, name, None)
            del table[name]
    codes, outputs = zip(*code_and_output(path.read_text()), strict=True)
    for printed, expected in zip((run_apart if integrations(path) else run_here)(codes), outputs, strict=True):
        (words, numbers), (shown, shown_numbers) = numbers_apart(printed), numbers_apart(expected)
        assert words == shown
        assert numbers == pytest.approx(shown_numbers, rel=1e-3)


def first_cells(text, table):
    """What is in the first cells of a table, by how its header begins: each word in backquotes."""
    body = text.partition(table)[2].partition("\n\n")[0]
    return [
        word for cell in re.findall(r"^\| ([^|]*`.*?) \|", body, re.MULTILINE) for word in re.findall(r"`(.+?)`", cell)
    ]


def test_the_two_forms_are_those_that_run():
    for shown, impl in zip(blocks(page("implementations"), "py"), ("einx", "bmm"), strict=True):
        steps = [step for step in vars(IMPLEMENTATIONS[impl]).values() if step is not None]
        assert len(steps) == 5
        assert all(inspect.getsource(step) in shown for step in steps)


def test_the_lines_of_the_patterns_are_those_that_run_and_its_terms_and_options_are_there():
    rows = re.findall(r"^\| `([^`]+)` \| `(b n d [^`]+)` \| `(maps[^`]+)` \|", page("patterns"), flags=re.MULTILINE)
    assert len(rows) == 6
    for pattern, einx_line, torch_line in rows:
        line = resolve_pattern(eval(pattern, {"va": vision_attn})).for_rank(2).line
        assert (line.einx, line.torch) == (einx_line, torch_line)
    terms = [term for term in first_cells(page("patterns"), "| `position=` |") if term.startswith("va.")]
    assert len(terms) == 6
    for term in terms:
        vision_attn.Attention2d(16, 2, position=eval(term, {"va": vision_attn}))
    options = first_cells(page("patterns"), "| argument of `va.Attention2d` |")
    names = {word.partition("(")[0] for word in options} - {"forward"}
    assert len(names) >= 10
    assert names <= set(inspect.signature(vision_attn.Attention2d).parameters)


def test_the_tables_of_implementations_and_of_the_benchmark_are_complete():
    names = [f'"{name}"' for name in ("auto", *vision_attn.IMPLS)]
    assert sorted(first_cells(page("implementations"), "| `impl` |")) == sorted(names)
    assert sorted(first_cells(page("performance"), "| `--rows` |")) == sorted([*speed.ROWS, "all"])


def test_the_table_and_the_drawing_have_every_module():
    package = ROOT / "vision_attn"
    layers = {path.name: path for path in package.iterdir() if (path / "__init__.py").exists()}
    modules = {
        path.stem
        for layer in layers.values()
        for path in layer.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"__init__"}
    shared = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    text = page("CONTRIBUTING")
    assert sorted(first_cells(text, "| module |")) == sorted(modules)
    assert set(re.findall(r"^\| \*\*(\w+)\*\* \|", text, flags=re.MULTILINE)) == set(layers)
    drawn = re.findall(r'class="module"[^>]*>(\w+)<', (ROOT / "docs/package-layout.svg").read_text())
    assert sorted(drawn) == sorted([*modules, *shared])


def commands(text):
    """What a page tells its reader to type: lines of its blocks, and code in its prose."""
    lines = [line for block in blocks(text, "(?:text|sh)") for line in re.split(r"\n|&&", block)]
    lines += re.findall(r"`([^`\n]+)`", without_blocks(text))
    found = [shlex.split(line) for line in lines if re.match("vision-attn |python ", line)]
    return [words for words in found if "…" not in words]


def parse(name, *words):
    """A command line that is not carried out; what cannot be parsed ends the program."""
    if name in cli.PLAIN:
        tyro.cli(functools.wraps(cli.PLAIN[name])(lambda *arguments, **flags: None), args=words)
        return
    if name == "compare":
        _, words = tyro.cli(cli.commands.Compared, args=words, return_unknown_args=True)
    cli.commands.settings_from([*words[name == "evaluate" :]], name)


def test_the_commands_are_commands():
    for path in PAGES:
        for program, *arguments in commands(path.read_text()):
            if program == "python":
                assert (ROOT / arguments[0]).exists(), (path, arguments)
                if arguments[0] == "benchmarks/speed.py":
                    speed.build_parser().parse_args(arguments[1:])
            elif arguments[1:] in ([], ["--help"]):
                assert arguments[0] in cli.COMMANDS, path
            else:
                parse(*arguments)


def anchors(text):
    """Return the targets of links into a page: its headings, as renderers of Markdown name them, and its anchors."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), flags=re.MULTILINE)
    names = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([\w-]+)">', text))


def broken_links(path):
    for found in re.findall(r"\]\(([^)]+)\)|<img src=\"([^\"]+)\"", path.read_text()):
        target = "".join(found)
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        there = linked.exists() and (not anchor or anchor in anchors(linked.read_text()))
        if not there and not target.startswith("https://"):
            yield target


def test_links_lead_somewhere():
    assert {relative(path): found for path in PAGES if (found := list(broken_links(path)))} == {}


def test_every_page_can_be_found():
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in DOCS
        for target in re.findall(r"\]\(([^)]+\.md[^)]*)\)", path.read_text())
    }
    assert set(DOCS[1:]) <= linked
    navigation = set(re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {relative(path) for path in (ROOT / "docs").rglob("*.md")} <= navigation
    assert [target for target in navigation if not (ROOT / target).exists()] == []


def test_the_api_reference_is_complete():
    pages = [path.read_text() for path in sorted((ROOT / "docs/api").glob("*.md"))]
    paths = re.findall(r"^::: (\S+)$", "\n".join(pages), flags=re.MULTILINE)
    assert len(paths) == len(set(paths))
    owners = (path.rpartition(".") for path in paths)
    found = [getattr(importlib.import_module(owner), name) for owner, _, name in owners]
    public = [getattr(owner, name) for owner in (vision_attn, convert, equations, figures) for name in owner.__all__]
    assert {thing for thing in public if inspect.isfunction(thing) or inspect.isclass(thing)} <= set(found)


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda path: path.parent.name)
def test_a_card_names_the_file_it_belongs_to(weights):
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert f"`{digest}`" in (weights.parent / "README.md").read_text()
