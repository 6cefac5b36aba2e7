"""Convert options of blocks to Python code and back, and compare the arguments of blocks in state dicts.

The code consists of literals, and of patterns and position encodings with literal arguments. It is parsed, not run.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from vision_attn.attention.blocks.config import CONFIG_KEY
from vision_attn.attention.patterns import Grid, Halo, Neighborhood, Pattern, Window
from vision_attn.attention.position import AbsPos, ConditionalPos, RelPosDecomposed, RelPosTable, Rope, SinCos
from vision_attn.networks.safe.pickled import METADATA
from vision_attn.text import did_you_mean

PATTERNS = (Window, Grid, Halo, Neighborhood, Pattern)
POSITIONS = (RelPosDecomposed, RelPosTable, AbsPos, Rope, ConditionalPos, SinCos)
#: The names that are allowed in the code.
CONFIG_CLASSES: dict[str, Callable[..., Any]] = {cls.__name__: cls for cls in (*PATTERNS, *POSITIONS)}

#: path of a block -> {argument: code}
Arguments = Mapping[str, Mapping[str, str]]

#: Largest number of characters of the code. Parsing needs about a hundred times as many bytes of memory.
MAX_LENGTH = 10_000


def to_code(name: str, value: object) -> str:
    """Return the value of an option as code.

    >>> to_code("pattern", Window(7, shift=3))
    'Window(size=7, shift=3)'
    """
    code = repr(value)
    try:
        again = from_code(code)
    except ValueError:
        again = NotImplemented
    if type(again) is not type(value) or repr(again) != code:
        plain = "numbers, strings, True, False, None, tuples, lists and dictionaries of these values"
        raise ValueError(f"{name}={code} cannot be saved: options must be {plain}, or {', '.join(CONFIG_CLASSES)}")
    return code


def from_code(code: str) -> Any:
    """Return the value of code.

    >>> from_code("{'pattern': Window(size=7, shift=3), 'heads': -1}")
    {'pattern': Window(size=7, shift=3), 'heads': -1}
    """
    if len(code) > MAX_LENGTH:
        raise ValueError(f"{code[:80]!r}… is not a valid value: it has more than {MAX_LENGTH:,} characters")
    try:
        return eval_node(ast.parse(code, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{code[:200]!r} is not a valid value: {error}") from error


def parse_option(word: str) -> Any:
    """Parse a value from the command line: names and einx expressions need no quotes, other values are code.

    >>> parse_option("rows"), parse_option("Grid(7)"), parse_option("b n d h w -> (b w) n h d"), parse_option("0.5")
    ('rows', Grid(size=7), 'b n d h w -> (b w) n h d', 0.5)
    """
    is_text = "->" in word or (word.isidentifier() and not keyword.iskeyword(word))
    return word if is_text else from_code(word.removeprefix("va."))


def eval_node(node: ast.expr) -> Any:
    match node:
        case ast.Tuple(elts=items):
            return tuple(map(eval_node, items))
        case ast.List(elts=items):
            return list(map(eval_node, items))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {eval_node(key): eval_node(item) for key, item in zip(keys, values, strict=True) if key}
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in CONFIG_CLASSES:
            named = {str(item.arg): eval_node(item.value) for item in keywords}  # **{} becomes an argument "None"
            return CONFIG_CLASSES[name](*map(eval_node, args), **named)
        case ast.Call(func=ast.Name(id=name)):
            guess = did_you_mean(name, CONFIG_CLASSES)
            raise ValueError(f"expected one of {', '.join(CONFIG_CLASSES)}, got {name}.{guess}")
    return ast.literal_eval(node)


def get_arguments(state: object) -> Arguments:
    """Return the arguments of the attention blocks in a state dict, by path.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> get_arguments(Attention2d(8, 2, pattern=Window(7)).state_dict())
    {'': {'num_heads': '2', 'pattern': 'Window(size=7, shift=0)'}}
    """
    metadata = getattr(state, METADATA, None) or {}
    return check_saved_arguments({path: entry[CONFIG_KEY] for path, entry in metadata.items() if CONFIG_KEY in entry})


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
