"""Damaged and hostile files are rejected with limited memory and time, and files are written atomically."""

import argparse
import ast
import errno
import os
import pickle
import re
import struct
import sys
import threading
import zipfile
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path

import crafted
import numpy as np
import pytest
import torch
from crafted import Call, Named, New, Stored, again_and_again, as_legacy, as_zip, pickled, shards
from safetensors.torch import save_file
from small_networks import convolutions
from torch import nn

import vision_attn as va
from vision_attn.networks.safe import Placeholder, check_writable, read_file, write_atomically
from vision_attn.networks.safe.write import temporary_folder, write_tensors

PACKAGE = Path(va.__file__).parent
PLAIN = {"epoch": 3, "big": 10**40, "history": [{"loss": 0.5}], "none": None, "of": {0.5: 1}}
PLAIN["shape"] = torch.Size([2, 3])


def objects():
    """Return objects that public checkpoints contain beside the weights, and other kinds of tensors."""
    return {
        "args": argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=1)), "path": Path("runs/1"),
        "best": np.float64(91.7), "array": np.ones(3), "random state": np.random.default_rng(0),
        "date": datetime(2026, 1, 31), "steps": Counter({30: 1}), "parts": {"a", 1}, "frozen": frozenset({"a"}),
        "range": range(3), "slice": slice(1, 3), "digest": b"\x00\xff", "device": torch.device("cpu"),
        "layout": torch.strided, "module": nn.Linear(2, 2),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "by channel": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "sparse": torch.eye(2).to_sparse(), "rows": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "meta": torch.empty(2, device="meta"),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_and_plain_values_are_read_and_other_objects_become_placeholders(legacy, tmp_path):
    shared = torch.arange(6.0)
    tensors = {"shared": shared, "part": shared[2:4], "turned": shared.view(2, 3).T, "expanded": shared[:1].expand(5)}
    tensors |= {"none": torch.zeros(0, 3), "parameter": nn.Parameter(torch.ones(2))}
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn):
        tensors[str(dtype)] = torch.ones(3).to(dtype)
    tensors["noted"] = torch.arange(3.0)
    tensors["noted"].note = Path("a")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {**PLAIN, "tensors": tensors, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    content |= {"default": defaultdict(int, a=1), "type": torch.bfloat16}
    others = objects()
    torch.save({**content, **others}, tmp_path / "file.pth", _use_new_zipfile_serialization=not legacy)
    read = read_file(tmp_path / "file.pth").content
    assert {name: read[name] for name in PLAIN} == PLAIN
    assert (read["default"], read["type"]) == ({"a": 1}, torch.bfloat16)
    assert {name for name in others if not isinstance(read[name], Placeholder)} == set()
    assert (read["path"].name.split(".")[-1], read["array"].name.split(".")[0]) == ("PosixPath", "numpy")
    for name, tensor in tensors.items():
        assert torch.equal(read["tensors"][name], tensor)
        for get in (type, torch.Tensor.stride, lambda tensor: (tensor.dtype, tensor.requires_grad)):
            assert get(read["tensors"][name]) == get(tensor)
    assert read["tensors"]["part"].data_ptr() == read["tensors"]["shared"].data_ptr() + 8
    assert read["model"]._metadata == model.state_dict()._metadata
    optimizer.load_state_dict(read["optimizer"])
    model.load_state_dict(read["model"])


LARGER = "a tensor that is larger than the file"
#: Content of a pickle, and the reason for its rejection (None if it is damaged).
SYSTEM = ("nt", "os", "posix", "subprocess", "sys")
REFUSED = {
    "sizes": (crafted.tensor(1, (2**31,), (0,)), LARGER),
    "strides": (crafted.tensor(1, (2,), (1,)), LARGER),
    "negative": (crafted.tensor(1, (-1,), (1,)), None),
    "axes": (crafted.tensor(1, (1,) * 65, (1,) * 65), None),
    "metadata": (crafted.tensor(1, (1,), (1,), metadata=({"conj": True},)), "a tensor with hooks, a conj"),
    "view": (crafted.tensor(1, (1,), (1,), ("0", 0, 1)), "an unsupported storage"),
    "declared length": ([crafted.tensor(1, (1,), (1,)), crafted.tensor(2, (1,), (1,))], None),
    "pairs": (again_and_again(Call("collections.OrderedDict", [("a", 1)] * 1000), 1000), "more than 1,000,000 values"),
    "attributes of a list": (b"\x80\x02]}b.", "attributes of list"),
    **{name: (Call(f"{name}.system", "touch witness"), f"a reference to '{name}.system'") for name in SYSTEM},
    "evaluation": (Call("__builtin__.eval", "open('witness', 'w')"), "a reference to 'builtins.eval'"),
}


def assert_rejected(message, path):
    with pytest.raises(va.errors.CheckpointError, match=message):
        read_file(path)


@pytest.mark.parametrize("name", REFUSED)
def test_false_tensors_and_references_to_the_system_are_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, reason = REFUSED[name]
    message = f"contains {reason}.* save only the state dict" if reason else "or not a checkpoint"
    content = content if isinstance(content, bytes) else pickled({"a": content})
    for file in (as_zip(content, [bytes(4)]), as_legacy(content, ["0"], bytes(12))):
        Path("file.pth").write_bytes(file)
        assert_rejected(message, "file.pth")
    assert os.listdir() == ["file.pth"]


@pytest.mark.parametrize("wrap", [as_zip, as_legacy])
def test_placeholders_import_and_call_nothing_and_ignore_their_content(wrap, tmp_path, monkeypatch):
    path = tmp_path / "file.pth"
    (tmp_path / "witness.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    called, made = Call("witness.function", 1, state={"a": [1]}), New("witness.Class", state=([1], {"b": 2}))
    path.write_bytes(wrap(pickled({"a": called, "b": made, "c": Call("builtins.bytearray", 2**60)})))
    names = [value.name for value in read_file(path).content.values()]
    assert names == ["witness.function", "witness.Class", "builtins.bytearray"]
    path.write_bytes(wrap(b"\x80\x02cwitness\nList\n)\x81(K\x01K\x02eK\x03aK\x04K\x05s(K\x06K\x07u."))
    assert_rejected(r"dictionary of tensors, got the object witness.List\. If you trust", path)
    assert "witness" not in sys.modules


def test_a_tensor_of_quantized_numbers_without_their_scale_is_a_placeholder(tmp_path):
    storage = Stored((Named("torch.QInt8Storage"), "0", "cpu", 4))
    integers = Call("torch._utils._rebuild_tensor_v2", storage, 0, (4,), (1,), False, Call("collections.OrderedDict"))
    (tmp_path / "file.pth").write_bytes(as_zip(pickled({"a": integers}), [bytes(4)]))
    assert read_file(tmp_path / "file.pth").content["a"].name == "torch.qint8"


#: Content of files that are no checkpoints, and what the error says about them.
KINDS = {
    "lfs.pth": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS .* git lfs pull"),
    "page.pth": (b"\n<!DOCTYPE html><html></html>", "an HTML or XML page"),
    "page.bin": (b"<HTML><body>404</body></HTML>", "an HTML or XML page"),
    "denied.pt": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an HTML or XML page"),
    "keras.h5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "truncated or not a checkpoint"),
    "net.pdparams": (pickle.dumps({"weight": np.ones(2)}), "truncated or not a checkpoint"),
}


def test_other_files_are_named_by_kind_with_a_remedy(tmp_path):
    for name, (content, message) in KINDS.items():
        (tmp_path / name).write_bytes(content)
        assert_rejected(rf"{name} is {message}", tmp_path / name)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "vit.npz", kernel=np.ones(2))
        assert_rejected("is a NumPy archive.* timm.models.load_checkpoint", tmp_path / "vit.npz")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("script/constants.pkl", b"")
    assert_rejected("is a TorchScript program.* torch.jit.load", tmp_path / "script.pt")


def test_long_lists_compressed_parts_and_storages_of_another_length_are_rejected(tmp_path):
    length = 10_000_000
    listed = b"PK\x03\x04" + bytes(length) + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, length, 4, 0)
    weight = pickled({"weight": crafted.tensor(1, (1,), (1,), None)})
    empty, counted = as_legacy(weight, [], bytes(100)), as_legacy(weight, ["0"], (3).to_bytes(8, "little") + bytes(4))
    big_endian = as_zip(pickled({}), byte_order=b"big"), as_legacy(pickled({}), big_endian=True)
    crafted.inflated(tmp_path / "zip", 2**12)
    for name, content, message in (
        ("file.safetensors", length.to_bytes(8, "little") + bytes(length), "contains too many tensors"),
        ("file.pth", listed, "contains too many archive entries"),
        ("file.pth", (tmp_path / "zip").read_bytes(), "contains compressed data"),
        ("file.pth", counted, "truncated or not a checkpoint"),
        ("file.pth", empty, "truncated or not a checkpoint"),  # the tensor would expose uninitialized memory
        *(("file.pth", content, "byte order") for content in big_endian),
    ):
        (tmp_path / name).write_bytes(content)
        assert_rejected(message, tmp_path / name)


