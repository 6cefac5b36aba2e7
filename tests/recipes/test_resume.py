"""Runs that are killed, interrupted, short of disk space or distributed, and resumed."""

import csv
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import tiny  # noqa: F401 - so that a process that begins here knows it
import torch
from filelock import FileLock
from safetensors.torch import load_file
from small_networks import assert_same
from test_train import at_step, spy

import vision_attn as va
from vision_attn import cli
from vision_attn.errors import CheckpointError, DataError, Interrupted, TrainingError
from vision_attn.networks.models import create_model
from vision_attn.recipes import train as module
from vision_attn.recipes.runs import newest_state
from vision_attn.recipes.settings import Evaluation


@pytest.fixture
def base(base):
    """Return settings with all components that are random or have a state."""
    return replace(base, epochs=2, opt="adamw", lr=0.002, warmup_epochs=0.5, ema=0.9)


def train(settings, **options):
    lines = []
    module.train(replace(settings, **options), log=lines.append)
    return lines


def progress_of(folder):
    progress = json.loads((newest_state(folder) / "progress.json").read_text())
    for row in progress["history"]:
        del row["images_per_second"]
    return progress


def assert_same_result(one, other, processes=1):
    found, expected = progress_of(one), progress_of(other)
    if processes > 1:  # an interruption adds the losses of the processes in another order
        losses = [[row.pop("train_loss") for row in progress["history"]] for progress in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert found == expected
    for file in newest_state(one).glob("*.safetensors"):
        assert_same(load_file(file), load_file(newest_state(other) / file.name))
    assert (one / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()


def interrupt(settings, monkeypatch, epoch, step, number=signal.SIGTERM):
    with monkeypatch.context() as patched:
        at_step(patched, epoch, step, lambda: signal.raise_signal(number))
        with pytest.raises(Interrupted) as caught:
            train(settings)
    return caught.value


fail = mock.Mock(side_effect=MemoryError)


def command_line(settings):
    file = settings.output.with_suffix(".json")
    file.write_text(json.dumps(asdict(settings), default=str))
    resume = ["--resume", str(settings.resume)] if settings.resume else []
    return ["train", "--config", str(file), "--output", str(settings.output), *resume]


def scaling(settings, make=module.make_accelerator):
    """Scale as float16 does on CUDA, in float32 on the CPU: the scale doubles every second step."""
    accelerator = make(settings)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    return accelerator


#: Signals, and settings of the runs that they interrupt.
INTERRUPTED = {
    "ctrl-c": (signal.SIGINT, {"attention_lr": 0.01, "layer_decay": 0.7}),
    "workers": (signal.SIGTERM, {"opt": "sgd", "grad_accum_steps": 2, "ema": None, "aa": "rand-m9", "workers": 1}),
    "mixed": (signal.SIGHUP, {"img_size": 72, "mixup": 0.2, "cutmix": 1.0, "reprob": 0.5, "opt": "muon"}),
    "frozen": (signal.SIGTERM, {"weights": "base.pth", "reset_head": True, "freeze_backbone": True}),
    "scaled": (signal.SIGTERM, {}),
}


@pytest.mark.parametrize("name", ["ctrl-c", *(pytest.param(x, marks=pytest.mark.slow) for x in [*INTERRUPTED][1:])])
def test_an_interrupted_run_is_resumed_bitwise(base, name, tmp_path, monkeypatch):
    number, options = INTERRUPTED[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "make_accelerator", scaling if name == "scaled" else module.make_accelerator)
    base = replace(base, **options)
    torch.save(create_model(base.model, num_classes=7).state_dict(), "base.pth")
    train(base)
    output = tmp_path / "interrupted"
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    stop = interrupt(replace(base, output=output), monkeypatch, 0, 1, number)
    assert str(stop) == f"interrupted; saved after step 2 of 4 of epoch 1. Continue with --resume {output}"
    assert stop.signal == number
    Path("base.pth").unlink()  # the state contains all weights
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    for step in (1, 3):  # the latter is before the last evaluation
        interrupt(replace(base, output=output, resume="auto"), monkeypatch, 1, step)
    lines = train(base, output=None, resume=str(output))
    assert f"resumed at epoch 2, step 4, from {output / 'state' / '00001-0000004'}" in lines
    assert_same_result(base.output, output)
    scales = [torch.load(file, weights_only=True)["scale"] for file in sorted(tmp_path.glob("*/state/*/scaler.pt"))]
    assert scales == [64 * 2**4] * 2 * (name == "scaled")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["state", "model"])
def test_a_run_killed_while_it_writes_is_resumed_bitwise(base, place, tmp_path, monkeypatch):
    """The killed process leaves an incomplete state, or the best network without a state of its epoch."""
    train(base)
    killed, replace_folder = replace(base, output=tmp_path / "killed", resume="auto"), os.replace

    def half(source, target):
        if Path(target).name == "00001-0000004":
            (Path(source) / "optimizer.bin").write_bytes(b"half of it")
            fail()
        replace_folder(source, target)

    with monkeypatch.context() as patched:
        if place == "state":
            patched.setattr(os, "replace", half)
            patched.setattr("shutil.rmtree", lambda *given, **how: None)  # a killed process removes no files
            at_step(patched, 1, 1, lambda: signal.raise_signal(signal.SIGTERM))
            at_step(patched, 1, 3, lambda: signal.raise_signal(signal.SIGTERM))
        else:
            patched.setattr(module.runs, "write_csv", lambda path, lines: fail() if len(lines) > 2 else None)
        with pytest.raises((MemoryError, TrainingError, Interrupted)):
            train(killed)
    train(killed)
    assert [path.name for path in (killed.output / "state").iterdir()] == ["00002-0000000"]
    assert_same_result(base.output, killed.output)
    with open(killed.output / "metrics.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]


def free_port_environment():
    """Return environment variables with an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def run_command(line, environment, log):
    """Run a command in a process with all imports, in the environment of torchrun."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    sys.exit(cli.main(line))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills"), [(1, 20), (2, 4)])
