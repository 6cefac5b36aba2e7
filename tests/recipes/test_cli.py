"""Command line: output, exit status and error messages."""

import csv
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

import vision_attn as va
from vision_attn import cli, errors
from vision_attn.networks.checkpoints import folder
from vision_attn.networks.models import create_model
from vision_attn.networks.models.registry import weights_folder
from vision_attn.recipes.explore import open_network
from vision_attn.recipes.runs import read_settings
from vision_attn.recipes.settings import Exploration, Settings

RUN = weights_folder() / "resnet20_attention_cifar100"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a network without blocks, which is loaded faster than ``RUN``."""
    return va.save_model(create_model("tiny"), tmp_path_factory.mktemp("saved"))


def run(capsys, *arguments):
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:  # tyro exits after help and for unknown flags
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def succeed(capsys, *arguments):
    """Run a command that prints no error, and return its output."""
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def train(capsys, image_folder, tmp_path, *arguments):
    small = ["--model", "tiny", "--epochs", "1", "--batch-size", "16", "--device", "cpu"]
    return run(capsys, "train", "--data", image_folder, *small, "--output", tmp_path / "run", *arguments)


def test_help_and_a_wrong_flag_are_fast_and_offline_and_the_package_is_executable():
    code = """
import runpy, sys
sys.addaudithook(lambda event, arguments: print(event) if event.startswith("socket.") else None)
import vision_attn
assert not {"torch", "tyro", "numpy", "timm", "matplotlib", "einx"} & sys.modules.keys()
from vision_attn import cli
for arguments in [["--help"], ["--version"], *([name, "--wrong"] for name in cli.COMMANDS)]:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == (2 if "--wrong" in arguments else 0), arguments
    heavy = {"torch", "timm", "matplotlib", "einx", "accelerate", "sklearn", "torchvision", "keras"}
    assert not heavy & sys.modules.keys(), arguments
sys.argv = ["", "--version"]
runpy.run_module("vision_attn", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"vision-attn {va.__version__}"), done.stderr
    assert set(re.findall(r"^socket\.\w+$", done.stdout, flags=re.MULTILINE)) <= {"socket.gethostname"}


