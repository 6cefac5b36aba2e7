"""Blocks that are made without memory and given their parameters, so that nothing is initialised first."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention, Attention1d, Attention2d, Attention3d
from vision_attn.convert.rows import Rows

__all__ = ["attention", "check_rank", "convolution", "filled"]

Module = TypeVar("Module", bound=nn.Module)

#: By the number of axes of a map.
BLOCKS: dict[int, type[Attention]] = {1: Attention1d, 2: Attention2d, 3: Attention3d}


def check_rank(rank: int) -> None:
    """Refuse a number of axes that no map has."""
    if isinstance(rank, bool) or not isinstance(rank, Integral) or rank not in BLOCKS:
        raise ValueError(f"rank must be the axes of a map, 1, 2 or 3, for Attention1d, 2d or 3d; got {rank!r}")


def attention(
    rank: int,
    projections: Mapping[str, Rows],
    tables: Mapping[str, Tensor] | None = None,
    *,
    training: bool,
    **options: Any,
) -> Attention:
    """The block for maps with this number of axes, with copies of these projections and tables."""
    first, out = projections["q" if "q" in projections else "qkv"], projections["proj"]
    block = BLOCKS[rank](
        first.weight.shape[1],
        out_channels=len(out.weight),
        context_channels=projections["kv"].weight.shape[1] if "kv" in projections else None,
        qkv_bias=first.bias is not None,
        proj_bias=out.bias is not None,
        device="meta",
        **options,
    )
    tensors = dict(tables or {})
    for name, rows in projections.items():
        tensors.update(convolution(name, rows, rank))
    return filled(block, tensors, training=training)


def convolution(name: str, rows: Rows, rank: int = 2) -> dict[str, Tensor]:
    """The parameters of a 1×1 convolution by name, ``(rows, c, 1, 1)`` and ``(rows,)``."""
    tensors = {f"{name}.weight": rows.weight[(..., *(None,) * rank)]}
    return tensors if rows.bias is None else {**tensors, f"{name}.bias": rows.bias}


def filled(block: Module, tensors: Mapping[str, Tensor], *, training: bool) -> Module:
    """A block made on the meta device, with copies of these tensors for parameters, trained or not as they are."""
    copies = {
        name: nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format)) for name, x in tensors.items()
    }
    block.load_state_dict(copies, assign=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return block.train(training)
