"""What happens to a run: it is killed, interrupted, short of room, in stages, on several processes; and goes on."""

import csv
import json
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
from dataclasses import replace
from pathlib import Path

import pytest
import tiny  # noqa: F401 - so that a process that begins here knows it
import torch
from filelock import FileLock
from safetensors.torch import load_file

import vision_attn as va
from vision_attn.errors import CheckpointError, Interrupted, TrainingError
from vision_attn.networks.models import create_model
from vision_attn.tools import cli
from vision_attn.tools.training import run as run_room
from vision_attn.tools.training.data import open_data
from vision_attn.tools.training.folder import newest_state
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import build_network
from vision_attn.tools.training.run import make_accelerator, train
from vision_attn.tools.training.settings import Settings, write_settings

pytestmark = pytest.mark.usefixtures("no_pictures")

#: Of a row of metrics.csv what depends on the clock.
CLOCK = ("seconds", "images_per_second")


@pytest.fixture
def base(image_folder, tmp_path):
    """A short run in which everything random and everything with a state takes part: four steps an epoch."""
    return Settings(
        data=image_folder, model="tiny", img_size=16, insert="layer1", epochs=2, batch_size=16, opt="adamw", lr=0.002,
        crop_padding=2, warmup_epochs=0.5, clip_grad=5.0, ema=0.9, device="cpu", output=tmp_path / "run",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def ctrl_c():
    """As a terminal has it: in the background of a shell, where tests may run as well, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def quiet(line):
    pass


def state_of(folder):
    """Weights and averages, and what the run says of itself but for the clock."""
    found = newest_state(folder)
    tensors = {file.name: load_file(file) for file in found.glob("*.safetensors")}
    progress = json.loads((found / "progress.json").read_text())
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in progress["rows"]]
    return tensors, {**progress, "rows": rows, "seconds": 0}


def assert_same_result(one, other):
    """The same weights, averages and log, bit for bit, and the same best network."""
    (tensors, progress), (others, their_progress) = state_of(one), state_of(other)
    assert (tensors.keys(), progress) == (others.keys(), their_progress)
    for name, values in tensors.items():
        assert all(torch.equal(value, others[name][key]) for key, value in values.items())
    assert (one / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()


def at_step(monkeypatch, epoch, step, action):
    """Do something in a step, before it is made; the step's loss is what that returns, if it does."""
    original = Trainer.step

    def acting(self, images, labels, epoch_now, step_now):
        found = action() if (epoch_now, step_now) == (epoch, step) else None
        loss = original(self, images, labels, epoch_now, step_now)
        return loss if found is None else found

    monkeypatch.setattr(Trainer, "step", acting)


def interrupt(settings, monkeypatch, epoch, step, number=signal.SIGTERM):
    """Train until a signal comes in a step."""
    with monkeypatch.context() as patched:
        at_step(patched, epoch, step, lambda: signal.raise_signal(number))
        with pytest.raises(Interrupted) as caught:
            train(settings, say=quiet)
    return caught.value


def fails(*arguments, **options):
    raise MemoryError


def words(settings):
    """The command line of these settings."""
    file = settings.output.with_suffix(".yaml")
    file.write_bytes(write_settings(settings))
    resume = ["--resume", settings.resume] if settings.resume else []
    return ["train", "--config", str(file), "--output", str(settings.output), *resume]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, {"attention_lr": 0.01, "layer_decay": 0.7, "model": "test_resnet", "drop_path": 0.2}),
        (signal.SIGTERM, {"opt": "sgd", "grad_accum_steps": 2, "ema": None, "aa": "rand-m9", "workers": 1}),
        (signal.SIGTERM, {"crop": "resized", "mixup": 0.2, "cutmix": 1.0, "reprob": 0.5, "opt": "muon"}),
    ],
    ids=["ctrl-c", "workers", "mixed"],
)
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(base, number, options, tmp_path, monkeypatch):
    base = replace(base, **options)
    train(base, say=quiet)
    output = tmp_path / "interrupted"
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    stop = interrupt(replace(base, output=output), monkeypatch, 0, 1, number)
    assert str(stop) == f"interrupted; saved after step 2 of 4 of epoch 1 in {output}: go on with --resume {output}"
    assert stop.signal == number
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    interrupt(replace(base, output=output, resume="auto"), monkeypatch, 1, 3)  # before the last evaluation
    assert json.loads((newest_state(output) / "progress.json").read_text())["step"] == 4
    lines = []
    train(replace(base, output=None, resume=str(output)), say=lines.append)
    assert f"resumed after epoch 1 and step 4 of the next from {output / 'state' / '00001-0000004'}" in lines
    assert_same_result(tmp_path / "run", output)


