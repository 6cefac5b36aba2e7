"""What can go wrong in a run through no fault of the program's; light, so that the command line can name it."""

__all__ = ["DataError", "TrainingError"]


class DataError(RuntimeError):
    """The data is not there, is damaged or does not fit."""


class TrainingError(RuntimeError):
    """Training cannot go on; what was saved before is whole."""
