"""Values that are valid inside a ``with`` block, in the thread or task that entered it; models store nothing.

The values are kept in a ``ContextVar``, so other threads and tasks can run the same model at the same time without
being affected. Tasks started inside the block inherit the values, as does :func:`asyncio.to_thread`. New threads do not
inherit them.

Activation checkpointing computes a segment of a forward pass again during the backward pass, which may run in another
``with`` block, or in a thread of autograd. The rule for all ``with`` blocks: a segment that runs again gets the values
of its first run, or an error is raised. The values are kept with the segment and freed with its graph.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Lock
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from vision_attn.attention.recomputation import backward_pass, running_segments
from vision_attn.checks import get_version

#: If a copy runs in place of a module, this attribute of the copy holds the module.
ORIGINAL = "original_of_copy"

#: Kinds of values that may change gradients; the recording of ``va.capture`` and the choice of eager mode do not.
WITH_EFFECT = {"valid", "context", "output", "impl"}


class Values(dict[tuple[str, nn.Module], Any]):
    """The values of a ``with`` block by kind and module."""

    #: The backward pass in which the ``with`` block was entered; -1 outside backward passes.
    entered_in: int
    #: The tensors among the values of a segment, and their versions, which count changes in place.
    versions: tuple[tuple[Tensor, int], ...] = ()


class DependsOnPass:
    """A value that depends on the running forward pass, such as the size of its images."""

    def fixed(self) -> Any:
        """Return the value for the running forward pass, for the case that it runs again."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Return the user's tensors on which the value depends."""
        return []


#: The active ``with`` blocks of this thread or task, innermost last.
SCOPES: ContextVar[tuple[Values, ...]] = ContextVar("SCOPES", default=())

#: True after the first ``with`` block of the process.
USED = False

#: The values with which a segment ran first, by the identity of the segment.
RECORDED: WeakKeyDictionary[Any, tuple[Values, ...]] = WeakKeyDictionary()

