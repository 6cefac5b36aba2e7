"""What can go wrong in a benchmark through no fault of the program's; light, so that the command line can name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["BenchmarkError", "naming"]


class BenchmarkError(RuntimeError):
    """The benchmark cannot go on: contestants do not compute the same, or the memory does not suffice."""


@contextmanager
def naming(contestant: str, place: str) -> Iterator[None]:
    """Say which contestant ran out of memory, and where.

    Args:
        contestant: who is run inside.
        place: where, in the message.

    Raises:
        BenchmarkError: the memory did not suffice.
    """
    try:
        yield
    except RuntimeError as error:
        # On the CPU the allocator of torch raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise BenchmarkError(
                f"{contestant} at {place}: there is not enough memory for it: choose smaller --shapes"
            ) from error
        raise
