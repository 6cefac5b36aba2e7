"""Weights of other libraries' attention in files, brought into the order of ours: what ``vision-attn convert`` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vision_attn.checks import check_counts, check_flags, check_type
from vision_attn.errors import ConversionError
from vision_attn.networks.checkpoints.specification import BLOCKS
from vision_attn.networks.checkpoints.weights import find_entry
from vision_attn.networks.safe import copy_to_write, read_file, write_atomically
from vision_attn.networks.convert.diffusers_layers import diffusers_rows
from vision_attn.networks.convert.keras_layers import keras_weights
from vision_attn.networks.convert.repositories import guided_rows, latent_rows
from vision_attn.networks.convert.timm_tokens import fused_rows
from vision_attn.networks.convert.weights import (
    Rows,
    Weights,
    check_rank,
    heads_first,
    input_projections,
    parameters_of,
    rows_of,
)
from vision_attn.text import Report, Table, escaped, shorten

__all__ = ["LAYOUTS", "ConvertedFile", "convert_file", "read_keras_weights"]


class Stored:
    """Tensors of a file as the layer that they are of: its attributes are names that follow the prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, num_heads: int, used: set[str]) -> None:
        self.stored, self.prefix, self.num_heads, self.used = tensors, prefix, num_heads, used

    def __getattr__(self, name: str) -> Any:
        key = f"{self.prefix}{name}"
        if key in self.stored:
            self.used.add(key)
            return self.stored[key]
        if any(other.startswith(f"{key}.") for other in self.stored):
            return Stored(self.stored, f"{key}.", self.num_heads, self.used)
        if name == "bias":
            return None
        raise AttributeError(f"it has no {key}")


def torch_rows(layer: Any) -> Weights:
    return {"qkv": Rows(layer.in_proj_weight, getattr(layer, "in_proj_bias", None)), "proj": rows_of(layer.out_proj)}


def by_heads(rows_of_layer: Callable[[Any], Weights]) -> Callable[[Any], Weights]:
    """For rows ordered (heads, qkv, width)."""

    def reordered(layer: Any) -> Weights:
        rows = rows_of_layer(layer)
        return {**rows, "qkv": heads_first(rows["qkv"], layer.num_heads)}

    return reordered


def llama_rows(layer: Any) -> Weights:
    q, k, v = (rows_of(getattr(layer, name)) for name in ("q_proj", "k_proj", "v_proj"))
    return {**input_projections(q, k, v), "proj": rows_of(layer.o_proj)}


def keras_rows(layer: Any) -> Weights:
    def kernels(name: str) -> tuple[Tensor, Tensor | None]:
        variables = getattr(layer, "_gate_dense" if name == "gate" else f"{name}_dense").vars
        return getattr(variables, "0"), getattr(variables, "1", None)

    return keras_weights(kernels, hasattr(layer, "_gate_dense"))


#: How layers are saved.
LAYOUTS: dict[str, Callable[[Any], Weights]] = {
    "torch-mha": torch_rows,
    "timm": fused_rows,
    "timm-maxxvit": by_heads(fused_rows),
    "diffusers": diffusers_rows,
    "latent-diffusion": latent_rows,
    "guided-diffusion": by_heads(guided_rows),
    "guided-diffusion-new": guided_rows,
    "llama": llama_rows,
    "keras-mha": keras_rows,
}
#: What is beside attention in a layer, or is ours already.
BESIDE = ("norm.", "group_norm.", "q_norm.", "k_norm.")


@dataclass(frozen=True, repr=False)
class ConvertedFile(Report):
    """What became of the layers in a file; prints as a table."""

    #: keys of each layer, and those that they became, with their shapes
    mapping: tuple[tuple[tuple[str, ...], Mapping[str, tuple[int, ...]]], ...]
    #: how many tensors are as they were
    kept: int
    #: the file, or why there is none
    written: str

    def parts(self) -> list[str | Table]:
        rows: list[tuple[str, str]] = []
        for old, new in self.mapping:
            shown = [f"{escaped(key)} {'×'.join(map(str, shape))}" for key, shape in new.items()]
            rows += zip_longest(map(escaped, old), shown, fillvalue="")
        return [Table([("from", "to"), *rows], left=(0, 1)), f"{self.kept} others as they were", self.written]


def convert_file(
    source: str | Path,
    output: str | Path,
    layout: str,
    *,
    prefix: str = "",
    num_heads: int | None = None,
    rank: int = 2,
    dry_run: bool = False,
) -> ConvertedFile:
    """Write the weights of a file with those of its attention in the order and under the names of our blocks.

    The new file says how many heads they have. No layer is run here: the shapes are checked, and the order of the rows
    is what ``layout`` says that it is.

    Args:
        source: weights or a checkpoint, ``.safetensors``, of torch, or Keras's ``.weights.h5``.
        output: file to write, ``.safetensors``.
        layout: how the layers are saved, one of ``LAYOUTS``.
        prefix: path of the layers, with globs, such as ``blocks.*.attn``; empty where the file is one layer.
        num_heads: heads of each; may be left out for Keras, whose kernels tell it.
        rank: axes of the maps that the blocks are for: 1, 2 or 3.
        dry_run: write nothing.

    Returns:
        A report that prints as a table.

    Raises:
        ValueError: an argument is none of these, or no layer is found there.
        ConversionError: a layer is not of this layout, or has parts that a block has not.
        OSError, CheckpointError: the file cannot be read or written.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save(torch.nn.MultiheadAttention(8, 2).state_dict(), folder / "mha.pth")
    >>> convert_file(folder / "mha.pth", folder / "block.safetensors", "torch-mha", num_heads=2, dry_run=True)
    from             to
    in_proj_bias     qkv.weight 24×8×1×1
    in_proj_weight   qkv.bias 24
    out_proj.bias    proj.weight 8×8×1×1
    out_proj.weight  proj.bias 8
    0 others as they were
    nothing was written
    """
    output, source = Path(output), Path(source)
    check_rank(rank)
    check_counts(num_heads=num_heads)
    check_flags(dry_run=dry_run)
    check_type("prefix", prefix, str, "a text")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if num_heads is None and layout != "keras-mha":
        raise ValueError(f"num_heads must be given for {layout}: no shape in the file tells it")
    if output.suffix != ".safetensors":
        raise ValueError(f"output must end in .safetensors; got {output.name!r}")
    tensors = read_keras_weights(source) if source.suffix == ".h5" else tensors_in(source)
    paths = {path for key in tensors for path in accumulate(key.split("."), lambda above, name: f"{above}.{name}")}
    chosen = sorted(path for path in paths - set(tensors) if fnmatchcase(path, prefix)) if prefix else [""]
    if not chosen:
        raise ValueError(f"prefix {prefix!r} matches no layer; the file has {shorten(sorted(paths - set(tensors)))}")
    new, mapping, told = dict(tensors), [], {}
    for path in chosen:
        used: set[str] = set()
        start = f"{path}." if path else ""
        try:
            layer = Stored(tensors, start, num_heads or 0, used)
            rows = LAYOUTS[layout](layer)
            heads: Any = getattr(layer.query_dense.vars, "0").shape[1] if layout == "keras-mha" else num_heads
            if num_heads not in (None, heads):
                raise ValueError(f"num_heads is {num_heads}, and its kernels have {heads} heads")
            made = parameters_of(rows, rank=rank)
            if len((rows.get("qkv") or rows["q"]).weight) % heads or rows["proj"].weight.shape[1] % heads:
                raise ValueError(f"its rows are no multiple of {heads} heads")
        except (AttributeError, RuntimeError, ValueError) as error:
            raise ConversionError(f"{path or 'the file'} is no layer of {layout}: {error}") from error
        rest = [key for key in tensors if key.startswith(start) and key not in used]
        if rest := [key for key in rest if not key.removeprefix(start).startswith(BESIDE)]:
            raise ConversionError(f"{path or 'the file'} has {shorten(rest)}, which a block made of {layout} has not")
        for key in used:
            del new[key]
        new.update({f"{start}{name}": tensor for name, tensor in made.items()})
        mapping.append((tuple(sorted(used)), {f"{start}{name}": tuple(x.shape) for name, x in made.items()}))
        told[path] = {"num_heads": str(heads), "pattern": "'full'"}
    if not dry_run:
        about = {BLOCKS: json.dumps(told)}
        write_atomically(output, save({key: copy_to_write(tensor) for key, tensor in new.items()}, about))
    kept = sum(tensor is tensors.get(key) for key, tensor in new.items())
    return ConvertedFile(tuple(mapping), kept, "nothing was written" if dry_run else f"written to {output}")


def tensors_in(path: Path) -> dict[str, Tensor]:
    file = read_file(path)
    entry = find_entry(file, ema=False)
    held: Any = file.content[entry] if entry else file.content
    return {key: value for key, value in held.items() if isinstance(value, Tensor)}


def read_keras_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a ``.weights.h5`` file of Keras, by their paths in it, with dots: ``layers.dense.vars.0``.

    Args:
        path: the file.

    Raises:
        ValueError: h5py is not installed.
        OSError: there is no such file, or it is damaged.

    >>> list(read_keras_weights("net.weights.h5"))  # doctest: +SKIP
    ['layers.dense.vars.0', 'layers.dense.vars.1']
    """
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(f"{path} needs h5py to be read: pip install h5py") from error
    found: dict[str, Tensor] = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
            found[name.replace("/", ".")] = torch.from_numpy(item[()])

    with h5py.File(path) as file:
        file.visititems(take)
    return found
