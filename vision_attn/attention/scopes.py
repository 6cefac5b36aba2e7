"""Values that are valid inside a ``with`` block, in the thread or task that entered it; models store nothing.

The values are kept in a ``ContextVar``, so other threads and tasks can run the same model at the same time without
being affected. Tasks started inside the block inherit the values, as does :func:`asyncio.to_thread`. New threads do not
inherit them, and neither do the threads in which autograd recomputes checkpointed activations on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

#: If a copy runs in place of a module, this attribute of the copy holds the module.
ORIGINAL = "original"

#: The active ``with`` blocks of this thread or task, innermost last: values by kind and module.
SCOPES: ContextVar[tuple[dict[tuple[str, nn.Module], Any], ...]] = ContextVar("SCOPES", default=())

#: Functions whose ``with`` block changed the last forward pass of a module, and the id of the module.
CHANGED: set[tuple[str, int]] = set()


@contextmanager
def scope(model: nn.Module, kind: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Assign values to modules of a model inside a ``with`` block; :func:`scoped_values` reads them.

    Inside it, a compiled model runs eagerly in this thread or task, because a compiled graph cannot read the values.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError("model must run in this thread, got nn.DataParallel on several GPUs. Pass model.module.")
    entered = {(kind, module): value for module, value in values.items()}
    STANCE.enter()
    SCOPES.set((*SCOPES.get(), entered))
    try:
        yield
    finally:
        entered.clear()  # tasks started inside the block share this dict
        SCOPES.set(tuple(other for other in SCOPES.get() if other is not entered))
        STANCE.exit()


def scoped_values(kind: str, module: nn.Module) -> list[Any]:
    """Return the values of a module in the active ``with`` blocks, innermost last."""
    if torch.compiler.is_dynamo_compiling() and not in_scope():
        return []
    key = kind, vars(module).get(ORIGINAL, module)
    return [value for values in SCOPES.get() if (value := values.get(key)) is not None]


def scoped_output(block: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Apply the functions of the active ``with`` blocks to the output ``y`` of a residual block with input ``x``."""
    functions = scoped_values("output", block)
    check_recomputation("va.disabled", block, return_input in functions)
    for function in functions:
        y = function(x, y)
    return y


def return_input(x: Tensor, y: Tensor) -> Tensor:
    """Return the input of a residual block as its output."""
    return x


def check_recomputation(function: str, module: nn.Module, changed: bool) -> None:
    """Raise if activation checkpointing computes a forward pass again outside the ``with`` block that changed it."""
    if torch.compiler.is_dynamo_compiling():
        return
    if changed:
        CHANGED.add((function, id(module)))
    elif (function, id(module)) in CHANGED and in_backward():
        remedy = "Run the backward pass inside it, or turn activation checkpointing off"
        raise RuntimeError(f"activation checkpointing ran a block outside {function}. {remedy}")
    else:
        CHANGED.discard((function, id(module)))


def in_backward() -> bool:
    """Return True during a backward pass, in which activation checkpointing computes a forward pass again."""
    return torch._C._current_graph_task_id() != -1


def in_scope() -> bool:
    """Return True inside a ``with`` block; the value is a constant for torch's compiler.

    The compiler traces a model inside such a block only for ``torch.export.export(…, strict=True)``, whose graph is a
    separate program.
    """
    return any(SCOPES.get())


# This is the effect of torch.compiler.assume_constant_result, which takes seconds to import.
in_scope._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside_scopes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside all ``with`` blocks, so that it runs compiled."""
    context = copy_context()
    context.run(SCOPES.set, ())
    return context.run(function, *args, **kwargs)


class EagerInScopes(str):
    """A stance of torch.compile: ``force_eager`` inside a scope, and the previous stance everywhere else.

    torch has one stance for all threads and compares it by name. This stance is set while any thread is in a scope.
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
                self.previous = str(self.handle.prev.stance) or "default"  # this class is an empty string
            self.entered += 1

    def exit(self) -> None:
        with self.lock:
            self.entered -= 1
            if not self.entered:
                self.handle.__exit__(None, None, None)


STANCE = EagerInScopes()
