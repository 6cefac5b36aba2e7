"""Every public name is documented in one form, and what its docstring says of the code is held against the code.

Public is what a module names in its ``__all__``, and of its classes the methods and properties without an underscore.
Not asked of: overrides of ``torch.nn.Module`` that take what they always take, and methods without a docstring of their
own where that of the method they override says all.

==========  ===========================================================================================================
summary     The first line is one sentence, which ends there or goes on after a colon or a semicolon.
Args        Each parameter of the signature, of a class its constructor's, in this order, and no other name. The fields
            of a dataclass or named tuple may have ``#:`` comments instead. ``Arguments are those of :class:`X`.``, or
            ``Arguments, result and errors``, stands for what is said there.
Returns     Or ``Yields``, for what is not None, unless the summary begins with a word of ``RESULT`` and so names the
            result; for a tensor it then holds a shape, as in ``(b, c, h, w)``.
Raises      Each exception in a ``raise`` of the function, and no name that is not an exception's.
doctest     In what a room exports, with an output.
Source      In what implements something published, with a link.
==========  ===========================================================================================================

A constant has a ``#:`` comment. The networks of :mod:`vision_attn.models` that take what all networks of timm take,
``pretrained`` and further arguments, may have one sentence each: their room says the rest once.
"""

import argparse
import ast
import builtins
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from functools import cached_property
from types import FunctionType, ModuleType, SimpleNamespace
from typing import get_origin

import pytest
import timm
import torch
from torch import nn

import vision_attn
from vision_attn import cli

#: What a summary begins with that names the result.
RESULT = ("A", "An", "Every", "How", "One", "The", "What", "Where", "Whether", "Which")

#: What implements something that was published, by module.
PUBLISHED = {
    "attend": "attend",
    "attend.linear": "attend_linear",
    "blocks": "Attention2d LinearAttention2d AttentionBlock2d AugmentedConv2d StridedAttention2d TransformerBlock2d",
    "equations": "attention_equations projection_equation",
    "insertion": "parameter_groups replace_",
    "models": "CifarResNet WideResNet aa_resnet50 botnet50",
    "patterns": "Grid Neighborhood Window",
    "position": "ConditionalPos RelPosDecomposed RelPosTable Rope2d SinCos",
}

#: How a section begins, and how it hands on what it would say.
HEADING = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+):", re.MULTILINE)
HANDED_ON = re.compile(r"(Arguments(?:, | and |result|errors)*) are\s+those\s+of :\w+:`([\w.]+)`")
METHODS_HANDED_ON = re.compile(r"methods are\s+those\s+of :class:`([\w.]+)`")
SHAPE = re.compile(r"``\((?:\w|…|[*]|\d)[^`]*\)``")

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(vision_attn.__path__, "vision_attn.")
    if not found.name.endswith("__main__")
]


# --- what is public ---------------------------------------------------------------------------------------------------


def names_of(module):
    return getattr(module, "__all__", ())


def ours(thing):
    return (getattr(thing, "__module__", None) or "").partition(".")[0] == "vision_attn"


def is_constant(thing):
    return not isinstance(thing, type | FunctionType | ModuleType) or get_origin(thing) is not None


