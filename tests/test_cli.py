"""The command line: what it says, what it returns, and that it never shows a traceback for a user's mistake."""

import contextlib
import importlib
import io
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vision_attn
from vision_attn import errors
from vision_attn.networks.models import create_model
from vision_attn.tools import cli
from vision_attn.tools.training.run_folder import RunFolder
from vision_attn.tools.training.settings import CHOICES, FIELDS, Settings, type_of


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def small(image_folder):
    return "train", "--data", image_folder, "--epochs", 1, "--batch-size", 16, "--device", "cpu"


def train(capsys, image_folder, tmp_path, *arguments):
    return run(capsys, *small(image_folder), "--output", tmp_path / "run", *arguments)


def test_the_issue_of_the_library_in_one_command(capsys, image_folder, tmp_path):
    torch.manual_seed(0)
    torch.save(create_model("resnet20", num_classes=3).state_dict(), tmp_path / "zoo.pth")
    code, out, err = train(
        capsys, image_folder, tmp_path, "--model", "resnet20", "--weights", tmp_path / "zoo.pth", "--insert", "layer3"
    )
    assert (code, err) == (0, "")
    assert "layer3.2  AttentionBlock2d        64  8×8      64      16,832      1,572,864" in out
    assert "128 tensors loaded" in out
    assert "7 new by design" in out
    assert "epoch 1/1: train loss" in out
    assert (tmp_path / "run" / "best.pth").exists()
    code, out, err = train(
        capsys, image_folder, tmp_path / "elsewhere",
        "--weights", tmp_path / "run" / "best.pth", "--insert", "layer3", "--test-only",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "top-1" in out
    assert not (tmp_path / "elsewhere").exists()


def test_every_setting_is_a_flag_that_sets_it_and_has_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in FIELDS.items():
        flag, (kind, many), rules = f"--{name.replace('_', '-')}", type_of(field), field.metadata
        assert rules["text"], name
        assert f"{flag} " in shown.partition("options:")[2], name
        assert rules["text"] in shown.replace("- ", "-"), name
        assert rules["needs"].keys() <= FIELDS.keys()
        value = True if kind is bool else "any" if kind is str else max(rules["allowed"])
        value = [*CHOICES.get(name, ())][-1] if CHOICES.get(name) else value
        words = [] if kind is bool else [str(value)] * (1 + many)
        options = vars(cli.parser().parse_args(["train", flag, *words]))
        assert options.keys() == {"command", "traceback", name}, "a flag that is not given sets nothing"
        assert options[name] == ([value, value] if many else value)
        if kind is bool:
            assert vars(cli.parser().parse_args(["train", f"--no-{flag[2:]}"]))[name] is False


def test_a_value_that_a_setting_cannot_be_is_refused_by_name():
    for name, field in FIELDS.items():
        kind, many = type_of(field)
        wrong = {bool: [1, "yes"], int: [-(10**9), 10**12, 2.5, True, "8"], str: [3, b"x"]}
        wrong[float] = [-(10.0**300), 1e300, math.nan, math.inf, True, "0.1"]
        for value in [*wrong[kind], {}, object()]:
            for given in [value, (value,)] if many else [value, [value]]:
                with pytest.raises(ValueError, match=f"^{name} must be .*; got "):
                    Settings(**{"data": "images", name: given})
        if CHOICES.get(name):
            with pytest.raises(ValueError, match=f"^{name} must be one of .*; got 'other'"):
                Settings(**{"data": "images", name: "other"})
    least = {"lr": 1e-300, "layer_decay": 1e-300, "batch_size": 1, "num_heads": 0, "std": (0.0,), "seed": -1}
    for name, value in least.items():
        with pytest.raises(ValueError, match=f"^{name} must be a .*number from"):
            Settings(**{"data": "images", name: value})
    assert Settings(data=Path("images"), insert=["layer3"]) == Settings(data="images", insert=("layer3",))


def test_a_run_begins_from_the_settings_of_another_and_flags_override_them(tmp_path):
    other = Settings(
        data="images", insert=("layer3", "layer2"), lr=0.3, amp=True, mean=(0.1,), std=(1e-5,), seed=3,
        output="elsewhere", overwrite=True,
    )  # fmt: skip
    RunFolder(tmp_path).write_settings(other.as_dict())
    line = ["train", "--config", str(tmp_path / "settings.yaml"), "--insert", "layer1", "--no-amp", "--seed", "0"]
    begun = Settings(**cli.given(Settings, cli.parser().parse_args(line)))
    assert begun == replace(other, insert=("layer1",), amp=False, seed=0, output=None, overwrite=False)
    (tmp_path / "by_hand.yaml").write_text("lr: 1e-3\nepochs: 5")
    options = cli.parser().parse_args(["train", "--config", str(tmp_path / "by_hand.yaml")])
    assert cli.given(Settings, options) == {"lr": 0.001, "epochs": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "there is no setting 'epoch'"),
        ("epochs: three", "epochs must be a whole number from 1 to 1,000,000; got 'three'"),
        ("epochs: 5\nlr: 1.0e+300", "lr must be a number from 1e-12 to 1,000; got 1e+300"),
        ("insert: layer3", "insert must be a list; got 'layer3'"),
        ("- lr", "settings must be names with values; got ['lr']"),
        ("", "settings must be names with values; got None"),
        ("lr: [", "is no file of settings: while parsing"),
        ("model: !!python/object/apply:os.system [echo this ran]", "could not determine a constructor"),
        ("data: &a [x]\ninsert: [*a, *a]", "it has an anchor or an alias"),
        ("[" * 2_000, "is no file of settings"),
        ("\0", "is no file of settings"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_not_one_of_settings_exits_with_2(capsys, tmp_path, text, message):
    if text is not None:
        (tmp_path / "settings.yaml").write_text(text)
    code, out, err = run(capsys, "train", "--config", tmp_path / "settings.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("vision-attn: error: config: ")
    assert message in err
    assert err.count("\n") == 1


def test_where_output_is_a_flag_o_is_short_for_it():
    (commands,) = (action.choices for action in cli.parser()._actions if isinstance(action.choices, dict))
    named = {name: sub._option_string_actions for name, sub in commands.items()}
    with_output = [name for name, flags in named.items() if "--output" in flags]
    assert {"train", "compare", "predict", "export", "explore", "maps", "demo"} <= set(with_output)
    assert all(named[name]["-o"] is named[name]["--output"] for name in with_output)


def test_without_a_command_all_are_listed(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name} " in said for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet21"], "model: there is no 'resnet21'"),
        (["--insert", "layer9"], "names: 'layer9' matches no module; at the top the model has 'conv1'"),
        (["--insert", "7"], "stages: there is no stage 7; the stages are 0 'layer1', 1 'layer2', 2 'layer3'"),
        (["--insert", "fc"], "'fc' returns a tensor of shape"),
        (["--insert", "layer3", "--num-heads", "7"], "num_heads must divide channels"),
        (["--lr", "0"], "lr must be a number from 1e-12 to 1,000; got 0.0"),
        (["--batch-size", "1000"], "batch_size must be at most the 72 training images"),
        (["--mean", "0.5"], "mean and std go together"),
    ],
)
def test_bad_usage_exits_with_2(capsys, image_folder, tmp_path, arguments, message):
    code, _, err = train(capsys, image_folder, tmp_path, *arguments)
    assert code == 2
    assert err.startswith("vision-attn: error: ")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--epoch", "3"], ["train", "--impl", "flash"]])
