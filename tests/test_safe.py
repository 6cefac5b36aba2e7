"""Files that are damaged or made to harm are refused at the cost of reading them; files are written whole or not."""

import argparse
import errno
import hashlib
import os
import pty
import re
import struct
import threading
from collections import Counter
from pathlib import Path

import crafted
import numpy as np
import pytest
import torch
from crafted import Call, New, as_legacy, as_zip, pickled, shards
from safetensors.torch import save_file
from torch import nn

import vision_attn as va
from vision_attn.networks.safe import check_writable, read_checkpoint, write_atomically
from vision_attn.networks.safe.write import write_tensors

PACKAGE = Path(va.__file__).parent
OLD = {
    "args": argparse.Namespace(lr=0.1, device=torch.device("cpu"), layers=[2, 2], nested=argparse.Namespace(a=1)),
    "best": np.float64(91.7),
    "numbers": [np.float32(0.5), np.float16(2), np.int64(-3), np.int8(-1), np.uint8(200), np.bool_(True)],
    "big": np.float64(1.5).astype(">f8"),
    "steps": Counter({30: 1}),
    "parts": {"a", 1},
    "digest": b"\x00\xff",
    "shape": torch.Size([2, 3]),
    "type": torch.bfloat16,
}


@pytest.mark.parametrize("legacy", [False, True])
def test_what_old_files_hold_beside_tensors_is_read(legacy, tmp_path):
    shared = torch.arange(6.0)
    tensors = {
        "shared": shared,
        "part": shared[2:4],
        "turned": shared.view(2, 3).T,
        "expanded": shared[:1].expand(5),
        "none": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn):
        tensors[str(dtype)] = torch.ones(3).to(dtype)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {**OLD, **tensors, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "file.pth", _use_new_zipfile_serialization=not legacy)
    read = read_checkpoint(tmp_path / "file.pth")
    assert {name: read[name] for name in OLD} == OLD
    assert [type(value) for value in read["numbers"]] == [float, float, int, int, int, bool]
    for name, tensor in tensors.items():
        again = read[name]
        assert torch.equal(again, tensor)
        assert (again.dtype, again.stride(), type(again)) == (tensor.dtype, tensor.stride(), type(tensor))
    assert read["part"].data_ptr() == read["shared"].data_ptr() + 8
    assert read["model"]._metadata == model.state_dict()._metadata
    optimizer.load_state_dict(read["optimizer"])
    nn.Linear(2, 2).load_state_dict(read["model"])


#: What a pickle asks for, and what is said of it.
REFUSED = {
    "setstate": (New("argparse.Namespace", {"__setstate__": 1}), "for attributes of a Namespace"),
    "another class": (New("collections.OrderedDict", {}), "for a new object"),
    "attributes": (Call("collections.OrderedDict", state={"__class__": 1}), "for attributes of a OrderedDict"),
    "sizes": (crafted.tensor(1, (2**31,), (0,)), "for a tensor of more numbers than the file has"),
    "strides": (crafted.tensor(1, (2,), (1,)), "for a tensor of more numbers than the file has"),
    "numbers": (crafted.number("f8", b"7 bytes"), None),
    "texts": (crafted.number("S8", b"8 bytes "), "for another number of NumPy's"),
    "constructor": (Call("numpy.core.multiarray._reconstruct"), "to run 'numpy.core.multiarray._reconstruct'"),
    "keys": ({0.5: 1}, "for a key of type float"),
    "colliding keys": ({(2**61 - 1) * 5: 1}, "for a key of type int"),
    "escapes": (Call("os.\x1b[2Jsystem"), r"to run 'os.\\x1b\[2Jsystem'"),
    "code": (Call("posix.system", "touch witness"), "to run 'posix.system'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_checkpoint_needs_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, said = REFUSED[name]
    message = f"asks {said}.* save the state dict alone" if said else "or no checkpoint"
    for file in (as_zip(pickled({"a": content}), [bytes(4)]), as_legacy(pickled({"a": content}), ["0"], bytes(12))):
        Path("file.pth").write_bytes(file)
        with pytest.raises(va.CheckpointError, match=message):
            read_checkpoint("file.pth")
    assert os.listdir() == ["file.pth"]


def test_a_list_longer_than_any_checkpoints_is_not_read(tmp_path):
    length = 10_000_000
    listed = b"PK\x03\x04" + bytes(length) + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, length, 4, 0)
    for suffix, content in {".safetensors": length.to_bytes(8, "little") + bytes(length), ".pth": listed}.items():
        (tmp_path / f"file{suffix}").write_bytes(content)
        with pytest.raises(va.CheckpointError, match=r"asks for too many (tensors|parts)"):
            read_checkpoint(tmp_path / f"file{suffix}")


def test_numbers_that_a_file_does_not_have_are_not_what_was_in_the_memory(tmp_path):
    content = pickled({"weight": crafted.tensor(8, (8,), (1,), None)})
    (tmp_path / "file.pth").write_bytes(as_legacy(content, [], bytes(100)))
    with pytest.raises(va.CheckpointError, match="truncated or no checkpoint"):
        read_checkpoint(tmp_path / "file.pth")


@pytest.mark.parametrize("form", ["zip.pth", "legacy.pth", "tensors.safetensors"])
def test_a_file_that_is_cut_or_damaged_is_refused_however_the_reader_fails(form, tmp_path):
    path, state = tmp_path / form, crafted.network().state_dict()
    if form == "tensors.safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip.pth")
    content = path.read_bytes()
    for share in (0.0, 0.01, 0.3, 0.9, 0.999):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(va.CheckpointError, match=r"truncated or no checkpoint.*fetch or save it again"):
            read_checkpoint(path)


