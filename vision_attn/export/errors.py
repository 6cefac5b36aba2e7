"""What can go wrong in an export through no fault of the caller's; light, so that the command line can name it."""

__all__ = ["ExportError"]


class ExportError(RuntimeError):
    """What was written does not compute what the network computes, or could not be made; no file is left of it."""