@pytest.mark.parametrize("place", ["state", "model"])
def test_a_run_killed_while_it_writes_goes_on_to_the_same_bits(base, place, tmp_path, monkeypatch):
    """What a kill leaves: a state that is half written, or a best network and no state of that epoch yet."""
    train(base, say=quiet)
    killed = replace(base, output=tmp_path / "killed", resume="auto")
    replace_folder, save_best = os.replace, Trainer.save_best

    def dying(source, target):
        if Path(target).name == "00001-0000004":
            (Path(source) / "optimizer.bin").write_bytes(b"half of it")
            raise MemoryError
        replace_folder(source, target)

    def last(trainer):
        save_best(trainer)
        if trainer.progress.epoch == 1:
            raise MemoryError

    with monkeypatch.context() as patched:
        if place == "state":
            patched.setattr(os, "replace", dying)
            patched.setattr("shutil.rmtree", lambda *given, **how: None)  # a killed process clears nothing away
        else:
            patched.setattr(Trainer, "save_best", last)
        with pytest.raises((MemoryError, TrainingError)):
            train(killed, say=quiet)
    assert newest_state(killed.output).name < "00001-0000004"
    train(killed, say=quiet)
    assert [path.name for path in (killed.output / "state").iterdir()] == ["00002-0000000"]
    assert_same_result(tmp_path / "run", tmp_path / "killed")
    with open(killed.output / "metrics.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]


def command(line, place, log):
    """A command in a process that has imported all it needs, with the place among several that torchrun would give."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    sys.exit(cli.main(line))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills"), [(1, 20), (2, 4)])
def test_a_run_killed_twenty_times_ends_with_the_same_bits(base, processes, kills, tmp_path):
    context, chance, log = multiprocessing.get_context("forkserver"), random.Random(processes), tmp_path / "log"
    context.set_forkserver_preload(["vision_attn.tools.training.run"])
    base = replace(base, epochs=2 * kills, save_every=2, workers=0)

    def start(settings):
        place, begun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}, []
        place |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes} if processes > 1 else {}
        for rank in range(processes):
            ranks = {**place, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
            begun.append(context.Process(target=command, args=(words(settings), ranks, log)))
            begun[-1].start()
        return begun

    def ends(begun):
        for process in begun:
            process.join()
        return [process.exitcode for process in begun]

    assert ends(start(base)) == [0] * processes, log.read_text()
    killed = replace(base, output=tmp_path / "killed", resume="auto")
    for _ in range(kills):
        before, running = newest_state(killed.output), start(killed)
        while running[0].is_alive() and newest_state(killed.output) == before:
            time.sleep(0.002)  # until it saved something new
        time.sleep(chance.uniform(0, 0.02))
        for process in running:
            process.kill()
        assert set(ends(running)) == {-signal.SIGKILL}, "the run ended before it was killed often enough"
    assert ends(start(killed)) == [0] * processes, log.read_text()
    assert_same_result(tmp_path / "run", tmp_path / "killed")


def test_signals_that_are_ignored_stay_so_and_a_run_in_a_thread_takes_none(base, tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    at_step(monkeypatch, 0, 1, lambda: signal.raise_signal(signal.SIGINT))
    train(replace(base, epochs=1), say=quiet)
    other = replace(base, epochs=1, output=tmp_path / "thread")
    thread = threading.Thread(target=train, args=(other,), kwargs={"say": quiet})
    thread.start()
    thread.join()
    assert_same_result(tmp_path / "run", tmp_path / "thread")


def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(base, tmp_path, monkeypatch):
    base = replace(base, resume="auto", epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", fails)
        with pytest.raises(MemoryError):
            train(base, say=quiet)
    # What a run leaves before its first step is no obstacle to the same run, and one to another.
    with pytest.raises(ValueError, match=r"but lr, label_smoothing differ from .*run"):
        train(replace(base, lr=0.1, label_smoothing=0.1), say=quiet)
    train(replace(base, workers=1, early_stopping=5), say=quiet)
    lines = []
    train(base, say=lines.append)
    assert not any(line.startswith("epoch ") for line in lines)
    # More epochs extend it; fewer are another run.
    train(replace(base, epochs=2, output=None, resume=str(tmp_path / "run")), say=lines.append)
    assert any(line.startswith("epoch 2/2") for line in lines)
    with pytest.raises(ValueError, match="but epochs differ from"):
        train(base, say=quiet)


def test_a_run_leaves_files_that_are_not_its_own(base, tmp_path):
    """An open log beside the best network loses nothing; before, a file beside the states ended the run."""
    for name in ("state", "model"):
        (base.output / name).mkdir(parents=True)
        (base.output / name / "notes.txt").write_text("mine")
    (base.output / "state" / "mine").mkdir()
    with open(base.output / "model" / "log.txt", "w", buffering=1) as log:
        train(replace(base, epochs=1), say=log.write)
    assert "before epoch 1: " in (base.output / "model" / "log.txt").read_text()
    assert "epoch 1/1: " in (base.output / "model" / "log.txt").read_text()
    assert {path.name for path in (base.output / "state").iterdir()} == {"00001-0000000", "mine", "notes.txt"}
    assert (base.output / "model" / "notes.txt").read_text() == "mine"


def test_what_cannot_be_resumed_is_said(base, tmp_path):
    for resume, output, message in (
        (tmp_path / "nothing", None, "resume: there is no run in .*nothing"),
        (tmp_path / "nothing", base.output, "output must be the folder that a run goes on in"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            train(replace(base, resume=str(resume), output=output), say=quiet)


def test_a_state_that_is_damaged_or_hostile_is_refused_and_runs_nothing(base, tmp_path, capfd):
    class RunsCode:
        def __reduce__(self):
            return os.system, ("echo this ran >&2",)

    train(replace(base, epochs=1), say=quiet)
    files = ("progress.json", "model.safetensors", "model_1.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl")
    for name in files:
        folder = shutil.copytree(tmp_path / "run", tmp_path / name)
        torch.save(RunsCode(), newest_state(folder) / name)
        with pytest.raises(CheckpointError, match="is damaged, and nothing can go on from it"):
            train(replace(base, output=folder, resume="auto"), say=quiet)
    torch.save(RunsCode(), newest_state(tmp_path / "run") / "random_states_0.pkl")
    train(replace(base, resume="auto"), say=quiet)  # whose content no run depends on
    assert "this ran" not in capfd.readouterr().err


def test_two_runs_do_not_share_a_folder(base, tmp_path, monkeypatch):
    monkeypatch.setattr(run_room, "PATIENCE", 0.05)
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(OSError, match=r"run/\.lock"):
        train(base, say=quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_loss_that_is_not_finite_ends_the_run_and_nothing_of_it_is_saved(base, tmp_path, monkeypatch):
    at_step(monkeypatch, 1, 1, lambda: torch.tensor(torch.inf))
    message = r"the loss is not finite at step 2 of 4 of epoch 2, .*lower --lr.* The last good state is in .*run"
    with pytest.raises(TrainingError, match=message):
        train(base, say=quiet)
    assert newest_state(tmp_path / "run").name == "00001-0000000"


def test_weights_that_are_not_finite_are_not_saved(base, tmp_path, monkeypatch):
    look = Trainer.look

    def breaking(trainer, total, due):
        if (trainer.progress.epoch, trainer.progress.step) == (1, 4):
            next(trainer.model.parameters()).data[0] = torch.nan
        look(trainer, total, due)

    monkeypatch.setattr(Trainer, "look", breaking)
    with pytest.raises(TrainingError, match="a weight is not finite at step 4 of 4 of epoch 2"):
        train(base, say=quiet)
    assert newest_state(tmp_path / "run").name == "00001-0000000"


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
    save = Trainer.save

    def in_a_full_disk(trainer):
        if trainer.progress.epoch == 0:
            return save(trainer)
        with files_of_at_most(5_000):
            return save(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save", in_a_full_disk)
        assert cli.main(words(base)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{tmp_path / 'run'} cannot be written (" in error
    assert ": make room, and --resume it" in error
    assert newest_state(tmp_path / "run").name == "00000-0000004"
    train(replace(base, resume="auto"), say=quiet)
    train(replace(base, output=tmp_path / "other"), say=quiet)
    assert_same_result(tmp_path / "run", tmp_path / "other")


def test_a_scaled_loss_goes_on_with_its_scale(base, tmp_path, monkeypatch):
    def scaling(settings):
        """What float16 does on CUDA, in float32 on the CPU: the scale doubles every second step."""
        accelerator = make_accelerator(settings)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        return accelerator

    monkeypatch.setattr(run_room, "make_accelerator", scaling)
    train(base, say=quiet)
    other = replace(base, output=tmp_path / "other", resume="auto")
    interrupt(other, monkeypatch, 0, 2)
    train(other, say=quiet)
    assert_same_result(tmp_path / "run", tmp_path / "other")
    scales = [torch.load(newest_state(tmp_path / name) / "scaler.pt", weights_only=True) for name in ("run", "other")]
    assert scales[0] == scales[1]
    assert scales[0]["scale"] == 64 * 2**4


def test_deterministic_kernels_are_asked_for(base, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        for wanted, variable in ((False, None), (True, ":4096:8")):
            make_accelerator(replace(base, deterministic=wanted))
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == variable
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_the_backbone_thaws_after_the_epochs_that_it_is_frozen_for(base, tmp_path, monkeypatch):
    torch.save(create_model(base.model, num_classes=7).state_dict(), tmp_path / "base.pth")
    base = replace(base, epochs=3, weights=tmp_path / "base.pth", reset_head=True, freeze_epochs=2, layer_decay=0.8)
    given = torch.load(tmp_path / "base.pth", weights_only=True)
    unchanged, lines, original = [], [], Trainer.close_epoch

    def watching(trainer, *arguments):
        state = trainer.model.state_dict()
        unchanged.append({key for key, value in given.items() if torch.equal(state[key], value)})
        original(trainer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "close_epoch", watching)
        train(base, say=lines.append)
    assert unchanged == [given.keys() - {"fc.weight", "fc.bias"}] * 2 + [set()]
    assert [line.partition(":")[0] for line in lines if line.startswith("the backbone is")] == [
        "the backbone is frozen", "the backbone is unfrozen",
    ]  # fmt: skip
    # Stopped in and between the stages, and gone on without the weights that it began from.
    other = replace(base, output=tmp_path / "other", resume="auto")
    for epoch, step in ((0, 3), (1, 1), (2, 1)):
        interrupt(other, monkeypatch, epoch, step)
        (tmp_path / "base.pth").unlink(missing_ok=True)
    train(other, say=quiet)
    assert_same_result(tmp_path / "run", tmp_path / "other")


def test_batch_norms_of_several_processes_are_synchronised_on_request(base):
    for wanted in (False, True):
        model = build_network(replace(base, sync_bn=wanted), open_data(base, train=True), quiet).model
        assert any("SyncBatchNorm" in type(module).__name__ for module in model.modules()) == wanted


def in_two_processes(settings):
    """What torchrun's two processes of the same command say."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    line = [*launch, "vision_attn", *words(settings)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_give_what_one_gives(base, tmp_path):
    """With a stage of frozen epochs, accumulated gradients and an average, where nothing is varied by chance."""
    # No batch norm, whose statistics would be those of each process's part.
    torch.save(create_model("test_efficientnet_gn", num_classes=3).state_dict(), tmp_path / "base.pth")
    base = replace(
        base, model="test_efficientnet_gn", insert="blocks.1", weights=tmp_path / "base.pth", opt="sgd", lr=0.005,
        attention_lr=0.02, freeze_epochs=1, grad_accum_steps=2, crop_padding=0, hflip=0.0,
    )  # fmt: skip
    result = train(base, say=quiet)
    said = in_two_processes(replace(base, output=tmp_path / "two"))
    assert said.count("epoch 2/2: ") == 1
    one, two = va.load_model(tmp_path / "run").state_dict(), va.load_model(tmp_path / "two").state_dict()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5)
    rows = state_of(tmp_path / "two")[1]["rows"]
    for key in ("train_loss", "eval_loss", "branch_share"):
        assert rows[1][key] == pytest.approx(result.rows[1][key], rel=1e-3)
    assert said.splitlines()[-2].partition(";")[2] == str(result.disabled).partition(";")[2]
