"""Read the pickle in a checkpoint: only tensors and plain values, up to a maximum number.

``pickle`` calls any function that a file names, with any arguments. torch's ``weights_only`` does this for a list of
allowed names. This is not sufficient: a file of 400 bytes can call ``bytearray(2**31)``, and the constructors of NumPy,
which old files with NumPy scores need, follow pointers in the file. This reader replaces each supported name by its
own function, rejects files with other names, and counts values.
"""

from __future__ import annotations

import argparse
import math
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.storage import _storage_type_to_dtype_map

#: Largest number of instructions and values, of about 100 bytes each. It limits the memory for a small file.
BUDGET = 1_000_000

#: Tensor dtypes by name in files.
DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and (dtype.is_floating_point or dtype.is_complex or str(dtype)[6:].strip("uint") in ("bool", "8", "16", "32", "64"))
}

#: Storage dtypes by name in files.
STORAGES: dict[str, torch.dtype] = {
    f"torch.{name}": dtype for name, dtype in _storage_type_to_dtype_map().items() if dtype in DTYPES.values()
} | {"torch.storage.UntypedStorage": torch.uint8}

#: NumPy scalar types of fixed size.
NUMPY_TYPES = {"b1", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}

#: Instructions that push their argument, and instructions that push a constant.
ARGUMENTS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "LONG1", "SHORT_BINSTRING"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class NotAllowedError(ValueError):
    """Raised if a file contains an object that checkpoints do not need; the message is a noun phrase."""


class Name(str):
    """Name of a function or class in a file. It is only compared, not imported."""


@dataclass(frozen=True)
class Storage:
    """Storage of one or more tensors."""

    #: the bytes, with dtype ``uint8``
    content: Tensor
    #: dtype of the elements
    dtype: torch.dtype


@dataclass
class NumpyType:
    """Replacement for ``numpy.dtype``."""

    name: str
    byte_order: str = "<"

    def __post_init__(self) -> None:
        if check(self.name, str) not in NUMPY_TYPES:
            raise NotAllowedError("an unsupported NumPy type")


