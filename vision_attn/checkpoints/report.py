"""What of a checkpoint went into a model, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vision_attn.checkpoints.weights import AVERAGED
from vision_attn.insertion import CHILD
from vision_attn.text import escaped, shorten

__all__ = ["LoadReport", "advise"]

#: key -> (shape in the model, shape in the checkpoint)
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class LoadReport:
    """What of a checkpoint went into a model, key by key; prints as a summary.

    ``new`` are the model's keys that the checkpoint cannot know, of inserted blocks and of what was left out on
    purpose; ``missing`` are those it should know. A block that the checkpoint has in part is one that it should know.

    >>> print(LoadReport("net.pth", "", ("fc.weight",), new=(), missing=("fc.bias",), unexpected=(), mismatched={}))
    1 tensor loaded from net.pth
    1 missing in the checkpoint: fc.bias
    """

    #: the file
    path: str
    #: which part of the file held the weights; "" when the file is nothing but weights
    entry: str
    #: keys that went into the model
    loaded: tuple[str, ...]
    #: the model's keys that the checkpoint cannot know
    new: tuple[str, ...]
    #: the model's keys that the checkpoint should have and has not
    missing: tuple[str, ...]
    #: keys of the checkpoint that the model has not
    unexpected: tuple[str, ...]
    #: key -> (shape in the model, shape in the checkpoint)
    mismatched: Shapes
    #: tables of positions that were saved for a map of another size and are loaded stretched to the model's, as above
    resampled: Shapes = field(default_factory=dict)
    #: keys of modules that ``replace_`` took out, which ``remove_`` puts back with what was loaded into them
    replaced: tuple[str, ...] = ()
    #: other parts of the file that hold weights, and were not taken
    others: tuple[str, ...] = ()
    #: what was taken off the names of all weights: ``"backbone."``
    prefix: str = ""
    #: keys left aside because they do not begin with the prefix that was asked for
    aside: tuple[str, ...] = ()
    #: the beginning of the file's SHA-256 that its name holds, which was verified; "" if it holds none
    verified: str = ""

    def __str__(self) -> str:
        source = escaped(f"{self.path} [{self.entry}]" if self.entry else self.path)
        lines = [f"{len(self.loaded)} tensor{'s' * (len(self.loaded) != 1)} loaded from {source}"]
        if self.verified:
            lines.append(f"its SHA-256 begins with {self.verified}, as its name says")
        if self.others:
            average = self.entry not in AVERAGED and not set(self.others).isdisjoint(AVERAGED)
            hint = " (ema=True takes the moving average)" if average else ""
            lines.append(f"not taken: the weights under {', '.join(self.others)}{hint}")
        if self.prefix:
            lines.append(f"prefix {self.prefix!r} taken off")
        for title, keys in (
            ("for modules that are replaced, loaded for when they come back", self.replaced),
            ("left aside", self.aside),
            ("new by design", self.new),
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("resampled for the model's size of map", tuple(shapes_of(self.resampled))),
            ("of another shape", tuple(shapes_of(self.mismatched))),
        ):
            if keys:
                lines.append(f"{len(keys)} {title}: {shorten(keys)}")
        return "\n".join(lines)


def shapes_of(keys: Shapes) -> Iterator[str]:
    for key, (model, checkpoint) in keys.items():
        yield f"{key} (model {model}, checkpoint {checkpoint})"


def advise(report: LoadReport, modules: Iterable[str]) -> str:
    """The report of a checkpoint that does not fit a model of these modules, and what to do about it."""
    lines = str(report).splitlines()[1:]
    sites = ", ".join(map(repr, sites_of_blocks(report.unexpected, modules)))
    replaced = ", ".join(
        repr(site)
        for site in dict.fromkeys(key.rpartition(".")[0] for key in report.missing)
        if any(key.startswith(f"{site}.attn.") for key in report.unexpected)
    )
    heads = {key.rpartition(".")[0] for key, (own, other) in report.mismatched.items() if own[1:] == other[1:]}
    if sites:
        lines.append(
            f"It was saved with blocks inserted at {sites}: insert_(model, names=[{sites}]) first (on "
            f"the command line: --insert {sites.replace(',', '').replace(chr(39), '')})."
        )
    if replaced:
        lines.append(
            f"It was saved with attention in the place of {replaced}: replace_(model, names=[{replaced}]) first."
        )
    if sites or replaced:
        return "\n".join(lines)
    if any(".position." in f".{key}" for key in report.mismatched):
        lines.append(
            "Its tables of positions are for groups of other proportions or heads of another width: give the block the "
            'feat_size and pattern that it was trained with, or keep new tables with fresh=["*position.*"].'
        )
    elif len(heads) == 1 and len(report.mismatched) <= 2 and not report.missing and not report.unexpected:
        (own, other), *_ = report.mismatched.values()
        head = heads.pop()
        lines.append(
            f"It was trained for {other[0]} classes and the model has {own[0]}: make a model of {other[0]} classes, or "
            f'keep a new head with fresh=["{head}.*"] (on the command line: --reset-head).'
        )
    else:
        lines.append("If it is the right file for this model, load_checkpoint with strict=False loads what fits.")
    return "\n".join(lines)


def sites_of_blocks(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The modules that blocks were inserted at, by the keys of a state dict.

    A module that cannot hold its block has it held by another one, under a name that says for which.
    """
    spelled = {name.replace(".", "_"): name for name in modules}
    sites: dict[str, None] = {}
    for key in keys:
        parts = key.split(".")
        for place, part in enumerate(parts[:-1]):
            if part == CHILD or part.startswith(f"{CHILD}_"):
                host = ".".join(parts[:place])
                sites[spelled.get(part.removeprefix(f"{CHILD}_"), host)] = None
                break
    return list(sites)
