"""Values that hold inside a ``with`` block, in the thread or task that entered it; nothing is stored on a model.

Threads and tasks have separate ``contextvars``: others run the same model at the same time, and see no difference. A
task that is started inside the block inherits it, as does :func:`asyncio.to_thread`. A new thread does not, and neither
do the threads in which autograd recomputes checkpointed activations on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

#: The attribute of a copy, which runs instead of a module, that holds this module.
ORIGINAL = "original"

#: The ``with`` blocks that this thread or task is inside of, the innermost last: values by kind and module.
SCOPES: ContextVar[tuple[dict[tuple[str, nn.Module], Any], ...]] = ContextVar("SCOPES", default=())


@contextmanager
def scope(model: nn.Module, kind: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Give modules of a model values inside a ``with`` block, for :func:`scoped_values`.

    A compiled model runs in eager meanwhile, in this thread or task alone: a compiled graph does not read the values.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError("model must run in this thread, got nn.DataParallel on several GPUs. Pass model.module.")
    entered = {(kind, module): value for module, value in values.items()}
    STANCE.enter()
    SCOPES.set((*SCOPES.get(), entered))
    try:
        yield
    finally:
        entered.clear()  # tasks that were started inside of the block have it, too
        SCOPES.set(tuple(other for other in SCOPES.get() if other is not entered))
        STANCE.exit()


def scoped_values(kind: str, module: nn.Module) -> list[Any]:
    """Return the values of a module in the ``with`` blocks that run now, of the innermost last."""
    if torch.compiler.is_dynamo_compiling() and not in_scope():
        return []
    key = kind, vars(module).get(ORIGINAL, module)
    return [value for one in SCOPES.get() if (value := one.get(key)) is not None]


def scoped_output(block: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the output of a block that adds to a feature map ``x``, after the functions of the ``with`` blocks."""
    for function in scoped_values("output", block):
        y = function(x, y)
    return y


def in_scope() -> bool:
    """Return True inside of a ``with`` block; a constant for torch's compiler.

    It traces a model inside of one only for ``torch.export.export(…, strict=True)``, whose graph is a separate program.
    """
    return any(SCOPES.get())


# As torch.compiler.assume_constant_result does, which takes seconds to import.
in_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside_scopes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as outside of all ``with`` blocks, so that it runs compiled."""
    context = copy_context()
    context.run(SCOPES.set, ())
    return context.run(function, *args, **kwargs)


class EagerInScopes(str):
    """A stance of torch.compile: eager inside of a scope, and everywhere else the stance that was set before.

    torch has one stance for all threads, and compares it with the name of each. It is set while any thread is inside.
    """

    lock = Lock()
    entered: int = 0
    previous: str = "default"
    handle: Any = None

    def __eq__(self, name: object) -> bool:
        return name == ("force_eager" if in_scope() else self.previous)

    __hash__ = str.__hash__

    def enter(self) -> None:
        with self.lock:
            if not self.entered:
                self.handle = torch.compiler.set_stance(self)  # type: ignore[arg-type]
                self.previous = str(self.handle.prev.stance) or "default"  # this one is empty
            self.entered += 1

    def exit(self) -> None:
        with self.lock:
            self.entered -= 1
            if not self.entered:
                self.handle.__exit__(None, None, None)


STANCE = EagerInScopes()
