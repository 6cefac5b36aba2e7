"""The record of an inserted block: its site, its feature map and its cost; records as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vision_attn.checks import product
from vision_attn.networks.insertion.costs import Cost, describe_added
from vision_attn.networks.insertion.layout import Element
from vision_attn.text import Report, Table, shorten

#: The name of a block as a child of its target, which marks its keys in a state dict.
CHILD = "inserted"

#: Tokens above which full attention costs more than most networks.
MOST_TOKENS = 4096

OPTIMIZERS = "Create optimizers and EMA copies now: existing ones do not contain these parameters."
FUSE_FIRST = "{}: freeze, fuse and quantize this network before inserting blocks at norms and convolutions."


@dataclass(frozen=True)
class InsertedBlock:
    """One block in a backbone: where it is and what it costs for one image.

    >>> from torch import nn
    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 12))
    >>> report.blocks[0].map_size, report.blocks[0].tokens
    ((16, 12), 192)
    """

    #: path of the module at which the block runs: the target of the site that was chosen
    site: str
    #: ``"after"`` or ``"before"`` it, or ``"instead"`` of it
    at: str
    #: name of the block's class
    block: str
    #: the options it was built with
    options: Mapping[str, Any]
    #: channels of the map
    channels: int
    #: size of the map along each of its axes: rows and columns
    map_size: tuple[int, ...]
    #: learned numbers in the block
    parameters: int
    #: multiply-adds of one forward of one image
    multiply_adds: int
    #: shape of the images that the map's size is for: batch, channels, rows, columns
    input_shape: tuple[int, ...]
    #: layout of the map in its tensor: ``"b c h w"``, ``"b h w c"``, ``"b (1 + h w) c"``, …
    layout: str = "b c h w"
    #: place of the tensor in what the module takes or returns: an index, a key, or None for the value itself
    element: Element = None
    #: path from the module to the block
    held: str = CHILD
    #: whether the output of the network depends on the map
    read: bool = True
    #: how the block was made an identity at initialization, in words; empty where it is one by design
    begins: str = ""
    #: options of the :class:`ExactBlock` around it; empty where there is none
    around: Mapping[str, Any] = field(default_factory=dict)
    #: pairs of tokens that its full attention compares; in no file
    compared: int = field(default=0, compare=False, repr=False)

    @property
    def size(self) -> str:
        """The size of the map in words: rows × columns."""
        return "×".join(map(str, self.map_size))

    @property
    def tokens(self) -> int:
        """Positions of the map, each a token."""
        return product(self.map_size)


@dataclass(frozen=True, repr=False)
class InsertionReport(Report):
    """What was inserted or removed; prints as a table.

    >>> from torch import nn
    >>> from vision_attn.networks.insertion import insert_
    >>> print(insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 16)))
    1 block inserted, for an input of 3×16×16
    where  block             channels    map  tokens  parameters  multiply-adds
    0      AttentionBlock2d         8  16×16     256         312      1,114,112
    together +975.0 % parameters, +18,133.3 % multiply-adds
    Create optimizers and EMA copies now: existing ones do not contain these parameters.
    """

    #: in the order of their sites
    blocks: tuple[InsertedBlock, ...]
    #: what was done to them
    verb: str = "inserted"
    #: cost of the network before; None where it was not measured
    whole: Cost | None = None
    #: cost of the modules that they replaced
    gone: Cost = field(default_factory=lambda: Cost(0, 0))
    #: change of the network's output, as a fraction of it
    changed: float = 0.0

    def __len__(self) -> int:
        return len(self.blocks)

    def parts(self) -> list[str | Table]:
        rows = [("where", "block", "channels", "map", "tokens", "parameters", "multiply-adds")]
        for block in self.blocks:
            costs = f"{block.tokens}", f"{block.parameters:,}", f"{block.multiply_adds:,}"
            rows.append((block.site, block.block, f"{block.channels}", block.size, *costs))
        if len(self) > 1:
            rows.append(("together", "", "", "", "", f"{self.parameters:,}", f"{self.multiply_adds:,}"))
        sizes = " and ".join(dict.fromkeys("×".join(map(str, block.input_shape[1:])) for block in self.blocks))
        heading = f"{len(self)} {'block' if len(self) == 1 else 'blocks'} {self.verb}, for an input of {sizes}"
        notes = [] if self.whole is None else [describe_added(self.added, self.whole)]
        kinds = dict.fromkeys((block.block, block.begins) for block in self.blocks if block.begins)
        notes += [f"{name} begins as the identity: {how}" for name, how in kinds if self.verb == "inserted"]
        notes += [f"the output of the network changes by {100 * self.changed:.2g} %"] if self.changed else []
        fusible = shorten(repr(one.site) for one in self.blocks if one.held.startswith("."))
        notes += [FUSE_FIRST.format(fusible)] if fusible and self.verb == "inserted" else []
        notes += [OPTIMIZERS] if self.verb != "removed" else []
        notes += [f"warning: {line}" for line in self.warnings]
        return [heading, Table(rows, left=(0, 1)), *notes] if self.blocks else [f"no block {self.verb}"]

    @property
    def parameters(self) -> int:
        """Parameters of all blocks together."""
        return sum(block.parameters for block in self.blocks)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all blocks together, in one forward of one image."""
        return sum(block.multiply_adds for block in self.blocks)

    @property
    def added(self) -> Cost:
        """Cost added to the network; negative where the replaced modules cost more."""
        return Cost(self.parameters - self.gone.parameters, self.multiply_adds - self.gone.multiply_adds)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line each for feature maps that are too small for attention, too large, or not read by the network."""
        large = [block for block in self.blocks if block.compared > MOST_TOKENS**2]
        tokens, cost = max((x.tokens for x in large), default=0), sum(x.multiply_adds for x in large) / 1e9
        remedy = "take pattern=va.Window(7), a kv_stride or another site"
        small = [block for block in self.blocks if max(block.map_size) <= 2]
        unread = [block for block in self.blocks if not block.read]
        kinds = (
            ("little to attend to at {}: choose an earlier site or a larger input", small),
            ("the output of the network does not depend on the map at {}: choose an earlier site", unread),
            (f"full attention at {{}} compares up to {tokens:,} tokens, {cost:,.1f} G multiply-adds: {remedy}", large),
        )
        return tuple(
            text.format(", ".join(f"{block.site!r} ({block.size})" for block in blocks))
            for text, blocks in kinds
            if blocks
        )
