"""A forward pass to look at a network: what its modules take and give, and where maps of the image are among that.

Which tensors are maps is decided as the top of ``maps`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vision_attn.errors import SiteError
from vision_attn.insertion.backbone import Hook, declared_stages, end_of_sequential, modules_around, run_quietly
from vision_attn.insertion.maps import Element, Form, Layout, Map, change, consistent_layouts, forms_in, misaligned

__all__ = ["DryRun", "branch_end"]


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

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.model = model
        self.example = example
        #: by path of the module, in order
        self.calls = calls_of(model, example)

    def maps(self, target: str, at: str = "after") -> list[Map]:
        """The maps among what a module that is called once gives, or takes."""
        calls = self.calls.get(target, [])
        if len(calls) != 1:
            return []
        found = []
        for element, form in calls[0].side(at).items():
            layouts = self.layouts(target, form)
            if layouts and self.wider is not None and len(wide := self.wider.calls.get(target, [])) == 1:
                twin = wide[0].side(at).get(element)
                layouts = same_kind(layouts, self.wider.layouts(target, twin)) if twin is not None else set()
            if len(layouts) > 1:
                layouts &= self.usual_layouts
            if len(layouts) == 1:
                found.append(Map(target, at, element, form, layouts.pop()))
        return found

    def layouts(self, target: str, form: Form) -> set[Layout]:
        """The layouts in which a tensor of a module can be a map; none if it cannot be one."""
        if not form.dtype.is_floating_point or self.compares_tokens(target, form.shape):
            return set()
        prefix = getattr(self.model, "num_prefix_tokens", None)
        rows, columns = self.example.shape[-2:]
        return consistent_layouts(
            form.shape, len(self.example), (rows, columns), prefix if isinstance(prefix, int) else None
        )

    def compares_tokens(self, target: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a module holds the weights of an attention.

        These are a number for each pair of the tokens that a module around it takes.
        """
        if len(shape) != 4 or not {shape[2]} & {shape[1], shape[3]}:
            return False
        calls = [call for around in modules_around(target) for call in self.calls.get(around, [])]
        taken = [form.shape for call in calls for form in call.taken.values()]
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
        given = [(name, form) for name, calls in self.calls.items() for call in calls for form in call.given.values()]
        found = [self.layouts(name, form) for name, form in given if len(form.shape) == 4]
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
        if len(maps) > 1:
            shapes = ", ".join(str(one.form.shape) for one in maps)
            raise SiteError(
                f"{target!r} {verb} {len(maps)} maps ({shapes}), and a block works on one: choose modules inside it"
            )
        if len(side) == 1:
            (form,) = side.values()
            size = "×".join(map(str, self.example.shape[-2:]))
            raise SiteError(
                f"{target!r} {verb} a tensor of shape {form.shape} for {len(self.example)} image(s) of {size}: that is "
                "no map (batch, channels, height, width) or (batch, height, width, channels), and no sequence of "
                "tokens of such a grid; choose another module"
            )
        what = f"{len(side)} tensors, none of them a map" if side else f"a {call.kind} without a tensor"
        raise SiteError(f"{target!r} {verb} {what}: choose a module inside or around it")

    def the_maps(self, targets: Iterable[str], at: str) -> list[Map]:
        """The one map of each of several modules, each seen to be one of the image and whether it is read."""
        found = [self.the_map(target, at) for target in targets]
        misplaced = self.misplaced(found)
        for one in found:
            if one.target in misplaced:
                raise SiteError(
                    f"{one.target!r} {'takes' if at == 'before' else 'returns'} a tensor of shape {one.form.shape}, "
                    f"which is no map of {one.shape[2]}×{one.shape[3]}: what changes in the image does not show at its "
                    "place there; choose another module"
                )
        unread = self.unread(found) if at == "after" else set()
        return [replace(one, read=one.target not in unread) for one in found]

    def misplaced(self, maps: Iterable[Map]) -> set[str]:
        """The targets of those that have the shape of a map and are none of the image."""
        # Of tokens, and where there is no other size of image to compare with, a shape says little.
        doubtful = [one for one in maps if one.layout.grid is not None or self.wider is None]
        return misaligned(self.model, doubtful, self.example)

    def meant(self, maps: list[Map]) -> list[Map]:
        """Those among a module's maps that the network reads and, if that is more than one, declares for a stage."""
        read = [one for one in maps if self.is_read(one)] or maps
        channels = {
            count
            for stage, count in declared_stages(self.model)
            if stage in self.calls and end_of_sequential(self.model, stage) == maps[0].target
        }
        return [one for one in read if one.shape[1] in channels] or read

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

        output = run_quietly(self.model, self.example, {one.target: spoil})
        return self.example.is_meta or any(bool(tensor.isnan().any()) for tensor in leaves(output))


def leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)


def same_kind(layouts: set[Layout], others: set[Layout]) -> set[Layout]:
    """Those of which there is one with the same axes for another size of image."""
    kinds = {(other.axes, other.prefix) for other in others}
    return {layout for layout in layouts if (layout.axes, layout.prefix) in kinds}


def calls_of(model: nn.Module, example: Tensor) -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {}
    ended = 0

    def note(name: str) -> Hook:
        def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            nonlocal ended
            taken = {**forms_in(args), **forms_in(kwargs)}
            calls.setdefault(name, []).append(Call(taken, forms_in(output), type(output).__name__, ended))
            ended += 1

        return hook

    run_quietly(model, example, {name: note(name) for name, _ in model.named_modules() if name})
    return calls


# --- the end of a residual branch: the module after which a block's output still goes through the addition -----------

ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)


def branch_end(model: nn.Module, site: str, example: Tensor) -> str:
    """The module in a residual block whose output is the branch that is added to the shortcut.

    Of the last two maps that the block adds, the branch is the one that more operations led to.
    """
    following = Following()
    block = model.get_submodule(site)
    hooks = {f"{site}.{name}": following.give(f"{site}.{name}") for name, _ in block.named_modules() if name}
    handle = block.register_forward_pre_hook(lambda module, args: following.watch(True))
    try:
        with following:
            run_quietly(model, example, {**hooks, site: lambda *_: following.watch(False)})
    finally:
        handle.remove()
    if following.last is None:
        raise SiteError(
            f"{site!r} adds no two maps, so it has no residual branch: choose a residual block, or at='after'"
        )
    one, other = following.last
    branch = max(one, other, key=lambda step: step.depth)
    if one.depth == other.depth or branch.module is None:
        what = (
            "adds two branches of equal length, and it cannot be told which is the shortcut"
            if one.depth == other.depth
            else "adds what is no output of a module, so nothing can follow the branch"
        )
        raise SiteError(f"{site!r} {what}: choose a module inside of a branch by names=, with at='after'")
    return branch.module


@dataclass
class Origin:
    """How a tensor came about."""

    #: the tensor itself, kept so that its identity is not given to another
    tensor: Tensor
    #: the longest row of operations that led to it from what the block was given
    depth: int
    #: the module that returned it as it is
    module: str | None = None


class Following(TorchFunctionMode):
    """Follows the tensors of one block through its operations to the last addition of two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self.origins: dict[int, Origin] = {}
        self.last: tuple[Origin, Origin] | None = None

    def watch(self, on: bool) -> None:
        self.watching = on

    def give(self, name: str) -> Hook:
        def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if isinstance(output, Tensor):
                self.origin(output).module = name

        return hook

    def origin(self, tensor: Tensor) -> Origin:
        return self.origins.setdefault(id(tensor), Origin(tensor, 0))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watching:
            return func(*args, **kwargs)
        taken = [self.origin(tensor) for tensor in leaves((*args, *kwargs.values()))]
        if func in ADDITIONS and len(taken) == 2:
            one, other = taken
            if one.tensor.shape == other.tensor.shape and one.tensor.dim() >= 3:
                self.last = replace(one), replace(other)
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            # In place or not, this is no longer what a module returned.
            self.origins[id(output)] = Origin(output, 1 + max((origin.depth for origin in taken), default=0))
        return output