@pytest.mark.parametrize("form", ["zip.pth", "legacy.pth", "tensors.safetensors"])
def test_a_truncated_file_is_rejected(form, tmp_path):
    path, state = tmp_path / form, convolutions(3, 8, 8).state_dict()
    if form == "tensors.safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip.pth")
    content = path.read_bytes()
    for kept in (0.0, 0.01, 0.9, 0.999):
        path.write_bytes(content[: int(len(content) * kept)])
        assert_rejected("truncated or not a checkpoint", path)


STATE = {name: torch.full((2,), number) for number, name in enumerate("abcde")}

#: Entries of an index for the tensor "f" that are not shards in the same folder.
NAMES = ["../secret.safetensors", "/etc/passwd", "folder", "..", "a\0b", "pipe.safetensors", "zeros.bin", "gone.bin"]
#: Changes to an index, and the reason for its rejection.
INDEXES = [
    *(({"f": name}, f"expected shards in the same folder, got {re.escape(repr(name))}") for name in NAMES),
    ({"e": "model-00001-of-00002.safetensors"}, "'model-00001-.*' and the index differ in e"),
    ({"f": "model-00002-of-00002.safetensors"}, "'model-00002-.*' and the index differ in f"),
    ({"f": "model.safetensors.index.json"}, r"index\.json is truncated or not a checkpoint"),
    *(({"f": value}, "lists no complete checkpoint") for value in (3, ["a"])),
    ({"f": "code.bin"}, r"code\.bin was not loaded, because it contains a reference to 'posix.system'"),
]


