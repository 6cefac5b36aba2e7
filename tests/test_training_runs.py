"""What happens to a run: it is killed, interrupted, short of room, in stages, on several processes; and goes on."""

import csv
import math
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
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from vision_attn.errors import CheckpointError, DataError, Interrupted, TrainingError
from vision_attn.networks.checkpoints import read_checkpoint
from vision_attn.networks.safe import read_file
from vision_attn.networks.models import create_model
from vision_attn.tools import cli
from vision_attn.tools.training import run_folder
from vision_attn.tools.training import train as train_room
from vision_attn.tools.training.checkpoint import Progress, progress_in
from vision_attn.tools.training.evaluation import Normalize
from vision_attn.tools.training.images import ImageSet
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import build_network
from vision_attn.tools.training.run_folder import RunFolder
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.step import TrainingStep
from vision_attn.tools.training.train import make_accelerator, train

pytestmark = pytest.mark.usefixtures("no_pictures")

#: Of each row of metrics.csv what does not depend on the clock.
RESULTS = ("epoch", "lr", "train_loss", "eval_loss", "eval_top1", "branch_share")
SOURCE = SimpleNamespace(classes=("blue", "green", "red"), channels=3, size=(16, 16))


def settings_of(images, output):
    """A short run in which everything random and everything with a state takes part: four steps an epoch."""
    return Settings(
        data=str(images),
        model="tiny",
        img_size=16,
        insert=("layer1",),
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
        output=str(output),
    )


@pytest.fixture
def base(image_folder, tmp_path):
    return settings_of(image_folder, tmp_path / "run")


@pytest.fixture
def base_of_programs(base):
    """With a network that other processes know too."""
    return replace(base, model="test_resnet")


@pytest.fixture(scope="module")
def undisturbed(image_folder, tmp_path_factory):
    """The folder of a run of one epoch that nothing befell."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(replace(settings_of(image_folder, folder), epochs=1), quiet)
    return folder


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
    for key in ("epoch", "step", "loss", "best", "scaler"):
        assert one.get(key) == other.get(key)


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


def fails(*arguments, **options):
    raise MemoryError


def trainer_of(settings, accelerator=None):
    """What a run of these settings trains with, on images of noise."""
    accelerator, generator = accelerator or make_accelerator(settings), torch.Generator().manual_seed(0)
    torch.manual_seed(settings.seed)
    images = ImageSet(torch.randint(256, (72, 3, 16, 16), dtype=torch.uint8, generator=generator), torch.arange(72) % 3)
    network = build_network(settings, SOURCE, quiet)
    normalize = Normalize(network.mean, network.std, 3)
    return Trainer(settings, accelerator, quiet, network, normalize, SOURCE.classes, images, images)


def make_steps(trainer, *numbers):
    trainer.step.enter_epoch(0, quiet)
    trainer.step.model.train()
    for number in numbers:
        images = trainer.normalize(trainer.train_data.images[8 * number : 8 * number + 8])
        trainer.step(images, trainer.train_data.labels[8 * number : 8 * number + 8], 0, number)


def assert_gone_on_with(settings, **how):
    """Two steps, saved, and a third from there by another trainer is the third of the first one, bit for bit."""
    one, other = (trainer_of(settings, **{key: make(settings) for key, make in how.items()}) for _ in range(2))
    make_steps(one, 0, 1)
    one.checkpoints.save_last()
    other.checkpoints.restore(read_file(one.checkpoints.last))
    for trainer in (one, other):
        make_steps(trainer, 2)
    found, expected = other.checkpoints.content(), one.checkpoints.content()
    for part in ("model", "model_ema"):
        assert all(torch.equal(value, found[part][key]) for key, value in expected[part].items())
    torch.testing.assert_close(found["optimizer"]["state"], expected["optimizer"]["state"], rtol=0, atol=0)
    assert found.get("scaler") == expected.get("scaler")
    return expected


# --- killed -----------------------------------------------------------------------------------------------------------


def process_main(arguments, log, environment, fault):
    """A process that runs a command, and something that befalls it."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - to the end of the process
    run_folder.save_figure, run_folder.curves_figure = lambda figure, path: path.write_bytes(b""), lambda rows: None
    if fault:
        function, *values = fault
        function(*values)
    sys.exit(cli.main(arguments))


