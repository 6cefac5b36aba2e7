"""What the documentation says is so: its code runs, its output is the output, its links and commands lead somewhere."""

import contextlib
import hashlib
import importlib.util
import inspect
import io
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest

from vision_attn.tools import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
#: The pages of the documentation, whose code runs.
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for room in ("docs", "examples", "weights", "tests") for page in (ROOT / room).rglob("*.md")),
]
WEIGHTS = sorted((ROOT / "weights").rglob("*.safetensors"))


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def relative(path):
    return str(path.relative_to(ROOT))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def code_and_output(text):
    """The blocks marked python, and of each what it prints: a block marked text that follows with nothing between."""
    found = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, flags=re.MULTILINE | re.DOTALL)
    return [code for code, _ in found], [output for _, output in found]


def numbers_apart(text):
    """A text without its decimal fractions, and these: the last digit may be another on another machine."""
    fraction = r"[+-]?\d+\.\d+"
    return re.sub(fraction, "…", text), [float(number) for number in re.findall(fraction, text)]


def check_page(path):
    """Run the blocks of a page, each after the others as one file, and compare what they print with what is shown."""
    names = vars(sys.modules.setdefault("page", types.ModuleType("page")))
    for code, expected in zip(*code_and_output(path.read_text()), strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        (words, numbers), (shown, shown_numbers) = numbers_apart(out.getvalue()), numbers_apart(expected)
        assert words == shown
        assert numbers == pytest.approx(shown_numbers, rel=1e-3)


@pytest.mark.parametrize(
    "path", [path for path in DOCS if blocks(path.read_text(), "python") and path.stem != "CONTRIBUTING"], ids=relative
)
def test_the_code_runs_and_prints_what_is_shown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))
    check_page(path)


def test_the_examples_for_contributors_run(monkeypatch):
    from vision_attn.attention.implementations import IMPLEMENTATIONS

    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))
    try:
        check_page(ROOT / "docs/CONTRIBUTING.md")
    finally:
        del IMPLEMENTATIONS["matmul"]


def test_code_and_output_are_told_apart():
    text = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx = 1\n```\n\nAnd then:\n\n```text\ny\n```\n"
    assert code_and_output(text) == (["print(1)\n", "x = 1\n"], ["1\n", ""])
    assert numbers_apart("loss +3.50 in 2 of 3") == ("loss … in 2 of 3", [3.5])


@pytest.mark.parametrize(("form", "impl"), [(0, "einx"), (1, "bmm")])
def test_the_two_forms_are_those_that_run(form, impl):
    from vision_attn.attention.implementations import IMPLEMENTATIONS

    shown, steps = blocks(page("implementations"), "py")[form], IMPLEMENTATIONS[impl]
    for step in (steps.heads_apart, steps.attend, steps.heads_together):
        assert inspect.getsource(step) in shown


def test_the_lines_of_the_patterns_are_those_that_run():
    import vision_attn
    from vision_attn.attention.patterns import resolve_pattern

    rows = re.findall(r"^\| `([^`]+)` \| `(b n d [^`]+)` \| `(maps[^`]+)` \|", page("patterns"), flags=re.MULTILINE)
    assert len(rows) == 6
    for pattern, einx_line, torch_line in rows:
        line = resolve_pattern(eval(pattern, {"va": vision_attn})).partitioner(2).line
        assert (line.einx, line.torch) == (einx_line, torch_line)


def test_the_position_terms_of_the_table_are_there():
    import vision_attn

    rows = re.findall(r"^\| `va\.((?:RelPos|Rope|Conditional|SinCos)[^`]*)` \|", page("patterns"), flags=re.MULTILINE)
    assert len(rows) == 5
    for term in rows:
        vision_attn.Attention2d(16, 2, position=eval(term, vars(vision_attn)))


def test_the_options_of_the_table_are_arguments():
    import vision_attn

    table = page("patterns").partition("## Further options")[2]
    names = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)))
    assert len(names) >= 10
    assert set(names) <= set(inspect.signature(vision_attn.Attention2d).parameters)


