"""Sites and records of inserted blocks, and the report that prints them as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

from vision_attn.checks import product
from vision_attn.networks.inspection.costs import BlockCost, Cost, describe_added
from vision_attn.networks.inspection.feature_maps import Element
from vision_attn.text import Report, Table

#: The name of a block as a child of its target, which identifies its keys in a state dict.
CHILD = "inserted"

#: The number of tokens above which full attention costs more than most networks.
MAX_TOKENS = 4096

OPTIMIZERS = "Create optimizers and EMA copies now: existing ones do not contain these parameters."


@dataclass(frozen=True)
class Site:
    """Site of a block: a module of the network, and the feature map in its input or output."""

    #: path of the module
    path: str
    #: ``"after"``, ``"before"`` or ``"replace"`` (in place of) the module
    at: str
    channels: int
    #: size of the feature map along each axis: rows and columns
    size: tuple[int, ...]
    #: shape of the images for which the feature map has this size: batch, channels, rows, columns
    input_shape: tuple[int, ...]
    #: layout of the feature map in its tensor: ``"b c h w"``, ``"b h w c"``, ``"b (1 + h w) c"``, …
    layout: str = "b c h w"
    #: index or key of the tensor in the input or output of the module; None if it is the value itself
    element: Element = None
    #: True if the output of the network depends on the feature map
    used: bool = True


@dataclass(frozen=True)
class SecondMap:
    """The feature map from which a block computes keys and values: a module of the network, and its output."""

    path: str
    layout: str
    element: Element
    size: tuple[int, ...]


@dataclass(frozen=True)
class InsertedBlock:
    """Record of one block: its site, how it was built, and its cost.

    >>> from torch import nn
    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 12))
    >>> report.blocks[0].site, report.blocks[0].map_size, report.blocks[0].tokens
    ('0', (16, 12), 192)
    """

    target: Site
    #: class name of the block
    block: str
    #: options of the block; their code in a record that was read from a file
    options: Mapping[str, Any]
    #: path of the block in the model
    block_path: str
    #: None if the block has no second feature map, or one from outside the network
    second: SecondMap | None
    #: how the block was made an identity at initialization, and the options of the :class:`ExactBlock` around it
    identity: tuple[str, Mapping[str, Any]]
    #: not compared, because files contain only a part of it
    cost: BlockCost = field(default=BlockCost(), compare=False)
    #: the module that the block replaced, in a tuple; not stored in files
    replaced: tuple[nn.Module, ...] = field(default=(), compare=False, repr=False)

    @property
    def site(self) -> str:
        """Path of the module at which the block runs."""
        return self.target.path

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        return self.target.channels

    @property
    def map_size(self) -> tuple[int, ...]:
        """Size of the feature map along each axis: rows and columns."""
        return self.target.size

    @property
    def size(self) -> str:
        """Size of the feature map as text: rows × columns."""
        return "×".join(map(str, self.map_size))

    @property
    def tokens(self) -> int:
        """Number of positions of the feature map."""
        return product(self.map_size)

    @property
    def is_child(self) -> bool:
        """True if the block is inside the module at its site, or replaced it."""
        return f"{self.block_path}.".startswith(f"{self.site}.")

    @property
    def context_shape(self) -> tuple[int, ...] | None:
        """Channels and size of the second feature map; None without one. A map from outside may have any size."""
        channels = self.options.get("context_channels")
        return None if channels is None else (channels, *(self.second.size if self.second else self.map_size))

    def moved(self, site: str, block_path: str, context: str | None) -> Self:
        """Return the record for another model, which contains the block and its modules under other paths."""
        second = self.second and replace(self.second, path=context or self.second.path)
        return replace(self, target=replace(self.target, path=site), block_path=block_path, second=second)


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class InsertionReport(Report):
    """Report on inserted or removed blocks; prints as a table.

    >>> from torch import nn
    >>> from vision_attn.networks.insertion import insert_
    >>> print(insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 16)))
    1 block inserted, for an input of 3×16×16
    site  block             channels  feature map  tokens  parameters       MACs
    0     AttentionBlock2d         8        16×16     256         312  1,114,112
    total +975.0 % parameters, +18,133.3 % MACs
    verified in evaluation and training mode
    Create optimizers and EMA copies now: existing ones do not contain these parameters.
    """

    #: records in the order of their sites
    blocks: tuple[InsertedBlock, ...]
    #: ``"inserted"``, ``"inserted by replacement"``, ``"loaded"``, ``"removed"`` or ``"dry run"``
    verb: str = "inserted"
    #: cost of the network before insertion; None if it was not measured
    model_cost: Cost | None = None
    #: cost of the replaced modules
    replaced_cost: Cost = field(default=Cost(0, 0))
    #: relative change of the output of the network
    output_change: float = 0.0
    #: statement of what was verified about the output of the network; empty if nothing is verified by design
    verified: str = ""

    def parts(self) -> list[str | Table]:
        count, dry = len(self.blocks), self.verb == "dry run"
        rows = [("site", "block", "channels", "feature map", "tokens", "parameters", "MACs", "saved MiB per image")]
        for block in self.blocks:
            costs = f"{block.cost.parameters:,}", f"{block.cost.macs:,}", f"{block.cost.saved_bytes / 2**20:.1f}"
            rows.append((block.site, block.block, f"{block.channels}", block.size, f"{block.tokens}", *costs))
        if count > 1:
            rows.append(("total", "", "", "", "", f"{self.parameters:,}", f"{self.macs:,}", ""))
        table = Table(rows if dry else [row[:-1] for row in rows], left=(0, 1))
        sizes = " and ".join(dict.fromkeys("×".join(map(str, block.target.input_shape[1:])) for block in self.blocks))
        blocks = f"{count} {'block' if count == 1 else 'blocks'}"
        heading = f"{f'dry run of {blocks}' if dry else f'{blocks} {self.verb}'}, for an input of {sizes}"
        notes = [] if self.model_cost is None else [describe_added(self.added, self.model_cost)]
        kinds = dict.fromkeys((block.block, block.identity[0]) for block in self.blocks if block.identity[0])
        notes += [f"{name} is an identity at initialization: {how}" for name, how in kinds if self.verb == "inserted"]
        if self.output_change:
            notes.append(f"the output of the network changes by {100 * self.output_change:.2g} %")
        notes += [self.verified] if self.verified else []
        notes += [OPTIMIZERS] if self.verb.startswith("inserted") else []
        notes += [f"warning: {line}" for line in self.warnings] if dry else []
        return [heading, table, *notes] if self.blocks else [f"no block {self.verb}"]

    @property
    def parameters(self) -> int:
        """Total number of parameters of the blocks."""
        return sum(block.cost.parameters for block in self.blocks)

    @property
    def macs(self) -> int:
        """Total MACs of the blocks in one forward pass of one image."""
        return sum(block.cost.macs for block in self.blocks)

    @property
    def added(self) -> Cost:
        """Cost added to the network; negative if the replaced modules cost more."""
        return Cost(self.parameters - self.replaced_cost.parameters, self.macs - self.replaced_cost.macs)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about feature maps that are too small or too large for attention, or not used by the network.

        :func:`vision_attn.insert_` issues them, so they are not printed with the table.
        """
        large = [block for block in self.blocks if block.cost.attention_pairs > MAX_TOKENS**2]
        tokens, cost = max((x.tokens for x in large), default=0), sum(x.cost.macs for x in large) / 1e9
        remedy = "Pass pattern=va.Window(7) or kv_stride, or choose another site"
        small = [block for block in self.blocks if block.context_shape is None and max(block.map_size) <= 2]
        unused = [block for block in self.blocks if not block.target.used]
        kinds = (
            ("attention has little effect on small feature maps: {}. Choose an earlier site or a larger input", small),
            ("the output of the network does not depend on the feature map at {}. Choose an earlier site", unused),
            (f"full attention at {{}} compares up to {tokens:,} tokens and costs {cost:,.1f} GMACs. {remedy}", large),
        )
        listed = [(text, ", ".join(f"{x.site!r} ({x.size})" for x in blocks)) for text, blocks in kinds]
        return tuple(text.format(sites) for text, sites in listed if sites)
