"""Ctrl-C and SIGTERM while a run trains: noted when they come, and obeyed between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """Notes the first of these signals inside a ``with``; Ctrl-C after it leaves at once, saving nothing.

    What the process ignores, as one in the background of a shell ignores Ctrl-C, stays ignored. Python takes signals
    in its main thread: a run in another one is left to them as ever.

    >>> with Interruption() as interruption:
    ...     signal.raise_signal(signal.SIGTERM)
    >>> interruption.signal == signal.SIGTERM
    True
    """

    #: the signal that came; 0 where none did
    signal: int

    def __init__(self) -> None:
        self.signal = 0
        self.before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            # None is a handler that was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.before.clear()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number
