"""What the documentation says is so: its code runs, its output is the output, its links and commands lead somewhere."""

import hashlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from vision_attn import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
WEIGHTS = sorted((ROOT / "weights").rglob("*.safetensors"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for room in ("examples", "weights", "tests") for page in (ROOT / room).rglob("*.md")),
]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_code_runs_and_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in blocks(README, "python"):
        exec(code, names)
    shown = next(block for block in blocks(README, "text") if "blocks inserted" in block)
    assert shown == capsys.readouterr().out
    assert names["report"].new == ("fc.weight", "fc.bias")


@pytest.mark.parametrize(("form", "impl"), [(0, "einx"), (1, "bmm")])
def test_the_two_forms_are_those_that_run(form, impl):
    from vision_attn.attend import IMPLEMENTATIONS

    shown, steps = blocks(README, "py")[form], IMPLEMENTATIONS[impl]
    for step in (steps.heads_apart, steps.attend, steps.heads_together):
        assert inspect.getsource(step) in shown


def test_the_lines_of_the_patterns_are_those_that_run():
    import vision_attn
    from vision_attn.patterns import resolve_pattern

    rows = re.findall(r"^\| `([^`]+)` \| `(b n d [^`]+)` \| `(maps[^`]+)` \|", README, flags=re.MULTILINE)
    assert len(rows) == 6
    for pattern, einx_line, torch_line in rows:
        line = resolve_pattern(eval(pattern, {"va": vision_attn})).partitioner(2).line
        assert (line.einx, line.torch) == (einx_line, torch_line)


def test_the_position_terms_of_the_table_are_there():
    import vision_attn

    rows = re.findall(r"^\| `va\.((?:RelPos|Rope|Conditional|SinCos)[^`]*)` \|", README, flags=re.MULTILINE)
    assert len(rows) == 5
    for term in rows:
        vision_attn.Attention2d(16, 2, position=eval(term, vars(vision_attn)))


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
    assert len(commands(README)) >= 7
    page = "type `vision-attn train --help` or\n```text\nvision-attn bench\nx\n```\nand `python examples/a.py --b`"
    expected = [["vision-attn", "bench"], ["vision-attn", "train", "--help"], ["python", "examples/a.py", "--b"]]
    assert commands(page) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_are_commands(page, capsys):
    for program, *arguments in commands(page.read_text()):
        if program == "python":
            assert (ROOT / arguments[0]).exists() or arguments[0] == "examples/NAME.py"
        elif "--help" in arguments:
            with pytest.raises(SystemExit, match=r"^0$"):
                cli.parser().parse_args(arguments)
        else:
            cli.parser().parse_args(arguments)


def test_ci_runs_the_two_command_lines_of_the_readme():
    commands = [block.strip() for block in blocks(README, "sh")]
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    assert "/^```sh$/" in (ROOT / ".ci/run").read_text()


def anchors(page):
    """Where links into a page lead: its headings, as the usual renderers of markdown name them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), target


def test_the_converters_of_the_table_are_there():
    from vision_attn import convert

    table = README.partition("## Convert")[2].partition("\n## ")[0]
    assert set(re.findall(r"from_\w+", table)) == {name for name in convert.__all__ if name.startswith("from_")}


def test_the_table_of_implementations_is_complete():
    import vision_attn

    table = README.partition("| `impl` |")[2].partition("\n\n")[0]
    assert set(re.findall(r'^\| `"(\w+)"`', table, flags=re.MULTILINE)) == set(vision_attn.IMPLS)


@pytest.mark.parametrize(
    "weights", sorted((ROOT / "weights").rglob("*.safetensors")), ids=lambda path: path.parent.name
)
def test_a_card_names_the_file_it_belongs_to(weights):
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert f"`{digest}`" in (weights.parent / "README.md").read_text()


def test_the_changelog_has_this_version():
    import vision_attn

    assert f"## {vision_attn.__version__}" in (ROOT / "CHANGELOG.md").read_text()
