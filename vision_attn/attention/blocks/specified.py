"""What a block is beyond the names and shapes of its weights, carried by its state dict."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["TOLD", "Specified"]

#: The entry of a block in the metadata of a state dict, beside torch's own ``version``.
TOLD = "block"


class Specified(nn.Module):
    """A block whose state dict says what it is.

    It says so in the metadata in which torch keeps the version of every module, which ``torch.save`` writes along: the
    keys are those that they were, and who does not know of it is not disturbed by it.
    """

    def specification(self) -> dict[str, object]:
        """The arguments that change what the block computes, and no shape of its weights."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata[TOLD] = {name: repr(value) for name, value in self.specification().items()}
