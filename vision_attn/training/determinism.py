"""Kernels that give the same bits each time, while a run lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["deterministic_kernels"]

#: What cuBLAS needs to be told to give the same bits.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Only deterministic kernels inside; an operation that has none raises, and afterwards all is as it was.

    >>> with deterministic_kernels(True):
    ...     torch.are_deterministic_algorithms_enabled()
    True
    >>> torch.are_deterministic_algorithms_enabled()
    False
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        os.environ.get(WORKSPACE),
    )
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        os.environ.setdefault(WORKSPACE, ":4096:8")
        yield
    finally:
        enabled, warn_only, cudnn.deterministic, cudnn.benchmark, workspace = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