def test_a_run_killed_twenty_times_is_resumed_bitwise(base, processes, kills, tmp_path):
    context, chance, log = multiprocessing.get_context("forkserver"), random.Random(processes), tmp_path / "log"
    context.set_forkserver_preload(["vision_attn.recipes.train"])
    base = replace(base, epochs=2 * kills, workers=0)

    def start(settings):
        environment = free_port_environment()
        environment |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes} if processes > 1 else {}
        running, words = [], command_line(settings)  # writes a file, which the first process may read at once
        for rank in range(processes):
            ranks = {**environment, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
            running.append(context.Process(target=run_command, args=(words, ranks, log)))
            running[-1].start()
        return running

    def exit_codes(running):
        return {process.join() or process.exitcode for process in running}

    assert exit_codes(start(base)) == {0}, log.read_text()
    killed = replace(base, output=tmp_path / "killed", resume="auto")
    for _ in range(kills):
        before, running = newest_state(killed.output), start(killed)
        while running[0].is_alive() and newest_state(killed.output) == before:
            time.sleep(0.002)  # until it saves a new state
        time.sleep(chance.uniform(0, 0.02))
        saves = chance.random() < 0.5  # in the middle of an epoch
        for process in running:
            (process.terminate if saves else process.kill)()
        expected = {128 + signal.SIGTERM, -signal.SIGTERM} if saves else {-signal.SIGKILL}
        assert exit_codes(running) <= expected, log.read_text()
    assert exit_codes(start(killed)) == {0}, log.read_text()
    assert_same_result(base.output, killed.output, processes)


def test_ignored_signals_stay_ignored_and_threads_handle_no_signals(base, tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    at_step(monkeypatch, 0, 1, lambda: signal.raise_signal(signal.SIGINT))
    train(base, epochs=1)
    with ThreadPoolExecutor() as pool:
        pool.submit(train, base, epochs=1, output=tmp_path / "thread").result()
    assert_same_result(base.output, tmp_path / "thread")


def test_auto_starts_or_resumes_and_more_epochs_extend_a_run(base, monkeypatch):
    base = replace(base, resume="auto", epochs=1)
    with monkeypatch.context() as patched:
        at_step(patched, 0, 0, fail)
        with pytest.raises(MemoryError):
            train(base)
    # A run that failed before its first step can be resumed, but not with other settings.
    with pytest.raises(ValueError, match=r"differ from .*run: --batch-size, --label-smoothing, --lr\. "):
        train(base, batch_size=8, lr=0.1, label_smoothing=0.1)
    train(base, workers=1)
    again = train(base, batch_size=None)
    assert not any(line.startswith("epoch ") for line in again)
    assert any(line.startswith("all 1 epochs are complete; a larger --epochs continues the run") for line in again)
    assert not any("depends on their number" in line for line in again)
    file = newest_state(base.output) / "progress.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processes": 2}))
    more = train(base, epochs=2, output=None, resume=str(base.output))
    assert "resumed by 1 processes instead of 2: the result depends on their number" in more
    assert any(line.startswith("epoch 2/2") for line in more)
    with pytest.raises(ValueError, match=r"settings differ from .*: --epochs"):
        train(base)


