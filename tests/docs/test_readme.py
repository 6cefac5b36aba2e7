"""The documentation is correct: its code runs and prints the output on the page, and links and commands are valid."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import safetensors.torch
import speed
import timm
import torch

import vision_attn
from vision_attn import cli
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.patterns import resolve_pattern
from vision_attn.networks.capture import figures
from vision_attn.networks.convert.conversion import CONVERSIONS
from vision_attn.recipes import settings
from vision_attn.recipes.compare import VARIANTS, settings_for_variant

ROOT = Path(__file__).resolve().parents[2]
README, DOCS = (ROOT / "README.md").read_text(), [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*ROOT.glob("*.md"), *(page for x in ("docs", "examples", "weights") for page in ROOT.glob(f"{x}/**/*.md"))]
#: Imports of packages in the extra `integrations`. A page with such imports runs in a separate process, because some of
#: the packages change the state of their process.
INTEGRATIONS = r"^(?:from|import) (diffusers|segmentation_models_pytorch|torchao|transformers|ultralytics)\b"
#: Environment of these processes: no downloads, no installation and little output.
QUIET = dict.fromkeys(("HF_HUB_OFFLINE", "YOLO_OFFLINE", "OMP_NUM_THREADS"), "1")
QUIET |= dict.fromkeys(("YOLO_AUTOINSTALL", "YOLO_VERBOSE"), "0")

#: Networks of different families, for which the quick start of the README runs: of timm by name, or of torchvision.
FAMILIES = ["mobilenetv3_small_050"]
SLOW = ["convnext_atto", "densenet121", "dla46_c", "efficientnet_b0", "edgenext_xx_small", "ghostnet_050", "resnet18"]
SLOW += ["nf_regnet_b0", "poolformerv2_s12", "regnety_002", "repghostnet_050", "swin_tiny_patch4_window7_224"]
SLOW += ["tf_efficientnet_lite0", "vit_tiny_patch16_224"]
SLOW += ["torchvision.models.mobilenet_v3_small", "torchvision.models.resnet18"]
FAMILIES += [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def relative(path):
    return str(path.relative_to(ROOT))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_quick_start_of_the_readme_works_for_other_networks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = blocks(README.partition("## Quick start")[2].partition("\n### ")[0], "python")
    lines = codes[0].partition("\n\n")[2].splitlines()
    assert (len(lines), lines[-1]) == (4, "assert torch.equal(model(images), before)")
    code, call = "\n".join(codes), 'timm.create_model("resnet50", '
    assert call in code
    library, _, function = name.rpartition(".")
    other = f"import_module({library!r}).{function}(" if library else f"timm.create_model({name!r}, "
    space = {"import_module": importlib.import_module}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code.replace(call, other), space)
    model = space["model"]
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    vision_attn.remove_(model)
    [module for module in model.modules() if hasattr(module, "reset_parameters")][-1].reset_parameters()  # classifier
    vision_attn.load_adapter_(model, "blocks.safetensors")
    assert all(value.equal(expected[key]) for key, value in model.state_dict().items())


def test_the_size_of_the_adapter_in_the_readme_is_that_of_its_file(tmp_path):
    finetuning = importlib.import_module("finetuning")
    model = timm.create_model("tf_efficientnet_lite0", num_classes=finetuning.CLASSES)
    size = torch.zeros(1, 3, finetuning.SIDE, finetuning.SIDE)
    vision_attn.insert_(model, names=finetuning.SITE, example_input=size, **finetuning.BLOCKS["attention"][1])
    vision_attn.freeze_backbone_(model, also_train="head")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    adapter = vision_attn.save_adapter(model, tmp_path / "adapter.safetensors", also="head").stat().st_size
    vision_attn.remove_(model)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    network = (tmp_path / "model.safetensors").stat().st_size
    file = f"in a file of {adapter / 1e3:.0f} kB; the file of the network has {network / 1e6:.1f} MB"
    assert f"{trained:,} parameters, with the classifier, {file}" in " ".join(README.split())


def code_and_output(text):
    """Return the Python blocks with their output, which is the text block that follows immediately."""
    return re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, flags=re.MULTILINE | re.DOTALL)


def split_numbers(text):
    """Return a text without its decimal fractions, and the fractions: their last digits depend on the machine."""
    fraction = r"[+-]?\d+\.\d+"
    return re.sub(fraction, "…", text), [float(number) for number in re.findall(fraction, text)]


def integrations(path):
    return set(re.findall(INTEGRATIONS, "".join(blocks(path.read_text(), "python")), flags=re.MULTILINE))


def skip_if_missing(text):
    """Skip the test if a package that the code of a page imports is not installed."""
    names = re.findall(r"^(?:from|import) (\w+)", "".join(blocks(text, "python")), flags=re.MULTILINE)
    if missing := [name for name in dict.fromkeys(names) if importlib.util.find_spec(name) is None]:
        pytest.skip(f'{" and ".join(missing)} not installed: pip install ".[integrations]"')


def run_here(codes):
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, vars(sys.modules["page"]))
        yield out.getvalue()


def run_in_process(codes):
    between = "— the next block —"
    program = f"\nprint({between!r})\n".join(["import socket; socket.getaddrinfo = None  # no network", *codes])
    environment = os.environ | QUIET | {"YOLO_CONFIG_DIR": os.getcwd()}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split(between + "\n")[1:]


# test_recipes.py runs the code of recipes.md.
CODE = [path for path in DOCS if blocks(path.read_text(), "python") and path.name != "recipes.md"]


@pytest.mark.slow
@pytest.mark.parametrize("path", CODE, ids=relative)
def test_the_code_runs_and_prints_the_output_on_the_page(path, tmp_path, monkeypatch, image_folder):
    skip_if_missing(path.read_text())
    monkeypatch.chdir(tmp_path)
    Path("flowers").symlink_to(image_folder)  # the images of the quickstart
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))
    for table in (IMPLEMENTATIONS, CONVERSIONS):  # the page for contributors adds entries
        for name in ("matmul", "page.Theirs"):
            monkeypatch.setitem(table, name, None)
            del table[name]
    codes, outputs = zip(*code_and_output(path.read_text()), strict=True)
    for printed, expected in zip((run_in_process if integrations(path) else run_here)(codes), outputs, strict=True):
        (words, numbers), (shown, shown_numbers) = split_numbers(printed), split_numbers(expected)
        assert (words, numbers) == (shown, pytest.approx(shown_numbers, rel=1e-3))


def first_cells(text, table):
    """Return the words in backquotes in the first column of the table whose header starts with this text."""
    cells = re.findall(r"^\| ([^|]*`.*?) \|", text.partition(table)[2].partition("\n\n")[0], re.MULTILINE)
    return [word for cell in cells for word in re.findall(r"`(.+?)`", cell)]


def test_the_two_implementations_on_the_page_are_the_code_that_runs():
    shown = blocks(page("implementations"), "py")
    for column, impl in enumerate(("einx", "bmm")):
        steps = filter(callable, vars(IMPLEMENTATIONS[impl]).values())
        assert sorted(shown[column::2]) == sorted(map(inspect.getsource, steps))


def test_the_tables_of_patterns_positions_and_arguments_match_the_code():
    text = page("implementations")
    rows = re.findall(r"^\| `([^`]+)` \| `(b n d [^`]+)` \| `(maps[^`]+)` \|", text, flags=re.MULTILINE)
    assert len(rows) == 6
    for pattern, einx_line, torch_line in rows:
        line = resolve_pattern(eval(pattern, {"va": vision_attn})).expand_to_rank(2).rearrangement
        assert (line.einx, line.torch) == (einx_line, torch_line)
    encodings = [word for word in first_cells(page("implementations"), "| `position=` |") if word.startswith("va.")]
    assert len(encodings) == 6
    for encoding in encodings:
        vision_attn.Attention2d(16, 2, position=eval(encoding, {"va": vision_attn}))
    options = first_cells(page("implementations"), "| argument of `va.Attention2d` |")
    names = {word.partition("(")[0] for word in options} - {"forward"}
    assert len(names) >= 10
    assert names <= set(inspect.signature(vision_attn.Attention2d).parameters)


def test_the_tables_of_implementations_variants_and_the_benchmark_are_complete():
    names = [f'"{name}"' for name in ("auto", *vision_attn.implementations.IMPLS)]
    assert sorted(first_cells(page("implementations"), "| `impl` |")) == sorted(names)
    assert sorted(first_cells(page("performance"), "| `--rows` |")) == sorted([*speed.ROWS, "all"])
    rows = first_cells(page("quickstart"), "| variant | inserted block |")
    assert sorted(row for row in rows if not row.startswith("NAME=")) == sorted(VARIANTS)


def test_the_table_and_the_diagram_contain_every_module():
    package = ROOT / "vision_attn"
    layers = {path.name: path for path in package.iterdir() if (path / "__init__.py").exists()}
    inner = [path for layer in layers.values() for path in layer.iterdir() if path.name != "__init__.py"]
    modules = {path.stem for path in inner if path.suffix == ".py" or (path / "__init__.py").exists()}
    shared = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    text = page("CONTRIBUTING")
    assert sorted(first_cells(text, "| module |")) == sorted(modules)
    assert set(re.findall(r"^\| \*\*(\w+)\*\* \|", text, flags=re.MULTILINE)) == set(layers)
    drawn = re.findall(r'class="module"[^>]*>(\w+)<', (ROOT / "docs/package-layout.svg").read_text())
    assert sorted(drawn) == sorted([*modules, *shared])


def commands(text):
    """Return the commands on a page: lines of its code blocks, and code in its prose."""
    lines = [line for block in blocks(text, "(?:text|sh)") for line in re.split(r"\n|&&", block.replace("\\\n", ""))]
    lines += re.findall(r"`([^`\n]+)`", without_blocks(text))
    found = [shlex.split(line) for line in lines if re.match("vision-attn |python ", line)]
    return [words for words in found if "…" not in words]


def parse(name, *words):
    """Parse a command line without running it; raise SystemExit or an error if it is wrong."""
    other = settings.Settings(model="resnet18") if "--resume" in words or "--config" in words else None
    found = cli.parse(getattr(settings, cli.COMMANDS[name][0]), words, name, default=other)
    settings.check_values(found)
    if name == "compare":
        for variant in found.variants:
            settings_for_variant(variant, settings.Settings())


def test_the_commands_can_be_parsed():
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


def test_the_train_command_of_the_readme_is_that_of_its_output():
    """All parameters were trained, for which the README expects no gain, and the output was of another network."""
    (words,) = (words for words in commands(README) if words[:2] == ["vision-attn", "train"] and len(words) > 2)
    assert "--freeze-backbone" in words
    (output,) = (block for block in blocks(README, "text") if "epoch 1/" in block)
    assert output.startswith(f"{words[words.index('--model') + 1]}: ")
    assert f"epoch 1/{words[words.index('--epochs') + 1]}: " in output


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
        if not there and not target.startswith(("https://", "../../actions/")):  # of the repository on GitHub
            yield target


def test_links_have_targets():
    assert {relative(path): found for path in PAGES if (found := list(broken_links(path)))} == {}


def navigation():
    """Return the titles of the navigation by page; None where the site takes the heading of the page."""
    found = re.findall(r"^ +- (?:(.+): )?(\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), flags=re.MULTILINE)
    return {path: title.strip('"') or None for title, path in found}


def test_every_page_is_linked_and_in_the_navigation():
    links = [(path, link) for path in DOCS for link in re.findall(r"\]\(([^)]+\.md)[^)]*\)", path.read_text())]
    assert set(DOCS[1:]) <= {(path.parent / link).resolve() for path, link in links}
    assert {relative(path) for path in (ROOT / "docs").rglob("*.md")} <= set(navigation())
    notebooks = {relative(path.with_suffix(".md")) for path in (ROOT / "examples/notebooks").glob("*.ipynb")}
    assert {path for path in navigation() if not (ROOT / path).exists()} == notebooks


def test_titles_are_those_of_the_navigation():
    for path, title in navigation().items():
        if title not in (None, "Home") and (heading := re.match("# (.*)", (ROOT / path).read_text())):
            assert heading[1].replace("`", "") == title, path


def test_the_page_on_security_names_tests_and_dependencies_that_exist():
    text = page("SECURITY")
    assert set(re.findall(r"`(\w+\.py)`", text)) <= {path.name for path in (ROOT / "tests").rglob("*.py")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["train"], *extras["viz"], *extras["export"]]
    listed = ", ".join(row.split(" | ")[1].rstrip(" |") for row in text.rpartition("| license |")[2].splitlines()[2:8])
    assert {name.lower() for name in listed.split(", ")} == {re.split(r"[<>=]", name)[0].lower() for name in needed}


def test_the_api_reference_is_complete_and_current():
    pytest.importorskip("griffe")
    reference = runpy.run_path(str(ROOT / "docs/api_reference.py"))
    paths = [path for of_page in reference["PATHS"].values() for path in of_page]
    assert len(paths) == len(set(paths))
    owners = (path.rpartition(".") for path in paths)
    found = [getattr(importlib.import_module(owner), name) for owner, _, name in owners]
    modules = [getattr(vision_attn, name) for name in ("blocks", "convert", "errors", "implementations")]
    public = [getattr(owner, name) for owner in (vision_attn, *modules, figures) for name in owner.__all__]
    assert {value for value in public if inspect.isfunction(value) or inspect.isclass(value)} <= set(found)
    written = {path.name: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    assert written == reference["generate"](), "python docs/api_reference.py updates the pages"