@pytest.mark.parametrize(("changes", "message"), INDEXES)
def test_an_index_may_list_only_complete_files_in_its_folder(changes, message, tmp_path):
    folder = tmp_path / "net"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "zeros.bin").symlink_to("/dev/zero")
    (folder / "gone.bin").symlink_to("nothing.bin")
    (folder / "code.bin").write_bytes(as_zip(pickled({"f": Call("posix.system", "echo")}), [bytes(4)]))
    save_file({"f": torch.ones(1)}, tmp_path / "secret.safetensors")
    shards(folder, "model.safetensors", STATE, **changes)
    assert_rejected(message, folder)


def test_shards_may_be_links(tmp_path):
    """The cache of the Hugging Face hub consists of links."""
    folder, blobs = tmp_path / "snapshots", tmp_path / "blobs"
    for path in (folder, blobs):
        path.mkdir()
        with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or .*pytorch_model\.bin"):
            read_file(path)
    with pytest.raises(FileNotFoundError, match=r"nothing\.pth"):
        read_file(folder / "nothing.pth")
    shards(folder, "model.safetensors", STATE)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert set(read_file(folder).content) == set(STATE)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"weight_map": 3}', b"{}", b"\xff", b"[" * 100_000])
def test_an_invalid_index_is_rejected(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    assert_rejected("lists no complete checkpoint", tmp_path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_is_written_completely_or_not_at_all(step, tmp_path, monkeypatch):
    path, tied = tmp_path / "weights.safetensors", torch.randn(4, 4)
    write_tensors(path, {"one": tied, "other": tied, "turned": tied.T}, {"a": "b"})
    for key, value in read_file(path).content.items():
        assert torch.equal(value, tied.T if key == "turned" else tied)
    before = path.read_bytes()
    monkeypatch.setattr(os, step, lambda *_: os.write(-1, b""))
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_atomically(path, b"half of")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, [path.name])


def test_pipes_and_devices_are_written_through(tmp_path):
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_writable(pipe)  # must not open the pipe, because closing it would end the reader
    write_atomically(pipe, b"content")
    reader.join()
    assert (received, pipe.is_fifo()) == ([b"content"], True)
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError) as caught:
        write_atomically(Path(f"/dev/fd/{writing}"), b"content")
    os.close(writing)
    assert caught.value.filename == f"/dev/fd/{writing}"


