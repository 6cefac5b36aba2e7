"""What a network says of its maps, and one dry run that sees their shapes: where blocks can go.

A map is told by its shape and by what the network declares: its stages and their channels, how many tokens come before
a grid, whether channels are last. No value is looked at. What shapes and declarations leave open, the user says by
``layout=`` or by other names, and one backward pass settles which tensor of several the network reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from vision_attn.checks import product
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.backbone import Example, Hook, end_of_sequential, modules_around, run_quietly
from vision_attn.networks.insertion.costs import Counting, Share
from vision_attn.networks.insertion.record import Element, change, map_shape, prefix_of, token_grid

#: The children of torchvision's residual networks that are stages, one after the other.
RESNET = ("relu", "layer1", "layer2", "layer3", "layer4")

#: The blocks of torchvision's networks that alternate with what makes maps smaller.
ODD = ("features.1", "features.3", "features.5", "features.7")

#: Stages by class, or the one part of a network in which the last module of each size of map is a stage. In a path {i}
#: counts from 0 and {j} from 1, as far as there are modules. Paths that a network does not have are left out; where it
#: has none of them, it is such a part itself. In torchvision's other networks ``features`` is such a part.
STAGES: dict[str, tuple[str, ...] | str] = {
    "diffusers.models.autoencoders.vae.Encoder": ("down_blocks.{i}", "mid_block"),
    "timm.models.coat.CoaT": ("serial_blocks{j}",),
    "timm.models.gemma4_vit.Gemma4VitClassifier": ("encoder.blocks.{i}",),
    "timm.models.hrnet.HighResolutionNet": ("act1", *(f"incre_modules.{index}" for index in range(4))),
    "timm.models.mobilenetv5.MobileNetV5": ("conv_stem", *(f"blocks.{index}" for index in range(4))),
    "timm.models.mvitv2.MultiScaleVit": ("stages.{i}",),
    "timm.models.twins.Twins": ("blocks.{i}",),
    "torchvision.models._utils.IntermediateLayerGetter": RESNET,
    "torchvision.models.convnext.ConvNeXt": ODD,
    "torchvision.models.googlenet.GoogLeNet": ("conv1", "conv3", "inception3b", "inception4e", "inception5b"),
    "torchvision.models.inception.Inception3": ("Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c"),
    "torchvision.models.maxvit.MaxVit": ("stem", "blocks.{i}"),
    "torchvision.models.mnasnet.MNASNet": "layers",
    "torchvision.models.regnet.RegNet": ("stem", "trunk_output.block{j}"),
    "torchvision.models.resnet.ResNet": RESNET,
    "torchvision.models.shufflenetv2.ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "conv5"),
    "torchvision.models.swin_transformer.SwinTransformer": ODD,
    "torchvision.models.video.mvit.MViT": ("blocks.{i}",),
    "torchvision.models.video.resnet.VideoResNet": RESNET[1:],
    "torchvision.models.video.swin_transformer.SwinTransformer3d": tuple(f"features.{index}" for index in (0, 2, 4, 6)),
    "torchvision.models.vision_transformer.VisionTransformer": ("encoder.layers.encoder_layer_{i}",),
    "transformers.models.convnext.modeling_convnext.ConvNextEncoder": ("stages.{i}",),
    "transformers.models.regnet.modeling_regnet.RegNetEncoder": ("stages.{i}",),
    "transformers.models.resnet.modeling_resnet.ResNetEncoder": ("stages.{i}",),
    "transformers.models.segformer.modeling_segformer.SegformerModel": ("stages.{i}",),
    "transformers.models.swin.modeling_swin.SwinEncoder": ("layers.{i}.blocks",),
    "transformers.models.vit.modeling_vit.ViTModel": ("layers.{i}",),
}

#: Networks whose tokens are in an order that no shape tells, and which.
SCRAMBLED = {
    "timm.models.hiera.Hiera": "the tokens of Hiera are in the order of its mask units",
    "torchvision.models.video.mvit.MViT": "the tokens of MViT are those of a video",
}

#: Layouts that a user can name; with other numbers of tokens before the grid.
LAYOUTS = ("b c w", "b c h w", "b c t h w", "b w c", "b h w c", "b t h w c", "b (h w) c", "b (1 + h w) c")
LAYOUT = re.compile(r"b c (w|h w|t h w)|b (w|h w|t h w) c|b \((\d+ \+ )?h w\) c")

#: How many tokens a sequence may begin with where the model does not say it: of a class, of a class and a teacher, and
#: four registers without and with the first.
PREFIXES = (0, 1, 2, 4, 5)


@dataclass(frozen=True)
class Declared:
    """What a network, or the one part of it that does, declares."""

    #: the parts that do where they are several, and then nothing else
    parts: tuple[str, ...] = ()
    #: path and channels of each stage
    stages: tuple[tuple[str, int | None], ...] = ()
    #: the part in which the last module of each size of map is a stage; None where nothing is declared
    trunk: str | None = None
    #: tokens before a grid
    prefix: int | None = None
    #: whether channels are last
    channels_last: bool = False
    #: why its tokens are no map
    scrambled: str = ""


def declaration(model: nn.Module) -> Declared:
    """What a model declares, or the part of it that does."""
    found: dict[str, nn.Module] = {}
    for wrapped in (False, True):  # ``features_only=True`` wraps a network, or the parts of one
        for path, module in model.named_modules():
            inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
            if not inside and declares_stages(module, wrapped):
                found[path] = module
        if found:
            break
    said = [said_by(module, path) for path, module in found.items()]
    return said[0] if len(said) == 1 else Declared(parts=tuple(found))


def declares_stages(module: nn.Module, wrapped: bool) -> bool:
    """Return True if a module declares stages in itself, or ``wrapped`` in a module inside it."""
    names = [entry["module"] for entry in stage_entries(module)]
    known = {path for path, _ in module.named_modules(remove_duplicate=False)} if names else set()
    direct = any(path in known for name in names for path in (name, name.replace(".", "_")))
    return bool(row_of_stages(module)) or direct or (wrapped and bool(names))


def said_by(module: nn.Module, path: str) -> Declared:
    """What a module at a path declares."""
    before = f"{path}." if path else ""
    known = {name for name, _ in module.named_modules(remove_duplicate=False)}
    entries, rows = stage_entries(module), row_of_stages(module)
    if isinstance(rows, str):
        return Declared(trunk=before + rows)
    if rows:
        paths = [row.format(i=i, j=i + 1) for row in rows for i in range(len(known) if "{" in row else 1)]
        paths = [name for name in paths if name in known]
    else:
        paths = [existing_path(entry["module"], known) for entry in entries]
        while paths and paths[-1] not in known:  # ``features_only=True`` cuts off what follows the last feature
            paths.pop()
    channels = [entry.get("num_chs") for entry in entries] + [None] * len(paths)
    stages = dict(zip((before + name for name in paths), channels, strict=False))  # crossvit says each one twice
    prefix = getattr(module, "num_prefix_tokens", None)
    return Declared(
        stages=tuple(stages.items()),
        trunk=None if paths else path,
        prefix=prefix if isinstance(prefix, int) else None,
        channels_last="NHWC" in str(getattr(module, "output_fmt", "")),
        scrambled=row_of(SCRAMBLED, module) or "",
    )


def existing_path(name: str, known: Collection[str]) -> str:
    """Return the path of a declared module: ``features_only=True`` flattens paths or wraps the network in a module."""
    wrapped = [path for path in known if path.endswith(f".{name}")]
    return next((path for path in (name, name.replace(".", "_"), *wrapped[:1]) if path in known), name)


def stage_entries(module: nn.Module) -> list[Mapping[str, Any]]:
    """The entries of timm's ``feature_info`` that name a module."""
    info = getattr(module, "feature_info", None)
    entries = getattr(info, "info", info)
    known = entries if isinstance(entries, (list, tuple)) else []
    return [entry for entry in known if isinstance(entry, Mapping) and entry.get("module")]


