"""A forward pass to look at a network: what its modules take and give, and where maps of the image are among that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from vision_attn.errors import SiteError
from vision_attn.insertion.alignment import misaligned
from vision_attn.insertion.elements import Element, FeatureMap, change, tensors_in
from vision_attn.insertion.layout import Layout, consistent_layouts
from vision_attn.insertion.running import run_quietly
from vision_attn.insertion.sites import declared_stages, last_of_sequential

__all__ = ["DryRun", "modules_around"]


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    #: tensors by position or keyword
    taken: dict[Element, FeatureMap]
    given: dict[Element, FeatureMap]
    #: what it returns is a …
    kind: str
    #: how many calls of any module had ended before
    order: int


@dataclass
class DryRun:
    """All calls of a model's modules in one forward of an example."""

    #: the network; afterwards it is as it was
    model: nn.Module
    #: an image batch
    example: Tensor
    #: by path of the module, in order; made by the run
    calls: dict[str, list[Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = calls_of(self.model, self.example)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the example, in pixels."""
        return self.example.shape[-2], self.example.shape[-1]

    def maps(self, name: str, at: str = "after") -> dict[Element, tuple[FeatureMap, Layout]]:
        """The maps among what a module that is called once gives, or takes, and how they lie in their tensors."""
        calls = self.calls.get(name, [])
        if len(calls) != 1:
            return {}
        found: dict[Element, tuple[FeatureMap, Layout]] = {}
        for element, tensor in self.side(calls[0], at).items():
            layouts = self.layouts(name, tensor)
            if layouts and self.wider is not None and len(self.wider.calls.get(name, [])) == 1:
                twin = self.wider.side(self.wider.calls[name][0], at).get(element)
                layouts = same_kind(layouts, self.wider.layouts(name, twin)) if twin is not None else set()
            if len(layouts) > 1:
                layouts &= self.usual_layouts
            if len(layouts) == 1:
                found[element] = (tensor, layouts.pop())
        return found

    def side(self, call: Call, at: str) -> dict[Element, FeatureMap]:
        """The tensors of a call on one side of it."""
        return call.taken if at == "before" else call.given

    def layouts(self, name: str, tensor: FeatureMap) -> set[Layout]:
        """The layouts in which a tensor of a module can be a map; none if it cannot be one."""
        if not tensor.dtype.is_floating_point or self.compares_tokens(name, tensor.shape):
            return set()
        prefix = getattr(self.model, "num_prefix_tokens", None)
        return consistent_layouts(
            tensor.shape, self.example.shape[0], self.image_size, prefix if isinstance(prefix, int) else None
        )

    def compares_tokens(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a module holds the weights of an attention.

        These are a number for each pair of the tokens that a module around it takes.
        """
        if len(shape) != 4 or not {shape[2]} & {shape[1], shape[3]}:
            return False
        taken = [
            tensor.shape
            for around in modules_around(name)
            for call in self.calls.get(around, [])
            for tensor in call.taken.values()
        ]
        return any(len(tokens) == 3 and tokens[1] == shape[2] for tokens in taken)

    @cached_property
    def wider(self) -> DryRun | None:
        """The same on a wider image, with which maps become wider; None if the network takes one size only."""
        try:
            return DryRun(self.model, torch.cat([self.example, self.example], dim=3))
        except SiteError:
            return None

    @cached_property
    def usual_layouts(self) -> set[Layout]:
        """The layouts of maps of which there is no doubt: what a model has elsewhere it has everywhere."""
        certain = set()
        for name, calls in self.calls.items():
            for call in calls:
                for tensor in call.given.values():
                    layouts = self.layouts(name, tensor)
                    if len(layouts) == 1 and len(tensor.shape) == 4:
                        certain |= layouts
        return certain if len(certain) == 1 else set()

    def check_called_once(self, name: str) -> None:
        """Refuse a module that one block cannot follow."""
        times = len(self.calls.get(name, []))
        if times == 0:
            raise SiteError(f"{name!r} is not called in the forward pass of the model: choose a module that is")
        if times > 1:
            raise SiteError(
                f"{name!r} is called {times} times in one forward pass, so one block cannot follow it: "
                "choose the module around it"
            )

    def the_map(self, name: str, at: str = "after") -> tuple[Element, FeatureMap, Layout]:
        """The one map that a module gives or takes."""
        self.check_called_once(name)
        maps = self.maps(name, at)
        if len(maps) > 1 and at == "after":
            maps = self.meant(name, maps)
        if len(maps) == 1:
            ((element, (tensor, layout)),) = maps.items()
            return element, tensor, layout
        call = self.calls[name][0]
        verb, side = ("takes", call.taken) if at == "before" else ("returns", call.given)
        rows, columns = self.image_size
        if len(maps) > 1:
            shapes = ", ".join(str(tensor.shape) for tensor, _ in maps.values())
            raise SiteError(
                f"{name!r} {verb} {len(maps)} maps ({shapes}), and a block works on one: choose modules inside it"
            )
        if len(side) == 1:
            (shape,) = (tensor.shape for tensor in side.values())
            raise SiteError(
                f"{name!r} {verb} a tensor of shape {shape} for {self.example.shape[0]} image(s) of {rows}×{columns}: "
                "that is no map (batch, channels, height, width) or (batch, height, width, channels), and no "
                "sequence of tokens of such a grid; choose another module"
            )
        what = f"{len(side)} tensors, none of them a map" if side else f"a {call.kind} without a tensor"
        raise SiteError(f"{name!r} {verb} {what}: choose a module inside or around it")

    def the_maps(self, names: Iterable[str], at: str) -> dict[str, tuple[Element, FeatureMap, Layout]]:
        """The one map of each of several modules, each seen to be one of the image."""
        found = {name: self.the_map(name, at) for name in names}
        for name in self.misplaced(found, at):
            _, tensor, layout = found[name]
            height, width = layout.map_shape(tensor.shape)[2:]
            raise SiteError(
                f"{name!r} {'takes' if at == 'before' else 'returns'} a tensor of shape {tensor.shape}, which is no "
                f"map of {height}×{width}: what changes in the image does not show at its place there; choose another "
                "module"
            )
        return found

    def misplaced(self, found: Mapping[str, tuple[Element, FeatureMap, Layout]], at: str = "after") -> set[str]:
        """The modules among these whose tensor has the shape of a map and is none of the image."""
        # Of tokens, and where there is no other size of image to compare with, a shape says little.
        doubtful = {
            name: (element, layout)
            for name, (element, _, layout) in found.items()
            if layout.grid is not None or self.wider is None
        }
        return misaligned(self.model, doubtful, self.example, at)

    def meant(
        self, name: str, maps: dict[Element, tuple[FeatureMap, Layout]]
    ) -> dict[Element, tuple[FeatureMap, Layout]]:
        """The maps among several that the network reads and, if that is more than one, that it declares for a stage."""
        read = {element: found for element, found in maps.items() if self.is_read(name, element, found[1])} or maps
        channels = {
            count
            for stage, count in declared_stages(self.model)
            if stage in self.calls and last_of_sequential(self.model, stage) == name
        }
        return {
            element: (tensor, layout)
            for element, (tensor, layout) in read.items()
            if layout.map_shape(tensor.shape)[1] in channels
        } or read

    def unread(self, maps: Mapping[str, tuple[Element, FeatureMap, Layout]]) -> set[str]:
        """The modules among these whose maps nothing comes of.

        A head may read the class token alone, and then so it is with the grid after the last block; tokens that come
        before a grid that is read are taken to be read with it. And what a module gives among other things may be for
        those who ask for features only. Any other map is what the next module works on.
        """
        found = set()
        grid_is_read = False
        for name in sorted(maps, key=lambda name: -self.calls[name][0].order):
            element, _, layout = maps[name]
            if element is not None or (layout.prefix and not grid_is_read):
                if self.is_read(name, element, layout):
                    grid_is_read |= layout.prefix > 0
                else:
                    found.add(name)
        return found

    def is_read(self, name: str, element: Element, layout: Layout) -> bool:
        """Whether what the model gives depends on the map that a module gives: with NaN for that map, NaN comes out."""

        def spoil(module: nn.Module, args: object, output: object) -> object:
            return change(output, element, lambda x: layout.of_map(x, layout.to_map(x) * torch.nan))

        handle = self.model.get_submodule(name).register_forward_hook(spoil)
        try:
            output = run_quietly(self.model, self.example)
        finally:
            handle.remove()
        return self.example.is_meta or any(bool(tensor.isnan().any()) for tensor in leaves(output))


def leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)


def modules_around(name: str) -> list[str]:
    """The paths of the modules that a module is inside of, without the model."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def same_kind(layouts: set[Layout], others: set[Layout]) -> set[Layout]:
    """Those of which there is one with the same axes for another size of image."""
    kinds = {(other.axes, other.prefix) for other in others}
    return {layout for layout in layouts if (layout.axes, layout.prefix) in kinds}


def calls_of(model: nn.Module, example: Tensor) -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {}
    ended = 0

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            nonlocal ended
            taken = {**tensors_in(args), **tensors_in(kwargs)}
            calls.setdefault(name, []).append(Call(taken, tensors_in(output), type(output).__name__, ended))
            ended += 1

        return hook

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        run_quietly(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return calls
