"""Read hostile and damaged files, in processes with limited memory and time.

``python tests/attack_files.py`` reads about 280 hostile files and mutations of valid files. The environment variable
``VISION_ATTN_MUTATIONS`` sets the number of mutations. The script fails if a reader runs code or opens other files,
takes more than ten seconds, takes more memory than 200 MB plus four times the file size, or raises an error of another
library.
"""

import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import crafted
import torch
from crafted import Call, Named, New, as_legacy, as_zip, pickled
from safetensors.torch import save_file
from small_networks import convolutions

import vision_attn as va
from vision_attn.networks.checkpoints.adapter import read_adapter
from vision_attn.networks.checkpoints.file_format import Saved
from vision_attn.networks.safe import read_file

FORMS = {"zip": as_zip, "legacy": as_legacy}
#: Functions that checkpoints must not call.
NAMES = (
    "os.system", "subprocess.Popen", "builtins.eval", "__builtin__.eval", "builtins.getattr", "torch.load",
    "torch.storage._load_from_bytes", "torch._utils._rebuild_tensor_v2.__globals__", "argparse.Namespace.__init__",
    "collections.OrderedDict.update", "vision_attn.load_adapter_", "numpy.dtype.__reduce__",
)  # fmt: skip
#: Ways in which a pickle can call or name an object, given its module and name.
WAYS = {
    "call": lambda module, name: pickled({"weight": Call(f"{module}.{name}", "echo")}),
    "stack": lambda module, name: b"\x80\x04" + text(module) + text(name) + b"\x93" + text("echo") + b"\x85R.",
    "inst": lambda module, name: b"\x80\x02(U\x04echoi" + f"{module}\n{name}\n".encode() + b".",
    "obj": lambda module, name: b"\x80\x02(c" + f"{module}\n{name}\n".encode() + b"U\x04echoo.",
    "new": lambda module, name: pickled({"weight": New(f"{module}.{name}", state={"a": 1})}),
    "new with keywords": lambda module, name: b"\x80\x04" + text(module) + text(name) + b"\x93)}\x92.",
    "state": lambda module, name: pickled(Call("collections.OrderedDict", state={"a": Named(f"{module}.{name}")})),
    "value": lambda module, name: pickled({"weight": [Named(f"{module}.{name}")]}),
}
#: False entries of a safetensors header.
LIES = {
    "dtype": ("F64", "BF16", "I64", "U8", "BOOL", "F4", "C64", "Q8", "", None, 7),
    "shape": ([2**62, 4], [0, 2**63], [-1], [1.5], [], None, "2", [2**64], [[2]]),
    "data_offsets": ([8, 0], [0, 2**63], [-8, 0], [4, 12], [0], None, [0.0, 8.0]),
}
#: Sizes and strides of a tensor in a storage with one element.
SIZES = ((2**40,), (2**31, 2**31), (1,) * 70, (-1,), (0, 2**63), (1.0,), ("1",), (2, 2), ())
STRIDES = ((0,), (1,), (-1,), (2**62,), (0, 0), (1,) * 70, ("1",), ())
#: Audit events that a reader of tensors must not cause.
FORBIDDEN = {
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "socket.bind",
    "os.remove", "os.rename", "os.mkdir", "shutil.rmtree", "pickle.find_class", "ctypes.dlopen", "marshal.loads",
    "exec", "pty.spawn", "webbrowser.open", "urllib.Request",
}  # fmt: skip
SECONDS = 10
#: Forbidden audit events during an attempt.
EVENTS = []

NESTED = b"N" + b"\x85" * 300_000
#: Pickles that crash other readers by the hash of nested tuples, or cause them to take unlimited memory or time.
PICKLES = {
    "allocates": pickled({"weight": Call("builtins.bytearray", 2**31)}),
    "nests a key": b"\x80\x02}" + NESTED + b"Ns.",
    "nests a key of a state dict": b"\x80\x02ccollections\nOrderedDict\n]" + NESTED + b"N\x86a\x85R.",
    "nests a storage": b"\x80\x02(U\x07storagectorch\nFloatStorage\n" + NESTED + b"U\x03cpuK\x01tQ.",
}


def share(path, count=150):
    """Write dictionaries that contain each other: there are as many entries of entries as pairs of them."""
    entries = [{"weight": torch.zeros(1)} for _ in range(count)]
    for entry in entries:
        entry |= {f"{number}": other for number, other in enumerate(entries)}
    torch.save(entries[0], path)


def repeat(path, count=20_000):
    """Write a part of a network under many prefixes."""
    first = list(convolutions(3, 8, 8).state_dict().items())[:2]
    torch.save({f"{number}.{key}": value for number in range(count) for key, value in first}, path)


