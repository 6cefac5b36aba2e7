"""What happens to a run: it is killed, interrupted, short of room, in stages, on several processes; and goes on."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import fields, replace

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from vision_attn import cli
from vision_attn.checkpoints import read_checkpoint
from vision_attn.errors import DataError, Interrupted, TrainingError
from vision_attn.models import create_model
from vision_attn.training import train as train_room
from vision_attn.training.curves import curves_figure
from vision_attn.training.images import ImageSet
from vision_attn.training.interruption import Interruption
from vision_attn.training.loop import Run
from vision_attn.training.network import build_network
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.settings import Settings
from vision_attn.training.state import Progress
from vision_attn.training.step import TrainingStep
from vision_attn.training.train import train
from vision_attn.training.watch import Watch

#: Of each row of metrics.csv what does not depend on the clock.
RESULTS = ("epoch", "lr", "train_loss", "eval_loss", "eval_top1", "branch_share")
#: Settings of a run that keeps no moving average.
NO_AVERAGE = {"model_ema": False, "model_ema_decay": 0.999}


@pytest.fixture
def base(image_folder, tmp_path):
    """A short run in which everything random and everything with a state takes part: four steps an epoch."""
    return Settings(
        data=str(image_folder),
        model="resnet20",
        insert=("layer3",),
        epochs=3,
        batch_size=16,
        opt="adamw",
        lr=0.002,
        crop_padding=2,
        warmup_epochs=0.5,
        clip_grad=5.0,
        model_ema=True,
        model_ema_decay=0.9,
        device="cpu",
        output=str(tmp_path / "run"),
    )


@pytest.fixture(autouse=True)
def ctrl_c():
    """As a terminal has it: in the background of a shell, where tests may run as well, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def quiet(line):
    pass


def flags(settings):
    """The command line of these settings."""
    usual = Settings(data="").as_dict()
    given = {key: value for key, value in settings.as_dict().items() if value != usual[key]}
    line = ["train"]
    for name, value in given.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


def assert_same_result(one, other):
    """The same weights, averages and log, bit for bit."""
    one, other = (read_checkpoint(folder / "last.pth") for folder in (one, other))
    for part in ("model", "model_ema"):
        assert one.get(part, {}).keys() == other.get(part, {}).keys()
        for key, value in one.get(part, {}).items():
            assert torch.equal(value, other[part][key]), key
    for mine, others in zip(one["rows"], other["rows"], strict=True):
        assert [mine[key] for key in RESULTS] == [others[key] for key in RESULTS]
    for key in ("epoch", "step", "loss", "best"):
        assert one[key] == other[key]


def at_step(monkeypatch, epoch, step, action):
    """Do something in a step, before it is made; the step's loss is what that returns, if it does."""
    original = TrainingStep.__call__

    def acting(self, images, labels, epoch_now, step_now):
        found = action() if (epoch_now, step_now) == (epoch, step) else None
        loss = original(self, images, labels, epoch_now, step_now)
        return loss if found is None else found

    monkeypatch.setattr(TrainingStep, "__call__", acting)