def members_of(cls):
    """Its public methods and properties by name."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and name not in getattr(cls, "__dataclass_fields__", ()):
            function = getattr(member, "__func__", member)
            if is_property(member) or (isinstance(function, FunctionType) and not is_usual_override(cls, function)):
                yield name, function


def is_property(thing):
    return isinstance(thing, property | cached_property)


def is_usual_override(cls, function):
    takes_a_map = len(inspect.signature(function).parameters) == 2
    return issubclass(cls, nn.Module) and (
        (function.__name__ == "forward" and takes_a_map) or function.__name__ in ("extra_repr", "train")
    )


def public_things(module):
    """The classes and functions that a module names and defines, and the methods of the classes, each by its path."""
    for name in names_of(module):
        thing = getattr(module, name)
        if is_constant(thing) or thing.__module__ != module.__name__:
            continue
        yield f"{module.__name__}.{name}", thing
        for method, function in members_of(thing) if isinstance(thing, type) else ():
            yield f"{module.__name__}.{name}.{method}", function


# --- what is said, and what is so -------------------------------------------------------------------------------------


def docstring(thing):
    """Its own, or that of the method that it overrides, or of the same method of a class that its class names."""
    if thing.__doc__ or is_property(thing) or "." not in thing.__qualname__:
        return inspect.cleandoc(thing.__doc__ or "")
    owner = resolve(thing.__qualname__.partition(".")[0], thing)
    named = METHODS_HANDED_ON.search(owner.__doc__ or "")
    for other in (*filter(ours, owner.__mro__), resolve(named[1], thing) if named else None):
        text = getattr(vars(other).get(thing.__name__), "__doc__", None) if other else None
        if text:
            return inspect.cleandoc(text)
    return ""


def sections(text):
    """The sections of a docstring by their heading, each to where its indentation ends."""
    found = {}
    for heading in HEADING.finditer(text):
        first, *rest = text[heading.end() :].split("\n")
        inside = []
        for line in rest:
            if line and not line.startswith("    "):
                break
            inside.append(line)
        found[heading[1]] = "\n".join([first, *inside])
    return found


def handed_on(thing, text):
    """What of a docstring is said by another, in its words, and what that is the docstring of."""
    found = HANDED_ON.search(text)
    return (found[1], resolve(found[2], thing)) if found else ("", None)


def constructor(cls):
    """What is called to make one: a function of ours, or None."""
    owner = next((base for base in cls.__mro__ if ours(base) and "__init__" in vars(base)), None)
    return None if owner is None or is_record(cls) or getattr(cls, "_is_protocol", False) else owner.__init__


def is_record(cls):
    """Whether its fields are its arguments."""
    made = getattr(cls, "__dataclass_params__", None)
    return hasattr(cls, "_fields") or (made is not None and made.init)


def parameters(thing):
    """What it takes, in order, with the stars that it is written with."""
    if isinstance(thing, type) and is_record(thing):
        return [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else thing._fields
    function = constructor(thing) if isinstance(thing, type) else inspect.unwrap(thing)
    taken = inspect.signature(function).parameters.values() if function is not None else ()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(one.kind, "") + one.name for one in taken if one.name not in ("self", "cls")]


def commented(source):
    """The names in some source that have a ``#:`` comment, above them or at the end of their line."""
    found, above = set(), False
    for line in source.splitlines():
        assigned = re.match(r"\s*(\w+)(?::| =)", line)
        if assigned and (above or "  #: " in line):
            found.add(assigned[1])
        above = line.strip().startswith("#:") or (above and line.strip().startswith("#"))
    return found


def resolve(name, thing):
    """What a name in the docstring of a thing means: in its module, in the package, or in full."""
    module = importlib.import_module(thing.__module__)
    for start in (module, vision_attn, SimpleNamespace(vision_attn=vision_attn)):
        found = start
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


def raised(thing):
    """The exceptions that stand in ``raise`` statements in its body, of a class in its constructor."""
    checks = vars(thing).get("__post_init__") if isinstance(thing, type) else None
    function = checks or (constructor(thing) if isinstance(thing, type) else inspect.unwrap(thing))
    if function is None:
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    statements = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = {ast.unparse(node.func if isinstance(node, ast.Call) else node) for node in statements}
    return {name for name in names if is_exception(name, function)}


def is_exception(name, thing):
    named = (getattr(module, name, None) for module in (builtins, *MODULES))
    found = resolve(name, thing) or next(filter(None, named), None)
    return isinstance(found, type) and issubclass(found, BaseException)


def result(thing):
    """What it returns, as annotated; None for nothing."""
    annotation = None if isinstance(thing, type) else inspect.unwrap(thing).__annotations__.get("return", "?")
    text = annotation if annotation is None or isinstance(annotation, str) else inspect.formatannotation(annotation)
    return None if text in ("None", "Iterator[None]") else text


# --- the rules: each yields what falls short --------------------------------------------------------------------------


def summary_shortcomings(thing, text):
    first = text.split("\n")[0]
    if not first:
        yield "has no docstring"
    elif first[-1] not in ".:;" or re.search(r"(?<!\be\.g)(?<!\bi\.e)[.?!] +[A-Z`]", first):
        yield f"does not begin with a line of one sentence: {first!r}"