@pytest.fixture(scope="module")
def forks():
    """Processes that have imported everything already."""
    multiprocessing.set_forkserver_preload(["vision_attn.tools.cli", "vision_attn.tools.training.train"])
    return multiprocessing.get_context("forkserver")


def start(forks, arguments, log, environment=None, fault=None):
    process = forks.Process(target=process_main, args=(arguments, str(log), environment or {}, fault))
    process.start()
    return process


def finish(process, log):
    process.join(240)
    assert process.exitcode is not None, log.read_text()
    return process.exitcode


def test_two_runs_do_not_share_a_folder(base, tmp_path, monkeypatch):
    """One that began meanwhile is refused, as is one that found the folder empty and comes after another's end."""
    monkeypatch.setattr(run_folder, "PATIENCE", 0.05)
    settings, folder = replace(base, epochs=1), RunFolder(tmp_path / "run")
    with folder.alone(), pytest.raises(ValueError, match=r"another run is at work in .*run: wait for its end"):
        train(settings, quiet)
    assert [path.name for path in folder.path.iterdir()] == [".lock"]
    (folder.path / "last.pth").touch()
    monkeypatch.setattr(RunFolder, "refuse_another_run", once_passed(RunFolder.refuse_another_run))
    with pytest.raises(ValueError, match="holds a run already"):
        train(settings, quiet)
    assert (folder.path / "last.pth").stat().st_size == 0


def once_passed(function):
    """The function, but for its first call."""
    calls = iter([lambda *_: None])
    return lambda *given: next(calls, function)(*given)


#: A field of last.pth that cannot be, as a damaged or foreign file may have it.
WRONG = {
    "epoch": [None, "1", -1, math.nan, 10**12, True], "step": [None, -1, 5, 1.0], "loss": [None, math.nan, "0"],
    "seconds": [[], math.inf], "rows": [None, [], [None], [{"epoch": 1}]], "best": [None, 3, {"top1": 1}],
    "optimizer": [None, {}], "model": [None, {}], "model_ema": [[]], "train_images": [torch.ones(2)],
}  # fmt: skip


def test_a_last_pth_with_a_field_that_cannot_be_is_refused_by_name(base, undisturbed, tmp_path):
    settings = replace(base, epochs=1, output=None, resume=str(tmp_path / "last.pth"))
    content = read_checkpoint(undisturbed / "last.pth")
    known = {key: content[key] for key in ("epoch", "step", "loss", "epoch_seconds", "seconds", "rows", "best")}
    assert progress_in(known, epochs=1, steps=4).epoch == 1
    trainer = trainer_of(settings)
    for key, values in WRONG.items():
        for value in values:
            if key in known:
                with pytest.raises((TypeError, ValueError, LookupError)):
                    progress_in({**known, key: value}, epochs=1, steps=4)
        torch.save({**content, key: values[0]}, tmp_path / "last.pth")
        with pytest.raises((CheckpointError, ValueError), match=r"last\.pth is damaged|number of training images"):
            trainer.checkpoints.restore(read_file(tmp_path / "last.pth"))


