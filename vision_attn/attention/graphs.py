"""Graphs, traces and transforms, whose tensors belong to a graph and whose sizes may be symbolic; CUDA graphs."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

#: Modules of torch with classes of tensors that are data, such as Parameter and DTensor; it traces with all others.
DATA = ("torch.nn.", "torch.distributed.")


def in_graph(x: Tensor) -> bool:
    """Return True while a graph is traced or exported, where sizes may be symbolic.

    Subclasses of tensors are data, such as the images of MONAI and fastai, except those with which torch traces.
    """
    if type(x) is not Tensor and is_symbolic(x):
        return True
    return torch.compiler.is_dynamo_compiling() or type(x.shape[0]) is not int  # a tensor in torch.jit.trace


def is_symbolic(x: Tensor) -> bool:
    """Return True for a tensor without values, of a class with which torch traces."""
    module = type(x).__module__
    return module.startswith("torch.") and not module.startswith(DATA)


#: Return the active transform of ``torch.func``, whose tensors have no data pointer; None outside transforms.
active_transform: Callable[[], object] = peek_interpreter_stack


def is_fixed(size: Sequence[int]) -> bool:
    """Return True if a size is fixed: in eager mode, or in ``torch.export`` if no length is symbolic."""
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return not torch.compiler.is_compiling() or (exporting and all(type(length) is int for length in size))


def outside_graph(size: Sequence[int], compute: Callable[[], Any]) -> Any:
    """Call a function whose tensors may be kept: they can be used in training, even if the call is in inference mode.

    ``torch.export`` stores the tensors as constants if the size is fixed. For other sizes, the graph computes them in
    every call, with operations that not every runtime supports.
    """
    if not torch.compiler.is_compiling():
        with torch.inference_mode(False):
            return compute()
    if not is_fixed(size):
        return compute()
    with ThreadPoolExecutor(1) as pool:  # the modes of torch that record a graph belong to a thread
        return pool.submit(compute).result()


def can_cache(x: Tensor) -> bool:
    """Return True if a tensor may be cached: it belongs to no torch mode, transform, or captured CUDA graph."""
    if torch.compiler.is_compiling() or is_capturing():
        return False
    return type(x) is Tensor and active_transform() is None


def is_capturing() -> bool:
    """Return True while a CUDA graph is being captured."""
    return has_driver(query := torch.cuda.is_current_stream_capturing) and query()


@cache
def has_driver(query: Callable[[], bool]) -> bool:
    """Return False if the query raises, because its driver is not installed."""
    try:
        query()
    except RuntimeError:
        return False
    return True
