"""Initialize any block as an identity, by running it on random feature maps.

The last layers of a block are set to zero if the output is then equal to the input, as at the end of a residual branch,
or to a half, quarter or eighth of the input, as in front of one to three sigmoids. In the second case, the output is
scaled back. Such a block learns from the first step. Any other block gets a gate with one value per channel, which is
initialized to zero: ``x + gate · (block(x) − x)``. The block learns as soon as the gate differs from zero. A block that
is an identity without a gate must not get one, because the gate would have no gradient.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vision_attn.attention.blocks.gated_residual import refuse_normalized_zeros
from vision_attn.attention.blocks.projection import to_memory_format_of
from vision_attn.checks import check_above
from vision_attn.errors import SiteError
from vision_attn.networks.inspection.costs import feature_map_error
from vision_attn.networks.inspection.network import fixed_seed, kept_tensors, quiet_eval

#: Methods of :func:`init_identity_`. ``ZEROS`` sets its last layers to zero if necessary. ``WRAPPED`` also returns the
#: memory format of the input, on which the rounding of the next layers depends. ``GATE`` adds a gate. ``UNCHANGED``
#: keeps the block as it is.
ZEROS, WRAPPED, GATE, UNCHANGED = "zeros", "wrapped", "gate", "unchanged"

#: Ratio of output to input for an identity, and for a product with one to three factors of sigmoid(0).
RATIOS = (1.0, 0.5, 0.25, 0.125)


class ExactBlock(nn.Module):
    """Wrapper that makes a block an identity at initialization.

    Computes ``x + gate · (scale · block(x) − x)``, or ``scale · block(x)`` without a gate, in the memory format of
    ``x``.

    Args:
        block: the block.
        channels: channels of the feature map.
        like: tensor that defines the device and dtype of the gate.
        gated: add the gate, which is initialized to zero.
        scale: factor of the output of the block.
        copied: pass a contiguous copy of the feature map to the block, because it changes its input in place or calls
            ``view``.

    >>> x = torch.randn(2, 8, 7, 7)
    >>> torch.equal(ExactBlock(nn.Conv2d(8, 8, 1), 8, x, gated=True)(x), x)
    True
    """

    def __init__(
        self, block: nn.Module, channels: int, like: Any, gated: bool = False, scale: float = 1.0, copied: bool = False
    ) -> None:
        super().__init__()
        check_above(0, scale=scale)
        gate = nn.Parameter(torch.zeros(channels, device=like.device, dtype=like.dtype)) if gated else None
        self.block: nn.Module = block
        self.scale: float = scale
        self.copied: bool = copied
        self.gate: nn.Parameter | None = gate

    def reset_parameters(self) -> None:
        """Set the gate to zero, for example after ``to_empty``."""
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * run_on_copy(self.block, x, self.copied)
        for layer in self.block.modules() if torch.is_grad_enabled() else ():
            refuse_normalized_zeros(self.block, layer)
        if self.gate is None:
            return to_memory_format_of(x, y.to(x.dtype))
        return x + (self.gate.view(-1, *(1,) * (x.dim() - 2)) * (y - x)).to(x.dtype)


def run_on_copy(block: nn.Module, x: Tensor, copied: bool) -> Tensor:
    """Run a block on a feature map, or on a contiguous copy of it."""
    return block(x.clone(memory_format=torch.contiguous_format) if copied else x)


def wrap_exactly(block: nn.Module, channels: int, like: Any, options: Mapping[str, Any]) -> nn.Module:
    """Return a block inside an :class:`ExactBlock` if it has options, else the block."""
    return ExactBlock(block, channels, like, **options).train(block.training) if options else block


def init_identity_(
    block: nn.Module, site: str, shape: tuple[int, ...], like: Any, method: str, shared: bool
) -> tuple[str, dict[str, Any]]:
    """Run a block on random feature maps, and make it an identity at initialization unless it stays unchanged.

    Args:
        block: the block.
        site: the module at which the block will run.
        shape: shape of the feature map.
        like: tensor with the device and dtype of the block.
        method: :data:`ZEROS`, :data:`WRAPPED`, :data:`GATE` or :data:`UNCHANGED`.
        shared: do not set layers to zero, because the block shares parameters with the network.

    Returns:
        How the block was made an identity, and the options of the required :class:`ExactBlock`; empty if none.

    Raises:
        SiteError: the output contains NaN or infinity.
        ValueError: the block does not run on the feature map, or returns no tensor.
    """
    with kept_tensors(block, ()), quiet_eval(block), fixed_seed(block):
        # The values span several orders of magnitude, because halving is not always exact in half precision.
        x = torch.randn(2, *shape[1:]) * torch.exp2(-12 * torch.rand(2, *shape[1:]))
        x = torch.cat([x, -x])  # A layer in front of a ReLU may return zeros for one of the signs.
        x = x.movedim(1, -1).contiguous().movedim(-1, 1).to(device=like.device, dtype=like.dtype)
        try:
            run = IdentityInitRun(block, x)
        except Exception as error:
            raise feature_map_error(block, site, shape[1:], error) from error
        if not isinstance(run.y, Tensor):
            what = f"block must return a feature map at {site!r}"
            raise ValueError(f"{what}, got {type(run.y).__name__} from {type(block).__name__}")
        if not run.y.isfinite().all():
            what = f"{type(block).__name__} returns NaN or infinity for the {'×'.join(map(str, shape[2:]))} feature map"
            raise SiteError(f"{what} at {site!r}. Choose a site with a larger feature map")
        wrapper_options: dict[str, Any] = {"copied": True} if run.copied else {}
        wrapper_options |= {"scale": 1.0} if method == WRAPPED or run.y.dtype != x.dtype else {}
        if method == UNCHANGED or run.y.shape != x.shape or (method != GATE and run.ratio == 1):
            return "", wrapper_options
        if method != GATE and not shared and (layers := run.zero_last_layers_()):
            identity_init, scale = f"{' and '.join(layers)} set to zero", 1 / (run.ratio or 1.0)
            if scale > 1:
                wrapper_options["scale"], identity_init = scale, f"{identity_init}, output multiplied by {scale:g}"
            return identity_init, wrapper_options
    return "gate set to zero", wrapper_options | {"gated": True}


class IdentityInitRun:
    """Run of a block on a feature map, with the output."""

    def __init__(self, block: nn.Module, x: Tensor) -> None:
        """Run the block on a channels-last feature map, or on a contiguous copy if the block does not support it."""
        self.block, self.x, self.copied = block, x, False
        #: values of the parameters, which a block may change in its first run; of lazy parameters, after it
        self.values: dict[nn.Parameter, Tensor] = {p: p.clone() for p in block.parameters() if not is_lazy(p)}
        #: modules with parameters, in the order in which they are called
        self.calls: list[nn.Module] = []
        given = x.clone()
        with ExitStack() as stack:
            for module in filter(direct_parameters, block.modules()):
                stack.callback(module.register_forward_hook(lambda module, *_: self.calls.append(module)).remove)
            try:
                self.y: Tensor = block(given)
                self.copied = not torch.equal(given, x)
            except RuntimeError:
                self.copied = True
                self.y = self.run()
        self.values = {p: p.clone() for p in block.parameters()} | self.values

    def run(self) -> Tensor:
        return run_on_copy(self.block, self.x, self.copied)

    @property
    def ratio(self) -> float | None:
        """Ratio of output to input if it is exactly one of :data:`RATIOS`, else None."""
        return next((ratio for ratio in RATIOS if torch.equal(self.y / ratio, self.x)), None)

    def zero_last_layers_(self) -> list[str]:
        """Set the last layers to zero until the output is a ratio of the input, and return the names of the layers.

        If this is impossible, or if a zero layer receives no gradient because, for example, queries and keys are both
        zero, the block is unchanged and the list is empty.
        """
        zeros: list[nn.Module] = []
        for module in dict.fromkeys(reversed(self.calls)):
            before = self.y
            for parameter in direct_parameters(module):
                parameter.zero_()
            self.y = self.run()
            if torch.equal(before.nan_to_num(), self.y.nan_to_num()):
                for parameter in direct_parameters(module):
                    parameter.copy_(self.values[parameter])
                continue
            zeros.append(module)
            if self.ratio:
                break
        if not (zeros and self.ratio and self.has_gradient_in_each_row(zeros)):
            zeros = []
        set_to_zero = {parameter for module in zeros for parameter in direct_parameters(module)}
        for parameter, value in self.values.items():
            if parameter not in set_to_zero:
                parameter.copy_(value)
        names = {module: name for name, module in self.block.named_modules()}
        return [names[module] or "parameters of the block" for module in reversed(zeros)]

    def has_gradient_in_each_row(self, zeros: Iterable[nn.Module]) -> bool:
        """Return True if each row of the zero layers has a gradient, in its weight or bias."""
        with torch.enable_grad():
            y = self.run()
            loss = (torch.randn(y.shape).to(y) * y).sum()
            for module in zeros:
                grads = torch.autograd.grad(loss, direct_parameters(module), retain_graph=True, allow_unused=True)
                learning: dict[int, Tensor] = {}  # Weight and bias have the same number of rows, which is the key.
                for grad in (grad for grad in grads if grad is not None):
                    rows = torch.atleast_1d(grad.reshape(*grad.shape[:1], -1).any(-1))
                    learning[len(rows)] = rows | learning.get(len(rows), False)
                if not learning or not all(rows.all() for rows in learning.values()):
                    return False
        return True


def direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of a module, without parameters of its children."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad and p.is_floating_point()]