def test_what_argparse_refuses_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: vision-attn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--epoch=3"], "unrecognized arguments: --epoch=3; did you mean --epochs?\n"),
        (["train", "--lable-smoothing=0.1", "--apm"], "; did you mean --label-smoothing --amp?\n"),
        (["bench", "--round", "3"], "; did you mean --rounds?\n"),
        (["bench", "--xyz", "3"], "unrecognized arguments: --xyz 3\n"),
    ],
)
def test_a_mistyped_flag_is_refused_with_the_one_that_may_be_meant(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(message)


def test_the_help_of_training_begins_with_what_it_does_and_two_examples(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: vision-attn train ")
    assert lines[1] == ""
    assert lines[2].startswith("Train an image classifier, ")
    examples = [line.split()[1:] for line in lines[3:12] if line.startswith("  vision-attn train ")]
    assert len(examples) == 2
    for words in examples:
        Settings(**cli.given(Settings, cli.parser().parse_args(words)))


@pytest.mark.parametrize("arguments", [["train", "--help"], ["inspect", "resnet20"]], ids=str)
def test_what_is_printed_survives_any_encoding(monkeypatch, arguments):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with contextlib.suppress(SystemExit):
        assert cli.main(arguments) == 0
    print("8×8 ± 2 … naïve ŵ 木")
    stream.flush()
    said = stream.buffer.getvalue().decode("ascii")
    assert said.endswith("\n8\\xd78 \\xb1 2 \\u2026 na\\xefve \\u0175 \\u6728\n")
    assert "torch/\\u2026," in said or "3\\xd732\\xd732" in said


def test_inspecting_says_what_attention_would_cost_and_where_to_put_it(capsys):
    code, out, err = run(capsys, "inspect", "resnet20", "--batch-size", 4)
    assert (code, err) == (0, "")
    assert "    2  layer3        64    8×8      64      75.5 %         32.1 %\n" in out
    assert "vision-attn train --data FOLDER --model resnet20 --insert -2 -1\n" in out


def test_inspecting_takes_sites_and_options_of_the_block(capsys):
    code, out, err = run(
        capsys, "inspect", "resnet20", "--input-size", 16, 32, "--batch-size", 2, "--insert", -1, "layer3", "--at",
        "before",
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert "not both; got -1 layer3" in err
    code, out, err = run(
        capsys, "inspect", "resnet20", "--input-size", 16, 32, "--batch-size", 2, "--insert", -1, "--at", "before",
        "--num-heads", 4, "--pattern", "va.Window(4)", "--dtype", "bfloat16", "--memory-limit", 0.0001,
    )  # fmt: skip
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "1 block inserted (AttentionBlock2d, pattern=va.Window(4), bfloat16;" in words
    assert "before layer3.0 32 8×16 4 " in words
    assert "for 2 images, more than the memory limit of 0.0001 GiB" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet21"], "model: there is no 'resnet21'; close to it"),
        (["torchvision:resnet19"], "Unknown model resnet19"),
        (["resnet20", "--insert", "7"], "stages: there is no stage 7; the stages are 0 'layer1'"),
        (["resnet20", "--insert", "layer9"], "names: 'layer9' matches no module"),
        (["resnet20", "--insert", "fc"], "'fc' returns a tensor of shape"),
        (["resnet20", "--insert", "1", "--num-heads", "7"], "num_heads must divide channels"),
        (["resnet20", "--at", "before"], "at applies to what is inserted"),
        (["resnet20", "--pattern", "diagonal"], "pattern must be one of 'full'"),
        (["resnet20", "--pattern", "Windo(7)"], "neither a literal nor one of Window"),
        (["resnet20", "--input-size", "1", "2", "3"], "input_size must be a side or a height and a width"),
        (["resnet20", "--memory-limit", "0"], "memory_limit must be positive"),
        (["resnet20", "--input-size", "100000"], "input_size must be of at most 67,108,864 pixels"),
        (
            ["resnet20", "--batch-size", str(10**20)],
            "batch_size must be a whole number of at least 1 and at most 2,147",
        ),
    ],
)
def test_what_cannot_be_inspected_exits_with_2(capsys, arguments, message):
    code, out, err = run(capsys, "inspect", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("vision-attn: error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("no 'a\x1b[2J\nvision-attn: all is well\r'"), 2, "no 'a\\x1b[2J vision-attn: all is well\\r'"),
        (FileNotFoundError("no x\x1b.pth"), 1, "no x\\x1b.pth"),
        (errors.CheckpointError("one\n", "two\x07"), 1, "one\\n\ntwo\\x07"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 TB"), 1, "DefaultCPUAllocator: can't allocate"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_an_error_is_one_line_in_which_a_name_cannot_steer_the_terminal(capsys, error, code, said):
    def fails():
        raise error

    assert cli.run_program("vision-attn", fails) == code
    assert capsys.readouterr().err.startswith(f"vision-attn: error: {said}")


class RunsCode:
    def __reduce__(self):
        return os.system, ("echo this ran >&2",)


def bad_checkpoint(kind, path):
    model = create_model("resnet20", num_classes=7 if kind == "another class count" else 3)
    if kind == "another architecture":
        model = create_model("resnet20_a", num_classes=3)
    torch.save(model.state_dict(), path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    if kind == "runs code":
        torch.save({"model": RunsCode()}, path)
    if kind == "missing":
        path.unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "is truncated or no checkpoint"),
        ("another architecture", "does not fit the model CifarResNet, nothing was loaded."),
        ("another class count", "trained for 7 classes and the model has 3"),
        ("runs code", "asks to run 'posix.system' on loading, and was not loaded"),
        ("missing", "there is no such checkpoint file"),
    ],
)
def test_a_bad_checkpoint_exits_with_1_and_writes_nothing(capsys, image_folder, tmp_path, kind, message):
    bad_checkpoint(kind, tmp_path / "zoo.pth")
    code, _, err = train(capsys, image_folder, tmp_path, "--weights", tmp_path / "zoo.pth")
    assert code == 1
    assert message in err
    assert "this ran" not in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_bad_data_exits_with_1(capsys, tmp_path):
    code, _, err = train(capsys, tmp_path / "nothing", tmp_path)
    assert (code, "there is no such folder of images" in err) == (1, True)
    (tmp_path / "val").mkdir()
    code, _, err = train(capsys, tmp_path, tmp_path)
    assert (code, "has 0 class folders" in err) == (1, True)


def test_an_output_that_cannot_be_written_is_said_before_training(capsys, image_folder, tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    code, out, err = train(capsys, image_folder, tmp_path)
    assert code == 1
    assert "run" in err
    assert "epoch 1/" not in out
    assert (tmp_path / "run").read_text() == "a file where the folder should be"
    code, out, err = run(capsys, *small(image_folder), "--output", "/proc/nothing")  # where root cannot write either
    assert (code, err.count("\n")) == (1, 1)
    assert "/proc/nothing" in err
    assert "epoch 1/" not in out


def test_the_traceback_is_there_on_request(capsys, tmp_path):
    code, _, err = run(capsys, "train", "--traceback", "--data", tmp_path / "nothing")
    assert code == 1
    assert "Traceback" in err


def test_a_fault_of_the_program_is_not_hidden(capsys, monkeypatch, image_folder, tmp_path):
    from vision_attn.tools.training import train as room

    def broken(*arguments):
        raise AssertionError("a bug")

    monkeypatch.setattr(room, "build_network", broken)
    code, _, err = train(capsys, image_folder, tmp_path)
    assert code == 1
    assert "Traceback" in err


def test_an_interrupt_exits_with_130_in_a_line(capsys, monkeypatch, image_folder, tmp_path):
    from vision_attn.tools.training import train as room

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "build_network", interrupted)
    code, _, err = train(capsys, image_folder, tmp_path)
    assert code == 130
    assert err == "vision-attn: interrupted\n"


def test_a_log_file_holds_lines_and_no_bars(capfd, image_folder, tmp_path):
    small = "--model", "tiny", "--img-size", 16
    code, out, err = train(capfd, image_folder, tmp_path, *small, "--epochs", 2, "--batch-size", 36)
    assert (code, err) == (0, "")
    assert "\r" not in out
    assert len(out.splitlines()) == 8
    assert "2 epochs, each of 2 steps of 36 images" in out.splitlines()


def in_two_processes(*arguments):
    """What torchrun's two processes of the same command say."""
    # Without a GPU they find one another though no --device is given.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "vision_attn", "train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Grad strides" not in done.stderr
    assert done.stdout.count("epoch 1/1: ") == 1
    return done.stdout


@pytest.mark.slow
def test_two_processes_give_what_one_gives(capsys, image_folder, tmp_path):
    """torchrun starts the same command; the global batch, and so the result, is the same."""
    # A network without batch norm, whose statistics are those of each process's share.
    arguments = [
        "--data", image_folder, "--epochs", 1, "--batch-size", 16, "--device", "cpu", "--lr", 0.01,
        "--model", "convnext_atto", "--img-size", 32, "--insert", "stages.1", "--mixup", 0.2, "--cutmix", 1,
        "--cutout", 8,
    ]  # fmt: skip
    assert run(capsys, "train", *arguments, "--output", tmp_path / "one")[0] == 0
    in_two_processes(*arguments, "--output", tmp_path / "two")
    one, two = (torch.load(tmp_path / name / "last.pth", weights_only=True) for name in ("one", "two"))
    start = create_model("convnext_atto", num_classes=3).state_dict()
    for key, value in one["model"].items():
        torch.testing.assert_close(two["model"][key], value, rtol=1e-4, atol=1e-5)
    assert any((one["model"][key] - start[key]).abs().max() > 1e-3 for key in start)
    for key in ("train_loss", "eval_loss", "eval_top1"):
        assert float(two["rows"][0][key]) == pytest.approx(float(one["rows"][0][key]), rel=1e-3)


@pytest.mark.slow
def test_two_processes_score_the_network_that_they_save(capsys, image_folder, tmp_path):
    """Batch norms see other images in each process; what is evaluated is what the first one has, and saves."""
    arguments = ["--data", image_folder, "--model", "resnet20", "--insert", "layer3", "--block-options", "gate_init=1"]
    together = in_two_processes(*arguments, "--epochs", 1, "--batch-size", 16, "--output", tmp_path / "run")
    saved = torch.load(tmp_path / "run" / "last.pth", weights_only=True)["rows"][0]
    options = ["--weights", tmp_path / "run" / "last.pth", "--test-only", "--device", "cpu"]
    code, alone, _ = run(capsys, "train", *arguments, *options)
    assert code == 0
    assert f"loss {float(saved['eval_loss']):.4f}" in alone
    assert f"branch/stream {float(saved['branch_share']):.4f}" in alone
    # What the blocks contribute is counted over the images of both.
    (worth,) = [line for line in together.splitlines() if "predictions" in line]
    assert worth in alone


@pytest.mark.parametrize("package", ["accelerate", "matplotlib"])
def test_an_extra_that_is_not_installed_is_named(capsys, monkeypatch, package, tmp_path):
    importlib.import_module(
        "vision_attn.tools.comparison.demo"
    )  # all of the rooms, so that all is as it was afterwards
    for room in ("training", "comparison"):
        monkeypatch.setattr(vision_attn, room, getattr(vision_attn, room), raising=False)
    for name in [
        name for name in sys.modules if name.startswith(("vision_attn.tools.training", "vision_attn.tools.comparison"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(capsys, "demo", "--output", tmp_path / "demo")
    assert (code, out) == (1, "")
    assert "pip install 'vision-attn[train]'" in err
    assert "Traceback" not in err
    assert not (tmp_path / "demo").exists()


def test_a_run_leaves_its_process_group_also_after_an_error(tmp_path):
    # A group that lives on has threads that may abort the process at its end, after its work is done.
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert cli.main(["train", "--data", str(tmp_path / "nothing"), "--device", "cpu"]) != 0
        assert not torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def run_folder():
    return vision_attn.networks.models.registry.weights_folder() / "resnet20_attention_cifar100"


def test_a_trained_network_is_explored_and_drawn(capsys, image_folder, tmp_path, run_folder):
    images = [image_folder / "val" / name / "0.png" for name in ("red", "blue")]
    code, out, err = run(capsys, "explore", *images, "--model", run_folder, "-o", tmp_path / "page.html", "--top", 3)
    page = (tmp_path / "page.html").read_text()
    assert (code, err) == (0, "")
    assert f"wrote {tmp_path / 'page.html'}, " in out
    assert all(
        word in page for word in ("layer3.2.inserted.attn", "Where resnet20_attention looks", '"title": "0.png"')
    )
    code, out, err = run(
        capsys, "maps", *images, "--model", run_folder, "-o", tmp_path / "maps", "--query", "4,4", "31,0",
        "--heads", 0, 2, "--sites", "layer3",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert {path.name for path in (tmp_path / "maps").iterdir()} == {
        *(f"layer3.{block}.inserted.attn.png" for block in range(3)),
        "summary.png",
    }


def test_a_network_by_its_name_is_looked_at_with_an_adapter_or_its_own_attention(capsys, image_folder, tmp_path):
    from vision_attn.tools.cli.looking import classifier_of

    torch.manual_seed(0)
    model = create_model("resnet20", num_classes=10)
    torch.manual_seed(0)
    vision_attn.insert_(model, names="layer3", num_heads=2, gate_init=1.0, example_input=(1, 3, 32, 32))
    adapter = tmp_path / "adapter.safetensors"
    vision_attn.save_adapter(model, adapter, about={"classes": [*"abcdefghij"], "input_size": [3, 24, 24]})
    torch.manual_seed(0)
    found = classifier_of("resnet20", False, str(adapter))
    assert (found.classes[:2], found.input_size, list(vision_attn.inserted(found.model))) == (
        *(("a", "b"), (3, 24, 24), ["layer3.2"]),
    )
    code, out, err = run(
        capsys, "explore", image_folder / "val" / "red", "--model", "test_vit", "-o", tmp_path / "page.html"
    )
    assert (code, err) == (0, "")
    assert "6 modules exchanged" in out
    assert "blocks.5.attn" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explore", "IMAGE", "--model", "resnet20"], "model has no Attention2d to capture"),
        (["explore", "IMAGE", "--model", "resnet-twenty"], "there is no 'resnet-twenty'"),
        (["explore", "IMAGE", "--model", "RUN", "--adapter", "a"], "adapter goes with a name"),
        (["explore", "IMAGE", "--model", "RUN", "--top", "0"], "top must be a whole number of at least 1; got 0"),
        (["maps", "IMAGE", "--model", "RUN", "--query", "middle"], "query must be y,x in pixels, such as 112,80"),
        (["maps", "IMAGE", "--model", "RUN", "--query", "40,0"], "pixels of an image of 32×32; got (40.0, 0.0)"),
        (["maps", "IMAGE", "--model", "RUN", "--heads", "4"], "heads must be from 0 to 3; got [4]"),
        (["maps", "IMAGE", "--model", "RUN", "--sites", "layer1"], "sites must have attention at or in them"),
    ],
)
def test_what_cannot_be_looked_at_is_said(capsys, image_folder, tmp_path, run_folder, arguments, message):
    given = {"IMAGE": image_folder / "val" / "red" / "0.png", "RUN": run_folder}
    code, _, err = run(capsys, *(given.get(word, word) for word in arguments), "-o", tmp_path / "made")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
