"""Generate the API reference, docs/api/*.md, from the signatures and docstrings of the package.

python docs/api_reference.py
"""

import re
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "api"
MAX_SIGNATURE = 90

#: Title, introduction and objects of each page, by the name of its file. Objects without a module are in vision_attn.
PAGES = {
    "insertion": (
        "Insert and fine-tune",
        "Insert blocks into a network, train them, and measure what they contribute ([guide](../insert.md)).",
        """
        insert_ replace_ remove_ inserted_blocks stage_names timm_layer parameter_groups freeze_backbone_
        unfreeze_backbone_ check_optimizer contribution measure_blocks disabled padded context errors.SiteError
        networks.insertion.InsertionReport networks.contributions.Contribution
        """,
    ),
    "blocks": (
        "Layers and blocks",
        "Attention layers and blocks, their patterns and position encodings, and the selection of the implementation "
        "([guide](../implementations.md)).",
        """
        Attention2d blocks.Attention1d blocks.Attention3d AttentionBlock2d blocks.AttentionBlock1d
        blocks.AttentionBlock3d blocks.TransformerBlock2d blocks.LinearAttention2d blocks.StridedAttention2d
        blocks.AugmentedConv2d set_impl_ use_impl implementations.register_impl Window Grid Halo Neighborhood Pattern
        RelPosDecomposed RelPosTable AbsPos Rope ConditionalPos SinCos
        """,
    ),
    "checkpoints": (
        "Load and save",
        "Checkpoints, adapters and complete networks ([guide](../checkpoints.md)).",
        """
        load_checkpoint_ save_model load_model save_adapter load_adapter_ errors.CheckpointError
        networks.checkpoints.LoadReport networks.checkpoints.AdapterReport
        """,
    ),
    "maps": (
        "Attention maps and figures",
        "Compute attention maps and draw them ([guide](../see.md)).",
        """
        capture explore networks.capture.maps.AttentionMaps networks.capture.maps.AttentionMap
        networks.capture.figures.save_figure networks.capture.figures.Figure
        """,
    ),
    "convert": (
        "Conversion",
        "Convert the attention layers of a complete network, or one layer at a time ([guide](../convert.md)).",
        """
        swap_ unswap_ networks.convert.swap.SwapReport convert.from_layer
        errors.ConversionError
        """,
    ),
    "training": (
        "Training and export",
        "Train on a folder of images or on a data set ([guide](../quickstart.md)), and export the network "
        "([guide](../deploy.md)).",
        """
        recipes.train.train recipes.settings.Settings export_model errors.VisionAttnError errors.DataError
        errors.TrainingError errors.ExportError errors.Interrupted
        """,
    ),
    "models": (
        "Models",
        "`import vision_attn.networks.models` registers [networks](../insert.md#registered-models) with timm. Create "
        "them with `timm.create_model`.",
        """
        networks.models.registry.create_model networks.models.cifar_resnet.CifarResNet
        """,
    ),
    "equations": (
        "Einsum equations",
        "The einsum equations of Keras's multi-head attention, for any rank and any attention axes.",
        """
        convert.attention_equations convert.attention_pattern
        convert.projection_equation
        """,
    ),
}
#: Classes that only the library creates: the pages do not show how to create them.
RETURNED = ("Inspection", "Contribution", "AttentionMaps", "AttentionMap")

SINCE = (
    "Most names are in `vision_attn`. The pages show other imports. Names without another version are part of the "
    "library since 0.1.0."
)

DOCTEST_OPTION = r"  # doctest: .*"
GENERATED = "<!-- Generated from the docstrings by docs/api_reference.py. -->"


#: Import paths by page.
PATHS = {page: [f"vision_attn.{name}" for name in names.split()] for page, (*_, names) in PAGES.items()}
#: Page of each documented object, by the last part of its path.
DOCUMENTED = {path.rpartition(".")[2]: page for page, paths in PATHS.items() for path in paths}


