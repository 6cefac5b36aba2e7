"""The program ``vision-attn``: commands, errors in one line, and exit statuses.

The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 128 plus the signal number after an
interruption. If the reader of the output closes the pipe, as ``head`` does, the status is 141 without a message.
Only bugs print a traceback. Help and wrong flags do not import heavy packages.
"""

import difflib
import errno
import io
import os
import pkgutil
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import vision_attn as va
from vision_attn.errors import CheckpointError, Interrupted, VisionAttnError

FAILURE, BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
#: Command that installs the packages of the extras, in all messages.
INSTALL = 'pip install "vision-attn[{0}]", or ".[{0}]" in a clone'
#: For each command, the class of its flags, its function in ``vision_attn``, and its help.
COMMANDS = {
    "train": ("Settings", "recipes.train:train", "Train an image classifier, with or without inserted attention."),
    "evaluate": ("Evaluation", "recipes.train:evaluate", "Evaluate the network of a run."),
    "compare": ("Comparison", "recipes.compare:compare", "Compare blocks over several seeds, with intervals."),
    "predict": ("Prediction", "recipes.predict:predict", "Classify images with a trained network."),
    "export": ("Export", "recipes.export:export", "Export a network for another runtime and check its output."),
    "explore": ("Exploration", "recipes.explore:explore_images", "Write an HTML page with attention maps."),
    "demo": ("Demo", "recipes.demo:demo", "Train networks with and without attention on a small task."),
    "inspect": ("Inspection", "cli:inspect", "Compare the cost of attention at each stage of a network."),
    "env": ("Nothing", "cli:env", "Print versions and the device, for a bug report."),
}
#: Flags that do not exist, with what to type instead.
OTHER_FLAGS = {"--num-heads": "--block-options num_heads=4", "--insert": "--names layer3", "--optimizer": "--opt",
               "--position": "--block-options 'position=Rope()'", "--color-jitter": "--aa",
               "--block": "--variants 'NAME=--block …'", "--seed": "--seeds",
               "--resume": "--variants and --output as before to continue a comparison"}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``, print errors to standard error and return the exit status.

    >>> main(["inspect", "resnet1000"])
    2
    """
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    # Each retry of a download is a warning; the error after the last one has the reason.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    return run_program("vision-attn", lambda: run_command(name, words))


def run_script(name: str, function: Callable[[Any], Any]) -> NoReturn:
    """Run a recipe as a program, with the flags of its command."""
    sys.exit(run_program(name, lambda: run_command(name, sys.argv[1:], function)))


def run_command(name: str, words: Sequence[str], function: Callable[[Any], Any] | None = None) -> int:
    """Parse the flags of a command and call its function, or ``function`` instead; or list all commands."""
    if name == "--version":
        print(f"vision-attn {va.__version__}")
    elif name in COMMANDS:
        from vision_attn.recipes import settings

        kind, path, text = COMMANDS[name]
        file = Path(__file__).parent / f"{path.partition(':')[0].replace('.', '/')}.py"
        about = f"{text}\n\nTo change what it does, copy this file: {file}"
        parsed = parse(getattr(settings, kind), words, name, about)
        settings.check_values(parsed)
        (function or pkgutil.resolve_name(f"vision_attn.{path}"))(parsed)
    else:
        status = 0 if name in ("-h", "--help") else BAD_USAGE
        lines = ["usage: vision-attn COMMAND [--help] …", ""]
        lines += [f"  {command:<10}{text}" for command, (_, _, text) in COMMANDS.items()]
        print("\n".join(lines), file=sys.stderr if status else sys.stdout)
        if name and status:
            raise ValueError(f"unknown command {name!r}.{did_you_mean(name, COMMANDS)}")
        return status
    return 0


def parse(kind: Any, words: Sequence[str], name: str, about: str = "", default: Any = None) -> Any:
    """Parse a command line; raise one-line errors that name the flags as they are typed."""
    import tyro

    from vision_attn.recipes import runs, settings

    prog, text, words = f"vision-attn {name}", io.StringIO(), hyphenate(words)
    for field in (one for one in fields(kind) if str(one.type).startswith("tuple")):  # only the last one would be read
        if [word.partition("=")[0] for word in words].count(flag := settings.flag(field.name)) > 1:
            raise ValueError(f"{flag} was passed twice. Pass it once, followed by all values")
    try:
        with redirect_stderr(text):
            found, unknown = tyro.cli(
                kind, prog=prog, description=about, args=words, default=default, return_unknown_args=True
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{describe_box(text.getvalue())}. See {prog} --help") from None
    if unknown:
        flags = [settings.flag(field.name) for field in fields(kind) if "Suppress" not in str(field.type)]
        word = unknown[0].partition("=")[0]
        use = OTHER_FLAGS.get(word, "")
        other = f" Use {use}" if use.partition(" ")[0] in flags else did_you_mean(word, flags)
        raise ValueError(f"unknown {'flag' if word[0] == '-' else 'argument'} {word}.{other or f' See {prog} --help'}")
    other_run = getattr(found, "config", None) or getattr(found, "resume", None)
    if default is None and other_run not in (None, "auto"):  # again, with the settings of that run as defaults
        typed = [word.partition("=")[0] for word in words]
        return parse(kind, words, name, about, runs.read_settings(Path(other_run), typed, kind))
    return found


def hyphenate(words: Iterable[str]) -> list[str]:
    """Write flags with hyphens: tyro also accepts underscores."""
    return [re.sub("^--[^=]+", lambda match: match[0].replace("_", "-"), word) for word in words]


def describe_box(box: str) -> str:
    """Return the message in a box of tyro as one line."""
    text = " ".join(re.sub(r"[│|╭╰╮╯+─]|-{3,}", " ", box).split())
    if match := re.search(r"Error parsing (\S+): (.*?)( Argument helptext| For full|$)", text):
        kind, quoted = "a whole number" if "INT" in text else "a number", re.findall("'([^']*)'", match[2])
        return f"{match[1].split('/')[-1]} must be {kind}, got {quoted[-1] if quoted else 'another value'!r}"
    if match := re.search(r"Missing value for argument '(\S+)'", text):
        return f"{match[1].split('/')[-1]} requires a value"
    match = re.search(r"Missing from [^:]*: (?:-\w \S+ )?(\S+)", text)
    return f"{match[1]} is required" if match else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the most similar known names, to append to an error; empty if none is similar."""
    close = difflib.get_close_matches(name, list(known))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def print_escaped(text: object) -> None:
    """Print lines with escaped control characters, which names and text from files may contain."""
    print("\n".join(map(escape, str(text).split("\n"))), flush=True)