def test_without_a_command_all_commands_are_listed(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert all(f"  {name:<10}" in err for name in cli.COMMANDS)
    assert run(capsys, "--help")[:2] == (0, err)
    code, _, err = run(capsys, "trian")
    assert (code, err.splitlines()[-1]) == (2, "vision-attn: error: unknown command 'trian'. Did you mean 'train'?")


INVALID = [
    (["train", "--lable-smoothing=0.1"], 2, "--label-smoothing"),
    (["train", "--names", "layer9"], 2, "error: --names: no module matches 'layer9'"),
    (["train", "--epochs", "0"], 2, "error: --epochs must be at least 1, got 0"),
    (["train", "--epochs", "many"], 2, "error: --epochs must be a whole number, got 'many'. See vision-attn train"),
    (["train", "--lr", "fast"], 2, "error: --lr must be a number, got 'fast'"),
    (["demo", "--output"], 2, "error: --output requires a value"),
    (["demo", "-x"], 2, "error: unknown flag -x. See vision-attn demo --help"),
    (["train", "--num-heads", "4"], 2, "error: unknown flag --num-heads. Use --block-options num_heads=4"),
    (["train", "--names", "a", "--names=b"], 2, "error: --names was passed twice. Pass it once, followed by all v"),
    (["train", "--block_options", "a=1", "--block-options", "b=2"], 2, "error: --block-options was passed twice"),
    (["predict", "SAVED", "IMAGE", "--seed", "1"], 2, "error: unknown flag --seed. See vision-attn predict"),
    (["explore", "SAVED", "IMAGE", "-o", "IMAGE"], 2, "error: --output must not be one of the images"),
    (["train", "--insert", "layer3"], 2, "error: unknown flag --insert. Use --names layer3"),
    (["train", "layer3"], 2, "error: unknown argument layer3"),
    (["train", "--resume", "empty"], 2, "error: empty is not the folder of a run: it has no config.json"),
    (["train", "--config", "images"], 2, "error: images is a folder of images, not the folder of a run"),
    (["train", "--resume", "nothere"], 1, "error: nothere: no such run"),
    (["train", "--output", "broken.png"], 2, "error: --output: broken.png is a file"),
    (["evaluate", "nothere"], 1, "error: nothere: no such run"),
    (["evaluate", "images"], 2, "images is a folder of images, not the folder of a run. The order is evaluate RUN"),
    (["evaluate"], 2, "error: RUN is required"),
    (["predict", "images", "SAVED"], 2, "not the folder of a run. The order is predict RUN IMAGE"),
    (["predict", "SAVED"], 2, "error: IMAGE is required"),
    (["predict", "SAVED", "IMAGE", "-o", "IMAGE"], 2, "error: --output must not be one of the images"),
    (["export", "IMAGE"], 2, "error: --output is required"),
    (["export", "IMAGE", "-o", "net.onnx"], 2, "is a file, not the folder of a run. The order is export RUN"),
    (["export", "SAVED", "-o", "net.pth"], 2, "output must end in .onnx or .pt2, got 'net.pth'"),
    (["export", "SAVED", "-o", "net.pt2", "--dynamic", "width"], 2, "--dynamic must contain batch or size, got 'w"),
    (["export", "SAVED", "-o", "broken.png/net.pt2"], 1, "'broken.png'"),
    (["export", "SAVED", "-o", "a.pt2", "--img-size", "1", "2", "3"], 2, "--img-size must be one or two numbers"),
    (["compare", "--variants", "plain"], 2, "error: --variants: expected at least 2 distinct names, got plain"),
    (["compare", "--variants", "plain", "a/b=attention"], 2, "error: --variants: expected …'a/b=attention'"),
    (["compare", "--seeds", "1", "1"], 2, "error: --seeds must be distinct"),
    (["compare", "--block", "se"], 2, "error: unknown flag --block. Use --variants 'NAME=--block …'"),
    (["compare", "--resume", "auto"], 2, "error: unknown flag --resume. Use --variants and --output as before"),
    (["compare", "--sead", "3"], 2, "error: unknown flag --sead. Did you mean '--seeds' or"),
    (["compare", "-o", "images"], 2, "error: --output: … is a folder of images"),
    (["compare", "--config", "old", "-o", "old"], 2, "error: --output: …old is the folder of a run"),
    (["train", "--output", "/proc/nothing"], 1, "/proc/nothing"),  # not writable for root
    (["predict", "SAVED", "empty"], 1, "empty contains no images"),
    (["predict", "SAVED", "missing.png"], 1, "missing.png does not exist"),
    (["evaluate", RUN], 2, "error: --data is required"),
    (["explore", "resnet20", "IMAGE"], 2, "error: MODEL: resnet20 has no attention modules…vit_tiny_patch16_224"),
    (["inspect", "resnet999"], 2, "--model: 'resnet999' does not exist. Did you mean 'resnet"),
    (["train", "--stages", "-1", "--block", "cbma"], 2, "got 'cbma'. Did you mean 'cbam'"),
]


def label(value):
    return " ".join(map(str, value[:4])) if isinstance(value, list) else ""


@pytest.mark.parametrize(("arguments", "code", "message"), INVALID, ids=label)
def test_invalid_input_is_an_error(capsys, image_folder, saved, tmp_path, monkeypatch, arguments, code, message):
    """The error has one line, and no files are written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "settings.json").write_text(json.dumps({"model": "tiny", "data": str(image_folder)}))
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "images").symlink_to(image_folder)
    paths = {"IMAGE": image_folder / "val" / "red" / "0.png", "SAVED": saved}
    name, *rest = (paths.get(word, word) for word in arguments)
    given = ["--data", image_folder] if name in ("train", "compare") else []
    given += ["--model", "tiny", "--epochs", "1", "--device", "cpu", "--output", tmp_path / "run"] if given else []
    found, out, err = run(capsys, name, *given, *rest)
    assert (found, "Traceback" in err, "epoch 1/" in out) == (code, False, False), err
    assert all(part in err for part in message.split("…"))
    assert err.startswith("vision-attn: ")
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"broken.png", "empty", "old", "images"}


def test_output_is_escaped_for_any_encoding(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    cli.print_escaped("a\x07\nb")
    assert sys.stdout.buffer.getvalue() == b"a\\x07\nb\n", "printed at once"
    assert cli.main(["inspect", "resnet20"]) == 0
    print("8×8 ± 2 … naïve ŵ 木", flush=True)
    assert sys.stdout.buffer.getvalue().endswith(rb"8\xd78 \xb1 2 \u2026 na\xefve \u0175 \u6728" + b"\n")


ERRORS = [
    (ValueError("no 'a\x1b[2J\nall is well\r'"), 2, "error: no 'a\\x1b[2J all is well\\r'"),
    (errors.CheckpointError("one\n", "two\x07"), 1, "error: one\\n\ntwo\\x07"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 TB"), 1, "error: DefaultCPUAllocator: can't "),
    (MemoryError(), 1, "error: MemoryError"),
    (errors.DataError("Caught DataError in DataLoader worker process 0.\n a\nDataError: a.png\n"), 1, "error: a.png\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (errors.Interrupted(signal.SIGTERM, "saved after step 2"), 143, "saved after step 2\n"),
    (AssertionError("a bug"), 1, None),
    (ModuleNotFoundError("No module", name="vision_attn.gone"), 1, None),
    (ModuleNotFoundError("No module", name="x"), 1, "error: the package x is not installed. Install it: pip install "),
    (ImportError("figures require x: pip install 'x'"), 1, "error: figures require x: pip install 'x'\n"),
    (ImportError("cannot import name 'x'"), 1, None),
]


@pytest.mark.parametrize(("error", "code", "said"), ERRORS)
def test_an_error_is_one_line_without_control_characters(capsys, error, code, said):
    assert cli.run_program("vision-attn", mock.Mock(side_effect=error)) == code
    assert capsys.readouterr().err.startswith(f"vision-attn: {said}" if said else "Traceback")


def test_a_worker_that_ends_after_an_error_does_not_replace_it(capsys):
    class LateError(RuntimeError):
        def __str__(self):
            os.kill(os.getpid(), signal.SIGCHLD)
            return "DataLoader worker exited"

    before = signal.signal(signal.SIGCHLD, mock.Mock(side_effect=RuntimeError("DataLoader worker is killed")))
    try:
        assert cli.run_program("vision-attn", mock.Mock(side_effect=LateError)) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert capsys.readouterr().err.endswith("Use fewer --workers. Cause: DataLoader worker exited\n")


FULL = r"vision-attn: error: .*No space left on device.*\n"


@pytest.mark.parametrize("words", ["--version", "train --help"])
def test_a_closed_pipe_ends_the_program_without_a_message_and_a_full_output_is_an_error(words):
    """As in ``vision-attn … | head``: no traceback, and no "Exception ignored" at exit."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vision_attn", *words.split()]
    for output, status, message in ((writing, 141, r""), (os.open("/dev/full", os.O_WRONLY), 1, FULL)):
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
        os.close(output)
        assert (done.returncode, bool(re.fullmatch(message, done.stderr))) == (status, True), done.stderr