def test_a_clock_that_stands_still_ends_no_run(base, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    assert train(replace(base, epochs=1), quiet).seconds == 0


def test_a_run_killed_while_it_writes_goes_on_to_the_same_bits(base, undisturbed, tmp_path, monkeypatch):
    """What a kill leaves on the disk: half of a file, not yet renamed; or the file, and nothing that comes after it."""
    left, replace_file = tmp_path / "left", os.replace
    killed = replace(base, epochs=1, output=str(left), resume="auto")
    # The first last.pth is written before the first step.
    for name, moment, there in (("last.pth", "half", False), ("best.pth", "after", True)):

        def dying_replace(source, target, name=name, moment=moment):
            if os.path.basename(target) != name:
                return replace_file(source, target)
            if moment == "half":
                os.truncate(source, os.path.getsize(source) // 2)
            else:
                replace_file(source, target)
            shutil.copytree(os.path.dirname(target), tmp_path / "disk")
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", dying_replace)
            with pytest.raises(MemoryError):
                train(killed, quiet)
        shutil.rmtree(left)
        (tmp_path / "disk").rename(left)
        for path in left.glob(".*.partial"):
            path.rename(path.with_name(f".{name}.another.partial"))  # of another process
        assert (left / "last.pth").exists() == there
        assert bool(list(left.glob(".*.partial"))) != there
    assert read_checkpoint(left / "last.pth")["epoch"] == 0
    train(killed, quiet)
    assert not list(left.glob(".*.partial"))
    assert_same_result(undisturbed, left)
    best, whole = (read_checkpoint(folder / "best.pth") for folder in (left, undisturbed))
    assert best["epoch"] == whole["epoch"]
    assert all(torch.equal(value, whole["model"][key]) for key, value in best["model"].items())


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_with_the_same_bits(base_of_programs, tmp_path):
    base = replace(base_of_programs, epochs=40)
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
        (signal.SIGINT, 130, 1, 1, {"epochs": 2, "attention_lr": 0.01, "layer_decay": 0.7, "drop_path": 0.2}),
        (
            signal.SIGTERM,
            143,
            0,
            0,
            {
                "opt": "sgd",
                "grad_accum_steps": 2,
                "model_ema": False,
                "model_ema_decay": 0.999,
                "aa": "rand-m9",
                "color_jitter": 0.4,
            },
        ),
        (
            signal.SIGTERM,
            143,
            0,
            3,
            {"cutout": 4, "mixup": 0.2, "cutmix": 1.0, "reprob": 0.5, "class_weights": "balanced", "sched": "poly"},
        ),  # before the last evaluation
    ],
    ids=["ctrl-c", "first step", "last step"],
)
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(
    base, number, code, epoch, step, options, tmp_path, monkeypatch, capsys
):
    def with_dropout(*arguments):
        network = build_network(*arguments)
        network.model.drop_rate = 0.3
        return network

    monkeypatch.setattr(train_room, "build_network", with_dropout)
    base = replace(base, **{"epochs": 1, **options})
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
    ahead = f"{base.epochs - epoch} of {base.epochs} epochs are ahead"
    assert f"resumed after epoch {epoch} and step {step + 1} of the next from {last}: {ahead}" in lines
    assert_same_result(tmp_path / "run", tmp_path / "interrupted")


@pytest.mark.parametrize("name", ["lion", "muon", "adamp"])
def test_any_optimiser_of_timm_goes_on_with_the_same_bits(base, name):
    state = assert_gone_on_with(replace(base, opt=name))["optimizer"]["state"]
    assert any(value.is_floating_point() and value.any() for part in state.values() for value in part.values()
               if isinstance(value, torch.Tensor))  # fmt: skip


def test_an_evaluation_is_interrupted_too_and_its_epoch_kept(base, undisturbed, tmp_path, monkeypatch):
    last, batches = tmp_path / "run" / "last.pth", ImageSet.batches
    for wanted, step in ((0, 0), (1, 4), (2, 4)):  # before the first epoch; of the weights, and of their average
        evaluations = []

        def signalling(images, rows, *, seed=0, evaluations=evaluations, wanted=wanted):
            if len(images) == 24:  # those that are evaluated
                evaluations.append(len(evaluations))
                if evaluations[-1] == wanted:
                    signal.raise_signal(signal.SIGTERM)
            return batches(images, rows, seed=seed)

        with monkeypatch.context() as patched:
            patched.setattr(ImageSet, "batches", signalling)
            with pytest.raises(Interrupted, match=f"saved after step {step} of 4 of epoch 1"):
                train(replace(base, epochs=1, resume="auto"), quiet)
        saved = read_checkpoint(last)
        assert (saved["epoch"], saved["step"], len(evaluations)) == (0, step, wanted + 1)
    train(replace(base, epochs=1, resume="auto"), quiet)
    assert_same_result(undisturbed, tmp_path / "run")


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_job_is_obeyed_by_the_one_that_trains(base_of_programs, tmp_path):
    command = [sys.executable, "-m", "vision_attn", *flags(replace(base_of_programs, workers=1, epochs=1000))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert any(line.startswith("epoch 1/1000: ") for line in process.stdout)
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
        time.sleep(10)  # until torch's handler of signals raises

    at_step(monkeypatch, 0, 1, kill_a_worker)
    with pytest.raises(DataError, match=r"a worker process that decodes images ended, .*--workers"):
        train(replace(base, epochs=1, workers=1), quiet)


def test_a_signal_that_comes_after_the_last_step_is_not_lost(base, monkeypatch):
    base, write = replace(base, epochs=1), RunFolder.write_metrics

    def signalling(folder, rows, **options):
        write(folder, rows, **options)
        if rows:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "write_metrics", signalling)
    with pytest.raises(Interrupted):
        train(base, quiet)


