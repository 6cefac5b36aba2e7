"""A forward pass to look at a network: what its modules take and give, and where maps of the image are among that.

Which tensors are maps is decided as the top of ``maps`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor, nn

from vision_attn.checks import product
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.backbone import (
    Example,
    Hook,
    declared_stages,
    end_of_sequential,
    modules_around,
    run_quietly,
)
from vision_attn.networks.insertion.maps import (
    Element,
    Form,
    Layout,
    Map,
    change,
    consistent_layouts,
    forms_in,
    layouts_of,
    misaligned,
)


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    #: tensors by position or keyword
    taken: dict[Element, Form]
    given: dict[Element, Form]
    #: what it returns is a …
    kind: str
    #: how many calls of any module had ended before
    order: int

    def side(self, at: str) -> dict[Element, Form]:
        return self.taken if at == "before" else self.given


class DryRun:
    """All calls of a model's modules in one forward of an example; the model is as it was afterwards."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model = model
        self.example = example
        #: by path of the module, in order
        self.calls: dict[str, list[Call]] = {}
        #: the same on an example whose images are twice as long along an axis; None if the network takes none
        self.others: dict[int, DryRun | None] = {}
        order = count()

        def note(name: str) -> Hook:
            def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
                taken = {**forms_in(args), **forms_in(kwargs)}
                call = Call(taken, forms_in(output), type(output).__name__, next(order))
                self.calls.setdefault(name, []).append(call)

            return hook

        output = run_quietly(model, example, {name: note(name) for name, _ in model.named_modules() if name})
        #: the shapes of what the model gives
        self.given = [tuple(tensor.shape) for tensor in leaves(output)]

    def grown(self, axis: int) -> DryRun | None:
        """The same on images twice as long along one of their axes; None if the network takes one size only."""
        if axis not in self.others:
            try:
                example = self.example.changed(lambda images: torch.cat([images, images], dim=axis))
                self.others[axis] = DryRun(self.model, example)
            except SiteError:
                self.others[axis] = None
        return self.others[axis]

    def tensors(self, target: str, at: str) -> dict[Element, Form]:
        """What a module that is called once gives, or takes."""
        calls = self.calls.get(target, [])
        return calls[0].side(at) if len(calls) == 1 else {}

    def maps(self, target: str, at: str = "after") -> list[Map]:
        """The maps among that."""
        found = []
        for element, form in self.tensors(target, at).items():
            layouts = self.layouts_at(target, at, element, form)
            if len(layouts) > 1:
                layouts &= self.usual_layouts
            if len(layouts) == 1:
                found.append(Map(target, at, element, form, layouts.pop()))
        return found

    def layouts_at(self, target: str, at: str, element: Element, form: Form) -> set[Layout]:
        """The layouts in which what a module gives or takes can be a map, by all sizes of image that are tried."""
        if self.holds_none(target, form):
            return set()
        flat = len(self.example.size) != 2  # of one or three axes
        first, wide = set(layouts_of(len(form.shape))[:1]), self.grown(-1)
        if self.example.image.dim() == 2 and (len(form.shape) > 3 or wide is None):
            return first if form.shape[0] == self.example.shape[0] else set()
        kept = self.layouts(target, form)
        if wide is None or self.example.count:
            return kept & first if flat else kept
        twin = None if flat else wide.tensors(target, at).get(element)
        kinds = {(one.axes, one.prefix) for one in wide.layouts(target, twin)} if twin is not None else set()
        if kept := {one for one in kept if (one.axes, one.prefix) in kinds}:
            return kept
        return {layout for layout in layouts_of(len(form.shape)) if self.follows(target, at, element, layout)}

    def follows(self, target: str, at: str, element: Element, layout: Layout) -> bool:
        """Whether each axis of a map grows with that axis of the image, if it can, and with no other."""
        form, rank = self.tensors(target, at)[element], len(self.example.size)
        if len(form.shape) != 2 + rank or form.shape[0] % self.example.shape[0]:
            return False
        here = layout.map_shape(form.shape)
        for axis in range(-rank, 0):
            if (other := self.grown(axis)) is None:
                continue
            twin = other.tensors(target, at).get(element)
            if twin is None or len(twin.shape) != len(here):
                return False
            there = layout.map_shape(twin.shape)
            growth = [(b > a) - (b < a) for a, b in zip(here, there, strict=True)]
            if growth != [int(k == axis) for k in range(-rank - 2, 0)]:
                return False
        return True

    def layouts(self, target: str, form: Form) -> set[Layout]:
        """The layouts in which a tensor of a module can be a map by its shape; none if it cannot be one."""
        if self.holds_none(target, form):
            return set()
        prefix = getattr(self.model, "num_prefix_tokens", None)
        return consistent_layouts(form.shape, self.example, prefix if isinstance(prefix, int) else None)

    def holds_none(self, target: str, form: Form) -> bool:
        """Whether a tensor of a module is no map whatever its size: of whole numbers, or the weights of an attention.

        Those are a number for each pair of the tokens that a module around it takes.
        """
        shape = form.shape
        if not form.dtype.is_floating_point:
            return True
        if len(shape) != 4 or not {shape[2]} & {shape[1], shape[3]}:
            return False
        calls = [call for around in modules_around(target) for call in self.calls.get(around, [])]
        taken = [form.shape for call in calls for form in call.taken.values()]
        return any(len(tokens) == 3 and tokens[1] == shape[2] for tokens in taken)

    @cached_property
    def usual_layouts(self) -> set[Layout]:
        """The layouts of maps of which there is no doubt: what a model has elsewhere it has everywhere."""
        given = [(name, form) for name, calls in self.calls.items() for call in calls for form in call.given.values()]
        dims = 2 + len(self.example.size)
        found = [self.layouts(name, form) for name, form in given if len(form.shape) == dims]
        certain = set().union(*(layouts for layouts in found if len(layouts) == 1))
        return certain if len(certain) == 1 else set()

    def check_called_once(self, target: str) -> None:
        """Refuse a module that one block cannot follow."""
        times = len(self.calls.get(target, []))
        if times == 0:
            raise SiteError(f"{target!r} is not called in the forward pass of the model: choose a module that is")
        if times > 1:
            raise SiteError(
                f"{target!r} is called {times} times in one forward pass, so one block cannot follow it: "
                "choose the module around it"
            )

    def the_map(self, target: str, at: str = "after") -> Map:
        """The one map that a module gives or takes."""
        self.check_called_once(target)
        maps = self.maps(target, at)
        if len(maps) > 1 and at == "after":
            maps = self.meant(maps)
        if len(maps) == 1:
            return maps[0]
        call = self.calls[target][0]
        verb, side = "takes" if at == "before" else "returns", call.side(at)
        shapes = ", ".join(str(form.shape) for form in ([one.form for one in maps] or side.values()))
        if maps:
            raise SiteError(
                f"{target!r} {verb} {len(maps)} maps ({shapes}), and a block works on one: choose modules inside it"
            )
        found = f"a tensor of shape {shapes}" if len(side) == 1 else f"{len(side)} tensors of shapes {shapes}"
        found = found if side else f"a {call.kind} without a tensor"
        raise SiteError(
            f"{target!r} {verb} {found} for images {self.example.shape}, and no map was found in that which follows "
            f"the image, with its channels second or last or as a grid of tokens: choose {self.neighbour(target)}"
        )

    def neighbour(self, target: str) -> str:
        """A module to choose in the place of one, in words: the last before it, or inside it, that gives one map."""
        names = list(self.calls)
        before = reversed(names[: names.index(target)])
        found = next((name for name in before if any(product(one.shape[2:]) > 1 for one in self.maps(name))), None)
        return "another module" if found is None else f"another module, such as {found!r}"

    def the_maps(self, targets: Iterable[str], at: str) -> list[Map]:
        """The one map of each of several modules, each seen to be one of the image and whether it is read."""
        found = [self.the_map(target, at) for target in targets]
        misplaced = self.misplaced(found)
        for one in found:
            if one.target in misplaced:
                raise SiteError(
                    f"{one.target!r} {'takes' if at == 'before' else 'returns'} a tensor of shape {one.form.shape}. "
                    f"Read as a map of {'×'.join(map(str, one.shape[2:]))}, it does not show what changes in the image "
                    f"at its place: choose {self.neighbour(one.target)}"
                )
        unread = self.unread(found) if at == "after" else set()
        return [replace(one, read=one.target not in unread) for one in found]

    def misplaced(self, maps: Iterable[Map]) -> set[str]:
        """The targets of those that have the shape of a map and are none of the image."""
        # Of tokens, and where there is no other size of image to compare with, a shape says little.
        doubtful = [one for one in maps if one.layout.grid is not None or None in self.others.values()]
        return misaligned(self.model, doubtful, self.example)

    def meant(self, maps: list[Map]) -> list[Map]:
        """Those among a module's maps that the network reads and, if that is more than one, declares for a stage."""
        read = [one for one in maps if self.is_read(one)] or maps
        declared = {
            channels
            for stage, channels in declared_stages(self.model)
            if stage in self.calls and end_of_sequential(self.model, stage) == maps[0].target
        }
        return [one for one in read if one.shape[1] in declared] or read

    def unread(self, maps: Iterable[Map]) -> set[str]:
        """The targets of those that nothing comes of.

        A head may read the class token alone, and then so it is with the grid after the last block; tokens that come
        before a grid that is read are taken to be read with it. And what a module gives among other things may be for
        those who ask for features only. Any other map is what the next module works on.
        """
        found = set()
        grid_is_read = False
        for one in sorted(maps, key=lambda one: -self.calls[one.target][0].order):
            if one.element is not None or (one.layout.prefix and not grid_is_read):
                if self.is_read(one):
                    grid_is_read |= one.layout.prefix > 0
                else:
                    found.add(one.target)
        return found

    def is_read(self, one: Map) -> bool:
        """Whether what the model gives depends on a map that a module gives: with NaN for it, NaN comes out."""

        def spoil(module: nn.Module, args: object, kwargs: object, output: object) -> object:
            return change(output, one.element, lambda x: one.layout.of_map(x, one.layout.to_map(x) * torch.nan))

        try:
            output = run_quietly(self.model, self.example, {one.target: spoil})
        except SiteError:  # somebody noticed
            return True
        return self.example.image.is_meta or any(bool(tensor.isnan().any()) for tensor in leaves(output))


def leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)) or is_dataclass(value):
        held = value if isinstance(value, (Mapping, tuple, list)) else vars(value)
        for item in held.values() if isinstance(held, Mapping) else held:
            yield from leaves(item)
