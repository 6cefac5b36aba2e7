"""Convert options of blocks to Python code and back, and compare the arguments of blocks in state dicts.

The code consists of literals, and of patterns and position encodings with literal arguments. It is parsed, not run.
Classes that are not of this library are known only while a file is written or if the caller passes them.
"""

import ast
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

from vision_attn.attention.blocks.config import CONFIG_KEY
from vision_attn.attention.patterns import Grid, Halo, Neighborhood, Pattern, Window
from vision_attn.attention.position import AbsPos, ConditionalPos, RelPosDecomposed, RelPosTable, Rope, SinCos
from vision_attn.networks.inspection.wrappers import unwrap_key
from vision_attn.networks.safe.pickled import METADATA

#: name -> class or function
Classes = Mapping[str, Callable[..., Any]]
PATTERNS = (Window, Grid, Halo, Neighborhood, Pattern)
POSITIONS = (RelPosDecomposed, RelPosTable, AbsPos, Rope, ConditionalPos, SinCos)
#: The classes of this library that are allowed in the code.
CONFIG_CLASSES: Classes = {cls.__name__: cls for cls in (*PATTERNS, *POSITIONS)}

#: path of a block -> {argument: code}
Arguments = Mapping[str, Mapping[str, str]]

#: Largest number of characters of the code. Parsing needs about a hundred times as many bytes of memory.
MAX_LENGTH = 10_000


def to_code(name: str, value: object) -> str:
    """Return the value of an option as code.

    >>> to_code("pattern", Window(7, shift=3))
    'Window(size=7, shift=3)'
    """
    code, kind = repr(value), type(value)
    classes: Classes = {kind.__name__: kind, **CONFIG_CLASSES} if is_dataclass(kind) else CONFIG_CLASSES
    with suppress(ValueError):
        again = from_code(code, classes)
        if type(again) is kind and repr(again) == code:
            return code
    plain = "numbers, strings, True, False, None, tuples, lists and dictionaries of these values"
    raise ValueError(f"{name}={code} cannot be saved: options must be {plain}, a pattern or a position encoding")


def from_code(code: str, classes: Classes = CONFIG_CLASSES) -> Any:
    """Return the value of code, which may create objects of these classes.

    >>> from_code("Window(size=7, shift=3)"), from_code("{'heads': -1}")
    (Window(size=7, shift=3), {'heads': -1})
    """
    if len(code) > MAX_LENGTH:
        raise ValueError(f"{code[:80]!r}… is not a valid value: it has more than {MAX_LENGTH:,} characters")
    try:
        return eval_node(ast.parse(code, mode="eval").body, classes)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{code[:200]!r} is not a valid value: {error}") from error


def class_names(code: str) -> set[str]:
    """Return the names of the classes in code; none in code that is invalid or too long for :func:`from_code`.

    >>> class_names("Distance(0.5)"), class_names("Distance("), class_names(chr(0xD800))
    ({'Distance'}, set(), set())
    """
    if len(code) > MAX_LENGTH:
        return set()
    try:
        calls = [node.func for node in ast.walk(ast.parse(code, mode="eval")) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {name.id for name in calls if isinstance(name, ast.Name)}


def eval_node(node: ast.expr, classes: Classes) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in classes:
            named = {str(item.arg): eval_node(item.value, classes) for item in keywords}  # **{} has the name "None"
            return classes[name](*(eval_node(arg, classes) for arg in args), **named)
    return ast.literal_eval(node)


def get_arguments(state: object) -> Arguments:
    """Return the arguments of the attention blocks in a state dict, by path in the network without wrappers.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> get_arguments(Attention2d(8, 2, pattern=Window(7)).state_dict())
    {'': {'num_heads': '2', 'pattern': 'Window(size=7, shift=0)'}}
    """
    metadata = getattr(state, METADATA, None) or {}
    found = {unwrap_key(path): entry[CONFIG_KEY] for path, entry in metadata.items() if CONFIG_KEY in entry}
    return check_saved_arguments(found)


def check_saved_arguments(arguments: Any) -> Arguments:
    """Return the arguments of blocks; raise an error unless paths, names and values are strings."""
    for path, values in arguments.items():
        if not all(isinstance(text, str) for text in (path, *values, *values.values())):
            raise ValueError("an argument of a block is not a string")
    return dict(arguments)


def compare_arguments(ours: Arguments, theirs: Arguments) -> tuple[str, ...]:
    """Describe the differences between the blocks of a model and of a checkpoint, at the paths that both have.

    >>> compare_arguments({"attn": {"num_heads": "2"}}, {"attn": {"num_heads": "4", "scale": "0.5"}})
    ('attn: num_heads=4 in the checkpoint, 2 in the model; scale=0.5 in the checkpoint, default in the model',)
    """
    differences = []
    for path in sorted(ours.keys() & theirs.keys()):
        here, there = ours[path], theirs[path]
        values = [
            f"{name}={there.get(name, 'default')} in the checkpoint, {here.get(name, 'default')} in the model"
            for name in {**here, **there}
            if here.get(name) != there.get(name)
        ]
        if values:
            differences.append(f"{path}: ".removeprefix(": ") + "; ".join(values))
    return tuple(differences)