def test_a_second_ctrl_c_leaves_at_once(base, tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 0, 1, twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(base, quiet)
    assert not isinstance(caught.value, Interrupted)
    assert read_checkpoint(tmp_path / "run" / "last.pth")["step"] == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_are_ignored_stay_so_and_a_run_in_a_thread_takes_none(base, undisturbed, tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with monkeypatch.context() as patched:
        at_step(patched, 0, 1, lambda: signal.raise_signal(signal.SIGINT))
        thread = threading.Thread(target=train, args=(replace(base, epochs=1), quiet))
        thread.start()
        thread.join()
    assert_same_result(undisturbed, tmp_path / "run")
    trainer = trainer_of(base)
    with trainer.signals_noted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
        assert not trainer.signal
        signal.raise_signal(signal.SIGTERM)
        assert trainer.signal == signal.SIGTERM


# --- begun, or gone on with -------------------------------------------------------------------------------------------


def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(base, tmp_path, monkeypatch):
    base = replace(base, resume="auto", epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingStep, "__call__", fails)
        with pytest.raises(MemoryError):
            train(base, quiet)
    # What a run leaves before its first step is no obstacle to the same run, and one to another.
    with pytest.raises(ValueError, match=r"but lr differ from .*last\.pth"):
        train(replace(base, lr=0.1), quiet)
    train(base, quiet)
    lines = []
    train(base, lines.append)
    assert f"resumed after epoch 1 from {tmp_path / 'run' / 'last.pth'}: 0 of 1 epochs are ahead" in lines
    assert not any(line.startswith("epoch ") for line in lines)
    (tmp_path / "run" / "last.pth").unlink()
    with pytest.raises(ValueError, match="holds a run already"):
        train(base, quiet)


def test_resuming_refuses_another_run_and_says_what_differs(base, image_folder, tmp_path, monkeypatch, capsys):
    missing = tmp_path / "run" / "last.pth"
    assert cli.main(flags(replace(base, resume=str(missing)))) == 1
    assert f"resume: there is no {missing} yet" in capsys.readouterr().err
    assert cli.main(flags(replace(base, output=None, resume=str(image_folder)))) == 2
    assert f"resume: {image_folder} is a folder: give the last.pth in it" in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"resume: {image_folder} is a folder"):
        train(replace(base, output=None, resume=str(image_folder)), quiet)
    interrupt(base, monkeypatch, 1, 1)
    with pytest.raises(ValueError, match=r"but opt, lr differ from .*--weights"):
        train(replace(base, opt="sgd", lr=0.1, resume=str(missing)), quiet)
    with pytest.raises(Exception, match=r"is not the last.pth of such a run \(it lacks best, .*optimizer, rows"):
        train(replace(base, resume=str(tmp_path / "run" / "best.pth")), quiet)
    fewer, others = tmp_path / "fewer", tmp_path / "others"
    for folder in (fewer, others):
        shutil.copytree(image_folder, folder)
    next((fewer / "train" / "red").iterdir()).unlink()
    for half in ("train", "val"):
        (others / half / "red").rename(others / half / "violet")
    for data, what in ((fewer, "the number of training images"), (others, "the classes of the data")):
        with pytest.raises(ValueError, match=rf"but {what} differ from .*last\.pth"):
            train(replace(base, resume="auto", data=str(data)), quiet)


def test_checkpoints_of_older_versions_are_gone_on_with(base):
    trainer = trainer_of(base)
    make_steps(trainer, 0)
    trainer.checkpoints.progress.reached(1, 0.5, 2.0)
    trainer.checkpoints.save_last()
    content = read_checkpoint(trainer.checkpoints.last)
    settings = content["settings"] | {"tensorboard": False}  # which is gone
    del settings["cutout"], settings["log_with"], settings["report_classes"]  # and those did not exist
    torch.save({**content, "settings": settings}, trainer.checkpoints.last)
    other = trainer_of(base)
    other.checkpoints.restore(read_file(trainer.checkpoints.last))
    assert other.checkpoints.progress == trainer.checkpoints.progress
    assert Settings.values_in({"tensorboard": False, "lr": 0.1}) == {"lr": 0.1}


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
    model = create_model(base.model, num_classes=3).state_dict()
    about = {"model": model, "classes": ["blue", "green", "red"], "input_size": [3, 16, 16], "train_images": 72}
    about |= {"mean": [0.5] * 3, "std": [0.5] * 3, "optimizer": {}, "model_ema": model}
    about |= dict.fromkeys((part.name for part in fields(Progress)), 0)
    settings = {**base.as_dict(), **crafted} if isinstance(crafted, dict) else crafted
    torch.save({**about, "settings": settings}, last)
    for options in ({"resume": str(last), "output": None}, {"weights": str(last), "test_only": True}):
        assert cli.main(flags(replace(base, **options))) == 1
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err


# --- the loss, and the disk -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "asked", "when"), [(3, False, 3), (2, True, 2)])
def test_a_loss_that_is_not_finite_ends_the_run_and_nothing_of_it_is_saved(
    base, every, asked, when, tmp_path, monkeypatch
):
    original = Trainer.train

    def looking(trainer, checkpoint):
        trainer.look_every = every
        return original(trainer, checkpoint)

    def broken():
        if asked:  # what would be saved now is looked at first
            signal.raise_signal(signal.SIGTERM)
        return torch.tensor(torch.inf)

    monkeypatch.setattr(Trainer, "train", looking)
    at_step(monkeypatch, 1, 1, broken)
    last = tmp_path / "run" / "last.pth"
    with pytest.raises(TrainingError, match=rf"loss \(inf\) .* step {when} of 4 of epoch 2, .*lower --lr.* is {last}"):
        train(replace(base, epochs=2), quiet)
    assert (read_checkpoint(last)["epoch"], read_checkpoint(last)["step"]) == (1, 0)


def test_weights_that_are_not_finite_are_not_saved(base, tmp_path, monkeypatch):
    step, last = TrainingStep.__call__, tmp_path / "run" / "last.pth"

    def breaking(self, images, labels, epoch, number):
        loss = step(self, images, labels, epoch, number)
        if (epoch, number) == (1, 3):
            with torch.no_grad():
                next(self.model.parameters())[0] = torch.nan
        return loss

    monkeypatch.setattr(TrainingStep, "__call__", breaking)
    with pytest.raises(TrainingError, match=rf"weight is not finite at step 4 of 4 of epoch 2.*good .* is {last}"):
        train(base, quiet)
    saved = read_checkpoint(last)
    assert saved["epoch"] == 1
    assert all(value.isfinite().all() for value in saved["model"].values())


def test_images_that_cannot_be_read_lose_nothing(base, undisturbed, tmp_path, monkeypatch):
    broken = replace(base, epochs=1, output=str(tmp_path / "broken"))
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
        patched.setattr(Trainer, "is_finite", lambda trainer, total: False)
        with pytest.raises(DataError):
            train(replace(broken, resume=str(last)), quiet)
    assert last.read_bytes() == before, "weights that are not finite take no good one's place"
    assert read_checkpoint(last)["step"] == 2
    train(replace(broken, resume=str(last)), quiet)
    assert_same_result(undisturbed, tmp_path / "broken")


def test_a_row_that_a_kill_kept_from_the_metrics_comes_back(base, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_metrics", lambda folder, rows, **how: fails() if len(rows) == 2 else None)
        with pytest.raises(MemoryError):
            train(replace(base, epochs=2), quiet)
    train(replace(base, epochs=2, resume="auto"), quiet)
    with open(tmp_path / "run" / "metrics.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]


@contextmanager
def files_of_at_most(size):
    """Writes beyond that fail in their middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing(base, tmp_path, monkeypatch, capsys):
    base, original, full = replace(base, epochs=1), RunFolder.save, {"from": 1}

    def in_a_full_disk(folder, name, content):
        if name != "last.pth" or content["epoch"] < full["from"]:
            return original(folder, name, content)
        with files_of_at_most(10_000):
            return original(folder, name, content)

    monkeypatch.setattr(RunFolder, "save", in_a_full_disk)
    assert cli.main(flags(base)) == 1
    last = tmp_path / "run" / "last.pth"
    error = capsys.readouterr().err
    assert f"{last} cannot be written (File too large), and the last.pth of before is whole: make room" in error
    assert "Traceback" not in error
    assert read_checkpoint(last)["epoch"] == 0
    assert not list((tmp_path / "run").glob(".*.partial"))

    # A run that cannot begin for want of room leaves the one that is there, and one that can takes its place.
    full["from"] = 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(TrainingError, match="make room"):
        train(replace(base, seed=1, overwrite=True), quiet)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    monkeypatch.setattr(RunFolder, "save", original)
    train(replace(base, resume="auto"), quiet)
    assert read_checkpoint(last)["epoch"] == 1


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_scaled_loss_goes_on_with_its_scale(base):
    def scaling(settings):
        """What float16 does on CUDA, in float32 on the CPU: the scale doubles every second step."""
        accelerator = make_accelerator(settings)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        return accelerator

    scale = assert_gone_on_with(base, accelerator=scaling)["scaler"]
    assert (scale["scale"], scale["_growth_tracker"]) == (128, 1)


def test_deterministic_kernels_are_asked_for_before_the_first_step(base, monkeypatch):
    seen = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")

    def look():
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        raise MemoryError  # it was the first step that matters

    at_step(monkeypatch, 0, 0, look)
    try:
        for deterministic in (False, True):
            with pytest.raises(MemoryError):
                train(replace(base, deterministic=deterministic, overwrite=True), quiet)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(False, None), (True, ":4096:8")]


# --- stages -----------------------------------------------------------------------------------------------------------


def test_the_backbone_thaws_after_the_epochs_that_it_is_frozen_for(base, tmp_path, monkeypatch):
    torch.save(create_model(base.model, num_classes=7).state_dict(), tmp_path / "base.pth")
    base = replace(
        base, epochs=2, weights=str(tmp_path / "base.pth"), reset_head=True, freeze_epochs=1, layer_decay=0.8
    )
    given = {key: value for key, value in read_checkpoint(tmp_path / "base.pth").items() if not key.startswith("fc.")}
    unchanged, lines, original = [], [], Trainer.close_epoch

    def watching(trainer, *arguments):
        state = trainer.step.model.state_dict()
        unchanged.append(sum(torch.equal(state[key], value) for key, value in given.items()))
        original(trainer, *arguments)

    monkeypatch.setattr(Trainer, "close_epoch", watching)
    train(base, lines.append)
    assert unchanged == [len(given), 0]
    assert any(line.startswith("the backbone is frozen for 1 epochs: ") for line in lines)
    assert any(line.startswith("all is thawed: ") for line in lines)

    # Stopped at the end of the first stage, and in the second.
    interrupted = replace(base, output=str(tmp_path / "interrupted"), resume="auto")
    for epoch, step in ((0, 3), (1, 1)):
        interrupt(interrupted, monkeypatch, epoch, step)
    train(interrupted, quiet)
    assert_same_result(tmp_path / "run", tmp_path / "interrupted")


# --- several processes ------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at_step_of_a_process(epoch, step, action):
    """In a process of its own what :func:`at_step` does: a signal as a scheduler sends it, or a loss that breaks."""
    patch = pytest.MonkeyPatch()
    actions = {"signal": lambda: signal.raise_signal(signal.SIGTERM), "nan": lambda: torch.tensor(torch.nan)}
    at_step(patch, epoch, step, actions[action])


def on_two_processes(forks, settings, log, faults=(None, None)):
    """The exit codes of two processes that train together."""
    port = str(free_port())
    processes = []
    for rank, fault in enumerate(faults):
        of_launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**{key: str(value) for key, value in of_launcher.items()}, "MASTER_ADDR": "127.0.0.1"}
        processes.append(start(forks, flags(settings), log, environment, fault))
    return [finish(process, log) for process in processes]


@pytest.mark.slow
def test_two_processes_stop_together_and_give_what_one_gives(base, forks, tmp_path):
    """With a stage of frozen epochs, mixed images, accumulated gradients, an average and an interruption."""
    # No batch norm, whose statistics would be those of each process's part.
    model = "test_efficientnet_gn"
    torch.manual_seed(5)
    torch.save(create_model(model, num_classes=3).state_dict(), tmp_path / "base.pth")
    base = replace(
        base, model=model, insert=("blocks.1",), weights=str(tmp_path / "base.pth"), epochs=2, opt="sgd",
        lr=0.005, attention_lr=0.02, layer_decay=0.9, freeze_epochs=1, grad_accum_steps=2, mixup=0.2, cutmix=1.0,
        report_classes=True,
    )  # fmt: skip
    train(base, quiet)
    log = tmp_path / "log"
    whole = replace(base, output=str(tmp_path / "whole"))
    assert on_two_processes(forks, whole, log) == [0, 0], log.read_text()
    interrupted = replace(base, output=str(tmp_path / "interrupted"), resume="auto")
    # The signal reaches one of them only, and stops both after the same step.
    for epoch, rank in ((0, 1), (1, 0)):
        faults = [None, None]
        faults[rank] = (at_step_of_a_process, epoch, 1, "signal")
        assert on_two_processes(forks, interrupted, log, faults) == [143, 143], log.read_text()
        saved = read_checkpoint(tmp_path / "interrupted" / "last.pth")
        assert (saved["epoch"], saved["step"]) == (epoch, 2)
        if epoch == 0:  # it goes on on one process as well
            shutil.copytree(tmp_path / "interrupted", tmp_path / "alone")
    assert on_two_processes(forks, interrupted, log) == [0, 0], log.read_text()
    train(replace(interrupted, output=str(tmp_path / "alone")), quiet)
    alone = read_checkpoint(tmp_path / "alone" / "last.pth")["model"]

    one, two, resumed = (read_checkpoint(tmp_path / name / "last.pth") for name in ("run", "whole", "interrupted"))
    given = read_checkpoint(tmp_path / "base.pth")
    for key, value in one["model"].items():
        assert torch.equal(resumed["model"][key], two["model"][key])
        torch.testing.assert_close(alone[key], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(resumed["model_ema"][key], two["model_ema"][key])
        torch.testing.assert_close(two["model"][key], value, rtol=1e-5, atol=1e-6)  # larger rates carry rounding on
    for key in ("conv_stem.weight", "classifier.weight"):
        assert (one["model"][key] - given[key]).abs().max() > 1e-4
    for key in ("train_loss", "eval_loss"):
        assert float(two["rows"][1][key]) == pytest.approx(float(one["rows"][1][key]), rel=1e-3)
    # Each class is counted over the images of both.
    for name in ("classes.csv", "confusion.csv"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.slow
def test_a_loss_that_is_no_number_in_one_process_stops_both_and_last_pth_is_usable(base_of_programs, forks, tmp_path):
    log = tmp_path / "log"
    faults = (None, (at_step_of_a_process, 1, 1, "nan"))
    assert on_two_processes(forks, replace(base_of_programs, epochs=2), log, faults) == [1, 1], log.read_text()
    assert log.read_text().count("the loss (nan) or a weight is not finite at step 2 of 4 of epoch 2") == 2
    saved = read_checkpoint(tmp_path / "run" / "last.pth")
    assert (saved["epoch"], saved["step"]) == (1, 0)
    assert all(value.isfinite().all() for value in saved["model"].values())


@pytest.mark.parametrize("number", [0.0, math.nan], ids=["whole here", "broken here"])
def test_what_one_process_finds_stops_each(base, number, monkeypatch):
    """Of two processes, of which the other one's triggers and losses are made up."""
    trainer = trainer_of(base)
    asked = []
    monkeypatch.setattr(trainer.accelerator, "set_trigger", lambda: asked.append("here"))
    monkeypatch.setattr(trainer.accelerator, "check_trigger", lambda: bool(asked))
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda total, how: total + math.nan)
    total = torch.tensor(number)
    if not number:
        trainer.look(total, 1, 0.0)  # nothing is amiss anywhere
        asked.append("there")
    with pytest.raises(TrainingError, match=r"loss \(nan\) or a weight is not finite at step 2 of 4 of epoch 1"):
        trainer.look(total, 2, 0.0)
    assert asked == ["there" if number == 0 else "here"]
    assert not trainer.checkpoints.last.exists()


def test_batch_norms_of_several_processes_are_synchronised_on_request(base):
    for wanted in (True, False):
        model = build_network(replace(base, sync_bn=wanted), SOURCE, quiet).model
        kinds = {type(module).__name__ for module in model.modules() if "BatchNorm" in type(module).__name__}
        assert any("Sync" in kind for kind in kinds) == wanted


@pytest.mark.slow
def test_a_launcher_that_is_stopped_lets_its_processes_save(base_of_programs, tmp_path):
    base = replace(base_of_programs, epochs=2000, resume="auto")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*launch, "vision_attn", *flags(base)], env=environment, stdout=log, stderr=log)
        while process.poll() is None and "epoch 2/" not in (tmp_path / "log").read_text():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    log = (tmp_path / "log").read_text()
    assert "interrupted; saved after step" in log, log
    assert read_checkpoint(tmp_path / "run" / "last.pth")["step"] > 0