def test_a_resumed_run_has_the_same_classes_and_images(base, photos):
    base = replace(base, data=photos, resume="auto", epochs=1)
    train(base)
    shutil.copy(photos / "red" / "0.png", photos / "red" / "another.png")
    with pytest.warns(UserWarning, match=r"images changed .*\[67, 6\] .*, \[66, 6\] before.* used for tr") as caught:
        train(base, epochs=2)
    with pytest.warns(UserWarning, match="trained on some of the images") as evaluated:
        module.evaluate(Evaluation(run=str(base.output), device="cpu"))
    assert caught[0].filename == evaluated[0].filename == __file__
    with pytest.warns(UserWarning, match="images changed"):
        train(base, epochs=2, resume=os.path.relpath(base.output))
    (photos / "blue").rename(photos / "zebra")
    with pytest.raises(DataError, match=r"classes differ .*: expected blue, green, red, got green, red, zebra"):
        train(base, epochs=3)
    (photos / "zebra").rename(photos / "blue")
    (newest_state(base.output) / "progress.json").write_text(json.dumps(progress_of(base.output) | {"step": 1}))
    with pytest.raises(DataError, match=r"and it was interrupted within an epoch\. Restore the images"):
        train(base, epochs=3)
    shutil.rmtree(base.output / "state")
    with pytest.raises(ValueError, match="contains a network, but no state of a run"):
        train(base)