def escape(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def print_warning(program: str, message: Warning | str, *where: Any, **options: Any) -> None:
    """Print a warning to standard error in one line, without the source line that Python adds."""
    print(f"{program}: warning: {escape(' '.join(str(message).split()))}", file=sys.stderr)


def run_program(name: str, run: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Run a program, print expected errors and warnings in one line, and return the exit status.

    >>> run_program("count", lambda: print(1 + 1))
    2
    0
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Unsupported characters are escaped. With line buffering, print raises errors of the stream.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(print_warning, name)
            return run() or 0
    except KeyboardInterrupt as stop:
        if message := str(stop) if isinstance(stop, Interrupted) else interrupted:
            print(f"{name}: {message}", file=sys.stderr)  # of several processes, only one has a message
        return 128 + stop.signal if isinstance(stop, Interrupted) else INTERRUPTED
    except Exception as error:
        with suppress(ValueError):  # not the main thread: torch raises errors of worker processes in its signal handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if isinstance(error, BrokenPipeError) and error.filename is None:  # the reader closed standard output
            return BROKEN_PIPE
        if (reason := describe_error(error)) is None:
            traceback.print_exc()
        # All processes of torchrun have the same error until they are connected: one of each machine prints.
        elif os.environ.get("LOCAL_RANK", "0") == "0" or is_distributed():
            print(f"{name}: error: {reason}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    finally:
        if is_distributed():  # its threads may abort the process at exit
            sys.modules["torch.distributed"].destroy_process_group()
        try:
            print(end="", flush=True)
        except OSError:  # prevents a second error when Python flushes it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_distributed() -> bool:
    """Return True if this process is connected to other processes."""
    return "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()


def describe_error(error: Exception) -> str | None:
    """Return the message of an error that a user can fix, or None for a bug.

    >>> describe_error(ValueError("se, seed 0 failed: SiteError: names: no module matches layer9"))
    'se, seed 0 failed: SiteError: --names: no module matches layer9'
    """
    text = str(error)
    if text.startswith("Caught ") and "in DataLoader worker" in text:  # with the traceback of the worker
        text = text.rstrip().rpartition("\n")[2].partition(": ")[2]
    # Only checkpoint errors have several lines, which are escaped.
    message = text if isinstance(error, CheckpointError) else " ".join(map(escape, text.split("\n")))
    names = "names|stages|model|block|pattern|dynamic|output"  # of the library
    message = re.sub(rf"(^|Error: )({names})(?=[: ])", r"\1--\2", message)
    if isinstance(error, OSError) and error.strerror and error.filename:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{error.strerror}: {error.filename!r}{'. Free disk space, or write to another disk' * full}"
    if isinstance(error, ImportError) and "pip install" not in message:
        if not isinstance(error, ModuleNotFoundError) or str(error.name).startswith("vision_attn"):
            return None
        return f"the package {error.name} is not installed. Install it: {INSTALL.format('train,export')}"
    if message.startswith("DataLoader worker"):  # torch raises it in whichever line of the main process runs
        return f"a worker process ended. Use fewer --workers. Cause: {message}"
    if "by peer" in message and is_distributed():
        return "another process ended, which prints its error"
    # torch is not imported here, so its error types are compared by name
    memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in message
    expected = isinstance(error, (ValueError, VisionAttnError, OSError, ImportError)) or memory
    return message or type(error).__name__ if expected else None


def inspect(flags: Any) -> None:
    """Print the cost of attention at each stage of a network."""
    from vision_attn.networks.models import create_model
    from vision_attn.recipes.settings import parse_option

    model: Any = create_model(flags.model)
    channels, *size = model.pretrained_cfg["input_size"]
    shape = (1, channels, *(flags.img_size * 2 if len(flags.img_size) == 1 else flags.img_size or size))
    pattern = parse_option(flags.pattern, "--pattern")
    print_escaped(va.insert_(model, dry_run=True, example_input=shape, pattern=pattern))


def env(flags: Any) -> None:
    """Print the software and the hardware."""
    from vision_attn.recipes.runs import describe_environment

    print_escaped("\n".join(f"{name}: {value}" for name, value in describe_environment().items()))