@cache
def package():
    return griffe.load("vision_attn", search_paths=[str(ROOT)], docstring_parser="google", resolve_aliases=True)


def find(path):
    found = package()[path.removeprefix("vision_attn.")]
    return found.final_target if found.is_alias else found


def markdown(text, page):
    """Convert the tables, literal blocks, doctests and roles of a docstring to Markdown."""
    text = re.sub(r"^(=+  .*)\n((?:.+\n)+?)\1(?:\n((?:.+\n)+?)\1)?$", table, text, flags=re.MULTILINE)
    text = re.sub(r"^::\n\n((?:    .*\n|\n)*(?:    .*))", literal_block, text, flags=re.MULTILINE)
    text = re.sub(DOCTEST_OPTION, "", text)
    text = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
    text = re.sub(r":(?:class|func|meth|attr|data|mod):`~?([^`]+)`", lambda role: reference(role[1], page), text)
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", text)


def literal_block(found):
    return "```text\n" + re.sub(r"^    ", "", found[1], flags=re.MULTILINE).rstrip() + "\n```"


def reference(name, page):
    """Return a link to a documented object or to the class of a method, and code for other names."""
    for part in (name, name.rpartition(".")[0]):
        documented = part.rpartition(".")[2]
        if documented in DOCUMENTED:
            file = "" if DOCUMENTED[documented] == page else f"{DOCUMENTED[documented]}.md"
            return f"[`{name.removeprefix('vision_attn.')}`]({file}#{documented.lower()})"
    return f"`{name}`"


