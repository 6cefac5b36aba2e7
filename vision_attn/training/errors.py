"""How a run can end early through no fault of the program's; light, so that the command line can name it."""

__all__ = ["DataError", "Interrupted", "TrainingError"]


class DataError(RuntimeError):
    """The data is not there, is damaged or does not fit."""


class TrainingError(RuntimeError):
    """Training cannot go on; what was saved before is whole."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped a run, which was saved before it left."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal
