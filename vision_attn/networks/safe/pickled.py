"""The pickle in a checkpoint, read by a reader that makes tensors and plain values and can do nothing else.

``pickle`` calls what a file names with the arguments that the file gives, and so does torch's ``weights_only`` for its
own list of names: ``bytearray(2**31)`` is a file of 400 bytes, and the constructors of NumPy that one has to allow for
the scores in old files follow pointers that a file can choose. Here a name stands for one of the few lines below or the
file is refused, and what is made is counted.
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

#: Instructions and parts of what they make, of 100 bytes or so each: what a file of a few kB can take is bounded by it.
BUDGET = 1_000_000

#: Types of numbers in tensors, as files name them.
DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and (dtype.is_floating_point or dtype.is_complex or str(dtype)[6:].strip("uint") in ("bool", "8", "16", "32", "64"))
}

#: The storages of tensors, by the type of their numbers.
STORAGES: dict[str, torch.dtype] = {
    f"torch.{name}": dtype for name, dtype in _storage_type_to_dtype_map().items() if dtype in DTYPES.values()
} | {"torch.storage.UntypedStorage": torch.uint8}

#: How NumPy names its numbers of fixed size.
NUMPY_FORMS = {"b1", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}

#: Instructions that push their argument, or a value that is always the same.
ARGUMENTS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "LONG1", "SHORT_BINSTRING"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class NotAllowedError(ValueError):
    """What a pickle asks for, which no checkpoint needs."""


class Name(str):
    """What a file calls by its name: it is compared, and never looked up."""


@dataclass(frozen=True)
class Storage:
    """The numbers of tensors."""

    #: one byte each
    content: Tensor
    #: of the numbers
    dtype: torch.dtype


@dataclass
class NumpyForm:
    """Stands for a ``numpy.dtype`` of numbers."""

    #: one of ``NUMPY_FORMS``
    name: str
    #: of bytes
    order: str = "<"


class PickleReader:
    """Reads the pickles of one file."""

    def __init__(self, size: int, storage: Callable[[object, int], Tensor]) -> None:
        self.largest = max(size, 2**20)  # some are one number, expanded
        self.storage = storage
        self.left = BUDGET
        self.makers: dict[str, Callable[..., object]] = {
            "collections.OrderedDict": self.ordered,
            "collections.Counter": lambda counts: check(counts, dict),
            "builtins.set": self.set_of,
            "torch.Size": lambda sizes: check(sizes, tuple),
            "torch.device": lambda *place: torch.device(*(check(part, str, int) for part in place)),
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor_of,
            "torch._utils._rebuild_parameter": self.parameter,
            "_codecs.encode": self.bytes_of,
            "numpy.dtype": lambda form, align, copy: numpy_form(form),
            "numpy.core.multiarray.scalar": number,
            "numpy._core.multiarray.scalar": number,
        }

    def load(self, file: IO[bytes]) -> Any:
        """The value of the pickle that begins here; afterwards the file stands at its end."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, object] = {}

        def since_mark() -> list[Any]:
            begin = marks.pop()
            items = stack[begin:]
            del stack[begin:]
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
                stack.append(tuple(since_mark()))
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else {})
            elif name in ("APPEND", "APPENDS"):
                items = since_mark() if name == "APPENDS" else [stack.pop()]
                check(stack[-1], list).extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                check(stack[-1], dict).update(zip(map(as_key, items[::2]), items[1::2], strict=True))
            elif name == "GLOBAL":
                stack.append(self.named(value.replace(" ", ".").replace("__builtin__", "builtins")))
            elif name == "BINPERSID":
                stack.append(self.stored(*check(stack.pop(), tuple)))
            elif name == "REDUCE":
                arguments = check(stack.pop(), tuple)
                stack[-1] = self.makers[check(stack[-1], Name)](*arguments)
            elif name == "NEWOBJ":
                if stack.pop() != () or stack[-1] != "argparse.Namespace":
                    raise NotAllowedError("for a new object")
                stack[-1] = argparse.Namespace()
            elif name == "BUILD":
                state = stack.pop()
                self.build(stack[-1], state)
            elif name not in ("PROTO", "STOP"):
                raise NotAllowedError(f"for pickle's instruction {name}")
        return stack.pop()

    def spend(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise NotAllowedError(f"for more than {BUDGET:,} values beside its tensors")

    def named(self, name: str) -> object:
        if name in DTYPES:
            return DTYPES[name]
        if name in self.makers or name in STORAGES or name == "argparse.Namespace":
            return Name(name)
        of_shards = " for shards (save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))"
        raise NotAllowedError(f"to run {name!r}" + of_shards * name.startswith("torch._tensor."))

    def build(self, made: object, state: Any) -> None:
        """What a pickle sets on an object after it is made."""
        self.spend(len(state))
        if isinstance(made, OrderedDict) and check(state, dict).keys() == {"_metadata"}:
            vars(made).update(state)  # of a state dict
        elif isinstance(made, NumpyForm):
            order = check(check(state, tuple)[1], str)
            if order not in ("<", ">", "|") or state[2:] != (None, None, None, -1, -1, 0):
                raise NotAllowedError("for another number of NumPy's")
            made.order = order.replace("|", "<")
        elif isinstance(made, argparse.Namespace) and not any(str(name)[:2] == "__" for name in check(state, dict)):
            vars(made).update(state)
        else:
            raise NotAllowedError(f"for attributes of a {type(made).__name__}")

    def stored(self, kind: str, name: str, number: object, location: str, numel: int, view: None = None) -> Storage:
        if kind != "storage" or view is not None or type(numel) is not int or numel < 0:
            raise NotAllowedError("for what is stored in another way")
        dtype = STORAGES[check(name, Name)]
        content = self.storage(as_key(number), numel * dtype.itemsize)
        if len(content) != numel * dtype.itemsize:
            raise ValueError("a storage is not as long as it says")
        return Storage(content, dtype)

    def tensor(
        self, storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool = False,
        hooks: object = None, metadata: object = None, dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        self.spend(10)
        dtype = dtype or check(storage, Storage).dtype
        places = (offset, *check(size, tuple)[:65], *check(stride, tuple)[:65])
        if len(size) > 64 or any(type(place) is not int or place < 0 for place in places):
            raise ValueError("a tensor has at most 64 axes, and places in it are whole numbers")
        numel = math.prod(size)
        end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
        if metadata:
            raise NotAllowedError("for a tensor with conjugate or negative bits")
        if end * dtype.itemsize > len(storage.content) or numel * dtype.itemsize > self.largest:
            raise NotAllowedError("for a tensor of more numbers than the file has")
        made = torch.empty(0, dtype=dtype).set_(storage.content.untyped_storage(), offset, size, stride)
        return made.requires_grad_(grad is True)

    def tensor_of(self, *given: Any) -> Tensor:
        """The newer form, of types without a storage of their own."""
        storage, offset, size, stride, grad, hooks, dtype, *metadata = given
        return self.tensor(storage, offset, size, stride, grad, hooks, any(metadata), check(dtype, torch.dtype))

    def parameter(self, data: Any, grad: bool, hooks: object) -> nn.Parameter:
        self.spend(10)
        return nn.Parameter(check(data, Tensor), grad is True)

    def ordered(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        pairs = check(pairs, list, tuple)
        self.spend(len(pairs))
        return OrderedDict((as_key(name), value) for name, value in pairs)

    def set_of(self, items: Any) -> set[Any]:
        self.spend(len(check(items, list)))
        return set(map(as_key, items))

    def bytes_of(self, text: str, encoding: str) -> bytes:
        self.spend(len(text) // 50)
        if encoding not in ("latin1", "latin-1"):
            raise NotAllowedError("for another encoding")
        return check(text, str).encode("latin-1")


def numpy_form(name: str) -> NumpyForm:
    if check(name, str) not in NUMPY_FORMS:
        raise NotAllowedError("for another number of NumPy's")
    return NumpyForm(name)


def number(form: NumpyForm, raw: bytes) -> bool | int | float:
    """A number of NumPy's as one of Python's; it has exactly the bytes of its form, and nothing follows them."""
    return np.frombuffer(check(raw, bytes), check(form, NumpyForm).order + form.name).item()


def as_key(value: Any) -> Any:
    """A value that may be a key: to hash any other can take as much time or stack as the file wants."""
    if value is None or isinstance(value, (str, bool)) or (type(value) is int and abs(value) < 2**60):
        return value
    raise NotAllowedError(f"for a key of type {type(value).__name__}")


def check(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise NotAllowedError(f"for a {type(value).__name__} in the place of a {kinds[0].__name__}")
    return value