UNWRITABLE = [
    (["predict", "SAVED", "IMAGE", "-o"], "/nothing/here"),
    (["explore", RUN, "IMAGE", "-o"], "/nothing/here"),
    (["export", "SAVED", "-o"], "/proc/net.onnx"),
]


@pytest.mark.parametrize(("words", "output"), UNWRITABLE, ids=label)
def test_an_unwritable_output_is_reported_before_the_run(capsys, image_folder, saved, monkeypatch, words, output):
    paths = {"IMAGE": image_folder / "val" / "red" / "0.png", "SAVED": saved}
    model = folder.load_model(paths.get(words[1], RUN))
    model.register_forward_pre_hook(lambda *given: pytest.fail("the network runs before the output is checked"))
    monkeypatch.setattr(va, "load_model", lambda path, **options: model)
    code, out, err = run(capsys, *(paths.get(word, word) for word in words), output)
    assert (code, err.count("\n")) == (1, 1), err
    assert f": '{output}" in err
    assert "red" not in out


def test_flags_override_the_settings_of_another_run(tmp_path):
    other = Settings(names=("layer3", "layer2"), lr=0.3, channels_last=True, seed=3, epochs=9)
    (tmp_path / "settings.json").write_text(json.dumps(asdict(other), default=str))

    def parsed(*words):
        return cli.parse(Settings, words, "train")

    found = parsed("--config", str(tmp_path), "--names", "layer1", "--no-channels-last", "--lr", "None")
    assert (found.names, found.lr, found.channels_last, found.seed) == (("layer1",), None, False, 3)
    assert found.output is None
    found = parsed(f"--config={tmp_path / 'settings.json'}", "--epochs", "30", "--hflip", "0.5", "-o", "x")
    assert (found.epochs, found.lr, str(found.output)) == (30, 0.3, "x"), "30 epochs are the default"
    assert parsed("--resume", "auto", "-o", "x").resume == "auto"
    assert parsed("--config", str(tmp_path), "--stages", "-1").names == ()