@pytest.mark.parametrize("ending", [".pth", ".th", ".pth.tar"])
def test_a_hash_in_the_name_is_verified(ending, tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "plain")
    digest = hashlib.sha256((tmp_path / "plain").read_bytes()).hexdigest()
    length = next(length for length in range(8, 64) if not digest[:length].isdecimal())
    path = (tmp_path / "plain").rename(tmp_path / f"resnet-{digest[:length]}{ending}")
    assert read_checkpoint(path)
    wrong = path.rename(tmp_path / f"resnet-deadbeef{ending}")
    with pytest.raises(va.CheckpointError, match=rf"SHA-256 begins with deadbeef, and it begins with {digest[:8]}"):
        read_checkpoint(wrong)
    for name in ("run-20260131.pth", "resnet-abcdef1.pth", "deadbeef.pth", "step-deadbeef-last.pth"):
        wrong = wrong.rename(tmp_path / name)
        assert read_checkpoint(wrong)


STATE = {name: torch.full((2,), number) for number, name in enumerate("abcde")}

#: What an index says, and what is said of it.
INDEXES = {
    "another shard": ({"e": "model-00001-of-00002.safetensors"}, "'model-00001-.*' and the index differ in e"),
    "not in a shard": (
        {"f": "model-00002-of-00002.safetensors"},
        "'model-00002-.*' and the index differ in f",
    ),
    "missing": ({"f": "model-00003-of-00003.safetensors"}, "expected shards in the same folder, got 'model-00003"),
    "above": ({"f": "../secret.safetensors"}, "expected shards in the same folder, got '../secret"),
    "absolute": ({"f": "/etc/passwd"}, "expected shards in the same folder, got '/etc/passwd'"),
    "inside": ({"f": "folder/a.safetensors"}, "expected shards in the same folder"),
    "folder": ({"f": "folder"}, "expected shards in the same folder"),
    "up": ({"f": ".."}, "expected shards in the same folder"),
    "nothing": ({"f": ""}, "expected shards in the same folder|Invalid name|empty name"),
    "zero": ({"f": "a\0b"}, r"expected shards in the same folder, got 'a\\x00b'"),
    "pipe": ({"f": "pipe.safetensors"}, "expected shards in the same folder"),
    "device": ({"f": "zeros.bin"}, "expected shards in the same folder"),
    "link to nothing": ({"f": "gone.bin"}, "expected shards in the same folder"),
    "itself": ({"f": "model.safetensors.index.json"}, "index.json is truncated or no checkpoint"),
    "no text": ({"f": 3}, "lists no complete checkpoint"),
    "list": ({"f": ["a"]}, "lists no complete checkpoint"),
    "code": ({"f": "code.bin"}, "code.bin asks to run 'posix.system'"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_lists_files_of_its_folder_and_all_that_is_in_them(name, tmp_path):
    changes, message = INDEXES[name]
    (tmp_path / "net" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "net" / "pipe.safetensors")
    (tmp_path / "net" / "zeros.bin").symlink_to("/dev/zero")
    (tmp_path / "net" / "gone.bin").symlink_to("nothing.bin")
    (tmp_path / "net" / "code.bin").write_bytes(as_zip(pickled({"f": Call("posix.system", "echo")}), [bytes(4)]))
    for path in ("secret.safetensors", "net/folder/a.safetensors"):
        save_file({"f": torch.ones(1)}, tmp_path / path)
    shards(tmp_path / "net", "model.safetensors", STATE)
    assert set(read_checkpoint(tmp_path / "net")) == set(STATE)
    shards(tmp_path / "net", "model.safetensors", STATE, **changes)
    with pytest.raises(va.CheckpointError, match=message):
        read_checkpoint(tmp_path / "net")


def test_shards_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    folder, blobs = tmp_path / "snapshots", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    shards(folder, "model.safetensors", STATE)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert set(read_checkpoint(folder)) == set(STATE)


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b'{"weight_map": 3}', b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_index_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(va.CheckpointError, match=r"lists no complete checkpoint.* Fetch all of its files again"):
        read_checkpoint(tmp_path)


def test_a_whole_file_is_read_where_there_is_one_beside_shards(tmp_path):
    shards(tmp_path, "model.safetensors", STATE)
    save_file({"whole": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(read_checkpoint(tmp_path)) == ["whole"]


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint file"):
        read_checkpoint(tmp_path / "nothing.pth")
    with pytest.raises(FileNotFoundError, match=r"nor model\.safetensors .*or pytorch_model\.bin in it"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(step, tmp_path, monkeypatch):
    path, tied = tmp_path / "weights.safetensors", torch.randn(4, 4)
    write_tensors(path, {"one": tied, "other": tied, "turned": tied.T}, {"a": "b"})
    assert all(torch.equal(value, tied.T if key == "turned" else tied) for key, value in read_checkpoint(path).items())

    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, step, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"half of")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_pipes_and_devices_are_written_through_and_stay(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_writable(pipe)  # without opening it, which would end what its reader reads
    write_atomically(pipe, b"content")
    assert pipe.is_fifo()
    reader.join()
    assert found == [b"content"]
    # No device that others use is named here: code that replaced it would harm the machine that tests it.
    terminal, device = pty.openpty()
    write_atomically(Path(os.ttyname(device)), b"content")
    assert os.read(terminal, 7) == b"content"
    assert Path(os.ttyname(device)).is_char_device()
    os.close(terminal)
    os.close(device)


def test_a_pipe_whose_reader_has_left_is_named():
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError) as caught:
        write_atomically(Path(f"/dev/fd/{writing}"), b"content")
    os.close(writing)
    assert caught.value.filename == f"/dev/fd/{writing}"


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_file_that_a_standard_stream_goes_to_is_written_through(mode, tmp_path):
    """As with ``-o /dev/stdout >> log``: if the file were replaced, all that is written to it later would be lost."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with open(log, mode) as stream:
        if not os.fork():
            os.dup2(stream.fileno(), 1)
            for path in (log, Path("/dev/fd/1")):
                write_atomically(path, b"content\n")
                os.write(1, b"after\n")
            os._exit(0)
        os.wait()
    assert log.read_text() == "before\n" * (mode == "a") + "content\nafter\n" * 2


def test_links_are_followed_and_modes_kept(tmp_path):
    target, link, dangling = tmp_path / "real" / "file", tmp_path / "link", tmp_path / "dangling"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link.symlink_to(target)
    dangling.symlink_to(Path("real") / "new")
    target.chmod(0o640)
    umask = os.umask(0o027)
    try:
        for path in (link, dangling):
            write_atomically(path, b"content")
            assert path.is_symlink()
            assert path.read_bytes() == b"content"
        write_atomically(tmp_path / "plain", b"content")
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (target, target.with_name("new"), tmp_path / "plain")}
    assert modes == {"file": 0o640, "new": 0o640, "plain": 0o640}
    target.chmod(0o604)
    write_atomically(link, b"again")
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"again", 0o604)
    assert sorted(path.name for path in target.parent.iterdir()) == ["file", "new"]


def test_names_as_long_as_a_name_may_be(tmp_path):
    path = tmp_path / ("x" * 250)
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    with pytest.raises(OSError, match=r"File name too long: '.*/y{256}'"):
        write_atomically(tmp_path / ("y" * 256), b"content")


@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomically(path, b"content")])
def test_errors_name_the_file_that_was_asked_for(write, tmp_path, monkeypatch):
    """And no temporary file."""
    (tmp_path / "file").write_bytes(b"old")
    paths = {tmp_path: "Is a directory", tmp_path / "missing" / "file": "No such file", Path("/proc/x"): "No such file"}
    paths |= {tmp_path / "file" / "below": "Not a directory"}
    for path, reason in paths.items():
        with pytest.raises(OSError, match=f"{reason}.*") as caught:
            write(path)
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)

    def refused(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", ".temporary", None, "other")

    monkeypatch.setattr("vision_attn.networks.safe.write.TemporaryDirectory", refused)
    with pytest.raises(PermissionError) as caught:
        write(tmp_path / "file")
    assert str(caught.value) == f"[Errno 13] Permission denied: '{tmp_path / 'file'}'"
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_write_protected_file_is_not_replaced(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(PermissionError):
        write_atomically(path, b"content")
    assert path.read_bytes() == b"old"


def test_keys_and_file_names_are_shown_escaped(tmp_path):
    path, other = tmp_path / "net\x1b[31m\n.pth", tmp_path / "no\x1b.safetensors"
    torch.save({"weight\x1b[2J\n": torch.ones(1), "weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    model = nn.Linear(2, 2)
    said = [str(va.load_checkpoint(model, path, strict=False))]
    for load, file in ((va.load_checkpoint, path), (va.load_checkpoint, other), (va.load_adapter_, other)):
        with pytest.raises((va.CheckpointError, FileNotFoundError)) as caught:
            load(model, file)
        said.append(str(caught.value))
    for text in said:
        assert "\\x1b" in text
        assert all(line.isprintable() for line in text.split("\n"))


READERS = re.compile(r"\b((?:import|from) (?:pickle|dill|joblib|shelve|marshal)\w*|(?:torch|np|numpy|jit|hub)\.load\b)")


def test_nothing_else_in_the_package_reads_pickles():
    found = {str(path.relative_to(PACKAGE)): READERS.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path for path, names in found.items() if names} == {"networks/safe/pickled.py"}
