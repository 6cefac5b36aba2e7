"""What a network's weights are, in a few characters a tensor: names, shapes, types and hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Fingerprint", "fingerprint", "hash_of"]

#: name -> (shape, type, beginning of the SHA-256 of its bytes)
Fingerprint = dict[str, tuple[tuple[int, ...], str, str]]

#: Hexadecimal digits that are kept of a hash.
DIGITS = 16


def fingerprint(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """The fingerprint of tensors, whatever device and memory layout they are in.

    >>> fingerprint({"bias": torch.zeros(2)})
    {'bias': ((2,), 'float32', 'af5570f5a1810b7a')}
    """
    return {name: (tuple(value.shape), type_of(value), hash_bytes(value)) for name, value in tensors.items()}


def type_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def hash_bytes(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()[:DIGITS]


def hash_of(value: object) -> str:
    """One hash over fingerprints and the like, whatever the order of their names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]
