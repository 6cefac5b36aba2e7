"""Read the pickle in a checkpoint: tensors and plain values. Every other object becomes a placeholder.

``pickle`` calls any function that a file names, with any arguments. torch's ``weights_only`` calls only functions on a
list, which is not sufficient: a file of 400 bytes can call ``bytearray(2**31)``, and a dictionary whose key consists of
300,000 nested tuples crashes the process (torch 2.14). This reader replaces each supported name by its own function,
imports nothing, hashes only plain keys, and counts values.
"""

import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Self

import torch
from torch import Tensor, nn

#: Largest number of instructions and values, of about 100 bytes each. It limits the memory for a small file.
BUDGET = 1_000_000

#: Tensor dtypes by name in files.
DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and (dtype.is_floating_point or dtype.is_complex or str(dtype)[6:].strip("uint") in ("bool", "8", "16", "32", "64"))
}

#: Classes of storages for one dtype, which torch.save uses for these dtypes only.
LEGACY_STORAGES = (
    "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8 Byte:uint8 "
    "Bool:bool ComplexDouble:complex128 ComplexFloat:complex64 QInt8:qint8 QInt32:qint32 QUInt8:quint8 "
    "QUInt4x2:quint4x2 QUInt2x4:quint2x4"
)

#: Storage dtypes by name in files.
STORAGES: dict[str, torch.dtype] = {
    **{f"torch.{kind}Storage": getattr(torch, t) for kind, t in (pair.split(":") for pair in LEGACY_STORAGES.split())},
    "torch.storage.UntypedStorage": torch.uint8,
}

#: The attribute of a state dict with the version and the configuration of each module.
METADATA = "_metadata"

#: Names of these modules show that a file is an attack.
BLOCKED = {"nt", "os", "posix", "subprocess", "sys"}

#: Instructions that torch.save writes in the protocols 2 to 5, with Python 2 or 3: values, containers, the memo, names
#: and calls. Files cannot execute any other.
INSTRUCTIONS = (
    "BININT BININT1 BININT2 BINFLOAT BINUNICODE SHORT_BINUNICODE LONG1 SHORT_BINSTRING BINSTRING NONE NEWTRUE NEWFALSE "
    "SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_SET ADDITEMS FROZENSET "
    "EMPTY_LIST EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 MARK APPEND APPENDS SETITEM SETITEMS MEMOIZE "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID REDUCE NEWOBJ BUILD PROTO FRAME STOP"
)


class NotAllowedError(ValueError):
    """Raised if a file contains an object that checkpoints do not need; the message is a noun phrase."""


@dataclass(frozen=True, eq=False, slots=True)
class Placeholder:
    """Stands for a function or class, and for an object that is neither a tensor nor a plain value."""

    #: name of the function or class of the object in the file
    name: str

    def __call__(self, *arguments: object) -> Self:
        return self

    def extend(self, items: object) -> None:
        """Ignore the items of a custom list."""

    append = extend


@dataclass(frozen=True)
class Storage:
    """Storage of one or more tensors."""

    #: the bytes, with dtype ``uint8``
    content: Tensor
    #: dtype of the elements
    dtype: torch.dtype


