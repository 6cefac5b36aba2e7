"""The segments of a forward pass that activation checkpointing computes again in the backward pass.

torch has no public identifier of a segment. It is read from the stack: the ``ctx`` of the segment's
``autograd.Function`` (reentrant checkpointing), or the frame object of ``torch.utils.checkpoint`` (not reentrant). Both
belong to the autograd graph and are freed with it.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.autograd.function import FunctionCtx


class Segment(NamedTuple):
    """A segment that is running in this thread."""

    #: An object that identifies the segment and lives as long as its graph.
    identity: Any
    #: True if the segment runs again, for its gradients.
    again: bool


def running_segments() -> Iterator[Segment]:
    """Yield the segments that are running in this thread, innermost first."""
    frame: FrameType | None = inspect.currentframe()
    in_segment = False
    while frame is not None:
        code, names = frame.f_code, frame.f_globals
        if code.co_varnames[:1] == ("ctx",) and code.co_name in ("forward", "backward"):
            ctx: Any = frame.f_locals["ctx"]
            # Without ctx in its forward method, a function cannot be identified while it runs first.
            if isinstance(ctx, FunctionCtx) and "ctx" in type(ctx)._forward_cls.forward.__code__.co_varnames[:1]:  # type: ignore[attr-defined]
                in_segment = True
                yield Segment(ctx, code.co_name == "backward")
        elif names is vars(torch.utils.checkpoint):
            if code.co_name == "unpack_hook":
                yield Segment(read_local(frame, "frame"), True)
            elif (generator := frame.f_locals.get("gen")) is not None:
                in_segment = True
                yield Segment(read_local(generator.gi_frame, "new_frame"), False)
            elif code.co_name == "checkpoint":
                if not in_segment:
                    raise unknown_checkpoint()
                in_segment = False
        frame = frame.f_back


def read_local(frame: FrameType, name: str) -> Any:
    if name not in frame.f_locals:
        raise unknown_checkpoint()
    return frame.f_locals[name]


def unknown_checkpoint() -> RuntimeError:
    what = f"torch {torch.__version__} implements activation checkpointing in another way than the tested versions"
    remedy = "Turn it off inside va.padded, va.context, va.disabled and va.use_impl, or use a tested version of torch"
    return RuntimeError(f"{what}. {remedy}")


#: Return the number of the backward pass that runs in this thread; -1 outside backward passes, and an error in dynamo.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 outside backward passes."""
    return -1 if torch.compiler.is_dynamo_compiling() else graph_task_id()