def test_images_that_a_run_was_trained_on_are_not_evaluated_in_silence(base, photos, capsys):
    train(base, data=photos, epochs=1)
    evaluate = ["evaluate", str(base.output), "--device", "cpu"]
    assert cli.main([*evaluate, "--val-fraction", "0.5"]) == 2
    assert "unknown flag --val-fraction" in capsys.readouterr().err
    assert (cli.main(evaluate), capsys.readouterr().err) == (0, "")
    moved, made = photos.rename(photos.with_name("moved")), mock.Mock(wraps=module.make_loader)
    with mock.patch.object(module, "make_loader", made):
        module.evaluate(Evaluation(run=str(base.output), device="cpu", data=moved))
    images = made.call_args.args[1]
    assert (len(images), int(images.epoch)) == (6, -1), "the held-out images, by workers that may end"
    (moved / "red" / "3.png").write_bytes((moved / "red" / "3.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"moved/red/3\.png cannot be read"):
        module.evaluate(Evaluation(run=str(base.output), device="cpu", workers=0, data=moved))


def test_a_run_keeps_files_of_other_programs(base):
    for name in ("state", "model"):
        (base.output / name).mkdir(parents=True)
        (base.output / name / "notes.txt").write_text("mine")
    (base.output / "state" / "mine").mkdir()
    with open(base.output / "model" / "log.txt", "w", buffering=1) as log:
        module.train(replace(base, epochs=1), log=log.write)
    assert "epoch 1/1: " in (base.output / "model" / "log.txt").read_text()
    assert {path.name for path in (base.output / "state").iterdir()} == {"00001-0000000", "mine", "notes.txt"}
    assert (base.output / "model" / "notes.txt").read_text() == "mine"


def test_a_damaged_or_hostile_state_is_rejected_and_runs_no_code(base, tmp_path, capfd):
    class RunsCode:
        def __reduce__(self):
            return os.system, ("echo this ran >&2",)

    train(base, epochs=1)
    files = ("progress.json", "model.safetensors", "model_1.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl")
    for name in files:
        folder = shutil.copytree(base.output, tmp_path / name)
        torch.save(RunsCode(), newest_state(folder) / name)
        with pytest.raises(CheckpointError, match="00001-0000000 is damaged"):
            train(base, output=folder, resume="auto")
    (newest_state(folder) / "progress.json").write_text('{"epoch": 1}')
    with pytest.raises(CheckpointError, match=r"is damaged.*progress\.json has no data, history"):
        train(base, output=folder, resume="auto")
    torch.save(RunsCode(), newest_state(base.output) / "random_states_0.pkl")
    train(base, resume="auto")  # its content is not used
    assert "this ran" not in capfd.readouterr().err


def test_two_runs_do_not_share_a_folder(base, image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vision_attn.recipes.runs.LOCK_TIMEOUT", 0.05)
    base.output.mkdir()
    with FileLock(base.output / ".lock"), pytest.raises(TrainingError, match=r"another process is training in .*run"):
        train(base)
    assert [path.name for path in base.output.iterdir()] == [".lock"]
    # A run that another process completes while this one waits for the lock is not overwritten.
    train(base, output=tmp_path / "first", epochs=1)
    enter = FileLock.__enter__

    def complete_first(lock):
        found = enter(lock)
        shutil.copytree(tmp_path / "first", base.output, dirs_exist_ok=True)
        return found

    monkeypatch.setattr(FileLock, "__enter__", complete_first)
    with pytest.raises(ValueError, match="already contains a run"):
        train(base, epochs=1)


@pytest.mark.parametrize("what", ["the loss", "a weight"])
def test_a_loss_or_weight_that_is_not_finite_ends_the_run_and_is_not_saved(base, monkeypatch, what):
    made = spy(monkeypatch, "create_optimizer_v2")

    def break_weights(*given):
        made[0].param_groups[0]["params"][0].data.fill_(torch.nan)

    if what == "the loss":
        at_step(monkeypatch, 1, 1, break_weights)
    else:  # after the last step of the epoch, in which the loss is finite
        at_step(monkeypatch, 1, 3, lambda: made[0].register_step_post_hook(break_weights))
    with pytest.raises(TrainingError, match=f"^{what} is not finite .* of 4 of epoch 2, .*--lr.*{base.output}"):
        train(base)
    assert newest_state(base.output).name == "00001-0000000"


def test_a_full_disk_loses_nothing(base, tmp_path, monkeypatch, capsys):
    save, limit = module.Accelerator.save_state, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk(accelerator, folder):
        if "00001" in folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limit[1]))
        try:
            save(accelerator, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with monkeypatch.context() as patched:
        patched.setattr(module.Accelerator, "save_state", save_on_a_full_disk)
        assert cli.main(command_line(base)) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(rf"vision-attn: error: cannot write to {base.output} \(.*\)\. Check the disk, and .*\n", error)
    assert newest_state(base.output).name == "00000-0000000"
    train(base, resume="auto")
    train(base, output=tmp_path / "other")
    assert_same_result(base.output, tmp_path / "other")


ERRORS = [
    (PermissionError(13, "denied"), r"^cannot write to .*denied\)\. Check the disk, and continue with --resume"),
    (RuntimeError("[enforce fail at inline_container.cc:664] . pos 64 vs 0"), "^cannot write to .*pos 64"),
    (RuntimeError("a bug"), "^a bug$"),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_only_errors_of_the_disk_advise_to_check_it(base, monkeypatch, error, expected):
    breaking = mock.Mock(side_effect=error)
    at_step(monkeypatch, 0, 1, lambda: monkeypatch.setattr(module.Accelerator, "save_state", breaking))
    with pytest.raises(Exception, match=expected):
        train(base)
    with pytest.raises(Exception, match=expected.replace("continue with --resume", "start again")):
        train(base, output=base.output.with_name("new"))
    assert not base.output.with_name("new").exists()


def test_a_file_is_replaced_only_by_a_complete_file(tmp_path, monkeypatch):
    (tmp_path / "settings.json").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    for name in ("settings.json", "new.json"):
        with pytest.raises(MemoryError):
            module.runs.write_file(tmp_path / name, "new")
    assert (tmp_path / "settings.json").read_text() == "old"
    monkeypatch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"settings\.json"):
        module.runs.write_file(tmp_path / "settings.json", "new")
    assert [*tmp_path.glob(".settings*")] == []
    monkeypatch.undo()
    module.runs.write_file(tmp_path / "names.csv", os.fsdecode(b"caf\xe9"))  # a name that is not UTF-8
    with pytest.raises(FileNotFoundError, match=r"nothing/names\.csv'$"):
        module.runs.write_file(tmp_path / "nothing" / "names.csv", "")
    assert (tmp_path / "names.csv").read_bytes() == b"caf\xe9"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_process_group_saves_the_run(base, number):
    """As systemd, timeout and Slurm send it: the worker processes receive the signal as well."""
    settings = replace(base, model="test_resnet", epochs=999, img_size=72, workers=2)
    line = [sys.executable, "-m", "vision_attn", *command_line(settings)]
    process = subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and (newest_state(base.output) is None or newest_state(base.output).name < "00001"):
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error.count("\n")) == (128 + number, 1), error
    assert re.match(r"vision-attn: interrupted; saved after step \d of 4 of epoch \d+\.", error)


@pytest.mark.slow
def test_two_processes_train_as_one_and_another_number_is_named(base, tmp_path):
    # No batch norms, whose statistics depend on the images of each process.
    torch.save(create_model("test_efficientnet_gn", num_classes=3).state_dict(), tmp_path / "base.pth")
    base = replace(
        base, model="test_efficientnet_gn", names=("blocks.1",), weights=str(tmp_path / "base.pth"), opt="sgd",
        lr=0.005, attention_lr=0.02, grad_accum_steps=2, hflip=0.0, crop_scale=1.0,
    )  # fmt: skip
    train(base)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    line = [*launch, "vision_attn", *command_line(replace(base, output=tmp_path / "two"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 2/2: ") == 1
    one, two = (va.load_model(folder).state_dict() for folder in (base.output, tmp_path / "two"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    rows, others = (progress_of(folder)["history"] for folder in (tmp_path / "two", base.output))
    for key in ("train_loss", "eval_loss", "eval_top1"):
        assert rows[1][key] == pytest.approx(others[1][key], rel=1e-3)
    assert any("by 1 processes instead of 2" in line for line in train(base, output=tmp_path / "two", resume="auto"))


def start_processes(folders, words):
    """Start a process in each folder, like one ``torchrun`` on each of several machines."""
    common = free_port_environment() | {"WORLD_SIZE": str(len(folders)), "LOCAL_RANK": "0"}
    network = ["--model", "test_resnet", "--img-size", "32", "--device", "cpu"]
    line = [sys.executable, "-m", "vision_attn", "train", *network, *map(str, words)]
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}
    started = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        variables = {**os.environ, **common, "RANK": str(rank)}
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(line, cwd=folder, env=variables, **pipes))
    return [(one.communicate(timeout=120), one.returncode) for one in started]


@pytest.mark.slow
def test_machines_without_a_shared_folder_stop_with_one_error(image_folder, tmp_path):
    words = ["--data", image_folder, "--epochs", "1", "--batch-size", "36", "--output", "run", "--resume", "auto"]
    one, other = tmp_path / "one", tmp_path / "other"
    ((out, _), status), ((_, others), second) = start_processes([one, one], words)
    assert (status, second, "epoch 1/1: " in out, others) == (0, 0, True, "")
    for folders in ([one, other], [tmp_path / "third", other]):
        ((_, error), status), ((_, others), second) = start_processes(folders, words)
        assert (status, second, others) == (1, 1, error)
        assert re.fullmatch(r"vision-attn: error: .*does not exist on every machine\. All machines must .*\n", error)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["image", "class"])
def test_data_that_differs_between_machines_is_one_error(image_folder, tmp_path, change):
    for name in ("one", "other"):
        shutil.copytree(image_folder, tmp_path / name / "data")
    if change == "image":
        (tmp_path / "other" / "data" / "train" / "red" / "5.png").unlink()
    else:
        for half in ("train", "val"):
            (tmp_path / "other" / "data" / half / "blue").rename(tmp_path / "other" / "data" / half / "zebra")
    words = ["--data", "data", "--epochs", "1", "--batch-size", "24", "--output", tmp_path / "run", "--workers", "0"]
    ((_, error), status), ((_, others), second) = start_processes([tmp_path / "one", tmp_path / "other"], words)
    assert (status, second) == (1, 1)
    for text in (error, others):
        assert re.match(r"vision-attn: error: the data differs between machines: one has \[7[12], 24\] training", text)


INVALID = [
    (["--batch-size", "15"], 2, "--batch-size must be at most 72, the number of training images, and a multiple"),
    (["--model", "resnet999"], 2, "'resnet999' does not exist"),
    (["--data", "nothing"], 1, "nothing: no such folder"),
    (["--amp", "float16"], 2, "--amp float16 requires a CUDA device"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "status", "message"), INVALID)
def test_an_error_before_the_first_step_is_one_line_of_one_process(image_folder, tmp_path, words, status, message):
    ((_, error), one), ((_, others), other) = start_processes([tmp_path, tmp_path], ["--data", image_folder, *words])
    assert one == status
    assert (error.count("\n"), message in error) == (1, True), error
    if words[0] in ("--model", "--data"):  # the processes were connected
        assert (other, others) == (1, "vision-attn: error: another process ended, which prints its error\n")
    else:
        assert (other, others) == (status, error)
