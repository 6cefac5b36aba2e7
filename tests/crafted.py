"""Small hostile checkpoints for the tests of the reader. They are harmless for other programs, too."""

import copy
import io
import json
import pickle
import zipfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vision_attn.networks.checkpoints.file_format import ENTRY, compute_hash, fingerprint
from vision_attn.networks.safe.read import MAGIC, VERSION


class Call:
    """Pickled as a call of a function by name."""

    def __init__(self, name, *arguments, state=None):
        self.name, self.arguments, self.state = name, arguments, state


class Named(str):
    """Pickled as a reference to a function or class by name."""


class New(Call):
    """Pickled as a new object of a class by name, with attributes."""


class Stored(tuple):
    """Pickled as a torch storage: type, key, device, length."""


def pickled(value):
    """Return the pickle of a value in protocol 2, which torch uses."""

    def write(value):
        match value:
            case Named():
                module, _, name = value.rpartition(".")
                return f"c{module}\n{name}\n".encode()
            case Call(name=name, arguments=arguments, state=state):
                made = b")\x81" if isinstance(value, New) else write(arguments) + b"R"
                return write(Named(name)) + made + (b"" if state is None else write(state) + b"b")
            case Stored():
                return write(("storage", *value)) + b"Q"
            case dict():
                return b"}(" + b"".join(write(item) for pair in value.items() for item in pair) + b"u"
            case tuple():
                return b"(" + b"".join(map(write, value)) + b"t"
            case list():
                return b"](" + b"".join(map(write, value)) + b"e"
            case _:
                return pickle.dumps(value, protocol=2)[2:-1].replace(b"q\x00", b"")

    return b"\x80\x02" + write(value) + b"."


def as_zip(content, data=(), byte_order=b"little"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        parts = {"data.pkl": content, **{f"data/{number}": numbers for number, numbers in enumerate(data)}}
        for name, part in {"byteorder": byte_order, **parts}.items():
            archive.writestr(f"archive/{name}", part)
    return file.getvalue()


def as_legacy(content, keys=(), data=b"", big_endian=False):
    system = {"little_endian": not big_endian, "protocol_version": VERSION, "type_sizes": {}}
    return b"".join([b"\x80\x02" + MAGIC, pickled(VERSION), pickled(system), content, pickled(list(keys)), data])


def tensor(length, size, stride, *view, key="0", metadata=()):
    """Return a call that rebuilds a tensor; ``view=None`` selects the format before torch 1.6."""
    storage = Stored((Named("torch.FloatStorage"), key, "cpu", length, *view))
    hooks = Call("collections.OrderedDict")
    return Call("torch._utils._rebuild_tensor_v2", storage, 0, size, stride, False, hooks, *metadata)


def again_and_again(call, times):
    """Return the pickle of a list in which five bytes create a new value each time."""
    name, arguments = pickled(Named(call.name))[2:-1], pickled(call.arguments)[2:-1]
    return b"\x80\x02](" + name + b"q\x00" + arguments + b"q\x01R" + b"h\x00h\x01R" * times + b"e."


def inflated(path, length):
    """Write an archive with a compressed tensor of zeros, whose size is a thousandth of its length."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled({"weight": tensor(length // 4, (length // 4,), (1,))}))
        archive.writestr("archive/data/0", bytes(length))


def one_part_under_many_names(path):
    """Write an archive that lists one entry of 1 MB 2,000 times."""
    names = [f"{number:04}" for number in range(2000)]
    content = [tensor(2**18, (2**18,), (1,), key=name) for name in names]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(content))
        archive.writestr("archive/data/0000", bytes(2**20))
        one = archive.NameToInfo.pop("archive/data/0000")
        archive.filelist.remove(one)
        for name in names:
            again = copy.copy(one)
            again.filename = f"archive/data/{name}"
            archive.filelist.append(again)


def read_entry(path):
    """Return the metadata of a saved network or adapter."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[ENTRY])


def rewrite(source, path, more=None, **changes):
    """Write a copy of a file with changed metadata or additional tensors, and with a valid hash."""
    with safe_open(source, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()} | (more or {})  # noqa: SIM118
    entry = {**read_entry(source), **changes}
    del entry["file_hash"]
    entry["file_hash"] = compute_hash([entry, fingerprint(tensors)])
    save_file(tensors, path, {ENTRY: json.dumps(entry)})
    return path


def shards(folder, name, state, **changes):
    """Write tensors to two files, and an index with ``changes``."""
    save, ending = (save_file, "safetensors") if name.endswith("safetensors") else (torch.save, "bin")
    listed = {}
    for number, keys in enumerate((list(state)[:3], list(state)[3:]), 1):
        shard = f"{name.partition('.')[0]}-0000{number}-of-00002.{ending}"
        save({key: state[key] for key in keys}, folder / shard)
        listed |= dict.fromkeys(keys, shard)
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": {**listed, **changes}}))
    return index
