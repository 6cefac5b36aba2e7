"""What blocks and networks cost: numbers that are learned, and multiply-adds, counted while they run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from vision_attn.attention.blocks import attention_modules, use_impl
from vision_attn.checks import product
from vision_attn.networks.insertion.backbone import quiet_eval
from vision_attn.networks.insertion.makers import reason


class Share(NamedTuple):
    """How much of something a network or a part of it has, or would have."""

    #: numbers that are learned
    parameters: int
    #: in one forward of one image
    multiply_adds: int


NOTHING = Share(0, 0)


def together(added: Share, whole: Share) -> str:
    """What is added to a network, as shares of what it has.

    >>> together(Share(269, 500), Share(1000, 0))
    'together +26.9 % parameters, – multiply-adds'
    """
    parameters, multiply_adds = map(percent, added, whole)
    return f"together {parameters} parameters, {multiply_adds} multiply-adds"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:+,.1f} %" if whole else "–"


class Counting(TorchDispatchMode):
    """Counts the operations that are run, two for a multiply-add, by torch's formulas for them.

    Torch's own counter follows modules too, which breaks networks that take gradients of their own; and it leaves out
    the fused kernels of the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # which loads Triton

        self.operations: int = 0
        aten = torch.ops.aten
        self.formulas: dict[Any, Any] = {
            **flop_registry,
            aten._scaled_dot_product_flash_attention_for_cpu: fused_operations,
            aten._native_multi_head_attention: whole_operations,
            aten._transformer_encoder_layer_fwd: whole_operations,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formula = kwargs or {}, self.formulas.get(func._overloadpacket)
        if formula is None and func.namespace == "aten":
            with self:  # what it is made of is counted
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        self.operations += formula(*args, **kwargs, out_val=output) if formula else 0
        return output


def fused_operations(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **further: Any) -> int:
    return 2 * product(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def whole_operations(x: Tensor, *rest: Any, **further: Any) -> int:
    """Of torch's attention and encoder layers in one call: each matrix on each token of ``(b, t, c)``, and between."""
    weights = sum(one.numel() for one in rest if isinstance(one, nn.Parameter) and one.dim() == 2)
    return 2 * x.shape[0] * x.shape[1] * (weights + 2 * x.shape[1] * x.shape[2])


def cost(block: nn.Module, site: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, int]:
    """The parameters and multiply-adds of a block, once it is seen to make maps of the expected shape."""
    try:
        output, multiply_adds = run_on_meta(block, shape)
    except Exception as error:
        raise wrong_map(block, site, shape, error) from error
    if tuple(output.shape[1:]) != expected:
        made = f"{type(block).__name__} makes {tuple(output.shape)} of {(1, *shape)}"
        raise ValueError(f"block must return a map {(1, *expected)} at {site!r}; {made}")
    return sum(p.numel() for p in block.parameters()), multiply_adds


def wrong_map(block: nn.Module, site: str, shape: tuple[int, ...], error: Exception) -> ValueError:
    """The error where a block cannot take the map of a site."""
    what = f"block must take the map {(1, *shape)} at {site!r}; {type(block).__name__} does not"
    return ValueError(f"{what} ({reason(error)})")


def pairs_compared(block: nn.Module, size: tuple[int, ...]) -> int:
    """The pairs of tokens on a map of this size that a block's full attention compares, where it has one."""
    full = (module for module in attention_modules(block).values() if module.resolved_pattern.is_global)
    return max((product(size) * product(-(-side // one.kv_stride) for side in size) for one in full), default=0)


def count_multiply_adds(module: nn.Module, shape: tuple[int, ...]) -> int:
    """The multiply-adds of one forward of one image or map, found without computing anything.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> count_multiply_adds(Attention2d(64, 4, device="meta"), (1, 64, 14, 14))  # 4·64²·196 + 2·64·196²
    8128512
    """
    return run_on_meta(module, shape[1:])[1]


def run_on_meta(module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, int]:
    """What a module makes of a map of this shape, which has no values, and its multiply-adds."""
    own = {name: x.to("meta") for name, x in (*module.named_parameters(), *module.named_buffers())}
    like = next(module.parameters(), torch.empty(0))
    # Counted on the form whose every product is a matrix product that the counter knows.
    with use_impl(module, "bmm"), quiet_eval(module):
        try:
            with Counting() as counter:
                output = functional_call(module, own, (torch.empty(1, *shape, device="meta", dtype=like.dtype),))
        except Exception:  # what makes tensors of its own, or reads values, runs with values alone
            with Counting() as counter:
                output = module(torch.zeros(1, *shape, device=like.device, dtype=like.dtype))
    return output, counter.operations // 2