def test_a_file_of_a_standard_stream_is_written_through(tmp_path):
    """``-o /dev/stdout >> log``: if the file were replaced, later output would be lost."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with open(log, "a") as stream:
        if not os.fork():
            os.dup2(stream.fileno(), 1)
            for path in (Path("/dev/stdout"), Path("/dev/fd/1")):
                write_atomically(path, b"content\n")
                os.write(1, b"after\n")
            os._exit(0)
        os.wait()
    assert log.read_text() == "before\n" + "content\nafter\n" * 2


def test_links_are_followed_and_file_modes_kept(tmp_path):
    target, link, dangling = tmp_path / "real" / "file", tmp_path / "link", tmp_path / "dangling"
    target.parent.mkdir()
    target.write_bytes(b"old")
    target.chmod(0o604)
    link.symlink_to(target)
    dangling.symlink_to(Path("real") / "new")
    umask = os.umask(0o027)
    try:
        for path in (link, dangling):
            write_atomically(path, b"content")
            assert path.is_symlink()
            assert path.read_bytes() == b"content"
    finally:
        os.umask(umask)
    assert {path.name: path.stat().st_mode & 0o777 for path in target.parent.iterdir()} == {"file": 0o604, "new": 0o640}


@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomically(path, b"content")])
def test_errors_name_the_file_and_not_a_temporary_file(write, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    paths = {tmp_path: "Is a directory", tmp_path / "missing" / "file": "No such file", Path("/proc/x"): "No such file"}
    for path, reason in paths.items():
        with pytest.raises(OSError, match=reason) as caught:
            write(path)
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", ".temporary", None, "other")

    write_atomically(tmp_path / ("x" * 250), b"content")
    with pytest.raises(OSError, match=r"File name too long: '.*/y{256}'"):
        write_atomically(tmp_path / ("y" * 256), b"content")
    monkeypatch.setattr("vision_attn.networks.safe.write.TemporaryDirectory", refuse)
    with pytest.raises(PermissionError) as caught:
        write(tmp_path / "file")
    assert str(caught.value) == f"[Errno 13] Permission denied: '{tmp_path / 'file'}'"
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_write_protected_file_is_not_replaced(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o444)
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_keys_and_file_names_are_shown_escaped(tmp_path):
    path, other = tmp_path / "net\x1b[31m\n.pth", tmp_path / "no\x1b.safetensors"
    torch.save({"weight\x1b[2J\n": torch.ones(1), "weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    model = nn.Linear(2, 2)
    texts = [str(va.load_checkpoint_(model, path, strict=False))]
    for load, file in ((va.load_checkpoint_, path), (va.load_checkpoint_, other), (va.load_adapter_, other)):
        with pytest.raises((va.errors.CheckpointError, FileNotFoundError)) as caught:
            load(model, file)
        texts.append(str(caught.value))
    assert all("\\x1b" in text and text.replace("\n", "").isprintable() for text in texts)


def reads_pickles(source):
    """Return True if a source file imports a module for pickles, or calls a function that can read them."""
    readers = r"(c?pickle|pickletools|dill|shelve|marshal)(\.|$)|(torch|np|numpy|jit|torch\.(hub|jit)|joblib)\.load$"
    nodes = list(ast.walk(ast.parse(source)))
    names = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(re.match(readers, name) for name in names)


def test_nothing_else_in_the_package_reads_pickles():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if reads_pickles(path.read_text())}
    assert found == {"networks/safe/pickled.py"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_long_values_of_every_protocol_are_read(protocol, tmp_path):
    """Short values, and files without checksums, are drawn in tests/crossings/test_files.py."""
    content = {"weight": torch.arange(5.0), "raw": bytes(300), "text": "ü" * 300, "big": 2**70}
    torch.save(content, tmp_path / "net.pth", pickle_protocol=protocol)
    found = read_file(tmp_path / "net.pth").content
    assert torch.equal(found["weight"], content["weight"])
    assert (found["text"], found["big"]) == (content["text"], content["big"])


@pytest.mark.parametrize("wrap", [as_zip, as_legacy])
def test_raw_strings_of_python_2_are_read(wrap, tmp_path):
    """NumPy numbers of Python 2 consist of bytes that are no UTF-8 text."""
    number = b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(U\x02f8K\x00K\x01tRU\x08\x9a\x99\x99\x99\x99\x99\xb9?tR"
    long = b"T" + (300).to_bytes(4, "little") + b"\xff" * 300
    content = b"\x80\x02}(U\x05epochK\x07U\x04best" + number + b"U\x04long" + long + b"u."
    (tmp_path / "net.pth").write_bytes(wrap(content))
    assert read_file(tmp_path / "net.pth").content["epoch"] == 7


def test_hidden_folders_of_killed_processes_are_removed(tmp_path):
    if not os.fork():
        with temporary_folder(tmp_path):
            os.kill(os.getpid(), 9)
    os.wait()
    (killed,) = tmp_path.iterdir()
    other = tmp_path / ".vision_attn-other-1-abc"
    other.mkdir()
    with temporary_folder(tmp_path) as running:
        assert not killed.exists()
        write_atomically(tmp_path / "net.safetensors", b"")
        assert running.exists()  # of a process that runs
        assert other.exists()  # of another machine
    assert {path.name for path in tmp_path.iterdir()} == {other.name, "net.safetensors"}
