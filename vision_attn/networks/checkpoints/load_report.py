"""Report of a loaded checkpoint, and remedies for a checkpoint that does not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vision_attn.networks.insertion.record import CHILD
from vision_attn.text import Report, escape_control_characters, shorten

#: Entries under which training scripts save the moving average of the weights.
EMA_ENTRIES = ("model_ema", "state_dict_ema", "ema", "params_ema")

#: key -> (shape in the model, shape in the checkpoint)
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, repr=False)
class LoadReport(Report):
    """Report of the tensors of a checkpoint that were loaded into a model; prints as a summary.

    >>> print(LoadReport("net.pth", "", ("fc.weight",), (), missing=("fc.bias",), unexpected=(), mismatched={}))
    1 tensor loaded from net.pth
    1 key missing from the checkpoint: fc.bias
    """

    #: path of the file
    file: str
    #: entry of the file with the weights; empty if the weights are at the top level
    entry: str
    #: keys that were loaded
    loaded: tuple[str, ...]
    #: keys that the checkpoint is not expected to contain: keys of inserted blocks, and keys that match ``skip``
    newly_initialized: tuple[str, ...]
    #: keys of the model that the checkpoint should contain, including the other keys of a partly saved block
    missing: tuple[str, ...]
    #: keys of the checkpoint that the model does not have
    unexpected: tuple[str, ...]
    #: key -> (shape in the model, shape in the checkpoint), for keys that were not loaded
    mismatched: Shapes
    #: key -> (shape in the model, shape in the checkpoint), for resized position tables and a converted convolution
    converted: Shapes = field(default_factory=dict)
    #: function of timm that converted the keys and shapes of the checkpoint; empty if none was required
    timm_filter: str = ""
    #: keys that were loaded into the original modules of ``replace_``, which ``remove_`` restores
    replaced: tuple[str, ...] = ()
    #: other entries of the file with weights
    other_entries: tuple[str, ...] = ()
    #: prefix that was removed from the keys, such as ``"backbone."``
    prefix: str = ""
    #: keys that were ignored because they do not start with the prefix
    ignored: tuple[str, ...] = ()
    #: descriptions of blocks with another configuration, which are accepted only with ``strict=False``
    config_mismatches: tuple[str, ...] = ()
    #: blocks that were loaded without a comparison, because their configuration is not in the file
    unchecked: tuple[str, ...] = ()
    #: names of the classes in a file of ``save_model``
    classes: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        source = escape_control_characters(f"{self.file} [{self.entry}]" if self.entry else self.file)
        hint = "" if set(self.other_entries).isdisjoint(EMA_ENTRIES) else " (ema=True loads the moving average)"
        titles = (
            ("key", "loaded into replaced modules", self.replaced),
            ("key", "without the prefix ignored", self.ignored),
            ("key", "newly initialized", self.newly_initialized),
            ("key", "missing from the checkpoint", self.missing),
            ("key", "unexpected in the checkpoint", self.unexpected),
            ("tensor", "converted to the shape in the model", format_shapes(self.converted)),
            ("tensor", "with another shape", format_shapes(self.mismatched)),
            ("block", "configured differently", self.config_mismatches),
        )
        lines = (
            f"{len(self.loaded)} tensor{'s' * (len(self.loaded) != 1)} loaded from {source}",
            self.other_entries and f"other weights in the file, not loaded: {', '.join(self.other_entries)}{hint}",
            self.prefix and f"prefix {self.prefix!r} removed from the keys",
            self.timm_filter and f"keys and shapes converted by {self.timm_filter}",
            *(k and f"{len(k)} {noun}{'s' * (len(k) != 1)} {title}: {shorten(k)}" for noun, title, k in titles),
            self.unchecked and f"not compared, because the file has no configuration: {shorten(self.unchecked)}",
        )
        return [str(line) for line in lines if line]


def format_shapes(shapes: Shapes) -> list[str]:
    return [f"{key} (model {model}, checkpoint {checkpoint})" for key, (model, checkpoint) in shapes.items()]


def remedies(report: LoadReport) -> Iterator[str]:
    """Yield remedies for a checkpoint that does not fit a model."""
    shapes = dict(report.mismatched)
    if key := find_input_conv(shapes):
        ours, theirs = shapes.pop(key)
        remedy = f"Create the model with in_chans={theirs[1]}, or convert the weights with adapt_input_conv=True"
        yield f"The checkpoint has {theirs[1]} input channels, the model has {ours[1]}. {remedy}."
    parameters = {key: pair for key, pair in shapes.items() if key.endswith((".weight", ".bias")) and all(pair)}
    heads = {key.rpartition(".")[0] for key, (ours, theirs) in parameters.items() if ours[1:] == theirs[1:]}
    if report.config_mismatches:
        yield "Insert the blocks with the options in the checkpoint, or load the weights anyway with strict=False."
    elif any(f".{CHILD}" in f".{key}" for key in report.unexpected):
        flags = "--stages or --names on the command line"
        yield f"The checkpoint has inserted blocks. Call va.insert_ at their sites first ({flags})."
    elif len(heads) == 1 and len(parameters) == len(shapes) <= 2 and not report.missing and not report.unexpected:
        (ours, theirs), *_ = shapes.values()
        skip = f'keep the classifier of the model with skip=["{heads.pop()}.*"] (--reset-head on the command line)'
        remedy = f"Create the model with {theirs[0]} classes, or {skip}"
        yield f"The checkpoint has {theirs[0]} classes, the model has {ours[0]}. {remedy}."
    elif shapes and not (report.missing or report.unexpected):
        yield "Create the model with the sizes of the checkpoint, or load only the keys that fit with strict=False."
    elif report.missing or report.unexpected:
        names = 'rename its keys with rename=[(r"^pattern", "replacement"), …]'
        yield f"If the checkpoint is for this model, {names}, or load only the keys that fit with strict=False."


def find_input_conv(shapes: Shapes) -> str:
    """Return the key of the first convolution, if only its input channels differ; otherwise, an empty string."""
    key = next((key for key, (own, _) in shapes.items() if len(own) > 2 and key.endswith("weight")), "")
    own, other = shapes.get(key, ((), ()))
    return key if (*own[:1], *own[2:]) == (*other[:1], *other[2:]) and len(own) == len(other) else ""