@pytest.mark.parametrize("name", ["train", "compare", "predict", "export", "explore", "demo"])
def test_every_recipe_is_a_program_whose_help_names_the_file_to_copy(capsys, monkeypatch, name):
    file = Path(cli.__file__).with_name("recipes") / f"{name}.py"
    monkeypatch.setattr(sys, "argv", ["copy.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(file), run_name="__main__")
    out = "".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    assert (end.value.code, out.startswith(f"usage: vision-attn {name} ")) == (0, True)
    assert f"copythisfile:{file}" in out.replace(" ", "")


def test_a_run_is_trained_evaluated_used_and_extended(capsys, image_folder, tmp_path):
    torch.save(create_model("tiny", num_classes=3).state_dict(), tmp_path / "zoo.pth")
    given = "--weights", tmp_path / "zoo.pth", "--names", "layer2", "--freeze-backbone"
    code, out, err = train(capsys, image_folder, tmp_path, *given)
    assert (code, err) == (0, "")
    assert all(text in out for text in ("layer2.2  AttentionBlock2d", "14 tensors loaded", "7 keys newly initialized"))
    logged = out.splitlines()[out.splitlines().index(f"best epoch, 1, in {tmp_path / 'run' / 'model'}:") + 1]
    assert "\r" not in out

    out = succeed(capsys, "evaluate", tmp_path / "run")
    assert logged in out.splitlines()
    images, exif = (tmp_path / "turned.png", image_folder / "val" / "blue"), Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees clockwise
    Image.open(image_folder / "val" / "red" / "1.png").save(images[0], exif=exif)
    out = succeed(capsys, "predict", tmp_path / "run", *images, "--top", 2, "-o", tmp_path / "found.csv")
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert len(out.splitlines()) == len(rows) == 9
    model = va.load_model(tmp_path / "run")
    with torch.no_grad(), Image.open(images[0]) as image:
        scores = model(model.transform(image)[None]).softmax(1)[0]
    assert float(rows[0]["probability_1"]) == pytest.approx(float(scores.max()), abs=1e-5)
    assert list(rows[0])[-1] == "probability_2"

    before = read_settings(tmp_path / "run", ())
    out = succeed(capsys, "train", f"--resume={tmp_path / 'run'}", "--epochs", 2)
    assert "resumed at epoch 2, step 0" in out
    assert "epoch 2/2: train loss" in out
    assert read_settings(tmp_path / "run", ()) == replace(before, epochs=2)


def test_predict_prints_class_names_in_the_order_of_the_network(capsys, image_folder, tmp_path):
    model, names = create_model("tiny", num_classes=3), ("zebra", "ant", "mule")
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data.copy_(torch.tensor([0.2, 0.5, 0.3]).log())
    va.save_model(model, tmp_path / "run", classes=names)
    image = image_folder / "val" / "red" / "1.png"
    out = succeed(capsys, "predict", tmp_path / "run", image, "-o", tmp_path / "found.csv")
    assert out == f"{image}: ant 50.0 %, mule 30.0 %, zebra 20.0 %\n"
    (row,) = csv.DictReader((tmp_path / "found.csv").read_text().splitlines())
    assert [row[f"class_{rank}"] for rank in (1, 2, 3)] == ["ant", "mule", "zebra"]
    assert [float(row[f"probability_{rank}"]) for rank in (1, 2, 3)] == pytest.approx([0.5, 0.3, 0.2], abs=1e-5)


def test_all_damaged_images_are_listed_before_the_network_runs(capsys, image_folder, saved, tmp_path):
    good, broken = image_folder / "val" / "red", tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    for command in (["predict", saved], ["explore", RUN, "-o", tmp_path / "page.html"]):
        code, out, err = run(capsys, *command, broken, good)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"vision-attn: error: 1 images cannot be read: {broken} (")
    assert not (tmp_path / "page.html").exists()


def test_predictions_do_not_depend_on_the_batch_and_each_image_is_read_once(capsys, image_folder, saved, tmp_path):
    images, tables = image_folder / "val" / "red", []
    for size in (1, 3):
        file = tmp_path / f"{size}.csv"
        words = images, images / "0.png", "--batch-size", size, "-o", file
        assert succeed(capsys, "predict", saved, *words).count("\n") == 8
        tables.append(list(csv.DictReader(file.read_text().splitlines())))
    for one, other in zip(*tables, strict=True):
        assert (one["image"], one["class_1"]) == (other["image"], other["class_1"])
        assert float(one["probability_1"]) == pytest.approx(float(other["probability_1"]), abs=1e-5)


#: A program in which some packages are not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
find, names = PathFinder.find_spec, sys.argv.pop(1).split(",")
PathFinder.find_spec = lambda name, *where: None if name.split(".")[0] in names else find(name, *where)
from vision_attn.cli import main
sys.exit(main())
"""


PACKAGES = [
    ("matplotlib", "demo", "train,export"),
    ("accelerate", "train --data IMAGE --model resnet20", "train,export"),
    ("accelerate", "train --help", None),
    ("accelerate,joblib,matplotlib,sklearn,scipy", "explore RUN IMAGE -o page.html", None),
    ("accelerate,joblib,matplotlib,sklearn,scipy", "predict RUN IMAGE", None),
    ("onnxruntime", "export RUN -o net.onnx", "export"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "words", "needed"), PACKAGES)
def test_commands_need_only_their_packages(image_folder, tmp_path, missing, words, needed):
    places = {"RUN": str(RUN), "IMAGE": str(image_folder / "val" / "red" / "0.png")}
    line = [sys.executable, "-c", WITHOUT, missing, *(places.get(word, word) for word in words.split())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
    if needed is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.endswith(f'Install it: pip install "vision-attn[{needed}]", or ".[{needed}]" in a clone\n')


def test_pretrained_weights_that_cannot_be_downloaded_name_the_alternative(capsys, image_folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_VERBOSITY", "")
    monkeypatch.delenv("HF_HUB_VERBOSITY")

    def offline(*given, **options):
        assert os.environ["HF_HUB_VERBOSITY"] == "error", "one line for each retry"
        raise LocalEntryNotFoundError("cannot find the requested files in the local cache")

    monkeypatch.setattr(timm, "create_model", offline)
    code, _, err = run(capsys, "train", "--data", image_folder, "--model", "resnet18", "--pretrained")
    assert (code, err.count("\n")) == (1, 1)
    assert "the pretrained weights of resnet18 cannot be downloaded. " in err
    assert "or load a downloaded file (--weights" in err


def test_env_prints_versions_and_device_to_copy(capsys):
    found = dict(line.split(": ", 1) for line in succeed(capsys, "env").splitlines())
    assert (found["vision_attn"], found["torch"], found["threads"]) == (va.__version__, torch.__version__, "1")
    assert {"torchvision", "timm", "einx", "python", "os", "cpu", "gpu"} < found.keys()
    assert "`vision-attn env`" in (Path(va.__file__).parents[1] / ".github/ISSUE_TEMPLATE/bug.yml").read_text()


class Mine(va.AttentionBlock2d):
    """A custom block."""


class Other(va.AttentionBlock2d):
    """Another custom block."""


@pytest.mark.slow
def test_a_run_with_a_custom_block_is_used_with_its_class(capsys, image_folder, tmp_path):
    block, image = ("--block", "test_cli:Mine"), image_folder / "val" / "red" / "0.png"
    assert train(capsys, image_folder, tmp_path, "--names=layer2", "--block-options=num_heads=4", *block)[0] == 0
    commands = {"evaluate": [], "predict": [image], "explore": [image, "-o", tmp_path / "page.html"]}
    for name, more in {**commands, "export": ["-o", tmp_path / "net.pt2"]}.items():
        words = [name, tmp_path / "run", *more]
        code, _, err = run(capsys, *words)
        assert code != 0
        assert re.search("--block (test_cli|MODULE):Mine", err), err
        assert run(capsys, *words, *block)[0] == 0


def test_custom_blocks_of_several_classes_are_given_by_name(capsys, image_folder, tmp_path):
    model = create_model("resnet20")
    for stage, block in (("layer1", Other), ("layer2", Mine)):
        va.insert_(model, block, names=stage, num_heads=2, example_input=(1, 3, 32, 32))
    image = image_folder / "val" / "red" / "0.png"
    predict = ["predict", va.save_model(model, tmp_path / "two"), image, "--block", "test_cli:Mine"]
    assert "block=[Mine, Other], or --block MODULE:Mine --block MODULE:Other" in run(capsys, *predict)[2]
    assert run(capsys, *predict, "--block", "test_cli:Other")[0] == 0


@pytest.mark.filterwarnings("default:the run was trained on some")
def test_all_images_of_another_folder_are_evaluated(capsys, image_folder, tmp_path):
    settings = "--data", image_folder / "train", "--names", "layer2", "--val-fraction", 0.25
    code, out, _ = train(capsys, image_folder, tmp_path, *settings)
    assert (code, " and 18 validation images" in out) == (0, True)
    code, evaluated, _ = run(capsys, "evaluate", tmp_path / "run")
    assert (code, "18 images of " in evaluated, out.splitlines()[-3] in evaluated) == (0, True, True)
    for data, count in ((image_folder, 24), (image_folder / "val" / ".." / "train", 18), (image_folder / "val", 24)):
        assert f"{count} images of " in run(capsys, "evaluate", tmp_path / "run", "--data", data)[1]


def test_inspect_shows_the_cost_of_attention_at_each_stage(capsys):
    out = succeed(capsys, "inspect", "resnet20", "--img-size", 16, 32, "--pattern", "va.Window(4)")
    assert out.startswith("dry run of 3 blocks, for an input of 3×16×32\n")
    assert "layer3.2 AttentionBlock2d 64 4×8 32 " in " ".join(out.split())
    assert " 8×8 " in run(capsys, "inspect", "resnet20", "--img-size", 32)[1]


#: Networks, options, and texts in the output and in the page.
EXPLORED = [
    (RUN, ["--names", "layer3.1.*"], "wrote ", "layer3.1.inserted.attn", '"note": ""'),
    ("test_vit", [], "replaced 6 attention modules", "blocks.5.attn", '"note": "The weights of test_vit are random. '),
]


@pytest.mark.parametrize(("model", "options", "printed", "site", "note"), EXPLORED, ids=label)
def test_a_network_is_explored(capsys, image_folder, tmp_path, model, options, printed, site, note):
    images, file = image_folder / "val" / "red", tmp_path / "page.html"
    out, page = run(capsys, "explore", model, images, "-o", file, *options)[1], file.read_text()
    wrote = f"wrote {file} ({len(page.encode()) / 1e3:,.0f} kB)"
    assert (printed in out, wrote in out, site in page, note in page) == (True,) * 4
    assert (note.rpartition('"')[2] in out, "layer3.2.inserted.attn" in page) == (True, False)
    assert ('"title": "0.png"' in page, '["class ' in page) == (True, False), "the page shows the names of classes"
    if model == RUN:
        name, score = re.search(r'"prediction": \[\["([^"]+)", ([\d.]+)', page).groups()
        assert f"0.png: {name} {100 * float(score):.1f} %" in run(capsys, "predict", model, images)[1]


def test_a_network_by_name_has_the_classes_and_the_transform_of_timm():
    found, _ = open_network(Exploration(model="vit_tiny_patch16_224"))
    assert (len(found.classes), found.classes[1]) == (1000, "goldfish, Carassius auratus")
    assert found.transform(Image.new("RGB", (240, 240))).shape == (3, 224, 224)


def test_a_run_leaves_its_process_group_also_after_an_error(tmp_path, capsys):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert cli.main(["train", "--data", str(tmp_path / "nothing"), "--model", "resnet20", "--device", "cpu"]) != 0
    assert not torch.distributed.is_initialized()
    assert "nothing: no such folder" in capsys.readouterr().err
