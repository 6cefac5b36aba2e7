"""What of a checkpoint went into a model, and what to do where it does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vision_attn.networks.insertion import CHILD
from vision_attn.text import Report, escaped, shorten

#: Entries under which training scripts keep the moving average of the weights.
AVERAGED = ("model_ema", "state_dict_ema", "ema")

#: key -> (shape in the model, shape in the checkpoint)
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, repr=False)
class LoadReport(Report):
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
    #: tables of positions for another size of map, and the first convolution for another number of input channels,
    #: converted to the model's; shapes as above
    resampled: Shapes = field(default_factory=dict)
    #: keys of modules that ``replace_`` took out, which ``remove_`` puts back with what was loaded into them
    replaced: tuple[str, ...] = ()
    #: other parts of the file that hold weights, and were not taken
    others: tuple[str, ...] = ()
    #: what was taken off the names of all weights: ``"backbone."``
    prefix: str = ""
    #: keys left aside because they do not begin with the prefix that was asked for
    aside: tuple[str, ...] = ()
    #: blocks that had other heads, another pattern, position or scale, in words; only ``strict=False`` lets them pass
    differing: tuple[str, ...] = ()
    #: blocks that were loaded and of which the file says nothing: shapes do not tell heads and patterns
    unchecked: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        source = escaped(f"{self.path} [{self.entry}]" if self.entry else self.path)
        lines = [f"{len(self.loaded)} tensor{'s' * (len(self.loaded) != 1)} loaded from {source}"]
        if self.others:
            hint = "" if set(self.others).isdisjoint(AVERAGED) else " (ema=True takes the moving average)"
            lines.append(f"not taken: the weights under {', '.join(self.others)}{hint}")
        if self.prefix:
            lines.append(f"prefix {self.prefix!r} taken off")
        for title, keys in (
            ("for modules that are replaced, loaded for when they come back", self.replaced),
            ("left aside", self.aside),
            ("new by design", self.new),
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("converted to the model's shape", described(self.resampled)),
            ("of another shape", described(self.mismatched)),
            ("made otherwise", self.differing),
        ):
            if keys:
                lines.append(f"{len(keys)} {title}: {shorten(keys)}")
        if self.unchecked:
            lines.append(f"heads and pattern not compared, as the file does not say them: {shorten(self.unchecked)}")
        return lines


def described(shapes: Shapes) -> list[str]:
    return [f"{key} (model {model}, checkpoint {checkpoint})" for key, (model, checkpoint) in shapes.items()]


def remedies(report: LoadReport, modules: Iterable[str]) -> Iterator[str]:
    """What to do about a checkpoint that does not fit a model of these modules."""
    sites = ", ".join(map(repr, sites_of_blocks(report.unexpected, modules)))
    lost = dict.fromkeys(key.rpartition(".")[0] for key in report.missing)
    instead = ", ".join(repr(site) for site in lost if any(k.startswith(f"{site}.attn.") for k in report.unexpected))
    shapes = dict(report.mismatched)
    for key in [key for key, pair in shapes.items() if inputs_differ(*pair)][:1]:
        own, other = shapes.pop(key)
        remedy = f"make a model with in_chans={other[1]}, or convert its weights with adapt_input_conv=True"
        yield f"It was trained for {other[1]} input channels and the model has {own[1]}: {remedy}."
    heads = {key.rpartition(".")[0] for key, (own, other) in shapes.items() if own[1:] == other[1:]}
    if report.differing:
        yield "Make the blocks as the file says. strict=False loads the weights, which mean something else there."
    elif sites or instead:
        if sites:
            yield f"It was saved with blocks inserted at {sites}: insert_(model, names=[{sites}]) first."
        if instead:
            yield f"It was saved with attention in the place of {instead}: replace_(model, names=[{instead}]) first."
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


def inputs_differ(own: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True for the weights of two convolutions of which one can be converted to the other's input channels."""
    convertible = len(own) > 2 and own[1] != other[1] and (own[1] == 1 or other[1] in (1, 3))
    return convertible and (own[0], *own[2:]) == (other[0], *other[2:])


def sites_of_blocks(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The modules that blocks were inserted at, by the keys of a state dict.

    A module around or inside that of the site may hold the block, under a name that says for which.
    """
    spelled = {name.replace(".", "_"): name for name in modules}
    sites: dict[str, None] = {}
    for key in keys:
        host, child, rest = f".{key}".partition(f".{CHILD}")
        if child:
            held_for = rest.partition(".")[0]
            around, inside = spelled.get(f"{host[1:]}{held_for}".replace(".", "_")), spelled.get(held_for[1:])
            sites[around or inside or host.removeprefix(".")] = None
    return list(sites)
