"""Values as the code that makes them, read back without running any, and what files say that their blocks are.

The code is literals, and the specifications of patterns and positions with literal arguments; nothing else is read or
written.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from vision_attn.attention.blocks.config import CONFIG_KEY
from vision_attn.attention.patterns import Grid, Halo, Neighborhood, Pattern, Window
from vision_attn.attention.position import AbsPos, ConditionalPos, RelPosDecomposed, RelPosTable, Rope2d, SinCos

#: The only names that stand for something.
PATTERNS = (Window, Grid, Halo, Neighborhood, Pattern)
POSITIONS = (RelPosDecomposed, RelPosTable, AbsPos, Rope2d, ConditionalPos, SinCos)
SPECIFICATIONS: dict[str, Callable[..., Any]] = {made.__name__: made for made in (*PATTERNS, *POSITIONS)}

#: path of a block -> {argument: code}
Arguments = Mapping[str, Mapping[str, str]]

#: Characters of the code of a value: to parse it takes a hundred times as many bytes.
LONGEST = 10_000


def to_code(name: str, value: object) -> str:
    """The code of an option's value.

    >>> to_code("pattern", Window(7, shift=3))
    'Window(size=7, shift=3)'
    """
    code = repr(value)
    try:
        again = from_code(code)
    except ValueError:
        again = NotImplemented
    if type(again) is not type(value) or repr(again) != code:
        plain = "numbers, texts, True, False, None, tuples, lists and dictionaries of them"
        one = ", ".join(SPECIFICATIONS)
        raise ValueError(f"{name}={code} cannot be written down: options must be {plain}, or one of {one}")
    return code


def from_code(code: str) -> Any:
    """The value of such code.

    >>> from_code("{'pattern': Window(size=7, shift=3), 'heads': -1}")
    {'pattern': Window(size=7, shift=3), 'heads': -1}
    """
    if len(code) > LONGEST:
        raise ValueError(f"{code[:80]!r}… is not the code of a value: it has more than {LONGEST:,} characters")
    try:
        return value_of(ast.parse(code, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{code[:200]!r} is not the code of a value: {error}") from error


def from_word(word: str) -> Any:
    """A value as one types it on a command line: names and lines of einx without quotes, all else as code.

    >>> from_word("rows"), from_word("Grid(7)"), from_word("b n d h w -> (b w) n h d"), from_word("0.5")
    ('rows', Grid(size=7), 'b n d h w -> (b w) n h d', 0.5)
    """
    plain = "->" in word or (word.isidentifier() and not keyword.iskeyword(word))
    return word if plain else from_code(word)


def value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=items):
            return tuple(map(value_of, items))
        case ast.List(elts=items):
            return list(map(value_of, items))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {value_of(key): value_of(item) for key, item in zip(keys, values, strict=True) if key}
        case ast.Call(func=ast.Name(id=name), args=args, keywords=given) if name in SPECIFICATIONS:
            named = {one.arg: value_of(one.value) for one in given if one.arg is not None}
            if len(named) == len(given):
                return SPECIFICATIONS[name](*map(value_of, args), **named)
    raise ValueError(f"{ast.unparse(node)[:80]} is neither a literal nor one of {', '.join(SPECIFICATIONS)}")


def arguments_of(state: object) -> Arguments:
    """What the blocks of a state dict are, where it says so: by their paths, in the words of their arguments.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> arguments_of(Attention2d(8, 2, pattern=Window(7)).state_dict())
    {'': {'num_heads': '2', 'pattern': 'Window(size=7, shift=0)'}}
    """
    metadata = getattr(state, "_metadata", None) or {}
    return arguments_in({path: said[CONFIG_KEY] for path, said in metadata.items() if CONFIG_KEY in said})


def arguments_in(said: Any) -> Arguments:
    """What is said of blocks, which may come from anyone's file."""
    for path, told in said.items():
        if not all(isinstance(text, str) for text in (path, *told, *told.values())):
            raise ValueError("what it says of its blocks is no text")
    found: Arguments = said
    return found


def other_arguments(ours: Arguments, theirs: Arguments) -> tuple[str, ...]:
    """What differs between the blocks of a model and those of a file, for the blocks that both tell of.

    >>> other_arguments({"attn": {"num_heads": "2"}}, {"attn": {"num_heads": "4", "scale": "0.5"}})
    ('attn has num_heads=4 in the file and 2 in the model, scale=0.5 in the file and its default in the model',)
    """
    found = {}
    for path in sorted(ours.keys() & theirs.keys()):
        here, there = ours[path], theirs[path]
        found[path or "the block"] = ", ".join(
            f"{name}={there.get(name, 'its default')} in the file and {here.get(name, 'its default')} in the model"
            for name in {**here, **there}
            if here.get(name) != there.get(name)
        )
    return tuple(f"{path} has {differing}" for path, differing in found.items() if differing)
