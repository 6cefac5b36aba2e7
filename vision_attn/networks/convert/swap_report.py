"""Report of the attention modules that ``swap_`` found in a model."""

from dataclasses import dataclass

from vision_attn.text import Report, Table, shorten


@dataclass(frozen=True)
class SwappedModule:
    """Result of :func:`vision_attn.swap_` for one attention module.

    >>> from torch import nn
    >>> from vision_attn import swap_
    >>> report = swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True)
    >>> report.modules[0].site, report.modules[0].block
    ('self_attn', "Attention1d, pattern='full'")
    """

    #: path of the module in the model; empty for the model
    site: str
    #: name of its class
    kind: str
    #: the block that computes its attention; empty if the module is not swapped
    block: str = ""
    #: largest difference between module and block on random weights, relative to the largest value
    difference: float = 0.0
    #: reason why the module is not swapped; empty if it is swapped
    reason: str = ""


@dataclass(frozen=True, repr=False)
class SwapReport(Report):
    """Report on the attention modules that were swapped or skipped; prints as a table.

    >>> from torch import nn
    >>> from vision_attn import swap_
    >>> print(swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True))  # doctest: +ELLIPSIS
    1 module would be swapped
    site       module              block                        difference
    self_attn  MultiheadAttention  Attention1d, pattern='full'  ...
    >>> print(swap_(nn.Conv2d(3, 8, 1)))
    0 modules swapped; no attention modules found
    See docs/convert.md for the supported layers, or call va.insert_ to add attention blocks.
    """

    #: the attention modules that were found, in the order of the model
    modules: tuple[SwappedModule, ...]
    #: the action: "swapped", "would be swapped" or "unswapped"
    verb: str = "swapped"

    @property
    def swapped(self) -> tuple[SwappedModule, ...]:
        """The modules that were swapped."""
        return tuple(module for module in self.modules if not module.reason)

    @property
    def skipped(self) -> tuple[SwappedModule, ...]:
        """The modules that were not swapped."""
        return tuple(module for module in self.modules if module.reason)

    def parts(self) -> list[str | Table]:
        headline = f"{len(self.swapped)} module{'s' * (len(self.swapped) != 1)} {self.verb}"
        parts, hint = list[str | Table](), list[str]()
        if self.swapped:
            rows = [(layer.site, layer.kind, layer.block, f"{layer.difference:.1e}") for layer in self.swapped]
            parts = [Table([("site", "module", "block", "difference"), *rows], left=(0, 1, 2))]
        elif self.verb != "unswapped":
            count = len(self.modules)
            headline += f"; {count or 'no'} attention module{'s' * (count != 1)} found"
            hint = ["See docs/convert.md for the supported layers, or call va.insert_ to add attention blocks."]
        for kind, reason in dict.fromkeys((layer.kind, layer.reason) for layer in self.skipped):
            layers = [layer for layer in self.skipped if (layer.kind, layer.reason) == (kind, reason)]
            paths = shorten(layer.site or "the model" for layer in layers)
            parts.append(f"not swapped: {len(layers)} {kind} ({paths}): {reason}")
        return [headline, *parts, *hint]
