"""Blocks that begin as the identity, whatever they are: found by trying each on a random map.

A block that does not begin so is made to. Where its last layers can be zeros, as in front of the sigmoids that weigh a
map or at the end of a residual branch, they are; what comes out is the map or, behind sigmoids of zero, a half or a
quarter of it, which is scaled back. Such a block learns from the first step. Any other gets a gate of zeros, one a
channel, which learns first: ``x + gate · (block(x) − x)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks.gated_residual import refuse_normalized_zeros
from vision_attn.checks import check_flags, check_number
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.backbone import quiet_eval, same_random_numbers
from vision_attn.networks.insertion.costs import wrong_map

#: What sigmoids of zero, one to three in a row, leave of a map; and the identity.
SHARES = (1.0, 0.5, 0.25, 0.125)


class ExactBlock(nn.Module):
    """A block in what lets it begin as the identity: ``x + gate · (scale · block(x) − x)``, or without the gate.

    Args:
        block: the block itself.
        channels: channels of the map.
        gated: whether there is a gate, zero at first.
        scale: what the output of the block is multiplied by.
        copied: give the block a copy of the map, contiguous, as it changes its map in place or calls ``view`` on it.
        device: of the gate.
        dtype: of the gate.

    >>> x = torch.randn(2, 8, 7, 7)
    >>> torch.equal(ExactBlock(nn.Conv2d(8, 8, 1), 8, gated=True)(x), x)
    True
    """

    def __init__(
        self,
        block: nn.Module,
        channels: int,
        *,
        gated: bool = False,
        scale: float = 1.0,
        copied: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_flags(gated=gated, copied=copied)
        check_number("scale", scale, above=0)
        self.block: nn.Module = block
        self.scale: float = scale
        self.copied: bool = copied
        self.gate: nn.Parameter | None = (
            nn.Parameter(torch.zeros(channels, device=device, dtype=dtype)) if gated else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.block(x.clone(memory_format=torch.contiguous_format) if self.copied else x)
        for layer in self.block.modules():
            refuse_normalized_zeros(self.block, layer)
        if self.gate is None:
            return y.to(x.dtype)
        return x + (self.gate.view(-1, *(1,) * (x.dim() - 2)) * (y - x)).to(x.dtype)


def bare(block: nn.Module) -> nn.Module:
    """The block itself, inside what lets it begin as the identity."""
    return block.block if isinstance(block, ExactBlock) else block


def begin(block: nn.Module, site: str, shape: tuple[int, ...], like: Any, exact: bool) -> dict[str, Any]:
    """Try a block on a random map, and let it begin as the identity if that is asked for.

    Returns:
        What its record has of it: ``around``, the options of the :class:`ExactBlock` that it needs, and ``begins``.

    Raises:
        SiteError: the block makes NaN or infinity of the map.
        ValueError: it does not take the map.
    """
    with quiet_eval(block), same_random_numbers(block):
        # Over some orders of magnitude: what is halved in half precision may not come back.
        x = torch.randn(2, *shape[1:]) * torch.exp2(-12 * torch.rand(2, *shape[1:]))
        x = x.movedim(1, -1).contiguous().movedim(-1, 1).to(device=like.device, dtype=like.dtype)
        try:
            trial = Trial(block, x)
        except Exception as error:
            raise wrong_map(block, site, shape[1:], error) from error
        if not trial.y.isfinite().all():
            what = f"{type(block).__name__} gives NaN or infinity on a map of {'×'.join(map(str, shape[2:]))}"
            raise SiteError(f"{site!r}: {what}: choose a larger one")
        if not exact or trial.share == 1 or trial.y.shape != x.shape:
            return {"around": trial.around}
        if zeros := trial.zero_last_layers_():
            scale = 1 / (trial.share or 1.0)
            begins = f"{' and '.join(zeros)} zero at first"
            if scale > 1:
                trial.around["scale"], begins = scale, f"{begins}, its output times {scale:g}"
            return {"around": trial.around, "begins": begins}
    return {"around": trial.around | {"gated": True}, "begins": "a gate of zero, which learns first"}


class Trial:
    """A block, and a map that it is run on."""

    def __init__(self, block: nn.Module, x: Tensor) -> None:
        self.block: nn.Module = block
        self.x: Tensor = x
        self.around: dict[str, Any] = {}
        #: the modules with parameters, as they were run
        self.order: list[nn.Module] = []
        holding = [module for module in block.modules() if own_parameters(module)]
        hooks = [module.register_forward_hook(lambda module, *_: self.order.append(module)) for module in holding]
        self.y: Tensor = self.try_on_views()
        for hook in hooks:
            hook.remove()

    def try_on_views(self) -> Tensor:
        """The first run, on a map whose channels are last in memory: a block that cannot have that gets a copy."""
        kept = self.x.clone()
        try:
            y = self.run()
        except RuntimeError:
            self.around["copied"] = True
            return self.run()
        if not torch.equal(kept, self.x):
            self.around["copied"], self.x = True, kept
        return y

    def run(self) -> Tensor:
        copied = self.around.get("copied", False)
        y: Tensor = self.block(self.x.clone(memory_format=torch.contiguous_format) if copied else self.x)
        return y

    @property
    def share(self) -> float | None:
        """What part of the map the output is, bit for bit."""
        if self.y.shape != self.x.shape:
            return None
        return next((share for share in SHARES if torch.equal(self.y / share, self.x)), None)

    def zero_last_layers_(self) -> list[str]:
        """Make the last layers zeros until the output is a part of the map, and name them; none if that cannot be.

        None, too, where the zeros would stay, as those of queries and keys do that are both zero.
        """
        kept: dict[nn.Module, list[Tensor]] = {}
        for module in dict.fromkeys(reversed(self.order)):
            before, values = self.y, [p.clone() for p in own_parameters(module)]
            self.fill_(module, [torch.zeros_like(p) for p in values])
            if torch.equal(before.nan_to_num(), self.y.nan_to_num()):
                self.fill_(module, values)
                continue
            kept[module] = values
            if self.share:
                break
        if kept and self.share and self.learns(kept):
            names = {module: name for name, module in self.block.named_modules()}
            return [names[module] or "its own parameters" for module in reversed(kept)]
        for module, values in kept.items():
            self.fill_(module, values)
        return []

    def fill_(self, module: nn.Module, values: Sequence[Tensor]) -> None:
        """Give the parameters of a module itself other values, and run the block."""
        for parameter, value in zip(own_parameters(module), values, strict=True):
            parameter.copy_(value)
        self.y = self.run()

    def learns(self, modules: Iterable[nn.Module]) -> bool:
        """Whether each row of what is zero has a gradient, in its weight or its bias."""
        with torch.enable_grad():
            y = self.run()
            loss = (torch.randn(y.shape).to(y) * y).sum()
            for module in modules:
                slopes = torch.autograd.grad(loss, own_parameters(module), retain_graph=True, allow_unused=True)
                learning: dict[int, Tensor] = {}  # by the number of rows, which weight and bias have in common
                for slope in (one for one in slopes if one is not None):
                    rows = torch.atleast_1d(slope.reshape(*slope.shape[:1], -1).any(-1))
                    learning[len(rows)] = rows | learning.get(len(rows), False)
                if not learning or not all(rows.all() for rows in learning.values()):
                    return False
        return True


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of a module itself, without those of its children."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad and p.is_floating_point()]
