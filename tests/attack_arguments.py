"""Wrong arguments in great number: of the public functions, and of every flag of every command.

``python tests/attack_arguments.py 10000`` tries as many calls and as many command lines. What comes of one is a result,
which for attention is that of ``vision_attn.attention.reference``, or an error of ours, a ``ValueError`` or a ``TypeError``, that
names the argument; of a command line exit code 0, or 1 or 2 and a line.
"""

import contextlib
import inspect
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import conftest  # noqa: F401  the profiles of draws, as a script, too
import numpy as np
import torch
from attack_files import TooLongError, too_long
from PIL import Image
from test_reference import PATTERNS, POSITIONS
from torch import nn

import vision_attn as va
from vision_attn.attention import reference
from vision_attn.attention.attend import IMPLEMENTATIONS, IMPLS, attend
from vision_attn.networks import convert
from vision_attn.tools import cli
from vision_attn.tools.comparison.controls import ConvBlock2d, NormBlock2d, SqueezeExciteBlock2d

SECONDS = 30
#: What is handed over in the place of any argument.
ANYTHING = (
    None, True, False, 0, 1, 2, 3, -1, 2**31, 2**63, 10**30, 0.0, 0.5, -1.0, 1e300, float("nan"), float("inf"), "",
    "full",
    "0", "2", "layer3", "all", "a\x1b[2J\nb", "\ud800", "\0", b"0", (), [], {}, (2, 3), [1], (1, 2, 3, 4), [None],
    {"a": 1},
    {1: 2}, {0}, object(), int, len, lambda *given, **named: None, range(2), iter([0]), np.int64(2), np.float32(0.5),
    np.ones(2), torch.tensor(2), torch.ones(2), torch.ones(1, 8, 4, 5), torch.float16, torch.int64,
    torch.device("meta"),
    "cpu", "meta", "cuda:99", "einx", nn.ReLU(), nn.Conv2d(3, 8, 1), re.compile("2"), Path("nothing"), va.Window(2),
    va.RelPosTable(), ValueError, va.Attention2d, "mean", "softmax", "after",
)  # fmt: skip
#: What may be right, by the name of the argument.
FITTING = {
    "pattern": [one.pattern for one in PATTERNS.values()],
    "position": [make((3, 3)) for make in POSITIONS.values()],
    "dtype": [torch.float64, torch.float32, torch.bfloat16], "impl": IMPLS, "qk_norm": ["cosine", True],
    "queries": [[(0, 0)], "all", [(99, 0)], [(float("nan"), 0)], [3], ["ab"], [(0, 0, 0)]], "reduce": ["mean", "max"],
    "names": ["0", "*", ["0", "2"]], "stages": [0, -1, 99], "at": ["before", "branch"], "example_input": [(1, 3, 8, 8)],
    "feat_size": [(4, 5), 3], "size": [(4, 3), 2], "kernel_size": [(3, 5), 3],
}  # fmt: skip


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def with_blocks():
    model = network()
    va.insert_(model, names=["0", "2"], num_heads=2, example_input=(1, 3, 8, 8))
    return model


def with_attention():
    return nn.Sequential(nn.Conv2d(3, 8, 1), va.Attention2d(8, 2))


def image():
    return torch.rand(2, 3, 8, 8)


def maps_of(model):
    with torch.no_grad(), va.capture(model) as maps:
        model(image())
    return dict(maps)


#: Every kind of block with parameters of its own.
MAKERS = (
    partial(va.Attention2d, 8, 2), partial(va.AttentionBlock2d, 8, 2), partial(va.LinearAttention2d, 8, 2),
    partial(va.TransformerBlock2d, 8, 2), partial(NormBlock2d, 8),
    partial(va.AugmentedConv2d, 8, 8, num_heads=2, key_channels=4, value_channels=4),
)  # fmt: skip


def block_run(kind, rank):
    """Make a block and run it; of attention on maps it is the definition that says what is right."""

    def make_and_run(**options):
        block = kind(**options)
        parameter = next(block.parameters())
        x = torch.randn(
            2, int(options.get("channels", 8)), *(4, 5, 3)[:rank], device=parameter.device, dtype=parameter.dtype
        )
        with torch.no_grad():
            found = block.eval()(x)
        if kind is va.Attention2d and parameter.dtype in (torch.float32, torch.float64) and not parameter.is_meta:
            check_by_reference(block, x, found, options)

    make_and_run.__signature__ = inspect.signature(kind)
    return make_and_run