#: State dicts that take memory or time when they are compared with a model.
STATE_DICTS = {
    "long key": lambda path: torch.save({"a." * 50_000: torch.zeros(1)}, path),
    "shared entries": share,
    "prefixes": repeat,
}
ONE, STATE = crafted.tensor(1, (1,), (1,)), pickled({"weight": crafted.tensor(1, (1,), (1,), None)})
#: Files that cause unlimited memory or time. Sparse files have a size of 64 GiB, but take no disk space.
FILES = {
    "compressed.pth": lambda path: crafted.inflated(path, 2**28),
    "nests keys.pth": lambda path: path.write_bytes(as_legacy(STATE + b"\x80\x02]" + NESTED + b"a.")),
    "listed again.pth": crafted.one_part_under_many_names,
    "made again.pth": lambda path: path.write_bytes(as_zip(crafted.again_and_again(ONE, 600_000), [bytes(4)])),
    "claims more.pth": lambda path: path.write_bytes(as_legacy(pickled([crafted.tensor(2**28, (2**28,), (1,), None)]))),
    "lists.index.json": lambda path: path.write_text('{"a":[' + f"{'[' * 100}{']' * 100}," * 10_000 + "0]}"),
    "names.index.json": lambda path: path.write_text(json.dumps({"weight_map": {i: f"{i}" for i in range(350_000)}})),
    "holes.index.json": lambda path: (path.touch(), os.truncate(path, 2**36)),
    # Computing the hash would take minutes.
    "holes-abcdef12.pth": lambda path: (path.touch(), os.truncate(path, 2**36)),
}
#: Options for the block of an adapter that describe large tensors.
OPTIONS = {
    "large table": {"position": "RelPosTable(feat_size=(6000, 6000))"},
    "wide heads": {"key_dim": "800000", "value_dim": "800000"},
    "many heads": {"num_heads": str(10**12), "num_kv_heads": "7", "key_dim": "1", "value_dim": "1"},
}


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def safetensors(header, data=bytes(8)):
    said = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(said).to_bytes(8, "little") + said + data