def table(found):
    """Convert a simple table of reStructuredText."""
    columns = [(rule.start(), rule.end()) for rule in re.finditer("=+", found[1])]
    columns[-1] = (columns[-1][0], None)
    head, body = (found[2], found[3]) if found[3] else ("", found[2])
    rows = [[line[a:b].strip() for a, b in columns] for line in [head, *body.splitlines()]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def parameters(function, skip_self):
    """Return the parameters of a signature as code, with the separators ``/`` and ``*``."""
    parts, before = [], None
    for parameter in [*function.parameters][skip_self:]:
        kind, name = parameter.kind.value, parameter.name
        if before == "positional-only" != kind:
            parts.append("/")
        if kind == "keyword-only" and before not in (kind, "variadic positional"):
            parts.append("*")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = "" if parameter.annotation is None else f": {parameter.annotation}"
        default = "" if stars or parameter.default is None else f" = {parameter.default}"
        parts.append(code(f"{stars}{name}{annotation}{default}"))
        before = kind
    return parts


def signature(name, parts, returns=None):
    """Return a signature as code, with one parameter per line if it is long."""
    end = "" if returns is None else f" -> {returns}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= MAX_SIGNATURE:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def code(text):
    """Return code with double quotes, as the formatter writes it."""
    return re.sub(r"'([^'\"]*)'", r'"\1"', str(text))


def comment_of(attribute):
    """Return the comment of an attribute: lines that begin with ``#:`` above it, or the comment behind it."""
    source, lines = attribute.lines_collection[attribute.filepath], []
    for line in reversed(source[: attribute.lineno - 1]):
        if not line.strip().startswith("#: "):
            break
        lines.append(line.strip()[3:])
    behind = source[attribute.lineno - 1].partition("  # ")[2]
    return " ".join(reversed(lines)) or ("" if behind.startswith("type: ") else behind)


def sections(docstring, page):
    """Yield the paragraphs, arguments, return value, errors and examples of a docstring."""
    for section in docstring.parse(warn_unknown_params=False) if docstring else ():
        kind, value = section.kind.value, section.value
        if kind == "text":
            yield markdown(value, page)
        elif kind == "parameters":
            yield "**Arguments**\n\n" + "\n".join(item(f"`{one.name}`", one.description, page) for one in value)
        elif kind == "raises":
            yield "**Raises**\n\n" + "\n".join(item(f"`{one.annotation}`", one.description, page) for one in value)
        elif kind in ("returns", "yields"):
            texts = [markdown(f"{one.name}: {one.description}" if one.name else one.description, page) for one in value]
            yield f"**{kind.capitalize()}:** " + " ".join(texts)
        else:
            raise ValueError(f"section {kind} is not supported")


def item(term, text, page):
    """Return an item of a list; further paragraphs of its text are indented."""
    return f"- {term}: " + markdown(text, page).replace("\n", "\n  ").replace("\n  \n", "\n\n")


def attributes(owner, page):
    """Return the list of the documented attributes and properties of a class."""
    lines = []
    for attribute in owner.members.values():
        if attribute.name.startswith("_") or not attribute.is_attribute:
            continue
        text = attribute.docstring.value if attribute.docstring else comment_of(attribute)
        if not text:
            continue
        term, default = f"`{attribute.name}`", attribute.value if "property" not in attribute.labels else None
        details = [f"`{code(attribute.annotation)}`"] if attribute.annotation is not None else []
        details += [f"default `{code(default)}`"] if default is not None and "field(" not in str(default) else []
        term += f" ({', '.join(details)})" if details else ""
        lines.append(item(term, text, page))
    return ["**Attributes**\n\n" + "\n".join(lines)] if lines else []


def describe(path, page, shown):
    """Yield the paragraphs about one object; ``shown`` has the functions whose arguments the page already lists."""
    found, (module, _, name) = find(path), path.rpartition(".")
    lines = [] if module == "vision_attn" else [f"from {module} import {name}"]
    yield f"## `{name}`"
    if found.is_function:
        lines.append(signature(name, parameters(found, 0), found.returns))
    else:
        initialize = found.all_members.get("__init__")
        if initialize is not None and not name.endswith(("Error", "Report", *RETURNED)):
            parts = parameters(initialize, 1)
            if initialize.canonical_path in shown:
                parts = [*parts[: parts.index("*") + 1], "..."]
            shown.add(initialize.canonical_path)
            lines.append(signature(name, parts))
    yield "```python\n" + "\n\n".join(lines) + "\n```" if lines else ""
    yield from sections(found.docstring, page)
    if found.is_function:
        return
    yield from attributes(found, page)
    inherited = [found.all_members["forward"]] if "forward" in found.all_members else []
    for method in [*inherited, *found.members.values()]:
        documented = method.is_function and method.docstring and not method.name.startswith("_")
        if documented and method.canonical_path not in shown:
            shown.add(method.canonical_path)
            yield f"### `{name}.{method.name}`"
            bound = "staticmethod" not in method.labels
            yield f"```python\n{signature(method.name, parameters(method, int(bound)), method.returns)}\n```"
            yield from sections(method.docstring, page)


def summary(path):
    """Return the first paragraph of a docstring, with links from the index."""
    text = find(path).docstring.value.partition("\n\n")[0].replace("\n", " ")
    return markdown(text, "README").replace("|", "\\|")


def generate():
    """Return the text of every page, by the name of its file."""
    index = ["# API reference", GENERATED, SINCE]
    texts = {}
    for page, (title, introduction, _) in PAGES.items():
        shown = set()
        parts = [f"# {title}", GENERATED, introduction]
        for path in PATHS[page]:
            parts += describe(path, page, shown)
        texts[f"{page}.md"] = "\n\n".join(filter(None, map(str.strip, parts))) + "\n"
        rows = [f"| {reference(path.rpartition('.')[2], 'README')} | {summary(path)} |" for path in PATHS[page]]
        index += [f"## {title}", introduction, "\n".join(["| name | description |", "|---|---|", *rows])]
    return {"README.md": "\n\n".join(index) + "\n"} | texts


def main():
    for path in FOLDER.glob("*.md"):
        path.unlink()
    for name, text in generate().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
