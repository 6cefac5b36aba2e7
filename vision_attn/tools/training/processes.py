"""Steps that several processes take together, so that none of them waits for one that failed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from vision_attn.errors import TrainingError

T = TypeVar("T")


def run_together(accelerator: Accelerator, function: Callable[[], T], *, main_first: bool = False) -> T:
    """Call a function in all processes, optionally first in the main process, so that downloads occur once.

    If it fails in one process, the main process raises an error, and the others exit with the same status.
    """
    result: Any = None
    error: Exception | None = None
    main = accelerator.is_main_process
    for turn in (main, not main) if main_first else (True,):
        if turn:
            try:
                result = function()
            except Exception as caught:
                error = caught
        failure = error and (accelerator.process_index, str(error), isinstance(error, ValueError))
        failures = [found for found in gather_object([failure]) if found]  # waits for all processes
        if failures:
            process, message, is_usage = failures[0]
            if not main:
                sys.exit(2 if is_usage else 1)
            raise error or (ValueError if is_usage else TrainingError)(f"process {process}: {message}")
    return result