def commands(text):
    """What a page tells its reader to type: lines of its blocks, and code in its prose."""
    lines = [line for block in blocks(text, "(?:text|sh)") for line in re.split(r"\n|&&", block)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [
        shlex.split(line)
        for line in [*lines, *re.findall(r"`([^`\n]+)`", prose)]
        if re.match("vision-attn |python ", line)
    ]
    return [words for words in found if "…" not in words]


def test_commands_are_found():
    assert sum(len(commands(path.read_text())) for path in DOCS) >= 12
    text = "type `vision-attn train --help` or\n```text\nvision-attn bench\nx\n```\nand `python examples/a.py --b`"
    expected = [["vision-attn", "bench"], ["vision-attn", "train", "--help"], ["python", "examples/a.py", "--b"]]
    assert commands(text) == expected


def test_the_commands_are_commands(capsys):
    for path in PAGES:
        for program, *arguments in commands(path.read_text()):
            if program == "python":
                assert (ROOT / arguments[0]).exists() or arguments[0] == "examples/NAME.py", (path, arguments)
            elif "--help" in arguments:
                with pytest.raises(SystemExit, match=r"^0$"):
                    cli.parser().parse_args(arguments)
            else:
                cli.parser().parse_args(arguments)


def test_ci_runs_the_two_command_lines_of_the_readme_and_builds_the_documentation():
    commands = [block.strip() for block in blocks(README, "sh")]
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    ci = (ROOT / ".ci/run").read_text()
    assert "/^```sh$/" in ci
    assert "mkdocs build --strict -f docs/mkdocs.yml" in ci


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def anchors(text):
    """Where links into a page lead: its headings, as the usual renderers of markdown name them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    for target in re.findall(r"\]\(([^)]+)\)|<img src=\"([^\"]+)\"", path.read_text()):
        target = "".join(target)
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        if not linked.exists() or (anchor and anchor not in anchors(linked.read_text())):
            yield target


def test_links_lead_somewhere(tmp_path):
    assert {relative(path): found for path in PAGES if (found := list(broken_links(path)))} == {}
    (tmp_path / "a.md").write_text("# One two\n\n[here](#one-two) [there](b.md) [where](a.md#three)")
    assert list(broken_links(tmp_path / "a.md")) == ["b.md", "a.md#three"]


def test_every_page_can_be_found():
    """From the README by links, and in the site's navigation."""
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in DOCS
        for target in re.findall(r"\]\(([^)]+\.md[^)]*)\)", path.read_text())
    }
    assert set(DOCS[1:]) <= linked
    navigation = set(re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {relative(path) for path in (ROOT / "docs").rglob("*.md")} <= navigation
    assert all((ROOT / target).exists() for target in navigation)


def documented():
    """By the paths on the pages of the API, what they are of."""
    pages = [path.read_text() for path in sorted((ROOT / "docs/api").glob("*.md"))]
    paths = re.findall(r"^::: (\S+)$", "\n".join(pages), flags=re.MULTILINE)
    assert len(paths) == len(set(paths))
    found = {}
    for path in paths:
        room, _, name = path.rpartition(".")
        module = importlib.import_module(room)
        of_a_file = not hasattr(module, "__path__") or importlib.util.find_spec(path) is None
        assert of_a_file, f"{path} is a module too, which the page would show: name the file that the function is in"
        found[path] = getattr(module, name)
    return found


def test_the_api_reference_is_complete():
    import vision_attn
    from vision_attn.attention import equations
    from vision_attn.networks import convert, figures

    public = [getattr(room, name) for room in (vision_attn, convert, equations, figures) for name in room.__all__]
    wanted = {thing for thing in public if inspect.isfunction(thing) or inspect.isclass(thing)}
    found = documented()
    assert {thing for path, thing in found.items() if not path.startswith("vision_attn.networks.models.")} == wanted


def test_docstrings_become_markdown():
    pytest.importorskip("griffe")
    markdown = runpy.run_path(str(ROOT / "docs/docstrings.py"))["markdown"]
    assert markdown("By :func:`insert_` and :meth:`Attention2d.forward`, not :func:`nothing`.") == (
        "By [`insert_`][vision_attn.insert_] and [`Attention2d.forward`][vision_attn.Attention2d], not `nothing`."
    )
    assert markdown("Such as:\n\n>>> 1 + 1\n2\n\nAnd") == "Such as:\n\n```pycon\n>>> 1 + 1\n2\n```\n\nAnd"
    assert (
        markdown("===  =====\nb    batch\nh w  sides\n===  =====\n")
        == "|  |  |\n|---|---|\n| b | batch |\n| h w | sides |\n"
    )
    with_header = "=====  ====\nname   what\n=====  ====\n``a``  x y\n=====  ====\n"
    assert markdown(with_header) == "| name | what |\n|---|---|\n| ``a`` | x y |\n"


def test_the_converters_of_the_table_are_there():
    from vision_attn.networks import convert

    table = page("convert").partition("| what |")[2].partition("\n\n")[0]
    assert set(re.findall(r"from_\w+", table)) == {name for name in convert.__all__ if name.startswith("from_")}


def test_the_table_of_implementations_is_complete():
    import vision_attn

    table = page("implementations").partition("| `impl` |")[2].partition("\n\n")[0]
    assert set(re.findall(r'^\| `"(\w+)"`', table, flags=re.MULTILINE)) == set(vision_attn.IMPLS)


def test_the_table_of_rows_of_the_benchmark_is_complete():
    from vision_attn.tools.benchmark.plan import ROWS

    table = page("speed").partition("| `--rows` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE) == list(ROWS)


def test_the_table_of_rooms_is_complete_and_in_order():
    from test_architecture import ROOMS

    table = page("CONTRIBUTING").partition("| room |")[2].partition("\n\n")[0]
    shown = [
        room for cell in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for room in re.findall(r"\w+", cell)
    ]
    package = ROOT / "vision_attn"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(shown) == there - {"__init__", "__main__"}
    assert [room for room in shown if room in ROOMS] == [room for room in ROOMS if room in shown]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda path: path.parent.name)
def test_a_card_names_the_file_it_belongs_to(weights):
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert f"`{digest}`" in (weights.parent / "README.md").read_text()


def test_the_changelog_has_this_version():
    import vision_attn

    assert f"## {vision_attn.__version__}" in (ROOT / "CHANGELOG.md").read_text()