#: Modules that used values outside known segments: possibly in a segment of another library.
UNRECORDED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def scope(model: nn.Module, kind: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Assign values to modules of a model inside a ``with`` block; :func:`scoped_values` reads them.

    Inside it, a compiled model runs eagerly in this thread or task, because a compiled graph cannot read the values.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError("model must run in this thread, got nn.DataParallel on several GPUs. Pass model.module.")
    record_segments(active_scopes())  # a segment that enters a scope enters it again when it runs again
    entered = Values({(kind, module): value for module, value in values.items()})
    entered.entered_in = backward_pass()
    global USED
    if not USED:  # this imports the compiler, as the stance does
        torch.compiler.assume_constant_result(has_scopes)
        USED = True
    EagerInScopes.enter()
    SCOPES.set((*SCOPES.get(), entered))
    try:
        yield
    finally:
        entered.clear()  # tasks started inside the block share this dict
        SCOPES.set(tuple(other for other in SCOPES.get() if other is not entered))
        EagerInScopes.exit()


def scoped_values(module: nn.Module, *kinds: str) -> list[list[Any]]:
    """Return the values of each kind for a module in the ``with`` blocks of its forward pass, innermost last."""
    traced = torch.compiler.is_dynamo_compiling()
    scopes = active_scopes(module) if not traced or in_scope() else ()
    recorded = traced or not scopes or record_segments(scopes)
    owner = vars(module).get(ORIGINAL, module)
    values_of = [[value for values in scopes if (value := values.get((kind, owner))) is not None] for kind in kinds]
    if not recorded and any(values_of[kinds.index(kind)] for kind in WITH_EFFECT.intersection(kinds)):
        UNRECORDED.add(module)
    return values_of


def scoped_output(block: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Apply the functions of the active ``with`` blocks to the output ``y`` of a residual block with input ``x``."""
    for function in scoped_values(block, "output")[0]:
        y = function(x, y)
    return y


def active_scopes(module: nn.Module | None = None) -> tuple[Values, ...]:
    """Return the values that apply to the running forward pass of a module, innermost last.

    For a segment that runs again, these are the values of its first run, and of the ``with`` blocks that it enters.
    """
    scopes, number = SCOPES.get(), backward_pass()
    if number == -1 or not (scopes or RECORDED or UNRECORDED):
        return scopes
    entered = tuple(values for values in scopes if values.entered_in == number)
    for segment in running_segments():
        if segment.again:
            recorded = RECORDED.get(segment.identity, ())
            if any(get_version(x) != version for values in recorded for x, version in values.versions):
                what = "the mask of va.padded or the features of va.context changed in place before the backward pass"
                raise RuntimeError(f"{what}, so activation checkpointing would compute other values. Pass a copy")
            return (*recorded, *entered)
    if module is not None and (len(entered) < len(scopes) or used_values(module)):
        what = f"{type(module).__name__} ran in a backward pass, in a function that does not keep the with block"
        remedy = "Use torch.utils.checkpoint for activation checkpointing"
        raise RuntimeError(f"{what} of its forward pass (va.padded, va.context, va.disabled or va.use_impl). {remedy}")
    return entered


def used_values(module: nn.Module) -> bool:
    """Return True if a graph that still exists, or an unknown segment, used values for a module."""
    return module in UNRECORDED or any(
        owner is module and kind in WITH_EFFECT
        for scopes in list(RECORDED.values())
        for values in scopes
        for kind, owner in values
    )


def record_segments(scopes: tuple[Values, ...]) -> bool:
    """Keep the values of the running forward pass for its segments; return False if there is no segment."""
    in_segment = False
    for segment in running_segments():
        in_segment = True
        if segment.again:
            break
        if segment.identity not in RECORDED:
            RECORDED[segment.identity] = tuple(fixed_values(values) for values in scopes)
    return in_segment


def fixed_values(values: Values) -> Values:
    """Return a copy of values in which none depends on the running forward pass."""
    fixed, tensors = Values(values), list[Any]()
    for key, value in values.items():
        if isinstance(value, DependsOnPass):
            fixed[key] = value.fixed()
        tensors += value.tensors() if isinstance(value, DependsOnPass) else [value]
    unique = {id(x): x for x in tensors if isinstance(x, Tensor) and not x.is_inference()}
    fixed.versions = tuple((x, get_version(x)) for x in unique.values())
    return fixed


def in_scope() -> bool:
    """Return True inside a ``with`` block.

    torch's compiler traces a model inside such a block only for ``torch.export.export(…, strict=True)``, whose graph is
    a separate program.
    """
    traced = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    return not traced and USED and has_scopes()


def has_scopes() -> bool:
    """Return True if the running forward pass is inside a ``with`` block; a constant for torch's compiler.

    A recomputed segment is inside the ``with`` blocks of its first run, so that it is compiled again or eager again.
    """
    return any(active_scopes())


def outside_scopes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside all ``with`` blocks, so that it runs compiled."""
    variables = copy_context()
    variables.run(SCOPES.set, ())
    return variables.run(function, *args, **kwargs)


class EagerInScopes(str):
    """A stance of torch.compile: ``force_eager`` inside a scope, and the previous stance everywhere else.

    torch has one stance for all threads and compares it by name. This stance is set while any thread is in a scope, and
    while a graph has segments that ran in a scope, so that they are recomputed eagerly.
    """

    lock: ClassVar[Lock] = Lock()
    entered: ClassVar[int] = 0
    #: The stance that is set, or was set last.
    latest: ClassVar[Any]
    #: torch's handle, which sets the previous stance again, and the name of that stance.
    handle: Any = None
    previous: str = "default"

    def __eq__(self, name: object) -> bool:
        if eager := in_scope():
            record_segments(active_scopes())
        return name == ("force_eager" if eager else self.previous)

    __hash__ = str.__hash__

    @classmethod
    def enter(cls) -> None:
        with cls.lock:
            # This runs even if the stance is set, because torch raises an error in a compiled function.
            stance = cls()
            handle: Any = torch.compiler.set_stance(stance)  # type: ignore[arg-type]
            if isinstance(previous := handle.prev.stance, cls):
                handle.__exit__(None, None, None)
                stance = previous
            elif handle.stance.stance is not stance:
                raise RuntimeError(f"torch {torch.__version__} does not keep this stance. Use a tested version")
            else:
                stance.handle, stance.previous = handle, str(previous)
            cls.latest = stance
            cls.entered += 1

    @classmethod
    def exit(cls) -> None:
        with cls.lock:
            cls.entered -= 1
            if not (cls.entered or RECORDED):
                cls.latest.handle.__exit__(None, None, None)
