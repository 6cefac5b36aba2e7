"""The running calls of modules, which hooks record inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from torch import nn

#: A running call of a module: the module, its arguments and its keyword arguments.
Call: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

#: The running calls of this thread or task, innermost first.
CALLS: ContextVar[tuple[Call, ...]] = ContextVar("CALLS", default=())


@contextmanager
def record_calls(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Record the running calls of modules inside a ``with`` block, for each thread and task separately.

    The hooks are functions of this module, so that copies and pickles of a module that have them stay ordinary modules.
    """
    before, handles = CALLS.get(), list[Any]()
    for module in modules:
        handles.append(module.register_forward_pre_hook(start_call, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(end_call, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        CALLS.set(before)


def start_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    CALLS.set(((module, args, kwargs), *CALLS.get()))


def end_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    calls = CALLS.get()
    if calls and calls[0][0] is module:  # the call may have started before the with block
        CALLS.set(calls[1:])
