"""Any block as an identity at initialization: how is found by running the block on random maps.

The last layers of a block are set to zero if its output is the map then, as at the end of a residual branch, or a half
or a quarter of it, as in front of the sigmoids that weigh a map, which is scaled back. Such a block learns from the
first step. Any other block gets a gate of zeros, one a channel, which learns first: ``x + gate · (block(x) − x)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks.gated_residual import refuse_normalized_zeros
from vision_attn.checks import check_flags, check_number
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.backbone import quiet_eval, same_random_numbers
from vision_attn.networks.insertion.costs import wrong_map

#: Output of one to three sigmoids of zero in a row, as a ratio to the map; and of the identity.
RATIOS = (1.0, 0.5, 0.25, 0.125)


class ExactBlock(nn.Module):
    """A block as an identity at initialization: ``x + gate · (scale · block(x) − x)``, or ``scale · block(x)``.

    Args:
        block: the block.
        channels: channels of the map.
        like: tensor whose device and dtype the gate has.
        gated: add the gate, which is zero at initialization.
        scale: factor of the output of the block.
        copied: give the block a contiguous copy of the map, because it changes its map in place or calls ``view``.

    >>> x = torch.randn(2, 8, 7, 7)
    >>> torch.equal(ExactBlock(nn.Conv2d(8, 8, 1), 8, x, gated=True)(x), x)
    True
    """

    def __init__(
        self, block: nn.Module, channels: int, like: Any, gated: bool = False, scale: float = 1.0, copied: bool = False
    ) -> None:
        super().__init__()
        check_flags(gated=gated, copied=copied)
        check_number("scale", scale, above=0)
        gate = nn.Parameter(torch.zeros(channels, device=like.device, dtype=like.dtype)) if gated else None
        self.block: nn.Module = block
        self.scale: float = scale
        self.copied: bool = copied
        self.gate: nn.Parameter | None = gate

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * run_on_copy(self.block, x, self.copied)
        for layer in self.block.modules():
            refuse_normalized_zeros(self.block, layer)
        if self.gate is None:
            return y.to(x.dtype)
        return x + (self.gate.view(-1, *(1,) * (x.dim() - 2)) * (y - x)).to(x.dtype)


def run_on_copy(block: nn.Module, x: Tensor, copied: bool) -> Tensor:
    """Run a block on a map, or on a contiguous copy of it."""
    return block(x.clone(memory_format=torch.contiguous_format) if copied else x)


def unwrap(block: nn.Module) -> nn.Module:
    """Return the block in an :class:`ExactBlock`, and any other block itself."""
    return block.block if isinstance(block, ExactBlock) else block


def init_identity_(
    block: nn.Module, site: str, shape: tuple[int, ...], like: Any, exact: bool, zeros: bool = True
) -> dict[str, Any]:
    """Run a block on random maps, and make it an identity at initialization if ``exact`` is set.

    Without ``zeros``, every block gets a gate.

    Returns:
        Fields of its record: ``around``, the options of the :class:`ExactBlock` that it needs, and ``begins``.

    Raises:
        SiteError: the output for the map has NaN or infinity.
        ValueError: the block does not run on the map.
    """
    with quiet_eval(block), same_random_numbers(block):
        # Over some orders of magnitude: what is halved in half precision may not come back.
        x = torch.randn(2, *shape[1:]) * torch.exp2(-12 * torch.rand(2, *shape[1:]))
        x = torch.cat([x, -x])  # a layer in front of a ReLU may give zeros for one of them
        x = x.movedim(1, -1).contiguous().movedim(-1, 1).to(device=like.device, dtype=like.dtype)
        try:
            trial = Trial(block, x)
        except Exception as error:
            raise wrong_map(block, site, shape[1:], error) from error
        if not trial.y.isfinite().all():
            what = f"{type(block).__name__} gives NaN or infinity on a map of {'×'.join(map(str, shape[2:]))}"
            raise SiteError(f"{site!r}: {what}: choose a larger one")
        around: dict[str, Any] = {"copied": True} if trial.copied else {}
        if not exact or trial.y.shape != x.shape or (zeros and trial.ratio == 1):
            return {"around": around}
        if zeros and (layers := trial.zero_last_layers_()):
            begins, scale = f"{' and '.join(layers)} zero at first", 1 / (trial.ratio or 1.0)
            if scale > 1:
                around["scale"], begins = scale, f"{begins}, its output times {scale:g}"
            return {"around": around, "begins": begins}
    return {"around": around | {"gated": True}, "begins": "a gate of zero, which learns first"}


class Trial:
    """A block, a map, and the output of the block for it."""

    def __init__(self, block: nn.Module, x: Tensor) -> None:
        """Run the block on a map with channels last in memory; a block that cannot have it gets a copy."""
        self.block, self.x, self.copied = block, x, False
        #: modules with parameters, in the order of their calls
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

    def run(self) -> Tensor:
        return run_on_copy(self.block, self.x, self.copied)

    @property
    def ratio(self) -> float | None:
        """The ratio of the output to the map if it is one of :data:`RATIOS`, bit for bit."""
        return next((ratio for ratio in RATIOS if torch.equal(self.y / ratio, self.x)), None)

    def zero_last_layers_(self) -> list[str]:
        """Set the last layers to zero until the output is a ratio of the map, and return their names.

        The block is unchanged and the list empty if that is impossible, or if zeros get no gradient, such as those of
        queries and keys that are both zero.
        """
        values = {parameter: parameter.clone() for parameter in self.block.parameters()}
        zeros: list[nn.Module] = []
        for module in dict.fromkeys(reversed(self.calls)):
            before = self.y
            for parameter in direct_parameters(module):
                parameter.zero_()
            self.y = self.run()
            if torch.equal(before.nan_to_num(), self.y.nan_to_num()):
                for parameter in direct_parameters(module):
                    parameter.copy_(values[parameter])
                continue
            zeros.append(module)
            if self.ratio:
                break
        if zeros and self.ratio and self.learns(zeros):
            names = {module: name for name, module in self.block.named_modules()}
            return [names[module] or "its own parameters" for module in reversed(zeros)]
        for parameter, value in values.items():
            parameter.copy_(value)
        return []

    def learns(self, zeros: Iterable[nn.Module]) -> bool:
        """Return True if each row of the layers of zeros has a gradient, in its weight or its bias."""
        with torch.enable_grad():
            y = self.run()
            loss = (torch.randn(y.shape).to(y) * y).sum()
            for module in zeros:
                grads = torch.autograd.grad(loss, direct_parameters(module), retain_graph=True, allow_unused=True)
                learning: dict[int, Tensor] = {}  # by the number of rows, which weight and bias have in common
                for grad in (grad for grad in grads if grad is not None):
                    rows = torch.atleast_1d(grad.reshape(*grad.shape[:1], -1).any(-1))
                    learning[len(rows)] = rows | learning.get(len(rows), False)
                if not learning or not all(rows.all() for rows in learning.values()):
                    return False
        return True


def direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of a module, without those of its children."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad and p.is_floating_point()]