class PickleReader(pickle._Unpickler):
    """Python's own reader, restricted to :data:`INSTRUCTIONS` and to names that it replaces, for the pickles of a file.

    :meth:`load` returns one pickle after the other.

    Args:
        file: the file, at the start of a pickle.
        size: size of the file in bytes, which is the maximum size of a tensor.
        new_storage: function that returns the bytes of a storage, given its key and length in bytes.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], size: int, new_storage: Callable[[str, int], Tensor]) -> None:
        super().__init__(file, encoding="utf-8", errors="backslashreplace")  # numbers of Python 2 are no text
        self.max_bytes = max(size, 2**20)  # small files can contain expanded tensors
        self.new_storage = new_storage
        self.storages: dict[str, Tensor] = {}
        self.budget = BUDGET
        self.dispatch = Instructions(self)  # type: ignore[misc]
        self.makers: dict[str, Callable[..., object]] = {
            "collections.OrderedDict": self.make_ordered_dict,
            "collections.defaultdict": lambda factory=None: {},
            "torch.Size": lambda sizes: check(sizes, tuple),
            "from_type_v2": self.make_subclass,
            **dict.fromkeys(("tensor", "tensor_v2", "tensor_v3"), self.make_tensor),
            **dict.fromkeys(("parameter", "parameter_with_state"), self.make_parameter),
        }

    def load(self) -> Any:
        self.memo: dict[int, Any] = {}  # each pickle of a file counts its values from 0
        return super().load()

    def spend(self, number: int) -> None:
        self.budget -= number
        if self.budget < 0:
            raise NotAllowedError(f"more than {BUDGET:,} values besides tensors")

    def find_class(self, module: str, name: str) -> object:
        """Return a dtype, the function that replaces a supported name, or a placeholder; nothing is imported."""
        name = f"{module}.{name}".replace("__builtin__", "builtins")
        if name.partition(".")[0] in BLOCKED or name in ("builtins.eval", "builtins.exec"):
            raise NotAllowedError(f"a reference to {name!r}, which is a sign of an attack")
        # torch's functions have names such as torch._utils._rebuild_tensor_v2.
        rebuilt = name.partition("._rebuild_")[2] if name.startswith("torch.") else ""
        # Errors contain the name of a placeholder.
        return DTYPES.get(name) or self.makers.get(rebuilt or name) or Placeholder(name[:100])

    def persistent_load(self, pid: Any) -> object:
        """Return a storage, or the class that a file from before torch 1.6 contains with its source code."""
        kind, name, key, _, *numel_and_view = check(pid, tuple)
        if kind == "module":
            return name
        numel, *view = numel_and_view
        if kind != "storage" or any(view) or type(numel) is not int or numel < 0:
            raise NotAllowedError("an unsupported storage")
        dtype = STORAGES[check(name, Placeholder).name]
        if check(key, str) not in self.storages:
            self.storages[key] = self.new_storage(key, numel * dtype.itemsize)
        if len(self.storages[key]) != numel * dtype.itemsize:
            raise ValueError("a storage does not have the declared length")
        return Storage(self.storages[key], dtype)

    def load_setitem(self) -> None:
        self.set_items([self.stack.pop(), self.stack.pop()][::-1])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        """Set items of a dictionary, whose keys must be plain values."""
        if not isinstance(self.stack[-1], Placeholder):
            check(self.stack[-1], dict).update(zip(map(as_key, items[::2]), items[1::2], strict=True))

    def load_build(self) -> None:
        """Set the metadata of a state dict, and ignore other attributes of objects."""
        state, target = self.stack.pop(), self.stack[-1]
        self.spend(len(state) if isinstance(state, dict | tuple) else 1)
        if isinstance(target, OrderedDict) and isinstance(state, dict) and METADATA in state:
            setattr(target, METADATA, state[METADATA])
        elif not isinstance(target, Placeholder | OrderedDict):
            raise NotAllowedError(f"attributes of {type(target).__name__}")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.BUILD[0]: load_build,
        # A new object is the result of a call of its class.
        pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[pickle.REDUCE[0]],
        # Sets would hash their items.
        pickle.EMPTY_SET[0]: pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]],
        pickle.ADDITEMS[0]: pickle._Unpickler.dispatch[pickle.APPENDS[0]],
        pickle.FROZENSET[0]: pickle._Unpickler.dispatch[pickle.TUPLE[0]],
        # A bytearray would be allocated before its length is compared with the file.
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
    }

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
        known = check(kind, Placeholder).name in ("torch.Tensor", "torch.nn.parameter.Parameter")
        return function(*check(arguments, tuple)) if known else kind

    def make_ordered_dict(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        self.spend(len(check(pairs, list, tuple)))
        return OrderedDict((as_key(name), value) for name, value in pairs)


class Instructions(dict[int, Callable[[Any], None]]):
    """The methods that execute the allowed instructions, by code; each use is counted."""

    def __init__(self, reader: PickleReader) -> None:
        codes = [code for name in INSTRUCTIONS.split() for code in getattr(pickle, name)]
        super().__init__((code, reader.dispatch[code]) for code in codes)
        self.spend = reader.spend

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self.spend(1)
        return super().__getitem__(code)

    def __missing__(self, code: int) -> Any:
        name = next(op.name for op in pickletools.opcodes if op.code == chr(code))
        raise NotAllowedError(f"the pickle instruction {name}")


def as_key(value: Any) -> Any:
    """Return a value if it is allowed as a key; hashing of other values can take unlimited time or stack."""
    if value is None or isinstance(value, str | bool | float) or (type(value) is int and abs(value) < 2**60):
        return value
    return Placeholder(type(value).__name__)


def check(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise NotAllowedError(f"a value of type {type(value).__name__} instead of {kinds[0].__name__}")
    return value
