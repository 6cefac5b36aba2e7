"""Who is compared at a shape: the same weights and the same map, in the hands of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attend import IMPLS
from vision_attn.benchmark.libraries import OTHERS, OTHERS_RELATIVE
from vision_attn.benchmark.settings import Shape
from vision_attn.blocks import Attention2d, set_impl
from vision_attn.position import RelPosDecomposed

__all__ = ["FLOOR", "OURS", "Contestant", "Step", "contestants", "contestants_relative", "make_map"]

#: The contestant that the others are compared with.
OURS = "ours sdpa"
#: The contestant that does what any attention has to do, and nothing else.
FLOOR = "floor"


@dataclass(frozen=True)
class Step:
    """One call that is timed by itself, forward and, to its inputs and parameters, backward.

    Args:
        call: the function.
        inputs: what it is given, leaves that require a gradient.
        parameters: what else a gradient is wanted of.
        gradient: of the output.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    gradient: Tensor

    @torch.no_grad()
    def forward(self) -> Tensor:
        """What the call gives, without gradients.

        Returns:
            The output, of any shape.
        """
        return self.call(*self.inputs)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """The gradients of the call by its inputs and by its parameters.

        Returns:
            One for each, of its shape.
        """
        return torch.autograd.grad(self.call(*self.inputs), (*self.inputs, *self.parameters), self.gradient)


@dataclass(frozen=True)
class Contestant:
    """Somebody's attention.

    Its time is the sum of its steps', and its output that of the last one.

    Args:
        name: as the report calls it.
        steps: one, but for the floor.
        backward: whether it has a backward pass.
        as_map: makes the map of what the last step gives.
    """

    name: str
    steps: tuple[Step, ...]
    backward: bool = True
    as_map: Callable[[Tensor], Tensor] = lambda y: y

    def output(self) -> Tensor:
        """The map that comes out, ``(b, c, h, w)``."""
        return self.as_map(self.steps[-1].forward())


def make_map(shape: Shape, *, device: torch.device, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Draw random maps that require a gradient.

    Args:
        shape: ``(b, c, h, w)``.
        device: where they are.
        dtype: their type.
        channels_last: whether they are in the channels-last memory format.

    Returns:
        The maps, ``(b, c, h, w)``.
    """
    x = torch.randn(shape).to(device, dtype)
    return x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()


def contestants(x: Tensor, heads: int) -> list[Contestant]:
    """The floor, ours by every implementation, and the others: attention between all positions, without positions.

    Args:
        x: the maps, ``(b, c, h, w)``.
        heads: of every contestant.
    """
    ours = Attention2d(x.shape[1], heads)
    found = [floor(ours, x)]
    for impl in IMPLS_IN_ORDER:
        # On the CPU flex has no backward pass.
        backward = impl != "flex" or x.is_cuda
        found.append(contestant(f"ours {impl}", with_impl(ours, impl), x, backward=backward))
    return found + [contestant(name, build(ours), x) for name, build in OTHERS.items()]


def contestants_relative(x: Tensor, heads: int) -> list[Contestant]:
    """The contestants with BoTNet's relative positions: ours, which then projects no output either, and the others.

    Args:
        x: the maps, ``(b, c, h, w)``.
        heads: of every contestant.
    """
    ours = Attention2d(x.shape[1], heads, position=RelPosDecomposed(feat_size=(x.shape[2], x.shape[3])), qkv_bias=False)
    ours.proj = nn.Identity()  # type: ignore[assignment]
    found = [contestant(OURS, with_impl(ours, "sdpa"), x)]
    return found + [contestant(name, build(ours), x) for name, build in OTHERS_RELATIVE.items()]


#: The fastest first: it is what the others are compared with.
IMPLS_IN_ORDER = ("sdpa", *(impl for impl in IMPLS if impl != "sdpa"))


def with_impl(block: Attention2d, impl: str) -> Attention2d:
    block = copy.deepcopy(block)
    set_impl(block, impl)
    return block


def contestant(name: str, module: nn.Module, x: Tensor, *, backward: bool = True) -> Contestant:
    module = module.to(x.device, x.dtype).eval()
    return Contestant(name, (Step(module, (x,), tuple(module.parameters()), torch.randn_like(x)),), backward)


def floor(ours: Attention2d, x: Tensor) -> Contestant:
    """What any attention has to do: project, attend, project, each on contiguous inputs, nothing between them."""
    n, d = ours.num_heads, ours.key_dim
    weights = {
        key: weight.flatten(1 if weight.dim() > 1 else 0).to(x.device, x.dtype, copy=True).requires_grad_()
        for key, weight in ours.state_dict().items()
    }
    tokens = leaf(x.detach().flatten(2).transpose(1, 2))
    project_in = step(F.linear, (tokens, weights["qkv.weight"], weights["qkv.bias"]))
    qkv = project_in.forward().unflatten(2, (3, n, d)).permute(2, 0, 3, 1, 4)
    attend = step(F.scaled_dot_product_attention, tuple(leaf(part) for part in qkv))
    joined = leaf(attend.forward().transpose(1, 2).flatten(2))
    project_out = step(F.linear, (joined, weights["proj.weight"], weights["proj.bias"]))
    return Contestant(
        FLOOR, (project_in, attend, project_out), as_map=lambda y: y.transpose(1, 2).unflatten(2, x.shape[2:])
    )


def step(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Step:
    with torch.no_grad():
        return Step(call, inputs, (), torch.randn_like(call(*inputs)))


def leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()