class PickleReader:
    """Reader for the pickles of one file.

    Args:
        size: size of the file in bytes, which is the maximum size of a tensor.
        new_storage: function that returns the bytes of a storage, given its key and length in bytes.
    """

    def __init__(self, size: int, new_storage: Callable[[object, int], Tensor]) -> None:
        self.max_bytes = max(size, 2**20)  # small files can contain expanded tensors
        self.new_storage = new_storage
        self.storages: dict[object, Tensor] = {}
        self.budget = BUDGET
        self.makers: dict[str, Callable[..., object]] = {
            "collections.OrderedDict": self.make_ordered_dict,
            "collections.Counter": lambda counts: check(counts, dict),
            "builtins.set": self.make_set,
            "torch.Size": lambda sizes: check(sizes, tuple),
            "torch.device": lambda *parts: torch.device(*(check(part, str, int) for part in parts)),
            "torch._utils._rebuild_tensor": self.make_tensor,
            "torch._utils._rebuild_tensor_v2": self.make_tensor,
            "torch._utils._rebuild_tensor_v3": self.make_tensor,
            "torch._utils._rebuild_parameter": self.make_parameter,
            "_codecs.encode": self.encode,
            "numpy.dtype": lambda name, align, copy: NumpyType(name),
            "numpy.core.multiarray.scalar": make_number,
            "numpy._core.multiarray.scalar": make_number,
        }

    def load(self, file: IO[bytes]) -> Any:
        """Read the pickle at the current position of a file; the new position is the end of the pickle."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, object] = {}

        def pop_mark() -> list[Any]:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            return items

        for opcode, argument, _ in pickletools.genops(file):
            self.spend(1)
            name: str = opcode.name
            value: Any = argument
            if name in ARGUMENTS:
                stack.append(value.encode("latin-1").decode() if name == "SHORT_BINSTRING" else value)
            elif name in CONSTANTS:
                stack.append(CONSTANTS[name])
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                number = int(name[-1])
                stack[-number:] = [tuple(stack[-number:])]
            elif name == "TUPLE":
                stack.append(tuple(pop_mark()))
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else {})
            elif name in ("APPEND", "APPENDS"):
                items = pop_mark() if name == "APPENDS" else [stack.pop()]
                check(stack[-1], list).extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = pop_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                check(stack[-1], dict).update(zip(map(as_key, items[::2]), items[1::2], strict=True))
            elif name == "GLOBAL":
                stack.append(self.find_name(value.replace(" ", ".").replace("__builtin__", "builtins")))
            elif name == "BINPERSID":
                stack.append(self.find_storage(*check(stack.pop(), tuple)))
            elif name == "REDUCE":
                arguments = check(stack.pop(), tuple)
                stack[-1] = self.makers[check(stack[-1], Name)](*arguments)
            elif name == "NEWOBJ":
                if stack.pop() != () or stack[-1] != "argparse.Namespace":
                    raise NotAllowedError("a new object of an unsupported class")
                stack[-1] = argparse.Namespace()
            elif name == "BUILD":
                state = stack.pop()
                self.build(stack[-1], state)
            elif name not in ("PROTO", "STOP"):
                raise NotAllowedError(f"the pickle instruction {name}")
        return stack.pop()

    def spend(self, number: int) -> None:
        self.budget -= number
        if self.budget < 0:
            raise NotAllowedError(f"more than {BUDGET:,} values besides tensors")

    def find_name(self, name: str) -> object:
        if name in DTYPES:
            return DTYPES[name]
        if name in self.makers or name in STORAGES or name == "argparse.Namespace":
            return Name(name)
        hint = " for shards (save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))"
        raise NotAllowedError(f"a reference to {name!r}" + hint * name.startswith("torch._tensor."))

    def find_storage(self, kind: str, name: str, key: object, location: str, numel: int, view: None = None) -> Storage:
        if kind != "storage" or view is not None or type(numel) is not int or numel < 0:
            raise NotAllowedError("an unsupported storage")
        dtype = STORAGES[check(name, Name)]
        if as_key(key) not in self.storages:
            self.storages[key] = self.new_storage(key, numel * dtype.itemsize)
        if len(self.storages[key]) != numel * dtype.itemsize:
            raise ValueError("a storage does not have the declared length")
        return Storage(self.storages[key], dtype)

    def build(self, target: object, state: Any) -> None:
        """Set the attributes of an object."""
        self.spend(len(state))
        if isinstance(target, OrderedDict) and check(state, dict).keys() == {"_metadata"}:
            vars(target).update(state)  # metadata of a state dict
        elif isinstance(target, NumpyType):
            order = check(check(state, tuple)[1], str)
            if order not in ("<", ">", "|") or state[2:] != (None, None, None, -1, -1, 0):
                raise NotAllowedError("an unsupported NumPy type")
            target.byte_order = order.replace("|", "<")
        elif isinstance(target, argparse.Namespace) and not any(str(name)[:2] == "__" for name in check(state, dict)):
            vars(target).update(state)
        else:
            raise NotAllowedError(f"attributes of {type(target).__name__}")

    def make_tensor(self, *arguments: Any) -> Tensor:
        """Rebuild a tensor; ``options`` are hooks, the dtype if the storage has none, and metadata."""
        self.spend(10)
        storage, offset, size, stride, grad, *options = (*arguments, False)
        dtypes = [option for option in options if isinstance(option, torch.dtype)]
        dtype: torch.dtype = (*dtypes, check(storage, Storage).dtype)[0]
        integers = (offset, *check(size, tuple)[:65], *check(stride, tuple)[:65])
        if len(size) > 64 or any(type(number) is not int or number < 0 for number in integers):
            raise ValueError("a tensor has more than 64 axes, or sizes, strides or offset that are not counts")
        numel = math.prod(size)
        end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
        if any(option for option in options if not isinstance(option, torch.dtype)):
            raise NotAllowedError("a tensor with hooks, a conjugate bit or a negative bit")
        if end * dtype.itemsize > len(storage.content) or numel * dtype.itemsize > self.max_bytes:
            raise NotAllowedError("a tensor that is larger than the file")
        tensor = torch.empty(0, dtype=dtype).set_(storage.content.untyped_storage(), offset, size, stride)
        return tensor.requires_grad_(grad is True)

    def make_parameter(self, data: Any, grad: bool, hooks: object) -> nn.Parameter:
        self.spend(10)
        return nn.Parameter(check(data, Tensor), grad is True)

    def make_ordered_dict(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        self.spend(len(check(pairs, list, tuple)))
        return OrderedDict((as_key(name), value) for name, value in pairs)

    def make_set(self, items: Any) -> set[Any]:
        self.spend(len(check(items, list)))
        return set(map(as_key, items))

    def encode(self, text: str, encoding: str) -> bytes:
        self.spend(len(text) // 50)
        if encoding not in ("latin1", "latin-1"):
            raise NotAllowedError("text in an unsupported encoding")
        return check(text, str).encode("latin-1")


def make_number(kind: NumpyType, raw: bytes) -> bool | int | float:
    """Convert a NumPy scalar to a Python number; raise an error unless the length matches the type."""
    return np.frombuffer(check(raw, bytes), check(kind, NumpyType).byte_order + kind.name).item()


def as_key(value: Any) -> Any:
    """Return a value if it is allowed as a key; hashing of other values can take unlimited time or stack."""
    if value is None or isinstance(value, (str, bool)) or (type(value) is int and abs(value) < 2**60):
        return value
    raise NotAllowedError(f"a key of type {type(value).__name__}")


def check(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise NotAllowedError(f"a value of type {type(value).__name__} instead of {kinds[0].__name__}")
    return value