def args_shortcomings(thing, text):
    taken, said = list(parameters(thing)), sections(text)
    named = ENTRY.findall(said.get("Args", ""))
    record = isinstance(thing, type) and is_record(thing)
    if record:
        named += ENTRY.findall(said.get("Attributes", ""))
        given = set(named) | commented(inspect.getsource(thing))
    else:
        given = set(named)
    unknown = [name for name in named if name not in taken]
    if unknown:
        yield f"has Args that there are not: {', '.join(unknown)}"
    words, other = handed_on(thing, text)
    if words and other is None:
        yield "hands its arguments on to what there is not"
    elif words:
        given |= set(ENTRY.findall(sections(docstring(other)).get("Args", "")))
    missing = [name for name in taken if name not in given]
    if missing:
        yield f"has no Args for {', '.join(missing)}"
    elif not record and not unknown and named != [name for name in taken if name in named]:
        yield f"has its Args in another order than the signature: {', '.join(taken)}"


def returns_shortcomings(thing, text):
    given, said = result(thing), sections(text)
    if given is None or {"Returns", "Yields"} & set(said) or "result" in handed_on(thing, text)[0]:
        return
    first = text.split("\n")[0]
    if not first.startswith(tuple(f"{word} " for word in RESULT)):
        yield f"has no Returns for {given}, and its summary does not name the result"
    elif re.match(r"(tuple\[)?(Tensor|np\.ndarray)", given) and not SHAPE.search(first):
        yield f"has no Returns, and its summary no shape, for {given}"


def raises_shortcomings(thing, text):
    said = ENTRY.findall(sections(text).get("Raises", ""))
    words, other = handed_on(thing, text)
    of_other = ENTRY.findall(sections(docstring(other)).get("Raises", "")) if "errors" in words and other else ()
    missing = sorted(raised(thing) - {*said, *of_other})
    if missing:
        yield f"has no Raises for {', '.join(missing)}"
    unknown = [name for name in said if not is_exception(name, thing)]
    if unknown:
        yield f"has Raises that are no exceptions: {', '.join(unknown)}"


