"""The report of a loaded checkpoint, and remedies for one that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vision_attn.networks.insertion import CHILD
from vision_attn.text import Report, escaped, shorten

#: Entries under which training scripts keep the moving average of the weights.
EMA_ENTRIES = ("model_ema", "state_dict_ema", "ema")

#: key -> (shape in the model, shape in the checkpoint)
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, repr=False)
class LoadReport(Report):
    """Report of the tensors of a checkpoint that were loaded into a model; prints as a summary.

    ``new`` are keys of the model that the checkpoint cannot have: those of inserted blocks and of ``skip``; ``missing``
    are keys that it should have. If it has a part of a block, it should have all of the block.

    >>> print(LoadReport("net.pth", "", ("fc.weight",), new=(), missing=("fc.bias",), unexpected=(), mismatched={}))
    1 tensor loaded from net.pth
    1 missing in the checkpoint: fc.bias
    """

    #: the file
    path: str
    #: the entry of the file with the weights; "" if the weights are at the top of the file
    entry: str
    #: keys that were loaded
    loaded: tuple[str, ...]
    #: the model's keys that the checkpoint cannot have
    new: tuple[str, ...]
    #: the model's keys that the checkpoint should have
    missing: tuple[str, ...]
    #: keys of the checkpoint that the model does not have
    unexpected: tuple[str, ...]
    #: key -> (shape in the model, shape in the checkpoint)
    mismatched: Shapes
    #: tables of positions that were resized, and the first convolution if it was converted to other input channels;
    #: shapes as above
    resampled: Shapes = field(default_factory=dict)
    #: loaded keys of modules that ``replace_`` took out and ``remove_`` puts back
    replaced: tuple[str, ...] = ()
    #: other entries of the file with weights
    others: tuple[str, ...] = ()
    #: prefix that was removed from the names of all weights: ``"backbone."``
    prefix: str = ""
    #: keys that were ignored because they do not begin with the prefix
    aside: tuple[str, ...] = ()
    #: blocks that had other heads, another pattern, position or scale, in words; only ``strict=False`` accepts them
    differing: tuple[str, ...] = ()
    #: blocks that were loaded and whose heads and patterns are not in the file
    unchecked: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        source = escaped(f"{self.path} [{self.entry}]" if self.entry else self.path)
        hint = "" if set(self.others).isdisjoint(EMA_ENTRIES) else " (ema=True takes the moving average)"
        titles = (
            ("loaded into modules that are replaced", self.replaced),
            ("left aside", self.aside),
            ("new by design", self.new),
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("converted to the model's shape", format_shapes(self.resampled)),
            ("of another shape", format_shapes(self.mismatched)),
            ("configured differently", self.differing),
        )
        lines = (
            f"{len(self.loaded)} tensor{'s' * (len(self.loaded) != 1)} loaded from {source}",
            self.others and f"not taken: the weights under {', '.join(self.others)}{hint}",
            self.prefix and f"prefix {self.prefix!r} taken off",
            *(keys and f"{len(keys)} {title}: {shorten(keys)}" for title, keys in titles),
            self.unchecked and f"heads and pattern not compared, not in the file: {shorten(self.unchecked)}",
        )
        return [str(line) for line in lines if line]


def format_shapes(shapes: Shapes) -> list[str]:
    return [f"{key} (model {model}, checkpoint {checkpoint})" for key, (model, checkpoint) in shapes.items()]


def remedies(report: LoadReport, modules: Iterable[str]) -> Iterator[str]:
    """Suggest what to do about a checkpoint that does not fit a model with these modules."""
    sites = ", ".join(map(repr, find_sites(report.unexpected, modules)))
    lost = dict.fromkeys(key.rpartition(".")[0] for key in report.missing)
    replaced = ", ".join(repr(site) for site in lost if any(k.startswith(f"{site}.attn.") for k in report.unexpected))
    shapes = dict(report.mismatched)
    for key in [key for key, pair in shapes.items() if is_convertible(*pair)][:1]:
        own, other = shapes.pop(key)
        remedy = f"make a model with in_chans={other[1]}, or convert its weights with adapt_input_conv=True"
        yield f"It was trained for {other[1]} input channels and the model has {own[1]}: {remedy}."
    heads = {key.rpartition(".")[0] for key, (own, other) in shapes.items() if own[1:] == other[1:]}
    if report.differing:
        yield "Insert the blocks with the options in the file; strict=False loads the weights into these blocks."
    elif sites or replaced:
        if sites:
            yield f"It was saved with blocks inserted at {sites}: insert_(model, names=[{sites}]) first."
        if replaced:
            yield f"It was saved with attention in the place of {replaced}: replace_(model, names=[{replaced}]) first."
    elif any(".position." in f".{key}" for key in shapes):
        yield 'Give the block the feat_size and pattern it was trained with, or keep new tables: skip=["*position.*"].'
    elif len(heads) == 1 and len(shapes) <= 2 and not report.missing and not report.unexpected:
        (own, other), *_ = shapes.values()
        skip = f'keep a new head with skip=["{heads.pop()}.*"], which is --reset-head on the command line'
        remedy = f"make a model of {other[0]} classes, or {skip}"
        yield f"It was trained for {other[0]} classes and the model has {own[0]}: {remedy}."
    elif report.missing or report.unexpected or shapes:
        names = 'rename=[(r"^pattern", "replacement"), …] gives its tensors other names'
        yield f"If it is the right file for this model, {names}, and strict=False loads what fits."


def is_convertible(own: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True for the weights of two convolutions of which one can be converted to the other's input channels."""
    convertible = len(own) > 2 and own[1] != other[1] and (own[1] == 1 or other[1] in (1, 3))
    return convertible and (own[0], *own[2:]) == (other[0], *other[2:])


def find_sites(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Find the modules at which blocks were inserted, from the keys of a state dict.

    The block may belong to a module around or inside that of the site, under a name that contains the site.
    """
    spelled = {name.replace(".", "_"): name for name in modules}
    sites: dict[str, None] = {}
    for key in keys:
        host, child, rest = f".{key}".partition(f".{CHILD}")
        if child:
            site = rest.partition(".")[0]
            around, inside = spelled.get(f"{host[1:]}{site}".replace(".", "_")), spelled.get(site[1:])
            sites[around or inside or host.removeprefix(".")] = None
    return list(sites)