def interrupt(settings, monkeypatch, epoch, step):
    """Train until a signal comes in a step."""
    with monkeypatch.context() as patched:
        at_step(patched, epoch, step, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(settings, quiet)


# --- killed -----------------------------------------------------------------------------------------------------------


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_the_write_of(name, moment):
    """Die while a file is written: when half of it is on the disk, before it is renamed, or after that."""
    replace_file, sync = os.replace, os.fsync

    def dying_replace(source, target):
        if os.path.basename(target) != name:
            return replace_file(source, target)
        if moment == "half":
            os.truncate(source, os.path.getsize(source) // 2)
        if moment == "after":
            replace_file(source, target)
        sync(os.open(os.path.dirname(target), os.O_RDONLY))
        return kill_oneself()

    os.replace = dying_replace


def process_main(arguments, log, environment, fault):
    """A process that runs a command, and something that befalls it."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - to the end of the process
    if fault:
        function, *values = fault
        function(*values)
    sys.exit(cli.main(arguments))


@pytest.fixture(scope="module")
def forks():
    """Processes that have imported everything already."""
    multiprocessing.set_forkserver_preload(["vision_attn.cli", "vision_attn.training.train"])
    return multiprocessing.get_context("forkserver")


def start(forks, arguments, log, environment=None, fault=None):
    process = forks.Process(target=process_main, args=(arguments, str(log), environment or {}, fault))
    process.start()
    return process


def finish(process, log):
    process.join(120)
    assert process.exitcode is not None, log.read_text()
    return process.exitcode


def test_a_run_killed_while_it_writes_goes_on_to_the_same_bits(base, forks, tmp_path):
    train(base, quiet)
    killed = replace(base, output=str(tmp_path / "killed"), resume="auto")
    last, log = tmp_path / "killed" / "last.pth", tmp_path / "log"
    faults = (("last.pth", "half", 0), ("best.pth", "after", 0), ("last.pth", "after", 1), ("last.pth", "before", 1))
    for name, moment, epoch in faults:
        process = start(forks, flags(killed), log, fault=(kill_at_the_write_of, name, moment))
        assert finish(process, log) == -signal.SIGKILL, log.read_text()
        assert last.exists() == (epoch > 0)
        if epoch:
            assert read_checkpoint(last)["epoch"] == epoch
    assert list(last.parent.glob(".*.partial"))
    assert finish(start(forks, flags(killed), log), log) == 0, log.read_text()
    assert not list(last.parent.glob(".*.partial"))
    assert_same_result(tmp_path / "run", tmp_path / "killed")
    best, whole = (read_checkpoint(tmp_path / name / "best.pth") for name in ("killed", "run"))
    assert best["epoch"] == whole["epoch"]
    assert all(torch.equal(value, whole["model"][key]) for key, value in best["model"].items())


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_with_the_same_bits(base, tmp_path):
    base = replace(base, epochs=40)
    command = [sys.executable, "-m", "vision_attn"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run([*command, *flags(base)], env=environment, check=True, capture_output=True)
    epoch_seconds = sum(float(row["seconds"]) for row in read_checkpoint(tmp_path / "run" / "last.pth")["rows"]) / 40
    killed = replace(base, output=str(tmp_path / "killed"), resume="auto")
    generator, kills = random.Random(0), 0
    while True:
        with open(tmp_path / "log", "w+") as log:
            process = subprocess.Popen([*command, *flags(killed)], env=environment, stdout=log, stderr=log)
            while kills < 20 and process.poll() is None and "before epoch" not in (tmp_path / "log").read_text():
                time.sleep(0.01)
            if kills == 20:
                assert process.wait() == 0, (tmp_path / "log").read_text()
                break
            time.sleep(generator.uniform(0, 4 * epoch_seconds))
            process.kill()
            assert process.wait() == -signal.SIGKILL, "the run ended before it was killed twenty times"
            kills += 1
        for path in (tmp_path / "killed").glob("*.pth"):
            weights = read_checkpoint(path)["model"]
            assert all(value.isfinite().all() for value in weights.values())
    print(f"{kills} kills in {time.monotonic() - began:.0f} s")
    assert_same_result(tmp_path / "run", tmp_path / "killed")


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "epoch", "step", "options"),
    [
        (signal.SIGINT, 130, 1, 1, {}),
        (
            signal.SIGTERM,
            143,
            0,
            0,
            {"opt": "sgd", "grad_accum_steps": 2, **NO_AVERAGE},
        ),
        (signal.SIGTERM, 143, 2, 3, {"mixup": 0.2, "cutmix": 1.0}),  # the last step: before the last evaluation
    ],
    ids=["ctrl-c", "first step", "last step"],
)
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(
    base, number, code, epoch, step, options, tmp_path, monkeypatch, capsys
):
    def with_dropout(*arguments):
        network = build_network(*arguments)
        network.model.head_drop.p = 0.3
        return network

    monkeypatch.setattr(train_room, "build_network", with_dropout)
    base = replace(base, **options)
    train(base, quiet)
    interrupted = replace(base, output=str(tmp_path / "interrupted"))
    last = tmp_path / "interrupted" / "last.pth"
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patched:
        at_step(patched, epoch, step, lambda: signal.raise_signal(number))
        assert cli.main(flags(interrupted)) == code
    error = capsys.readouterr().err
    assert f"saved after step {step + 1} of 4 of epoch {epoch + 1} in {last}" in error
    assert f"--resume {last}" in error
    saved = read_checkpoint(last)
    assert (saved["epoch"], saved["step"], len(saved["rows"])) == (epoch, step + 1, epoch)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before

    lines = []
    train(replace(interrupted, resume=str(last)), lines.append)
    assert f"resumed after epoch {epoch} and step {step + 1} of the next from {last}" in lines
    assert_same_result(tmp_path / "run", tmp_path / "interrupted")


@pytest.mark.parametrize("evaluation", [0, 1])
def test_an_evaluation_is_interrupted_too_and_its_epoch_kept(base, evaluation, tmp_path, monkeypatch):
    train(base, quiet)
    interrupted = replace(base, output=str(tmp_path / "interrupted"))
    last = tmp_path / "interrupted" / "last.pth"
    evaluations, batches = [], ImageSet.batches

    def signalling(images, rows, *, seed=0):
        if len(images) == 24:  # those that are evaluated
            evaluations.append(len(evaluations))
            if evaluations[-1] == evaluation:
                signal.raise_signal(signal.SIGTERM)
        return batches(images, rows, seed=seed)

    with monkeypatch.context() as patched:
        patched.setattr(ImageSet, "batches", signalling)
        with pytest.raises(Interrupted, match=f"saved after step {4 * evaluation} of 4 of epoch 1"):
            train(interrupted, quiet)
    saved = read_checkpoint(last)
    assert (saved["epoch"], saved["step"], len(evaluations)) == (0, 4 * evaluation, evaluation + 1)
    train(replace(interrupted, resume=str(last)), quiet)
    assert_same_result(tmp_path / "run", tmp_path / "interrupted")


def test_a_signal_to_all_processes_of_a_job_is_obeyed_by_the_one_that_trains(base, tmp_path):
    command = [sys.executable, "-m", "vision_attn", *flags(replace(base, workers=1, epochs=100))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert any(line.startswith("epoch 1/100: ") for line in process.stdout)
        os.killpg(process.pid, signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert "interrupted; saved after step" in error
    assert read_checkpoint(tmp_path / "run" / "last.pth")["epoch"] >= 1
    with pytest.raises(ProcessLookupError):  # no worker is left over
        os.killpg(process.pid, 0)


def test_a_worker_that_is_killed_during_a_step_is_no_traceback(base, monkeypatch):
    def kill_a_worker():
        (worker, *_) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(1)

    at_step(monkeypatch, 0, 1, kill_a_worker)
    with pytest.raises(DataError, match=r"a worker process that decodes images ended, .*--workers"):
        train(replace(base, workers=1), quiet)


def test_a_signal_that_comes_after_the_last_step_is_not_lost(base, monkeypatch):
    write = RunFolder.write_metrics

    def signalling(folder, rows):
        write(folder, rows)
        if len(rows) == base.epochs:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "write_metrics", signalling)
    with pytest.raises(Interrupted):
        train(base, quiet)


def test_a_second_ctrl_c_leaves_at_once(base, tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 1, 1, twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(base, quiet)
    assert not isinstance(caught.value, Interrupted)
    assert read_checkpoint(tmp_path / "run" / "last.pth")["step"] == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_are_there_only_while_a_run_trains_and_only_where_signals_are_taken(base, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with suppress(RuntimeError), Interruption() as interruption:
        assert signal.getsignal(signal.SIGTERM) == interruption.note
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
        assert interruption.signal == 0
    finally:
        signal.signal(signal.SIGINT, before[0])
    results = []
    thread = threading.Thread(target=lambda: results.append(train(replace(base, epochs=1, warmup_epochs=0), quiet)))
    thread.start()
    thread.join()
    assert results[0].seconds > 0


# --- begun, or gone on with -------------------------------------------------------------------------------------------


def fails(*arguments):
    raise MemoryError


def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(base, tmp_path, monkeypatch):
    base = replace(base, resume="auto")
    with monkeypatch.context() as patched:
        patched.setattr(TrainingStep, "__call__", fails)
        with pytest.raises(MemoryError):
            train(base, quiet)
    # What a run leaves before its first checkpoint is no obstacle to the same run, and one to another.
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["inserted.txt", "settings.yaml"]
    with pytest.raises(ValueError, match=r"but lr differ from .*run"):
        train(replace(base, lr=0.1), quiet)
    train(base, quiet)
    lines = []
    train(base, lines.append)
    assert f"resumed after epoch 3 from {tmp_path / 'run' / 'last.pth'}" in lines
    assert not any(line.startswith("epoch ") for line in lines)
    with pytest.raises(ValueError, match=r"but lr differ from .*last\.pth"):
        train(replace(base, lr=0.1), quiet)
    for name in ("last.pth", "settings.yaml"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match="holds a run already"):
        train(base, quiet)


def test_a_checkpoint_that_is_not_there_yet_is_said_with_what_to_do(base, tmp_path, capsys):
    missing = tmp_path / "run" / "last.pth"
    assert cli.main(flags(replace(base, resume=str(missing)))) == 1
    assert f"resume: there is no {missing} yet" in capsys.readouterr().err
    with pytest.raises(ValueError, match="resume and overwrite exclude each other"):
        replace(base, resume="auto", overwrite=True)
    assert replace(base, output=None, resume="auto").folder.name == "train"


# --- the loss, and the disk -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "asked", "when"),
    [(1, False, "step 2"), (3, False, "steps 1 to 3"), (50, False, "steps 1 to 4"), (50, True, "steps 1 to 2")],
)
def test_a_loss_that_is_not_finite_ends_the_run_where_it_came(base, every, asked, when, tmp_path, monkeypatch):
    original = Run.go

    def looking(run, checkpoint):
        run.watch.every = every
        return original(run, checkpoint)

    def broken():
        if asked:  # what would be saved now is looked at first
            signal.raise_signal(signal.SIGTERM)
        return torch.tensor(torch.inf)

    monkeypatch.setattr(Run, "go", looking)
    at_step(monkeypatch, 1, 1, broken)
    last = tmp_path / "run" / "last.pth"
    with pytest.raises(TrainingError, match=rf"epoch 2 is inf, at .*{when} of 4 and .* rate of 0\.001.*is {last}"):
        train(base, quiet)
    assert (read_checkpoint(last)["epoch"], read_checkpoint(last)["step"]) == (1, 0)


def test_weights_that_are_not_finite_are_not_saved(base, tmp_path, monkeypatch):
    step, last = TrainingStep.__call__, tmp_path / "run" / "last.pth"

    def breaking(self, images, labels, epoch, number):
        loss = step(self, images, labels, epoch, number)
        if (epoch, number) == (1, 3):
            with torch.no_grad():
                self.model.conv1.weight[0] = torch.nan
        return loss

    monkeypatch.setattr(TrainingStep, "__call__", breaking)
    with pytest.raises(TrainingError, match=rf"weights of epoch 2 are not finite, at step 4 of 4 .*good .* is {last}"):
        train(base, quiet)
    assert read_checkpoint(last)["epoch"] == 1


def test_a_device_without_memory_is_said_with_the_flags_that_need_less(base, monkeypatch):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")

    at_step(monkeypatch, 0, 1, full)
    with pytest.raises(
        TrainingError, match=r"no memory for a step \(CUDA out of .* 2\.00 GiB\.\): .*--grad-accum-steps"
    ):
        train(base, quiet)


def test_images_that_cannot_be_read_lose_nothing(base, tmp_path, monkeypatch):
    train(base, quiet)
    broken = replace(base, output=str(tmp_path / "broken"))
    last, batches, good = tmp_path / "broken" / "last.pth", ImageSet.batches, 2

    def breaking(images, rows, *, seed=0):
        for number, batch in enumerate(batches(images, rows, seed=seed)):
            if len(images) == 72 and number == good:
                raise DataError("damaged or no images: a.png")
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(ImageSet, "batches", breaking)
        with pytest.raises(DataError):
            train(broken, quiet)
        before, good = last.read_bytes(), 1
        patched.setattr(Watch, "whole", lambda watch: False)
        with pytest.raises(DataError):
            train(replace(broken, resume=str(last)), quiet)
    assert last.read_bytes() == before, "weights that are not finite take no good one's place"
    assert read_checkpoint(last)["step"] == 2
    train(replace(broken, resume=str(last)), quiet)
    assert_same_result(tmp_path / "run", tmp_path / "broken")


def test_a_row_that_a_kill_kept_from_the_metrics_comes_back(base, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_metrics", lambda folder, rows: fails() if len(rows) == 3 else None)
        with pytest.raises(MemoryError):
            train(base, quiet)
    train(replace(base, resume="auto"), quiet)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 4


def test_other_data_is_not_gone_on_with(base, image_folder, tmp_path, monkeypatch):
    interrupt(base, monkeypatch, 1, 1)
    fewer, others = tmp_path / "fewer", tmp_path / "others"
    for folder in (fewer, others):
        shutil.copytree(image_folder, folder)
    next((fewer / "train" / "red").iterdir()).unlink()
    for half in ("train", "val"):
        (others / half / "red").rename(others / half / "violet")
    resumed = replace(base, resume="auto")
    with pytest.raises(ValueError, match="is of 72 training images and there are 71: give the same --data"):
        train(replace(resumed, data=str(fewer)), quiet)
    with pytest.raises(ValueError, match=r"last\.pth is of other classes: give the same --data"):
        train(replace(resumed, data=str(others)), quiet)
    settings = base.as_dict()
    del settings["cutout"]  # of a version that had no such setting
    assert base.differences(settings) == []


@pytest.mark.parametrize(
    ("crafted", "message"),
    [
        ({"lr": torch.ones(2)}, "lr must be a number from"),
        ({"insert": "layer3"}, "insert must be a list; got 'layer3'"),
        (["lr"], "settings must be names with values; got ['lr']"),
    ],
    ids=str,
)
def test_settings_of_a_checkpoint_that_cannot_be_are_refused_in_words(base, crafted, message, tmp_path, capsys):
    last = tmp_path / "crafted.pth"
    model = create_model("resnet20", num_classes=3).state_dict()
    about = {"model": model, "classes": ["blue", "green", "red"], "input_size": [3, 32, 32], "train_images": 72}
    about |= {"mean": [0.5] * 3, "std": [0.5] * 3, "optimizer": {}, "model_ema": model}
    about |= dict.fromkeys((part.name for part in fields(Progress)), 0)
    settings = {**base.as_dict(), **crafted} if isinstance(crafted, dict) else crafted
    torch.save({**about, "settings": settings}, last)
    for options in ({"resume": str(last), "output": None}, {"weights": str(last), "test_only": True}):
        assert cli.main(flags(replace(base, **options))) == 1
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err


def test_a_run_that_is_not_begun_leaves_the_old_one(base, tmp_path, monkeypatch):
    events = tmp_path / "run" / "tensorboard"
    events.mkdir(parents=True)
    train(replace(base, epochs=1, warmup_epochs=0), quiet)
    assert events.exists(), "it may be anyone's where no run is"
    before = (tmp_path / "run" / "last.pth").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 2**10))
        with pytest.raises(TrainingError, match="make room"):
            train(replace(base, model="resnet32", overwrite=True), quiet)
    assert (tmp_path / "run" / "last.pth").read_bytes() == before
    train(replace(base, epochs=1, warmup_epochs=0, overwrite=True), quiet)
    assert not events.exists()


def test_a_disk_without_room_is_said_before_training(base, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 2**20))
    with pytest.raises(TrainingError, match=r"take about [\d.]+ MiB, .* and 1\.0 MiB are free in .*run: make room"):
        train(base, lines.append)
    assert not any(line.startswith("before epoch") for line in lines)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("options", [{"opt": "sgd"}, {"opt": "adamw"}, {"opt": "adan", **NO_AVERAGE}], ids=str)
def test_the_room_that_is_asked_for_is_the_room_that_is_taken(base, options, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(RunFolder, "refuse_full_disk", lambda folder, last, best: seen.append((last, best)))
    train(replace(base, epochs=1, warmup_epochs=0, **options), quiet)
    for name, estimate in zip(("last.pth", "best.pth"), seen[0], strict=True):
        # The rest is what each file says of its tensors, which a network as small as this one has many of.
        assert estimate == pytest.approx((tmp_path / "run" / name).stat().st_size, rel=0.25)


@contextmanager
def files_of_at_most(size):
    """Writes beyond that fail in their middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_in_its_middle_leaves_the_old_checkpoint(base, tmp_path, monkeypatch, capsys):
    original = RunFolder.save

    def in_a_full_disk(folder, name, content):
        if name != "last.pth" or content["epoch"] < 2:
            return original(folder, name, content)
        with files_of_at_most(1_000_000):
            return original(folder, name, content)

    monkeypatch.setattr(RunFolder, "save", in_a_full_disk)
    assert cli.main(flags(base)) == 1
    last = tmp_path / "run" / "last.pth"
    error = capsys.readouterr().err
    assert f"{last} cannot be written (File too large), and the last.pth of before is whole: make room" in error
    assert "Traceback" not in error
    assert read_checkpoint(last)["epoch"] == 1
    assert not list((tmp_path / "run").glob(".*.partial"))


# --- the step ---------------------------------------------------------------------------------------------------------


def from_weights(base, tmp_path, classes=3, **options):
    torch.manual_seed(5)
    torch.save(create_model("resnet20", num_classes=classes).state_dict(), tmp_path / "base.pth")
    return replace(base, weights=str(tmp_path / "base.pth"), **options)


def test_accumulated_gradients_are_those_of_the_whole_batch(base, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "100")  # the settings say how many
    # Batch norms would see parts of the batch: they are frozen here.
    base = from_weights(base, tmp_path, freeze_backbone=True, epochs=1, warmup_epochs=0, opt="sgd", mixup=0.5)
    calls = []
    for parts in (1, 4):
        result = train(replace(base, grad_accum_steps=parts, output=str(tmp_path / str(parts))), quiet)
        result.model.train()
        calls.append(read_checkpoint(tmp_path / str(parts) / "last.pth"))
    one, four = calls
    for key, value in one["model"].items():
        torch.testing.assert_close(four["model"][key], value, rtol=1e-4, atol=1e-6)
    assert float(four["rows"][0]["train_loss"]) == pytest.approx(float(one["rows"][0]["train_loss"]), abs=1e-5)
    given = read_checkpoint(tmp_path / "base.pth")
    assert any(not torch.equal(one["model"][key], given.get(key, torch.zeros(()))) for key in one["model"])


def test_no_more_than_a_part_of_the_batch_is_in_the_network(base, monkeypatch):
    seen = []

    def watching(*arguments):
        network = build_network(*arguments)
        network.model.conv1.register_forward_pre_hook(lambda module, args: seen.append((module.training, len(args[0]))))
        return network

    monkeypatch.setattr(train_room, "build_network", watching)
    train(replace(base, epochs=1, warmup_epochs=0, grad_accum_steps=4), quiet)
    assert [count for training, count in seen if training] == [4] * 16


def test_dropout_is_drawn_anew_in_each_step_and_in_each_process(base, monkeypatch):
    seeds = []
    original = TrainingStep.__call__

    def watching(self, *arguments):
        loss = original(self, *arguments)
        seeds.append(torch.initial_seed())
        return loss

    monkeypatch.setattr(TrainingStep, "__call__", watching)
    train(base, quiet)
    first = list(seeds)
    assert len(set(first)) == len(first) == 12
    train(replace(base, seed=1, overwrite=True), quiet)
    monkeypatch.setattr(Accelerator, "process_index", 1)
    with monkeypatch.context() as patched:
        patched.setattr(Accelerator, "is_main_process", True)
        patched.setattr("vision_attn.training.loop.share", lambda batch, process, processes: torch.arange(batch))
        train(replace(base, overwrite=True), quiet)
    assert len(set(seeds)) == 36


def test_a_scaled_loss_goes_on_with_its_scale(base, tmp_path, monkeypatch):
    # What float16 does on CUDA, in float32 on the CPU: the scale doubles every third step.
    original = train_room.make_accelerator

    def scaling(settings):
        accelerator = original(settings)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        return accelerator

    monkeypatch.setattr(train_room, "make_accelerator", scaling)
    train(base, quiet)
    assert read_checkpoint(tmp_path / "run" / "last.pth")["scaler"]["scale"] == 64 * 2**4
    interrupted = replace(base, output=str(tmp_path / "interrupted"))
    interrupt(interrupted, monkeypatch, 1, 0)
    train(replace(interrupted, resume="auto"), quiet)
    assert_same_result(tmp_path / "run", tmp_path / "interrupted")
    one, other = (read_checkpoint(tmp_path / name / "last.pth")["scaler"] for name in ("run", "interrupted"))
    assert one == other


def test_deterministic_kernels_are_asked_for_in_the_run_alone(base, monkeypatch):
    seen = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def look():
        cudnn = torch.backends.cudnn
        enabled = torch.are_deterministic_algorithms_enabled()
        seen.append((enabled, cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))

    at_step(monkeypatch, 0, 1, look)
    base = replace(base, epochs=1, warmup_epochs=0, overwrite=True)
    for deterministic in (True, False):
        train(replace(base, deterministic=deterministic), quiet)
    look()
    assert seen == [(True, True, ":4096:8"), (False, False, None), (False, False, None)]
    with pytest.raises(ValueError, match="there is no 'resnet21'"):
        train(replace(base, deterministic=True, model="resnet21"), quiet)
    look()
    assert seen[-1] == (False, False, None)


@pytest.mark.parametrize("name", ["lion", "lamb", "muon", "adamp", "rmsproptf"])
def test_any_optimiser_of_timm_trains_and_goes_on(base, name, tmp_path, monkeypatch):
    base = replace(base, opt=name, epochs=2, **NO_AVERAGE)
    train(base, quiet)
    interrupted = replace(base, output=str(tmp_path / "interrupted"), resume="auto")
    interrupt(interrupted, monkeypatch, 0, 2)
    train(interrupted, quiet)
    assert_same_result(tmp_path / "run", tmp_path / "interrupted")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt": "adamww"}, r"opt: there is no 'adamww'; close to it: adamw"),
        ({"opt": "lion", "lr": None}, r"lr must be given for lion: only sgd and adamw have a usual rate"),
        ({"momentum": 0.5}, r"momentum applies to optimisers such as sgd; 'adamw' has none"),
        ({"opt": "adahessian"}, r"opt: 'adahessian' needs second derivatives"),
        ({"opt": "fusedadam"}, r"opt: 'fusedadam' cannot be used here .*: choose another"),
        ({"amp": True, "amp_dtype": "float16"}, r"amp_dtype: float16 needs CUDA.*on the CPU use bfloat16"),
    ],
)
def test_what_cannot_train_here_is_refused_before_anything_is_written(base, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(replace(base, **options), quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_accum_steps": 3}, "batch_size must be a multiple of grad_accum_steps=3; got 16"),
        ({"amp_dtype": "float16"}, "amp_dtype applies to amp: give amp too"),
        ({"freeze_epochs": 3, "weights": "a.pth"}, "freeze_epochs must be fewer than epochs=3; got 3"),
        ({"freeze_epochs": 1}, "freeze_epochs keeps weights as they are, and none are given"),
        ({"freeze_epochs": 1, "weights": "a.pth", "insert": ()}, "freeze_epochs leaves nothing to train"),
        (
            {"freeze_epochs": 1, "freeze_backbone": True, "weights": "a.pth"},
            "freeze_backbone and freeze_epochs exclude each other",
        ),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused(base, options, message):
    with pytest.raises(ValueError, match=message):
        replace(base, **options)


# --- stages -----------------------------------------------------------------------------------------------------------


def test_the_backbone_thaws_after_the_epochs_that_it_is_frozen_for(base, tmp_path, monkeypatch):
    base = from_weights(base, tmp_path, classes=7, reset_head=True, freeze_epochs=2, layer_decay=0.8, amp=True)
    given = {key: value for key, value in read_checkpoint(tmp_path / "base.pth").items() if not key.startswith("fc.")}
    unchanged, lines = [], []
    original = Run.record

    def watching(run, *arguments):
        state = run.model.state_dict()
        unchanged.append(sum(torch.equal(state[key], value) for key, value in given.items()))
        original(run, *arguments)

    monkeypatch.setattr(Run, "record", watching)
    train(base, lines.append)
    assert unchanged[:2] == [len(given)] * 2
    assert unchanged[2] == 0
    assert "the backbone is frozen for 2 epochs: 17,027 parameters are trained" in lines
    assert any(line.startswith("all is thawed: 28") for line in lines)

    # Stopped in the first stage, between the stages' ends, and in the second.
    for epoch, step in ((0, 1), (1, 3), (2, 1)):
        interrupted = replace(base, output=str(tmp_path / f"{epoch}"), resume="auto")
        interrupt(interrupted, monkeypatch, epoch, step)
        train(interrupted, quiet)
        assert_same_result(tmp_path / "run", tmp_path / f"{epoch}")


def test_frozen_epochs_are_not_thawed_ones(base, tmp_path):
    base = from_weights(base, tmp_path, epochs=2)
    for frozen in (0, 1):
        train(replace(base, freeze_epochs=frozen, output=str(tmp_path / str(frozen))), quiet)
    one, other = (read_checkpoint(tmp_path / str(frozen) / "last.pth")["model"] for frozen in (0, 1))
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_curves_are_those_of_the_metrics(base, tmp_path):
    train(base, quiet)
    rows = read_checkpoint(tmp_path / "run" / "last.pth")["rows"]
    with Image.open(tmp_path / "run" / "curves.png") as picture:
        assert (picture.width, picture.height) == (900, 1050)
    loss, top1, rate, share = curves_figure(rows).axes
    columns = ((loss, 0, "train_loss"), (loss, 1, "eval_loss"), (top1, 0, "eval_top1"), (rate, 0, "lr"))
    for axis, line, key in (*columns, (share, 0, "branch_share")):
        assert list(axis.lines[line].get_xdata()) == [1, 2, 3]
        assert list(axis.lines[line].get_ydata()) == [float(row[key]) for row in rows]
    without_blocks = [{**row, "branch_share": ""} for row in rows]
    assert len(curves_figure(without_blocks).axes) == 3


# --- several processes ------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask_to_stop(epoch, step):
    """A signal comes in a step, as a scheduler sends it."""
    original = TrainingStep.__call__

    def asked(self, images, labels, epoch_now, step_now):
        if (epoch_now, step_now) == (epoch, step):
            signal.raise_signal(signal.SIGTERM)
        return original(self, images, labels, epoch_now, step_now)

    TrainingStep.__call__ = asked


def on_two_processes(forks, settings, log, faults=(None, None)):
    """The exit codes of two processes that train together."""
    port = str(free_port())
    processes = []
    for rank, fault in enumerate(faults):
        of_launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**{key: str(value) for key, value in of_launcher.items()}, "MASTER_ADDR": "127.0.0.1"}
        processes.append(start(forks, flags(settings), log, environment, fault))
    return [finish(process, log) for process in processes]


def test_two_processes_stop_together_and_give_what_one_gives(base, forks, tmp_path):
    """With a stage of frozen epochs, mixed images, accumulated gradients, an average and an interruption."""
    # No batch norm, whose statistics would be those of each process's part.
    torch.manual_seed(5)
    torch.save(create_model("convnext_atto", num_classes=3).state_dict(), tmp_path / "base.pth")
    base = replace(
        base, model="convnext_atto", img_size=32, insert=("stages.1",), weights=str(tmp_path / "base.pth"), epochs=2,
        opt="sgd", lr=0.02, attention_lr=0.1, layer_decay=0.9, freeze_epochs=1, grad_accum_steps=2, mixup=0.2,
        cutmix=1.0,
    )  # fmt: skip
    train(base, quiet)
    log = tmp_path / "log"
    whole = replace(base, output=str(tmp_path / "whole"))
    assert on_two_processes(forks, whole, log) == [0, 0], log.read_text()
    interrupted = replace(base, output=str(tmp_path / "interrupted"), resume="auto")
    # The signal reaches one of them only, and stops both after the same step.
    for epoch, rank in ((0, 1), (1, 0)):
        faults = [None, None]
        faults[rank] = (ask_to_stop, epoch, 1)
        assert on_two_processes(forks, interrupted, log, faults) == [143, 143], log.read_text()
        saved = read_checkpoint(tmp_path / "interrupted" / "last.pth")
        assert (saved["epoch"], saved["step"]) == (epoch, 2)
    assert on_two_processes(forks, interrupted, log) == [0, 0], log.read_text()

    one, two, resumed = (read_checkpoint(tmp_path / name / "last.pth") for name in ("run", "whole", "interrupted"))
    given = read_checkpoint(tmp_path / "base.pth")
    for key, value in one["model"].items():
        assert torch.equal(resumed["model"][key], two["model"][key])
        assert torch.equal(resumed["model_ema"][key], two["model_ema"][key])
        torch.testing.assert_close(two["model"][key], value, rtol=1e-5, atol=1e-7)
    for key in ("stages.3.downsample.0.weight", "head.fc.weight"):
        assert (one["model"][key] - given[key]).abs().max() > 1e-4
    for key in ("train_loss", "eval_loss"):
        assert float(two["rows"][1][key]) == pytest.approx(float(one["rows"][1][key]), rel=1e-3)


def test_batch_norms_of_several_processes_are_synchronised_on_request(base, tmp_path):
    base = replace(base, epochs=1, warmup_epochs=0)
    result = train(replace(base, sync_bn=True), quiet)
    kinds = {type(module).__name__ for module in result.model.modules() if "BatchNorm" in type(module).__name__}
    assert kinds == {"SyncBatchNorm"}
    # One process has nothing to exchange.
    train(replace(base, output=str(tmp_path / "plain")), quiet)
    assert_same_result(tmp_path / "run", tmp_path / "plain")


def test_synchronised_norms_on_the_cpu_are_refused(base, forks, tmp_path):
    log = tmp_path / "log"
    assert on_two_processes(forks, replace(base, sync_bn=True), log) == [2, 2]
    assert "sync_bn: torch synchronises batch norms of several processes on CUDA only" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_launcher_that_is_stopped_lets_its_processes_save(base, number, tmp_path):
    base = replace(base, epochs=200, resume="auto")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*launch, "vision_attn", *flags(base)], env=environment, stdout=log, stderr=log)
        while process.poll() is None and "epoch 2/" not in (tmp_path / "log").read_text():
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(60)
    log = (tmp_path / "log").read_text()
    assert "interrupted; saved after step" in log, log
    assert read_checkpoint(tmp_path / "run" / "last.pth")["step"] > 0