def source_shortcomings(thing, text):
    source = re.search(r"^Source: (.+?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    if source is None:
        yield "has no Source"
    elif not re.search(r"https://\S+\.\S+", source[1]):
        yield "has a Source without a link"


def doctest_shortcomings(thing, text):
    if not any(example.want for example in doctest.DocTestParser().get_examples(text)):
        yield "has no doctest that shows what comes out"


def is_network_of_timm(thing):
    """Whether it is registered with timm and takes what all such functions take."""
    return ours(thing) and timm.is_model(thing.__name__) and parameters(thing) == ["pretrained", "**kwargs"]


def shortcomings(thing, *, exported=False, published=False):
    text = docstring(thing)
    yield from summary_shortcomings(thing, text)
    if published or "\nSource:" in text:
        yield from source_shortcomings(thing, text)
    if not text or is_property(thing) or (is_network_of_timm(thing) and "Args" not in sections(text)):
        return
    for rule in (args_shortcomings, returns_shortcomings, raises_shortcomings):
        yield from rule(thing, text)
    if exported:
        yield from doctest_shortcomings(thing, text)


def exported_by_rooms():
    rooms = [vision_attn, *(module for module in MODULES if module.__name__.count(".") == 1)]
    return [getattr(room, name) for room in rooms for name in names_of(room)]


def published_things():
    modules = {name: importlib.import_module(f"vision_attn.{name}") for name in PUBLISHED}
    return [getattr(modules[module], name) for module, names in PUBLISHED.items() for name in names.split()]


def networks():
    """The names of those that we registered with timm."""
    return [name for name in timm.list_models() if ours(timm.model_entrypoint(name))]


def ids(things):
    return {id(thing) for thing in things}


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module):
    exported, published = map(ids, (exported_by_rooms(), published_things()))
    found = {
        path: list(shortcomings(thing, exported=id(thing) in exported, published=id(thing) in published))
        for path, thing in public_things(module)
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert module.__doc__


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_constant_has_its_comment(module):
    constants = {name for name in names_of(module) if is_constant(getattr(module, name))}
    assigned = set(re.findall(r"^(\w+)(?::.*)? = ", inspect.getsource(module), re.MULTILINE))
    assert (constants & assigned) - commented(inspect.getsource(module)) == set()


def test_what_is_public_is_found():
    found = {path: thing for module in MODULES for path, thing in public_things(module)}
    exported = [thing for thing in exported_by_rooms() if not is_constant(thing) and not isinstance(thing, ModuleType)]
    assert ids([*exported, *published_things()]) <= ids(found.values())
    assert set(networks()) <= set(vision_attn.models.__all__)
    assert {"vision_attn.blocks.spatial.Attention.forward", "vision_attn.inspection.sites.Site.tokens"} <= set(found)


def test_networks_have_as_many_parameters_as_they_say():
    for name in networks():
        said = re.findall(r"(\d+\.\d+) M", docstring(timm.model_entrypoint(name)).split("\n")[0])
        if said:
            with torch.device("meta"):
                parameters = sum(p.numel() for p in timm.create_model(name).parameters()) / 1e6
            decimals = len(said[0].partition(".")[2])
            assert round(sum(map(float, said)), decimals) == round(parameters, decimals), name


def test_every_command_and_flag_has_its_help():
    def silent(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helped = {choice.dest for choice in action._choices_actions if choice.help}
                yield from (name for name in action.choices if name not in helped)
                for command in action.choices.values():
                    yield from silent(command)
            elif not action.help:
                yield f"{parser.prog} {action.dest}"

    assert list(silent(cli.parser())) == []


# --- that they find what falls short ----------------------------------------------------------------------------------


def example(x, *rest, **options) -> "Tensor":  # noqa: F821
    if not rest:
        raise ValueError
    return x


GOOD = """The sum of maps, ``(b, c, h, w)``.

Args:
    x: a map.
    *rest: more of them.
    **options: none.

Raises:
    ValueError: there is no other map.

Source: https://arxiv.org/abs/1706.03762

>>> 1 + 1
2
"""


@pytest.mark.parametrize(
    ("good", "bad", "shortcoming"),
    [
        (GOOD, "", "has no docstring"),
        ("w)``.\n", "w)``, which\n", "does not begin with a line of one sentence"),
        ("w)``.\n", "w)``. It adds.\n", "does not begin with a line of one sentence"),
        ("The sum of maps, ``(b, c, h, w)``.", "Add maps, ``(b, c, h, w)``.", "its summary does not name the result"),
        (", ``(b, c, h, w)``.", ".", "has no Returns, and its summary no shape"),
        ("    *rest: more of them.\n", "", "has no Args for *rest"),
        ("    **options: none.\n", "    **options: none.\n    y: a map.\n", "has Args that there are not: y"),
        ("    x: a map.\n", "", "has no Args for x"),
        ("    x: a map.\n    *rest: more", "    *rest: more of them.\n    x: a map", "in another order"),
        ("    ValueError:", "    TypeError:", "has no Raises for ValueError"),
        ("Raises:\n", "Raises:\n    NoError: never.\n", "has Raises that are no exceptions: NoError"),
        ("Args:\n", "Arguments are those of :func:`nobody`.\n\nArgs:\n", "hands its arguments on to what there is not"),
        ("https://arxiv.org/abs/1706.03762", "a paper.", "has a Source without a link"),
        ("Source:", "From:", "has no Source"),
        (">>> 1 + 1\n2\n", ">>> two = 1 + 1\n", "has no doctest"),
    ],
)
def test_what_falls_short_is_found(monkeypatch, good, bad, shortcoming):
    assert good in GOOD
    monkeypatch.setattr(example, "__doc__", GOOD)
    assert list(shortcomings(example, exported=True, published=True)) == []
    monkeypatch.setattr(example, "__doc__", GOOD.replace(good, bad))
    assert shortcoming in "; ".join(shortcomings(example, exported=True, published=True))


def test_a_comment_may_say_what_a_field_is():
    source = "#: of the map\nsize: int\n#: long,\n#: and wide\nside = 1\nend: int  #: last\n# not said\nx = 2"
    assert commented(source) == {"size", "side", "end"}
