"""Dry run: one forward pass of an example records the shapes of inputs and outputs, and finds the feature maps.

Feature maps are found by shape and by the metadata of the network: stages and their channels, the number of tokens
before a grid, and the position of the channel axis. If the layout is ambiguous, the user must pass ``layout=`` or
choose other modules. A backward pass shows which of several tensors the network uses.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vision_attn.attention.graphs import is_symbolic
from vision_attn.attention.scopes import scope
from vision_attn.checks import product
from vision_attn.errors import SiteError
from vision_attn.networks.impl_choice import blocks_with_impl
from vision_attn.networks.inspection import feature_maps
from vision_attn.networks.inspection.costs import Cost, count_flops
from vision_attn.networks.inspection.example import make_example, tree_leaves, tree_map_only
from vision_attn.networks.inspection.feature_maps import Element, FeatureMap, TensorSpec
from vision_attn.networks.inspection.metadata import read_metadata
from vision_attn.networks.inspection.network import CONVS, fixed_seed, kept_tensors, quiet_eval, without_hooks
from vision_attn.networks.inspection.selection import find_module

#: Values of the argument ``layout``.
LAYOUT = re.compile(r"b c (w|h w|t h w)|b (w|h w|t h w) c|b \((\d+ \+ )?h w\) c")

#: Numbers of tokens before a grid, tried if the model has no metadata: no token, a class token, a class and a
#: distillation token, four register tokens, and four register tokens with a class token.
PREFIXES = (0, 1, 2, 4, 5)

#: Paths of modules and hooks. Hooks are called as ``hook(module, args, kwargs, output)``, pre-hooks without ``output``.
Hooks = Iterable[tuple[str, Callable[..., Any]]]

#: Layout of a feature map, and its size along one to three axes.
Layout = tuple[str, tuple[int, ...]]


class DryRun:
    """Record the calls of all modules in one forward pass, and find their feature maps.

    Args:
        model: the network.
        example_input: input of the network, as in :func:`vision_attn.insert_`.
        layout: layout of all feature maps; inferred from shapes and metadata when None.
    """

    def __init__(self, model: nn.Module, example_input: Any = None, layout: str | None = None) -> None:
        if layout is not None and not LAYOUT.fullmatch(layout):
            raise ValueError(f"layout must be of the form 'b c h w', 'b h w c' or 'b (1 + h w) c', got {layout!r}")
        self.model, self.layout = model, layout
        self.example, self.declared = make_example(model, example_input), read_metadata(model)
        #: inputs (``"before"``) and outputs (``"after"``) of each call, by path, in the order in which the calls return
        self.calls: dict[str, list[dict[str, dict[Element, TensorSpec]]]] = {}
        #: whether the output does not depend on a feature map, by feature map and position of the block
        self.unused: dict[tuple[FeatureMap, str], bool] = {}
        #: parameters that a forward pass changes, by training mode; missing before the first run in a mode
        self.changed: dict[bool, list[Tensor]] = {}
        #: True if the forward pass needs the hooks of other code, such as timm's ``FeatureHookNet``
        self.needs_hooks: bool = False
        self.output: object = None
        hooks = [(x, partial(self.record_call, x)) for x, _ in model.named_modules() if x]
        with suppress(SiteError):
            self.output, self.cost = self.measure(hooks)
        if not get_tensors(self.output):
            self.needs_hooks = True
            self.calls.clear()
            self.output, self.cost = self.measure(hooks)

    def record_call(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """Record the shapes of a call, in a forward hook."""
        call = {"before": TensorSpec.read(args) | TensorSpec.read(kwargs), "after": TensorSpec.read(output)}
        self.calls.setdefault(name, []).append(call)

    def run(self, hooks: Hooks = (), *, before: bool = False, training: bool = False, context: Any = None) -> object:
        """Run the model on a copy of the example with a fixed random seed, and restore its state afterwards.

        Parameters, buffers, modes and random states are restored, and hooks of other code are not called.

        Args:
            hooks: temporary hooks.
            before: register them as pre-hooks.
            training: run in training mode instead of evaluation mode.
            context: context manager for the forward pass alone, which enables gradients or counts operations.
        """
        model = self.model
        # Copying all parameters doubles the memory of a network, so only the first run in each mode does it.
        parameters = [*self.changed.get(training, model.parameters())]
        try:
            with ExitStack() as stack:
                stack.enter_context(nullcontext() if self.needs_hooks else without_hooks(model))
                self.changed.setdefault(training, stack.enter_context(kept_tensors(model, parameters)))
                stack.enter_context(fixed_seed(model))
                stack.enter_context(quiet_eval(model, training))
                # With hooks inside, a swapped module runs its original code: so do all runs, to have the same rounding.
                swapped = [x for x in model.modules() if hasattr(x, "running_block")]
                inside = [(child, lambda *call: None) for x in swapped for child in x.children()]
                for module, hook in (*((model.get_submodule(path), hook) for path, hook in hooks), *inside):
                    register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
                    stack.callback(register(hook, with_kwargs=True, prepend=True).remove)
                # torch's counter of operations does not support FlexAttention. Its blocks run as matrix products in all
                # runs, so that the outputs have the same rounding.
                if flex := {x: "bmm" for x in blocks_with_impl(model).values() if x.impl == "flex"}:
                    stack.enter_context(scope(model, "impl", flex))
                # A forward method may normalize an image in place, assign to a list or pop from a dictionary.
                inputs = self.example.args, dict(self.example.kwargs)
                args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), inputs)
                stack.enter_context(context or nullcontext())
                return model(*args, **kwargs)
        except SiteError:
            raise
        except Exception as error:
            # The message is cut off before the values of tensors.
            why = f"{type(error).__name__}: {str(error).partition('tensor(')[0][:300]}"
            remedy = "Pass an input of its forward as example_input: images, their shape, or a tuple or dictionary"
            raise SiteError(f"the model does not run on an example {self.example} ({why}). {remedy}") from error

    def measure(self, hooks: Hooks = ()) -> tuple[object, Cost]:
        """Run the model and return its output, and its cost for one image."""
        counter = count_flops()
        output = self.run(hooks, context=counter)
        parameters = sum(p.numel() for p in self.model.parameters())
        return output, Cost(parameters, counter.get_total_flops() // 2 // self.example.shape[0])

    def maps(self, target: str, at: str = "after") -> list[FeatureMap]:
        """Return the feature maps in the input or output of a module that have the same layout in all calls."""
        calls = self.calls.get(target, [])
        by_signature: dict[Any, list[FeatureMap]] = {}
        for element, spec in (item for call in calls for item in call[at].items()):
            if (layout := self.find_layout(spec, target)) is not None:
                x = FeatureMap(target, element, spec, *layout)
                # A block runs in all calls. Feature maps may change in size between calls, a grid of tokens may not.
                signature = x.element, x.layout, x.shape[1], x.size if "(" in x.layout else None
                by_signature.setdefault(signature, []).append(x)
        alike = [maps for maps in by_signature.values() if len(maps) == len(calls)]
        return [max(maps, key=lambda x: product(x.size))._replace(calls=tuple(x.spec for x in maps)) for maps in alike]

    def find_layout(self, spec: TensorSpec, target: str) -> Layout | None:
        """Return the layout and size of the feature map in a tensor, or None if the tensor cannot be a feature map."""
        shape, batch, axes = spec.shape, self.example.shape[0], len(self.example.size)
        if not spec.dtype.is_floating_point or len(shape) not in (3, 4, 5) or 0 in shape:
            return None
        if self.layout is not None:
            return self.user_layout(shape, self.layout)
        if shape[0] % batch:
            return None
        if self.example.image.dim() == 2:  # The input is vectors for an image generator, or audio without channels.
            axes = len(shape) - 2
        if len(shape) == 2 + axes:
            return self.spatial_layout(shape, target)
        if len(shape) == 3 and axes == 2 and shape[0] == batch and not self.declared.non_raster:
            for prefix in PREFIXES if self.declared.prefix is None else (self.declared.prefix, 0):
                if (grid := feature_maps.token_grid(shape[1] - prefix, *self.example.size)) is not None:
                    return f"b ({prefix} + h w) c" if prefix else "b (h w) c", grid
        return None

    def user_layout(self, shape: tuple[int, ...], layout: str) -> Layout | None:
        """Return the layout from the argument ``layout``, for any axes and batch size of the input."""
        if "(" in layout:
            tokens, size = shape[1] - feature_maps.count_prefix(layout), self.example.image.shape[-2:]
            grid = feature_maps.token_grid(tokens, *size) if len(shape) == 3 and len(size) == 2 else None
            return None if grid is None else (layout, grid)
        return (layout, feature_maps.map_shape(shape, layout)[2:]) if len(layout.split()) == len(shape) else None

    def spatial_layout(self, shape: tuple[int, ...], target: str) -> Layout | None:
        """Return a layout with channels second, unless metadata or the aspect ratio shows that channels are last."""
        names = {3: "w", 4: "h w", 5: "t h w"}[len(shape)]
        layouts = [f"b c {names}", f"b {names} c"]
        if isinstance(find_module(self.model, target), CONVS):  # whose strides may change the aspect ratio
            layouts.pop()
        shapes = {layout: feature_maps.map_shape(shape, layout) for layout in layouts}
        fits = [layout for layout, (_, _, *size) in shapes.items() if self.keeps_aspect(size)]
        if not fits and shape[0] != self.example.shape[0]:
            return None
        fits = fits or list(shapes)
        fits = [layout for layout in fits if shapes[layout][1] == self.declared.channels.get(target)] or fits
        layout = fits[-1] if self.declared.channels_last and len(shape) > 3 else fits[0]
        return layout, shapes[layout][2:]

    def keeps_aspect(self, size: Sequence[int]) -> bool:
        """Return True if a size has the aspect ratio of the images, up to one position of rounding."""
        if len(size) == 1 or self.example.count or len(self.example.size) == 1:
            return True
        (height, width), (rows, columns) = size[-2:], self.example.size[-2:]
        return abs(height * columns - width * rows) <= rows + columns

    def select_maps(self, targets: Iterable[str], at: str) -> list[FeatureMap]:
        """Return the feature map of each module, with ``used=False`` if the output does not depend on it.

        Among several feature maps, the one that the network uses is selected. If it uses all, the declared one is.
        """
        candidates = [self.require_maps(target, at) for target in targets]
        self.test_use([x for maps in candidates for x in maps], at)
        selected = []
        for maps in candidates:
            used = [x for x in maps if not self.unused[x, at]] or [x._replace(used=False) for x in maps]
            used = [x for x in used if x.shape[1] == self.declared.channels.get(x.target)] or used
            if len(used) > 1:
                what = f"{used[0].target!r} {'receives' if at == 'before' else 'returns'} {len(used)} feature maps"
                raise SiteError(f"{what}, but a block processes only one. Choose modules inside it")
            selected.append(used[0])
        return selected

    def require_maps(self, target: str, at: str) -> list[FeatureMap]:
        """Return the feature maps in the input or output of a module; raise if there are none."""
        if target not in self.calls:
            raise SiteError(f"{target!r} is not called in the forward pass. Choose another module")
        if maps := self.maps(target, at):
            return maps
        shapes = " and ".join(str(spec.shape) for call in self.calls[target] for spec in call[at].values())
        what = f"{'receives' if at == 'before' else 'returns'} {shapes or 'no tensor'} for images {self.example.shape}"
        why = f", because {self.declared.non_raster}" if self.declared.non_raster else ""
        remedy = "Choose another module, or pass the layout of its feature map as layout="
        raise SiteError(f"{target!r} {what}, and no feature map of one layout and token grid was found{why}. {remedy}")

    def test_use(self, maps: Iterable[FeatureMap], at: str) -> None:
        """Test whether the output depends on feature maps, in one forward and backward pass for all of them."""
        inputs: dict[FeatureMap, list[Tensor]] = {x: [] for x in maps if (x, at) not in self.unused}
        if not inputs:
            return
        self.unused |= {(x, at): False for x in inputs}  # also in a network without a backward pass
        hooks = [(x.target, partial(track_gradient, x.element, tensors)) for x, tensors in inputs.items()]
        with suppress(SiteError, RuntimeError):
            output = self.run(hooks, before=at == "before", context=torch.enable_grad())
            with torch.enable_grad():
                sums = [x.float().square().sum() for x in get_tensors(output) if x.requires_grad]
                every = [x for tensors in inputs.values() for x in tensors]
                found = iter(torch.autograd.grad(torch.stack(sums).sum(), every, allow_unused=True))
            for x, tensors in inputs.items():
                used = [is_used(x, next(found)) for _ in tensors]
                # Without a gradient, the network may use values that it detaches or rounds.
                self.unused[x, at] = not any(used) and not self.depends_on(x, at)

    def depends_on(self, x: FeatureMap, at: str) -> bool:
        """Return True if the output changes with the values of a feature map."""

        def add_noise(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
            def change(values: Tensor) -> Tensor:
                noise = torch.randn_like(values)
                if prefix := feature_maps.count_prefix(x.layout):
                    noise[:, :prefix] = 0
                return values + noise

            return feature_maps.apply_to_call(args, kwargs, output, x.element, change)

        return not bitwise_equal(self.run([(x.target, add_noise)], before=at == "before"), self.output)


def track_gradient(
    element: Element, tensors: list[Tensor], module: nn.Module, args: Any, kwargs: Any, *output: Any
) -> Any:
    """Store one tensor of the output of a module, or of its arguments in a pre-hook, to compute its gradient."""

    def keep(x: Tensor) -> Tensor:
        tensors.append(x.clone() if x.requires_grad else x.detach().clone().requires_grad_())
        return tensors[-1].clone()  # The network may change this copy in place.

    return feature_maps.apply_to_call(args, kwargs, output, element, keep)


def is_used(feature_map: FeatureMap, gradient: Tensor | None) -> bool:
    """Return True if the output depends on a feature map, not only on the tokens before it."""
    prefix = feature_maps.count_prefix(feature_map.layout)
    if gradient is None or has_no_values(gradient) or not prefix:
        return gradient is not None
    return bool(gradient[:, prefix:].any() or not gradient[:, :prefix].any())


def has_no_values(x: Tensor) -> bool:
    return x.is_meta or is_symbolic(x)


def get_tensors(value: object) -> list[Tensor]:
    """Return the tensors and NumPy arrays in the output of a network, also in attributes of objects at any depth.

    >>> from types import SimpleNamespace
    >>> get_tensors([SimpleNamespace(boxes=np.zeros(2)), {"scores": torch.ones(1)}])
    [tensor([1.]), tensor([0., 0.], dtype=torch.float64)]
    """
    found: list[Tensor] = []
    # A list keeps the objects alive, so that their identities stay unique.
    seen: dict[int, object] = {}
    pending: list[object] = [value]
    while pending:
        for leaf in tree_leaves(pending.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
                found.append(torch.from_numpy(np.array(leaf)))
            elif isinstance(leaf, Mapping):  # a subclass of dict
                pending.append([*leaf.values()])
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and id(leaf) not in seen:
                seen[id(leaf)] = leaf
                pending.append([*vars(leaf).values()])
    return found


def equal_tensors(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are equal; NaN equals NaN. Fake and meta tensors are compared by shape and dtype."""
    alike = x.shape == y.shape and x.dtype == y.dtype
    return alike and (has_no_values(x) or bool(((x == y) | (x.isnan() & y.isnan())).all()))


def bitwise_equal(one: object, other: object) -> bool:
    """Return True if all tensors of two outputs are equal."""
    ours, theirs = get_tensors(one), get_tensors(other)
    return len(ours) == len(theirs) and all(map(equal_tensors, ours, theirs))
