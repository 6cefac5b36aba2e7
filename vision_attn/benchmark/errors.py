"""What can go wrong in a benchmark through no fault of the program's; light, so that the command line can name it."""

__all__ = ["BenchmarkError"]


class BenchmarkError(RuntimeError):
    """The benchmark cannot go on: contestants do not compute the same, or the memory does not suffice."""
