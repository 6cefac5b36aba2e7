"""Run the attention modules of a network through blocks with ``swap_``, and undo it with ``unswap_``."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from vision_attn.attention.blocks import Attention
from vision_attn.errors import SiteError
from vision_attn.networks.convert.conversion import known_class
from vision_attn.networks.convert.swapped import Swap, Swapped, make_swap, original_class, swapped_class
from vision_attn.networks.impl_choice import is_attention
from vision_attn.networks.insertion.registry import replaced_modules
from vision_attn.networks.inspection.selection import Globs, Where, ancestor_paths, select_inside
from vision_attn.networks.inspection.wrappers import require_modifiable
from vision_attn.text import Report, Table, shorten


@dataclass(frozen=True)
class SwappedModule:
    """Result of :func:`vision_attn.swap_` for one attention module.

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


def swap_(model: nn.Module, *, names: Globs = None, where: Where = None, dry_run: bool = False) -> SwapReport:
    """Run the attention modules of a model through vision_attn blocks, in place, with the model's weights.

    ``docs/convert.md`` lists the supported layers. The outputs stay the same, and so do modules, parameters and
    state-dict keys: checkpoints load as before, and an existing optimizer still trains the model. Select an
    implementation with :func:`vision_attn.set_impl_`. :func:`vision_attn.capture` returns attention maps of the model,
    including attention in windows and between the tokens of a ViT.

    Each module is compared with its block on random weights before it is swapped. A module with an unsupported option
    is not swapped, and the report states the reason. Calls that a block does not support run the original forward. The
    original forward also runs while a submodule has hooks, was replaced (for example by LoRA) or is in another mode.
    Several threads can run the model at the same time.

    Args:
        model: any network, or one attention module.
        names: globs on module paths, as in :func:`vision_attn.insert_`. Only attention in these modules is swapped.
        where: a function of path and module that selects modules. If ``names`` is also given, both must match.
        dry_run: return the report without changing the model.

    Returns:
        A report that prints as a table. If no module was swapped, it states the reasons.

    Raises:
        SiteError: ``names`` or ``where`` matches no attention, or the model is wrapped or a TorchScript program.

    >>> import timm, torch
    >>> model = timm.create_model("test_vit").eval()
    >>> image = torch.randn(1, 3, 160, 160)
    >>> before = model(image)
    >>> len(swap_(model).swapped)
    6
    >>> model(image).shape, (model(image) - before).abs().max().item() < 1e-5
    (torch.Size([1, 1000]), True)
    """
    model = require_modifiable(model, "va.swap_")
    modules: dict[str, Any] = dict(model.named_modules())
    lines, swaps = [], {}
    for name, module in chosen_attention(modules, names, where, own=True).items():
        try:
            swap = swaps[name] = make_swap(module)
            lines.append(SwappedModule(name, original_class(module).__name__, str(swap), swap.difference))
        except (ValueError, RuntimeError, AttributeError) as error:  # AttributeError: a subclass lacks an attribute
            lines.append(SwappedModule(name, original_class(module).__name__, reason=str(error)))
    if not dry_run:
        for name, swap in swaps.items():
            modules[name].swapped = swap
            modules[name].__class__ = swapped_class(modules[name].__class__)
    return SwapReport(tuple(lines), "would be swapped" if dry_run else "swapped")


def unswap_(model: nn.Module) -> SwapReport:
    """Undo :func:`swap_`: restore the original class of each swapped module.

    Weights that were trained in the meantime, and the current mode, dtype and device, are kept.

    Args:
        model: the network.

    Returns:
        A report that prints as a table; it has no modules if no module was swapped.

    Raises:
        SiteError: a swapped module has parametrizations, or the model is wrapped or a TorchScript program.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> attention = model.self_attn
    >>> report = swap_(model)
    >>> print(unswap_(model))  # doctest: +ELLIPSIS
    1 module unswapped
    site       module              block                        difference
    self_attn  MultiheadAttention  Attention1d, pattern='full'  ...
    >>> model.self_attn is attention, type(attention).__name__
    (True, 'MultiheadAttention')
    """
    lines, network = [], require_modifiable(model, "va.unswap_")
    replaced = (old.named_modules(prefix=site) for site, old in replaced_modules(network).items())
    modules = {name: x for name, x in chain(network.named_modules(), *replaced) if isinstance(x, Swapped)}
    for name, module in modules.items():
        if Swapped not in type(module).__bases__:
            remedy = "Call torch.nn.utils.parametrize.remove_parametrizations first"
            raise SiteError(f"{name!r} cannot be unswapped, because it has parametrizations. {remedy}")
    for name, module in modules.items():
        swap: Swap = vars(module).pop("swapped")
        module.__class__ = original_class(module)  # type: ignore[assignment]
        lines.append(SwappedModule(name, type(module).__name__, str(swap), swap.difference))
    return SwapReport(tuple(lines), "unswapped")


def chosen_attention(modules: dict[str, nn.Module], names: Any, where: Any, own: bool = False) -> dict[str, nn.Module]:
    """Return the selected attention modules, supported or not; ``own`` includes blocks of this library.

    A module that only contains other attention modules is not returned.
    """
    blocks = {name for name, module in modules.items() if own and isinstance(module, Attention)}
    known = {name for name, module in modules.items() if known_class(module) is not None} | blocks
    similar = {name for name, module in modules.items() if is_attention(module)}
    similar -= {outer for name in known | similar for outer in outer_paths(name)}
    similar -= {name for name in similar if known.intersection(outer_paths(name))}
    attention = {name: module for name, module in modules.items() if name in known | similar}
    inside = select_inside(modules, attention, names, where)
    if not inside and (names is not None or where is not None):
        found = f"Attention modules of the model: {shorten(x or 'the model' for x in attention) or 'none'}"
        given = " and ".join(name for name, value in (("names", names), ("where", where)) if value is not None)
        raise SiteError(f"{given}: no attention module matches. {found}")
    return {name: attention[name] for name in inside}


def outer_paths(name: str) -> list[str]:
    """Return the paths of the parent modules of a module, starting with the model."""
    return ["", *ancestor_paths(name)] if name else []