def row_of_stages(module: nn.Module) -> Any:
    """The row of a module among those of stages."""
    of_torchvision = any(kind.__module__.startswith("torchvision.models.") for kind in type(module).__mro__)
    return row_of(STAGES, module) or ("features" if of_torchvision and "features" in module._modules else None)


def row_of(table: Mapping[str, Any], module: nn.Module) -> Any:
    """The row of a table for the class of a module, or for one that it is made from."""
    kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__)
    return next((table[kind] for kind in kinds if kind in table), None)


# --- one forward pass that sees shapes -------------------------------------------------------------------------------


class Form(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Map(NamedTuple):
    """A map that a module, its **target**, takes or gives."""

    target: str
    element: Element
    form: Form
    layout: str
    #: rows and columns; of the largest feature map where the module is called several times
    size: tuple[int, ...]
    #: whether the output of the network depends on it
    read: bool = True
    #: the tensors of all calls of the module
    calls: tuple[Form, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch, channels, rows, columns, or as many axes as there are."""
        return map_shape(self.form.shape, self.layout, self.size)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of the map in each call of the module."""
        return [map_shape(form.shape, self.layout, self.size) for form in self.calls]


def forms_in(value: object) -> dict[Element, Form]:
    """The tensors in what a module takes or gives, without their values."""
    items: list[tuple[Element, object]] = [(None, value)]
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if isinstance(key, str)]
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    return {key: Form(tuple(x.shape), x.dtype, x.device) for key, x in items if isinstance(x, Tensor)}


class DryRun:
    """All calls of a model's modules in one forward of an example, and the maps in them."""

    def __init__(self, model: nn.Module, example: Example, layout: str | None = None) -> None:
        if layout is not None and not LAYOUT.fullmatch(layout):
            raise ValueError(f"layout must be like {', '.join(map(repr, LAYOUTS))}; got {layout!r}")
        self.model = model
        self.example = example
        #: how maps lie, where the user says it
        self.layout = layout
        #: what the model declares
        self.said: Declared = declaration(model)
        known = dict(model.named_modules(remove_duplicate=False))
        #: the channels that are declared, by the module that ends a stage
        self.channels: dict[str, int | None] = {
            end_of_sequential(model, path): count for path, count in self.said.stages if path in known
        }
        #: what each call took, ``"before"``, and gave, ``"after"``, by path of the module in the order of their ends
        self.calls: dict[str, list[dict[str, dict[Element, Form]]]] = {}
        hooks = [(name, partial(self.note, name)) for name, _ in model.named_modules() if name]
        #: what the model gives, and what it has and does
        self.output: object
        self.whole: Share
        self.output, self.whole = self.run(hooks)

    def note(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """Keep the shapes of a call."""
        call = {"before": forms_in(args) | forms_in(kwargs), "after": forms_in(output)}
        self.calls.setdefault(name, []).append(call)

    def run(self, hooks: Iterable[tuple[str, Hook]] = ()) -> tuple[object, Share]:
        """What the model gives for the example; and its parameters, and its multiply-adds for one image."""
        with Counting() as counter:
            output = run_quietly(self.model, self.example, hooks)
        parameters = sum(p.numel() for p in self.model.parameters())
        return output, Share(parameters, counter.operations // 2 // self.example.shape[0])

    def maps(self, target: str, at: str = "after") -> list[Map]:
        """Return the feature maps in a module's input or output that lie alike in each of its calls."""
        calls = [self.maps_of_call(target, call[at]) for call in self.calls.get(target, [])]
        found = []
        for one in calls[0] if calls else []:
            same = [next((other for other in call if is_alike(one, other)), None) for call in calls]
            alike = [other for other in same if other is not None]
            if len(alike) == len(calls):
                largest = max(alike, key=lambda other: product(other.size))
                found.append(largest._replace(calls=tuple(other.form for other in alike)))
        return found

    def maps_of_call(self, target: str, forms: Mapping[Element, Form]) -> list[Map]:
        found = ((element, form, self.layout_of(form, target)) for element, form in forms.items())
        return [Map(target, element, form, *layout) for element, form, layout in found if layout is not None]

    def layout_of(self, form: Form, target: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the layout and size of the feature map in a tensor; None if it can be no map of the images."""
        shape, batch, axes = form.shape, self.example.shape[0], len(self.example.size)
        if not form.dtype.is_floating_point or len(shape) not in (3, 4, 5) or 0 in shape:
            return None
        if self.layout is not None:
            return self.declared_layout(shape, self.layout)
        if shape[0] % batch:
            return None
        if self.example.image.dim() == 2:  # vectors of which images are made, or sound without channels
            axes = len(shape) - 2
        if len(shape) == 2 + axes:
            return self.spatial_layout(shape, target)
        if len(shape) == 3 and axes == 2 and shape[0] == batch and not self.said.scrambled:
            return self.token_layout(shape[1])
        return None

    def declared_layout(self, shape: tuple[int, ...], layout: str) -> tuple[str, tuple[int, ...]] | None:
        """The layout that the user declares, whatever axes and batch the model's input has."""
        if "(" in layout:
            tokens, size = shape[1] - prefix_of(layout), self.example.image.shape[-2:]
            grid = token_grid(tokens, *size) if len(shape) == 3 and len(size) == 2 else None
            return None if grid is None else (layout, grid)
        if len(layout.split()) != len(shape):
            return None
        return layout, shape[2:] if layout.startswith("b c") else shape[1:-1]

    def spatial_layout(self, shape: tuple[int, ...], target: str) -> tuple[str, tuple[int, ...]] | None:
        """Channels second, unless the model or the aspect of the image says that they are last."""
        names = {3: "w", 4: "h w", 5: "t h w"}[len(shape)]
        sizes = {f"b c {names}": shape[2:], f"b {names} c": shape[1:-1]}
        fits = [layout for layout, size in sizes.items() if self.keeps_aspect(size)]
        if not fits and shape[0] != self.example.shape[0]:
            return None
        fits = fits or list(sizes)
        fits = [one for one in fits if map_shape(shape, one)[1] == self.channels.get(target)] or fits
        chosen = fits[-1] if self.channels_last and len(shape) > 3 else fits[0]
        return chosen, sizes[chosen]

    @cached_property
    def channels_last(self) -> bool:
        """Whether channels are last where a shape leaves it open: declared, or so in most maps that do not."""
        forms = [form.shape for calls in self.calls.values() for form in calls[0]["after"].values()]
        forms = [shape for shape in forms if len(shape) == 2 + len(self.example.size) and 1 not in shape[1:]]
        balance = sum(self.keeps_aspect(shape[1:-1]) - self.keeps_aspect(shape[2:]) for shape in forms)
        return self.said.channels_last or balance > 0

    def keeps_aspect(self, size: tuple[int, ...]) -> bool:
        """Whether a size has the aspect of the images, give or take a cell of rounding."""
        if len(size) == 1 or self.example.count or len(self.example.size) == 1:
            return True
        (height, width), (rows, columns) = size[-2:], self.example.size[-2:]
        return abs(height * columns - width * rows) <= rows + columns

    def token_layout(self, tokens: int) -> tuple[str, tuple[int, ...]] | None:
        """A grid with the aspect of the image, after as many other tokens as the model says, or usual."""
        for prefix in PREFIXES if self.said.prefix is None else (self.said.prefix, 0):
            if (grid := token_grid(tokens - prefix, *self.example.size)) is not None:
                return f"b ({prefix} + h w) c" if prefix else "b (h w) c", grid
        return None

    def the_maps(self, targets: Iterable[str], at: str) -> list[Map]:
        """Return the one map of each of several modules, and whether the output of the network depends on it.

        Of several it is the one that the network reads, and else the one that it declares. A network that ignores the
        only map of a module is refused: a block there would never be used. Of a map among other things, features-only
        networks or a head on the class token alone may read nothing, which is a warning.
        """
        found = [self.some_maps(target, at) for target in targets]
        unread = self.unread([one for maps in found for one in maps], at)
        chosen = []
        for maps in found:
            read = [one for one in maps if one not in unread] or [one._replace(read=False) for one in maps]
            read = [one for one in read if one.shape[1] == self.channels.get(one.target)] or read
            if len(read) > 1:
                what = f"{read[0].target!r} {'takes' if at == 'before' else 'returns'} {len(read)} maps"
                raise SiteError(f"{what}, and a block works on one: choose modules inside it")
            if not read[0].read and self.is_ignored(maps[0].target, at):
                what = f"{maps[0].target!r}: the network ignores the {'input' if at == 'before' else 'output'}"
                raise SiteError(f"{what} of this module, so a block there would have no effect. Choose another module")
            chosen.append(read[0])
        return chosen

    def some_maps(self, target: str, at: str) -> list[Map]:
        """The maps that a module gives or takes, one at least."""
        self.check_called(target)
        if maps := self.maps(target, at):
            return maps
        calls = self.calls[target]
        shapes = ", ".join(str(form.shape) for form in calls[0][at].values())
        if self.maps_of_call(target, calls[0][at]):
            owner = next((f"model.{name}" for name in [*modules_around(target)[:1], target]), "model")
            raise SiteError(
                f"{target!r} is called {len(calls)} times in one forward pass, on different tokens or layouts: a block "
                f"stores one token grid. Insert into the shared module itself, as in va.insert_({owner}, ...)"
            )
        what = f"{'takes' if at == 'before' else 'returns'} {shapes or 'no tensor'} for images {self.example.shape}"
        why = f", as {self.said.scrambled}" if self.said.scrambled else ""
        remedy = "choose another module, or declare the layout of its feature map with layout="
        raise SiteError(f"{target!r} {what}, and no feature map was found in that{why}: {remedy}")

    def check_called(self, target: str) -> None:
        """Raise for a module that the forward pass does not call."""
        if target not in self.calls:
            raise SiteError(f"{target!r} is not called in the forward pass: choose another module")

    def unread(self, maps: list[Map], at: str) -> list[Map]:
        """Return the maps that the output does not depend on, by one forward and backward pass."""
        held: dict[Map, list[Tensor]] = {one: [] for one in maps}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        try:
            for parameter in parameters:
                parameter.requires_grad_(False)  # so that nothing before the first map is kept for the backward pass
            output = self.run_changed(maps, at, lambda one, x: hold(held[one], x), gradients=True)
            with torch.enable_grad():
                sums = [x.float().square().sum() for x in leaves(output) if x.requires_grad]
                if not sums:
                    return [one for one in maps if self.is_ignored(one.target, at)]
                every = [x for tensors in held.values() for x in tensors]
                found = iter(torch.autograd.grad(torch.stack(sums).sum(), every, allow_unused=True))
        except (SiteError, RuntimeError):  # a network that has no backward
            return []
        finally:
            for parameter in parameters:
                parameter.requires_grad_()
        gradients = {one: [next(found) for _ in tensors] for one, tensors in held.items()}
        return [one for one, each in gradients.items() if not any(is_read(one, gradient) for gradient in each)]

    def is_ignored(self, target: str, at: str) -> bool:
        """Return True if not even other values in what a module takes or returns change the output of the network."""

        def noise(x: Tensor) -> Tensor:
            return x + (1 + x.abs().amax()) * torch.rand_like(x) if x.is_floating_point() else x

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return tree_map_only(Tensor, noise, output)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(Tensor, noise, (args, kwargs))

        hook: Any = before if at == "before" else after
        output = run_quietly(self.model, self.example, [(target, hook)], before=at == "before")
        return any(x.numel() for x in leaves(output)) and same_bits(self.output, output)

    def run_changed(
        self, maps: Iterable[Map], at: str, function: Callable[[Map, Tensor], Tensor], gradients: bool = False
    ) -> object:
        """Run the model with a function applied to some of its maps."""

        def after(one: Map, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return change(output, one.element, partial(function, one))

        def before(one: Map, module: nn.Module, args: Any, kwargs: Any) -> Any:
            in_kwargs = isinstance(one.element, str)
            changed = change(kwargs if in_kwargs else args, one.element, partial(function, one))
            return (args, changed) if in_kwargs else (changed, kwargs)

        hook: Callable[..., Any] = before if at == "before" else after
        hooks = [(one.target, partial(hook, one)) for one in maps]
        return run_quietly(self.model, self.example, hooks, gradients=gradients, before=at == "before")


def is_alike(one: Map, other: Map) -> bool:
    """Return True if one block can work on the maps of both calls: only a token grid has to keep its size."""
    same_place = (one.element, one.layout, one.shape[1]) == (other.element, other.layout, other.shape[1])
    return same_place and ("(" not in one.layout or one.size == other.size)


def hold(held: list[Tensor], x: Tensor) -> Tensor:
    """Keep a tensor to follow its gradient; another goes on, as the network may change it in place."""
    held.append(x * 1 if x.requires_grad else x.detach().clone().requires_grad_())
    return held[-1] * 1


def is_read(one: Map, gradient: Tensor | None) -> bool:
    """Whether a map is in the graph of the output, and not only the tokens before it."""
    prefix = prefix_of(one.layout)
    if gradient is None or without_values(gradient) or not prefix:
        return gradient is not None
    return bool(gradient[:, prefix:].any() or not gradient[:, :prefix].any())


def without_values(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def leaves(value: object) -> list[Tensor]:
    """The tensors in what a network gives."""
    held = vars(value) if is_dataclass(value) and not isinstance(value, Mapping) else value
    return [leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor)]


def same_bits(one: object, other: object) -> bool:
    """Whether two outputs are the same numbers, NaN included; tensors without values are compared by their shapes."""
    ours, theirs = leaves(one), leaves(other)
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and x.dtype == y.dtype and (without_values(x) or torch.equal(x.nan_to_num(), y.nan_to_num()))
        for x, y in zip(ours, theirs, strict=True)
    )