def hostile(folder):
    contents = {}
    for (way, make), name, (form, wrap) in itertools.product(WAYS.items(), NAMES, FORMS.items()):
        contents[f"{way} {name} {form}.pth"] = wrap(make(*name.rsplit(".", 1)))
    true = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for name, lie in ((name, lie) for name, lies in LIES.items() for lie in lies):
        contents[f"{name} {lie}.safetensors"] = safetensors({"weight": {**true, name: lie}})
    for size, stride in itertools.product(SIZES, STRIDES):
        name = f"tensor {str(size)[:40]} {str(stride)[:40]}.pth"
        contents[name] = as_zip(pickled({"weight": crafted.tensor(1, size, stride)}), [bytes(4)])
    deep = {"list": b"]" * 100_000, "tuple": b"(" * 100_000, "dictionary": b"}" * 100_000, "memo": b"h\x00" * 1000}
    contents |= {f"deep {what}.pth": as_zip(b"\x80\x02" + content + b".") for what, content in deep.items()}
    contents |= {
        "empty.pth": b"", "empty.safetensors": b"", "zeros.pth": bytes(10_000), "ones.pth": b"\xff" * 10_000,
        "long header.safetensors": (2**62).to_bytes(8, "little"), "deep.safetensors": safetensors(b"[" * 100_000),
        "not text.safetensors": safetensors(b"\xff\xfe{}"), "twice.safetensors": safetensors(b'{"a":{},"a":{}}'),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for name, target in {"link": "link.pth", "device": "/dev/zero", "gone": "nothing", "up": "/"}.items():
        (folder / f"{name}.pth").symlink_to(target)
    os.mkfifo(folder / "pipe.pth")
    (folder / "folder.pth").mkdir()
    return dict.fromkeys(folder.iterdir(), read_file)


def harmful(folder, honest):
    for (name, content), (form, wrap) in itertools.product(PICKLES.items(), FORMS.items()):
        (folder / f"{name} {form}.pth").write_bytes(wrap(content))
    for name, write in FILES.items():
        write(folder / name)
    for name, write in STATE_DICTS.items():
        write(folder / f"{name}.loaded")
    (block,) = crafted.read_entry(honest)["blocks"]
    for name, changed in OPTIONS.items():
        blocks = [{**block, "options": block["options"] | changed}]
        crafted.rewrite(honest, folder / f"{name}.safetensors", blocks=blocks)
    readers = {".safetensors": partial(va.load_adapter_, convolutions(3, 8, 8))}
    readers[".loaded"] = partial(va.load_checkpoint_, convolutions(3, 8, 8))
    return {path: readers.get(path.suffix, read_file) for path in folder.iterdir()}


def mutate(content, random):
    """Flip, remove, repeat or set a few bytes of a file, or truncate it."""
    content = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        place, length = random.randrange(len(content) + 1), random.choice((1, 1, 2, 8, 64))
        match random.randrange(5):
            case 0:
                content[place % len(content)] ^= 1 << random.randrange(8)
            case 1:
                del content[place : place + length]
            case 2:
                content[place:place] = content[place : place + length]
            case 3:
                content[place : place + 8] = random.choice((0, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case _:
                content[max(1, len(content) - length) :] = b""
        content = content or bytearray(1)
    return bytes(content)


def comparable(value):
    """Convert a value of a checkpoint to values that can be compared with ``==``."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    value = vars(value) if isinstance(value, Saved) else value
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return [comparable(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def honest(folder):
    """Write valid files in four formats, and return their readers by path."""
    model = convolutions(3, 8, 8)
    content = {"model": dict(model.state_dict()), "epoch": 3, "history": [{"loss": 0.5}], "best": None}
    for form in ("zip", "legacy"):
        torch.save(content, folder / f"{form}.pth", _use_new_zipfile_serialization=form == "zip")
    save_file(model.state_dict(), folder / "plain.safetensors", {"format": "pt"})
    va.insert_(model, names="2", num_heads=2, example_input=(1, 3, 16, 16))
    va.save_adapter(model, folder / "adapter.safetensors")
    return {path: read_adapter if path.stem == "adapter" else read_content for path in sorted(folder.iterdir())}


def read_content(path):
    return dict(read_file(path).content)


def memory():
    """Return the peak virtual memory of this process in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmPeak"))


def attempt(read, path):
    """Read a file, and return the outcome and a description of a failure (empty if there is none)."""
    EVENTS.clear()
    before, size = memory(), path.stat().st_size if path.is_file() else 0
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        read(path)
        outcome = "read"
    except (va.errors.CheckpointError, FileNotFoundError):
        outcome = "refused"
    except KeyboardInterrupt:  # raised by the timer; readers do not catch it
        return "hung", f"more than {SECONDS} s"
    except BaseException as error:
        return "raised", repr(error)[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if EVENTS:
        return "ran", str(EVENTS[:3])
    if memory() - before > 4 * size / 1e6 + 200:
        return "took", f"{memory() - before:.0f} MB of a file of {size} bytes"
    return outcome, ""


def attempt_mutation(read, path, original, number):
    target = path.with_name(f"mutated{path.suffix}")
    target.write_bytes(mutate(path.read_bytes(), random.Random(number)))
    outcome, fault = attempt(read, target)
    if outcome == "read" and path.stem in ("zip", "adapter") and comparable(read(target)) != original:
        return "read as another", "its numbers have changed"
    return outcome, fault


def prepare():
    """Limit the memory of this process, and record forbidden audit events."""
    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.addaudithook(lambda event, args: EVENTS.append((event, repr(args)[:80])) if event in FORBIDDEN else None)


def run_in_fork(tasks):
    """Return the results of tasks in a fork of this process; after a crash, all results are "died"."""
    with ProcessPoolExecutor(1, get_context("fork"), prepare) as pool:
        futures = [pool.submit(task) for task in tasks]
        return [("died", repr(future.exception())) if future.exception() else future.result() for future in futures]


def attack(count):
    """Read all hostile files and ``count`` mutations, and return the failures."""
    results = []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for name in ("hostile", "honest", "harmful"):
            (folder / name).mkdir()
        files, paths = honest(folder / "honest"), hostile(folder / "hostile")
        harm = harmful(folder / "harmful", folder / "honest" / "adapter.safetensors")
        # Imports and codecs for non-ASCII names are loaded before memory is measured.
        for path, read in files.items():
            (folder / path.name).write_bytes(path.read_bytes()[:-1])
            attempt(read, folder / path.name)
        attempt(read_file, folder / "hostile" / "call os.system zip.pth")
        va.load_adapter_(convolutions(3, 8, 8), folder / "honest" / "adapter.safetensors")
        for codec in ("cp437", "raw_unicode_escape"):
            b"a".decode(codec)
        mutations = [partial(attempt_mutation, read, path, comparable(read(path))) for path, read in files.items()]
        tasks = [partial(mutations[number % 4], number) for number in range(count)]
        results += zip(itertools.repeat("mutation"), range(count), run_in_fork(tasks), strict=False)
        tasks = [partial(attempt, read, path) for path, read in paths.items()]
        results += [("hostile", path.name, result) for path, result in zip(paths, run_in_fork(tasks), strict=True)]
        for path, read in harm.items():
            results += [("harmful", path.name, *run_in_fork([partial(attempt, read, path)]))]
    outcomes = Counter((kind, outcome) for kind, _, (outcome, _) in results)
    print(f"{len(paths)} hostile files", *sorted(outcomes.items()), sep="\n")
    return [result for result in results if result[2][1]]


if __name__ == "__main__":
    faults = attack(int(os.environ.get("VISION_ATTN_MUTATIONS", "2000")))
    print(*faults[:50], sep="\n")
    sys.exit(bool(faults))
