"""Read the pickle in a checkpoint: tensors and plain values. Every other object becomes a placeholder.

``pickle`` calls any function that a file names, with any arguments. torch's ``weights_only`` calls only functions on a
list, which is not sufficient: a file of 400 bytes can call ``bytearray(2**31)``, and a dictionary whose key consists of
300,000 nested tuples crashes the process (torch 2.14). This reader replaces each supported name by its own function,
imports nothing, hashes only plain keys, and counts values.
"""

from __future__ import annotations

import math
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

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
    **{f"torch.{name}": dtype for name, dtype in _storage_type_to_dtype_map().items()},
    "torch.storage.UntypedStorage": torch.uint8,
}

#: Names of these modules show that a file is an attack.
BLOCKED = {"nt", "os", "posix", "subprocess", "sys"}

#: Instructions that push their argument, and instructions that push a constant.
ARGUMENTS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "LONG1", "SHORT_BINSTRING"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class NotAllowedError(ValueError):
    """Raised if a file contains an object that checkpoints do not need; the message is a noun phrase."""


class Name(str):
    """Name of a function or class in a file. It is only compared, not imported."""


@dataclass(frozen=True, eq=False, slots=True)
class Placeholder:
    """Stands for an object that is neither a tensor nor a plain value."""

    #: name of the function or class of the object in the file
    name: str


@dataclass(frozen=True)
class Storage:
    """Storage of one or more tensors."""

    #: the bytes, with dtype ``uint8``
    content: Tensor
    #: dtype of the elements
    dtype: torch.dtype


class PickleReader:
    """Reader for the pickles of one file.

    Args:
        size: size of the file in bytes, which is the maximum size of a tensor.
        new_storage: function that returns the bytes of a storage, given its key and length in bytes.
    """

    def __init__(self, size: int, new_storage: Callable[[str, int], Tensor]) -> None:
        self.max_bytes = max(size, 2**20)  # small files can contain expanded tensors
        self.new_storage = new_storage
        self.storages: dict[str, Tensor] = {}
        self.budget = BUDGET
        self.makers: dict[str, Callable[..., object]] = {
            "collections.OrderedDict": self.make_ordered_dict,
            "collections.defaultdict": lambda factory=None: {},
            "torch.Size": lambda sizes: check(sizes, tuple),
            "torch._tensor._rebuild_from_type_v2": self.make_subclass,
            **{f"torch._utils._rebuild_tensor{version}": self.make_tensor for version in ("", "_v2", "_v3")},
            **{f"torch._utils._rebuild_parameter{state}": self.make_parameter for state in ("", "_with_state")},
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
                if not isinstance(stack[-1], Placeholder):
                    check(stack[-1], list).extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = pop_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                if not isinstance(stack[-1], Placeholder):
                    check(stack[-1], dict).update(zip(map(as_key, items[::2]), items[1::2], strict=True))
            elif name == "GLOBAL":
                stack.append(find_name(value.replace(" ", ".").replace("__builtin__", "builtins")))
            elif name == "BINPERSID":
                stack.append(self.find_storage(*check(stack.pop(), tuple)))
            elif name in ("REDUCE", "NEWOBJ"):
                arguments, function = check(stack.pop(), tuple), check(stack.pop(), Name, Placeholder)
                stack.append(self.call(function, arguments) if name == "REDUCE" else Placeholder(str(function)))
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

    def call(self, function: Name | Placeholder, arguments: tuple[Any, ...]) -> object:
        """Return the result of a supported function, and a placeholder for any other."""
        if isinstance(function, Placeholder):
            return function
        return self.makers[function](*arguments) if function in self.makers else Placeholder(function)

    def find_storage(
        self, kind: str, name: Name, key: Any, location: object, numel: int = -1, view: None = None
    ) -> Any:
        if kind == "module":  # a class with its source code, in files before torch 1.6
            return name
        if kind != "storage" or view is not None or type(numel) is not int or numel < 0:
            raise NotAllowedError("an unsupported storage")
        dtype = STORAGES[check(name, Name)]
        if check(key, str) not in self.storages:
            self.storages[key] = self.new_storage(key, numel * dtype.itemsize)
        if len(self.storages[key]) != numel * dtype.itemsize:
            raise ValueError("a storage does not have the declared length")
        return Storage(self.storages[key], dtype)

    def build(self, target: object, state: Any) -> None:
        """Set the metadata of a state dict, and ignore other attributes."""
        self.spend(len(state) if isinstance(state, dict | tuple) else 1)
        if isinstance(target, OrderedDict) and isinstance(state, dict) and "_metadata" in state:
            vars(target)["_metadata"] = state["_metadata"]
        elif not isinstance(target, Placeholder | OrderedDict):
            raise NotAllowedError(f"attributes of {type(target).__name__}")

    def make_tensor(self, *arguments: Any) -> object:
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
        if dtype not in DTYPES.values():
            return Placeholder(str(dtype))
        tensor = torch.empty(0, dtype=dtype).set_(storage.content.untyped_storage(), offset, size, stride)
        return tensor.requires_grad_(grad is True)

    def make_parameter(self, data: Any, grad: bool, *hooks: object) -> object:
        self.spend(10)
        return nn.Parameter(data, grad is True) if isinstance(data, Tensor) else data

    def make_subclass(self, function: Any, kind: Any, arguments: Any, state: object) -> object:
        """Rebuild a tensor with attributes; other classes, such as shards, do not consist of one tensor."""
        known = check(kind, Name) in ("torch.Tensor", "torch.nn.parameter.Parameter")
        return self.call(check(function, Name), check(arguments, tuple)) if known else Placeholder(kind)

    def make_ordered_dict(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        self.spend(len(check(pairs, list, tuple)))
        return OrderedDict((as_key(name), value) for name, value in pairs)


def find_name(name: str) -> object:
    """Return the dtype of this name, or the name of a function or class."""
    if name.partition(".")[0] in BLOCKED or name in ("builtins.eval", "builtins.exec"):
        raise NotAllowedError(f"a reference to {name!r}, which is a sign of an attack")
    return DTYPES.get(name, Name(name[:100]))  # errors contain the name


def as_key(value: Any) -> Any:
    """Return a value if it is allowed as a key; hashing of other values can take unlimited time or stack."""
    if value is None or isinstance(value, str | bool | float) or (type(value) is int and abs(value) < 2**60):
        return value
    return Placeholder(type(value).__name__)


def check(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise NotAllowedError(f"a value of type {type(value).__name__} instead of {kinds[0].__name__}")
    return value