def check_by_reference(block, x, found, options):
    """What a block gives, against its definition, as far as that goes."""
    case = next((one for one in PATTERNS.values() if one.pattern == options.get("pattern", "full")), None)
    position = next((n for n, make in POSITIONS.items() if make((3, 3)) == options.get("position")), "other")
    if not case or position not in (None, "convolution") or block.kv_stride != 1 or block.groups != 1:
        return
    if block.context_channels is not None or options.get("qk_norm") == "cosine":
        return
    known = {name: getattr(block, name) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "causal")}
    state = {key: value.numpy() for key, value in block.state_dict().items()}
    right = reference.attention_map(
        x.numpy(), state, scale=block.scale, pattern=case.relations(*x.shape[2:]), position=position, **known
    )
    np.testing.assert_allclose(found.double(), right, atol=1e-4 * max(1.0, abs(right).max()))


def of_pattern(make):
    return lambda **options: va.Attention2d(8, 2, pattern=make(**options))(torch.randn(1, 8, 4, 5))


def of_position(make):
    return lambda **options: va.Attention2d(8, 2, position=make(**options))(torch.randn(1, 8, 4, 5))


def entered(context):
    """Run the model inside of a context of its."""

    def enter(model, **options):
        with torch.no_grad(), context(model, **options):
            model(image())

    return enter


def honest(folder):
    """Each function, and what makes arguments that it takes."""
    sizes = {"channels": 8, "num_heads": 2}
    calls = {kind.__name__: (block_run(kind, rank), sizes.copy) for kind, rank in (
        (va.Attention1d, 1), (va.Attention2d, 2), (va.Attention3d, 3), (va.AttentionBlock1d, 1),
        (va.AttentionBlock2d, 2), (va.AttentionBlock3d, 3), (va.LinearAttention2d, 2), (va.StridedAttention2d, 2),
        (va.TransformerBlock2d, 2),
    )}  # fmt: skip
    one = {"channels": 8}
    for kind in (ConvBlock2d, NormBlock2d, SqueezeExciteBlock2d):
        calls[kind.__name__] = block_run(kind, 2), one.copy
    augmented = {"in_channels": 8, "out_channels": 8, "num_heads": 2, "key_channels": 4, "value_channels": 4}
    calls["AugmentedConv2d"] = block_run(va.AugmentedConv2d, 2), augmented.copy
    for make, options in (
        (va.Window, {"size": 2}), (va.Grid, {"size": 2}), (va.Halo, {"block_size": 2, "halo_size": 1}),
        (va.Neighborhood, {"kernel_size": 3}), (va.Pattern, {"s": 2}),
    ):  # fmt: skip
        maker = partial(va.Pattern, "b n d h (w s) -> (b s) n (h w) d") if make is va.Pattern else make
        run = of_pattern(maker)
        run.__signature__ = inspect.signature(make)
        calls[make.__name__] = run, options.copy
    calls["Pattern of a line"] = of_pattern(lambda line: va.Pattern(line)), {"line": "b n d h w -> b n (h w) d"}.copy
    for make in (va.RelPosDecomposed, va.RelPosTable, va.AbsPos, va.Rope2d, va.SinCos, va.ConditionalPos):
        run = of_position(make)
        run.__signature__ = inspect.signature(make)
        calls[make.__name__] = run, ({"feat_size": (4, 5)} if make is va.AbsPos else {}).copy

    def tokens():
        return {name: torch.randn(2, 2, 6, 4) for name in "qkv"}

    calls["attend"] = attend, tokens
    block = va.Attention2d(8, 2)
    calls["forward"] = block.forward, lambda: {"x": torch.randn(2, 8, 4, 5)}
    calls["attention_weights"] = block.attention_weights, lambda: {"x": torch.randn(2, 8, 4, 5)}
    example = {"names": "0", "example_input": (1, 3, 8, 8), "num_heads": 2}
    calls["insert_"] = va.insert_, lambda: {"model": network(), **example}
    calls["replace_"] = va.replace_, lambda: {"model": network(), **example, "names": "2"}
    weights, adapter, saved, run, file = (folder / name for name in ("w.pth", "a.safetensors", "model", "run", "m.pth"))
    torch.save(network().state_dict(), weights)
    torch.save(nn.MultiheadAttention(8, 2).state_dict(), file)
    va.save_adapter(with_blocks(), adapter)
    resnet = va.models.create_model("resnet20", num_classes=2)
    va.insert_(resnet, stages=-1, num_heads=2)
    va.save_model(resnet, saved, architecture="resnet20")
    blocks = lambda: {"model": with_blocks()}  # noqa: E731
    for function, more in (
        (va.remove_, {}), (va.gates, {}), (va.inserted, {}), (va.freeze_backbone_, {}), (va.freeze_gates_, {}),
        (va.set_gates_, {"value": 0.5}), (va.print_trainable_parameters, {}), (va.parameter_groups, {"lr": 0.1}),
        (va.set_impl_, {"impl": "bmm"}), (va.contribution, {"batch": image()}),
        (va.save_adapter, {"path": folder / "b.safetensors"}), (va.explore, {"images": image(),
        "output": folder / "p.html"}),
        (va.check_optimizer, {"optimizer": torch.optim.SGD(network().parameters())}),
    ):  # fmt: skip
        calls[function.__name__] = function, lambda more=more: {**blocks(), **more}
    for context, more in ((va.capture, {}), (va.use_impl, {"impl": "bmm"}), (va.closed, {})):
        run_in = entered(context)
        run_in.__signature__ = inspect.signature(context)
        calls[context.__name__] = run_in, lambda more=more: {**blocks(), **more}
    layer = lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)  # noqa: E731
    calls["swap_"] = va.swap_, lambda: {"model": nn.Sequential(layer())}
    calls["swap_back_"] = va.swap_back_, lambda: {"model": layer()}
    calls["stage_names"] = va.stage_names, lambda: {"model": resnet}
    calls["timm_layer"] = lambda **options: va.timm_layer(**options)(8), dict
    calls["timm_layer"][0].__signature__ = inspect.signature(va.timm_layer)
    calls["inspect_model"] = (
        va.inspect_model,
        lambda: {"model": network(), "example_input": (1, 3, 8, 8), "batch_size": 2},
    )
    calls["load_checkpoint"] = va.load_checkpoint, lambda: {"model": network(), "path": weights}
    calls["load_adapter_"] = va.load_adapter_, lambda: {"model": network(), "path": adapter}
    calls["load_model"] = va.load_model, lambda: {"folder": saved}
    calls["save_model"] = (
        va.save_model,
        lambda: {"model": resnet, "folder": folder / "again", "architecture": "resnet20"},
    )
    calls["rollout"] = va.rollout, lambda: {"maps": maps_of(with_attention())}
    calls["register_impl"] = va.register_impl, lambda: {"name": f"mine {len(IMPLEMENTATIONS)}", "function": attend}
    classifier = {
        "model": network(),
        "classes": ("a", "b"),
        "input_size": (3, 8, 8),
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
    calls["Classifier"] = va.Classifier, classifier.copy
    from vision_attn.tools.export.export import export_classifier

    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    whole = {"classifier": va.Classifier(**{**classifier, "model": flat}), "output": folder / "e.safetensors"}
    calls["export_classifier"] = export_classifier, whole.copy
    picture = {"images": image(), "attention": maps_of(with_attention())["1"]}
    calls["attention_figure"] = va.figures.attention_figure, picture.copy
    for name in convert.__all__:
        function = getattr(convert, name)
        if name.startswith(("from_", "to_")):
            calls[name] = function, partial(arguments_of_converter, name, function)
    layout = {"source": file, "output": folder / "c.safetensors", "layout": "torch-mha", "num_heads": 2}
    calls["convert_file"] = convert.convert_file, layout.copy
    calls["read_keras_weights"] = convert.read_keras_weights, lambda: {"path": folder / "none.h5"}
    return calls


def arguments_of_converter(name, function):
    known = {
        "from_torch_mha": nn.MultiheadAttention(8, 2),
        "from_torch_encoder_layer": nn.TransformerEncoderLayer(8, 2),
    }
    first, *_ = inspect.signature(function).parameters
    given = va.Attention2d(8, 2) if name.startswith("to_") else known.get(name, nn.Linear(8, 8))
    if name == "from_linear_projections":
        return {**{part: nn.Linear(8, 8) for part in ("query", "key", "value", "output")}, "num_heads": 2}
    return {first: given}


def named_in(names, given, error):
    """Whether an error says which argument it is about."""
    said = str(error)
    if "os.PathLike" in said or isinstance(error, FileNotFoundError):  # as Python says it of a path
        return True
    files = [str(given[name]) for name in names if isinstance(given.get(name), (str, Path, bytes))]
    return any(re.search(rf"\b{re.escape(name.split('_')[0])}", said) for name in names) or any(
        file and (file in said or repr(file)[1:-1] in said) for file in files
    )


@contextlib.contextmanager
def limited(seconds=SECONDS):
    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt_call(calls, rng):
    """One call with one wrong argument or two: what it was, how it ended, and what is wrong with that."""
    name = rng.choice(sorted(calls))
    function, make = calls[name]
    given = make()
    signature = inspect.signature(function).parameters.values()
    takes = [one.name for one in signature if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    takes += [*given.keys() - set(takes)]
    if any(one.kind == one.VAR_KEYWORD for one in signature) and rng.random() < 0.3:
        takes = ["pattern", "position", "num_heads", "key_dim", "dtype", "device", "gate_init", "nothing", "channels"]
    changed = rng.sample(takes, min(len(takes), rng.choice((1, 1, 1, 2))))
    for one in changed:
        given[one] = rng.choice(FITTING[one] if one in FITTING and rng.random() < 0.4 else ANYTHING)
    own = {"normalize", "where", "block", "function"} & {*changed}  # what one's own code does is not ours
    if (
        any(callable(given[one]) for one in own)
        or "push_to_hub" in changed
        or ("weights" in changed and str(given["weights"]) == "pretrained")
    ):
        return name, "skipped", None
    what = f"{name}({', '.join(f'{one}={short(given[one])}' for one in changed)})"
    try:
        with limited(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            function(**given)
        return what, "result", None
    except (ValueError, TypeError, va.VisionAttnError, OSError) as error:
        fine = named_in({*changed, *given}, given, error)
        return what, type(error).__name__, None if fine else f"names no argument: {short(str(error))}{place(error)}"
    except TooLongError:
        return what, "hung", "takes too long"
    except BaseException as error:
        lack = any(words in str(error) for words in ("allocate memory", "Storage size", "overflow"))
        return what, "no memory" if lack else type(error).__name__, None if lack else f"{error!r:.200}{place(error)}"


def place(error):
    """Where in the package an error came from."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "vision_attn/" in one.filename]
    return f" [{frames[-1].filename.rpartition('vision_attn/')[2]}:{frames[-1].lineno}]" if frames else ""


def short(value):
    text = repr(value) if not isinstance(value, torch.Tensor) else f"tensor{tuple(value.shape)}"
    return text if len(text) < 160 else f"{text[:160]}…"


# --- the command line -------------------------------------------------------------------------------------------------

WORDS = (
    "", " ", "0", "1", "2", "-1", "-2", "0.5", "1e-300", "1e300", "nan", "inf", "-inf", "2147483648", "1" + "0" * 30,
    "9" * 5000,
    "0x10", "1,2", "1,2,3,4", "a,b", "full", "Window(4)", "Window(0)", "Grid(99999)", "Window(", "lambda: 0",
    "__import__('os')",
    "pattern=Window(4)", "position=Rope2d()", "gate_init=x", "layer3", "layer9", "*", "[", "**." * 50, "none", "all",
    "auto",
    "\x1b[2J", "a\nb", "a\rb", "木 ŵ", "\udcff", "\0", "/", ".", "/dev/null", "/proc/self/mem", "no/such/file",
    "resnet20",
    "resnet20.cifar10.x", "torchvision:resnet18x", "hfds/", "torch/", "wds/x", "cifar10", "adamw", "cpu", "float16",
    "=",
    "a=", "=a", "plain", "attention", "x=attention --lr 1", "y=plain --lr", "'", "--", "sdpa", "last", "max",
    "rand-m9", "a:b",
)  # fmt: skip
#: The functions that do the work of some commands, which takes minutes: when they are reached, all arguments were
#: right.
WORK = (
    "vision_attn.tools.comparison.compare.carry_out",
    "vision_attn.tools.benchmark.run.times",
    "vision_attn.tools.benchmark.run.check_outputs",
)


def honest_lines(folder):
    """What each command takes."""
    images, generator = folder / "images", np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (images / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(images / split / name / f"{number}.png")
    one, saved = str(images / "val" / "a" / "0.png"), str(folder / "model")
    train = ["--data", str(images), "--model", "resnet20", "--batch-size", "4", "--epochs", "1", "--device", "cpu"]
    return {
        "inspect": ["resnet20", "--batch-size", "2"], "train": [*train, "--output", str(folder / "run"), "--overwrite"],
        "predict": [saved, one], "export": [saved, "--output", str(folder / "x.safetensors")],
        "maps": [one, "--model", saved, "--output", str(folder / "maps")],
        "explore": [one, "--model", saved, "--output", str(folder / "r.html")],
        "convert": [str(folder / "m.pth"), str(folder / "o.safetensors"), "--from", "torch-mha", "--num-heads", "2"],
        "compare": [*train, "--output", str(folder / "compare"), "--seeds", "0"],
        "demo": ["--output", str(folder / "demo")], "bench": ["--rows", "forward", "--shapes", "1,8,4,4", "--rounds",
        "1"],
    }  # fmt: skip


class ReachedError(BaseException):
    """The arguments were right, and the work would begin."""


def reached(*_, **__):
    raise ReachedError


def attempt_line(lines, rng):
    """One command with wrong values of one flag or of several: the same three."""
    name = rng.choice(sorted(lines))
    commands = next(action for action in cli.parser()._actions if action.choices)
    actions = [one for one in commands.choices[name]._actions if one.dest not in ("help", "traceback")]
    line = [name, *lines[name]]
    for action in rng.sample(actions, rng.choice((1, 1, 1, 2, 3))):
        words = [
            rng.choice(WORDS)
            for _ in range(1 if action.nargs is None else 0 if action.nargs == 0 else rng.choice((1, 2)))
        ]
        if action.choices and rng.random() < 0.5:
            words = words and [str(rng.choice([*action.choices]))]
        if not action.option_strings:
            line[1:2] = words
        elif action.nargs is None and rng.random() < 0.5:
            line.append(f"{action.option_strings[-1]}={words[0]}")
        else:
            line += [rng.choice(action.option_strings), *words]
    if {"--pretrained", "--dataset-download"} & {*line} or "pretrained" in line:
        return " ".join(line), "skipped", None
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=rng.choice(("ascii", "latin-1", "utf-8"))) for _ in range(2)]
    what, code = " ".join(map(repr, line)), None
    try:
        with limited(), contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = cli.main(line)
    except ReachedError:
        return what, "runs", None
    except SystemExit as leaving:
        code = leaving.code
    except TooLongError:
        return what, "hung", "takes too long"
    except BaseException as error:
        return what, type(error).__name__, f"{error!r:.200}{place(error)}"
    torch.use_deterministic_algorithms(False)  # as a run may have asked for
    for stream in streams:
        stream.flush()
    said = streams[1].buffer.getvalue().decode(streams[1].encoding)
    errors = [one for one in said.splitlines() if "rror: " in one]
    wrong = "\x1b" in said or "Traceback" in said or (code and len(errors) != 1) or code not in (0, 1, 2)
    return what, f"exit {code}", said[-700:] if wrong else None


@contextlib.contextmanager
def prepared(folder):
    """No memory but 24 GiB, no work of minutes, and a folder of its own to be in."""
    import importlib

    before, held = os.getcwd(), []
    for path in WORK:
        module, _, name = path.rpartition(".")
        module = importlib.import_module(module)
        held.append((module, name, getattr(module, name)))
        setattr(module, name, reached)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for module, name, value in held:
            setattr(module, name, value)


def attack(count, seed=0, kinds=("calls", "lines")):
    """So many cases of either kind: how they ended, and those that ended wrongly."""
    outcomes, wrong = Counter(), []
    with tempfile.TemporaryDirectory() as made, prepared(made):
        folder = Path(made)
        calls, lines = honest(folder), honest_lines(folder)
        for kind, attempt, of in (("calls", attempt_call, calls), ("lines", attempt_line, lines)):
            for number in range(count if kind in kinds else 0):
                what, outcome, why = attempt(of, random.Random(f"{seed} {kind} {number}"))
                outcomes[kind, outcome] += 1
                if why:
                    wrong.append((kind, number, what, outcome, why))
    return outcomes, wrong


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30,) * 2)
    torch.set_num_threads(1)
    number, seed, *kinds = [*sys.argv[1:], "0"] if len(sys.argv) == 2 else sys.argv[1:]
    outcomes, wrong = attack(int(number), int(seed), kinds or ("calls", "lines"))
    for found in wrong:
        print(json.dumps(found))
    for (kind, outcome), number in sorted(outcomes.items()):
        print(f"{kind:<6} {outcome:<20} {number:>7,}")
    sys.exit(bool(wrong))
