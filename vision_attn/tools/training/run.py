"""Training and evaluation of a network from settings: the data, the network, then the loop."""

from __future__ import annotations

import math
import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, broadcast_object_list, set_seed
from filelock import FileLock
from torch import nn

from vision_attn.errors import DataError, TrainingError
from vision_attn.networks.insertion.makers import get_maker
from vision_attn.networks.models.folder import load_model
from vision_attn.networks.safe import write_atomically
from vision_attn.text import shorten
from vision_attn.tools.training.data import open_data, open_images
from vision_attn.tools.training.evaluation import Disabled, Evaluation, Scores
from vision_attn.tools.training.folder import newest_state, numbered_folder
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import Log, block_class, build_network
from vision_attn.tools.training.settings import Settings, differences, read_settings, write_settings

#: Seconds to wait for the lock on a folder: worker processes of a killed run hold it until they notice.
LOCK_TIMEOUT = 10


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    #: network as it was evaluated last, in evaluation mode; ``load_model(folder)`` gives that of the best epoch
    model: nn.Module
    #: shape of an input image, ``(c, h, w)``
    input_size: tuple[int, int, int]
    #: scores after the last epoch
    final: Scores
    #: scores of the epoch with the highest top-1
    best: Scores
    #: scores with all blocks disabled; None without blocks
    disabled: Disabled | None
    #: rows of ``metrics.csv``, one per epoch
    rows: list[dict[str, Any]]
    #: folder of the run
    folder: Path


def train(model: nn.Module | str | None = None, *, log: Log = print, **options: Any) -> Result:
    """Train an image classifier, with or without attention, and leave the run in a folder.

    Every random choice follows from the seed, the epoch, the step and the process. So a run that was stopped anywhere
    and is resumed has bitwise the same weights as one that was not.

    Args:
        model: name of a network, or a network of timm's with its blocks inserted, which is trained in place.
        log: function that is called with each line of the log, on the main process.
        **options: settings by name, as ``vision-attn train --help`` lists them: ``data="flowers", epochs=10``.

    Returns:
        The network and its scores. The folder of the run, ``result.folder``, has its settings, ``metrics.csv``,
        ``curves.png``, the best network, which :func:`vision_attn.load_model` reads, and the state to resume from.

    Raises:
        ValueError: a setting is wrong, or names something that does not exist.
        DataError: the data is missing, empty or damaged.
        CheckpointError: weights, or the run to resume, cannot be read or do not fit.
        TrainingError: the loss or a weight is no longer finite, or the folder cannot be written.
        Interrupted: Ctrl-C or SIGTERM came during training; the run is saved.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for half, kind in ((half, kind) for half in ("train", "val") for kind in ("blue", "red")):
    ...     (root / half / kind).mkdir(parents=True)
    ...     Image.new("RGB", (32, 32), kind).save(root / half / kind / "1.png")
    >>> settings = {"data": root, "batch_size": 2, "epochs": 1, "output": root / "run", "device": "cpu"}
    >>> result = train("resnet20", insert="layer3", log=lambda line: None, **settings)
    >>> result.input_size, len(result.rows)
    ((3, 32, 32), 1)
    """
    if model is None or isinstance(model, nn.Module):
        return run_training(Settings(**options), model, log)
    return run_training(Settings(model=model, **options), log=log)


def run_training(settings: Settings, model: nn.Module | None = None, log: Log = print) -> Result:
    """Train the network of the settings, or a given one."""
    settings, resumed = find_run(settings)
    accelerator = make_accelerator(settings)
    main, processes = accelerator.is_main_process, accelerator.num_processes
    log = log if main else (lambda line: None)
    with accelerator.main_process_first():  # what is downloaded is downloaded once
        held_out, source = (open_data(settings, train=half) for half in (False, True))
        if only := sorted(set(source.classes) ^ set(held_out.classes)):
            raise DataError(f"{shorten(only)}: classes of {source.name} or of {held_out.name}, and not of both")
        parts = processes * math.lcm(settings.grad_accum_steps, 2 if settings.mixup or settings.cutmix else 1)
        if settings.batch_size > len(source) or settings.batch_size % parts:
            limits = f"at most the {len(source)} training images, and a multiple of {parts} to be divided"
            raise ValueError(f"batch_size must be {limits}; got {settings.batch_size}")
        network = build_network(settings, source, log, model=model, resumed=resumed)
    evaluation = Evaluation(held_out, settings, network, accelerator, log)
    data = open_images(source, settings, network.config, accelerator.device, train=True)
    log(f"training: {len(source):,} images of {source.name}, {data.storage}")
    log(f"{settings.epochs:,} epochs of {len(source) // settings.batch_size:,} steps of {settings.batch_size} images")

    if settings.output is None:  # now that nothing is refused any more
        settings = replace(settings, output=broadcast_object_list([numbered_folder() if main else None])[0])
    folder = Path(str(settings.output))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", timeout=LOCK_TIMEOUT) if main else nullcontext():
        trainer = Trainer(settings, network, data, evaluation, log)
        if main:
            write_atomically(folder / "settings.yaml", write_settings(settings))
            write_atomically(folder / "inserted.txt", f"{network.report}\n".encode())
        if resumed:
            trainer.restore()
        else:
            trainer.save()
        accelerator.project_configuration.logging_dir = str(folder / "logs")
        accelerator.init_trackers("vision_attn", config={key: str(value) for key, value in settings.as_dict().items()})
        try:
            final, predictions = trainer.train()
        except Exception as error:
            raise_block_error(error, settings.block)
            raise
        for tracker in accelerator.trackers:
            tracker.finish()
        disabled = evaluation.without_blocks(trainer.evaluated, final, predictions)
    rows, row = trainer.progress.rows, trainer.progress.rows[trainer.progress.best]
    best = Scores(row["eval_loss"], row["eval_top1"], row["eval_top5"], row["branch_share"])
    log(f"{disabled}\n" * bool(disabled) + f"best epoch, {row['epoch']}: {best}, in {folder / 'model'}")
    return Result(trainer.get_plain_network(), network.config["input_size"], final, best, disabled, rows, folder)


def raise_block_error(error: Exception, name: str) -> None:
    """Raise an error that names the line of the user's block, if the error came from there."""
    path = getattr(sys.modules.get(name.partition(":")[0]), "__file__", "")
    if lines := [line for line in traceback.extract_tb(error.__traceback__) if line.filename == path]:
        where = f"line {lines[-1].lineno} of {lines[-1].filename}"
        raise TrainingError(f"block {name} raised {type(error).__name__} ({error}) in {where}") from error


def evaluate(settings: Settings, path: Path | None = None, *, log: Log = print) -> Scores:
    """Evaluate the network in a folder of a run or of ``save_model``, or else that of the settings, on their data."""
    accelerator = make_accelerator(settings)
    log = log if accelerator.is_main_process else (lambda line: None)
    source = open_data(settings, train=False)
    model = None
    if path is not None:
        model = load_model(path, block=get_maker(block_class(settings.block)))
        classes = vars(model)["classes"] or source.classes
        if classes != source.classes:
            found = f"{source.name} has {shorten(source.classes)}"
            raise ValueError(f"{path} was trained for the classes {shorten(classes)}; {found}: name the folders alike")
    network = build_network(settings, source, log, model=model)
    evaluation = Evaluation(source, settings, network, accelerator, log)
    model = network.model.to(accelerator.device).eval()
    scores, predictions = evaluation(model)
    disabled = evaluation.without_blocks(model, scores, predictions)
    log(f"{scores}\n{disabled}" if disabled else str(scores))
    return scores


def make_accelerator(settings: Settings) -> Accelerator:
    """Seed the process and create the accelerator; mixed precision is on by default on CUDA alone."""
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    for name, value in (("device", "cuda"), ("amp", "float16")):  # whose gradients CUDA alone has scaled
        if on_cpu and getattr(settings, name) == value:
            raise ValueError(f"{name}: {value} was asked for and there is no CUDA device: leave --{name} out")
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs, and Accelerate does not set
    set_seed(settings.seed, deterministic=settings.deterministic)
    default = "no" if on_cpu else "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # A process may run several times, each in its own precision, and Accelerate keeps the first one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    return Accelerator(
        cpu=on_cpu,
        mixed_precision={None: default, "no": "no", "bfloat16": "bf16", "float16": "fp16"}[settings.amp],
        # As a plugin: the plain argument yields to a variable of the environment, and so would dynamo's.
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.grad_accum_steps, sync_with_dataloader=False),
        dynamo_backend="no",
        log_with=list(settings.log_with) or None,
        project_config=ProjectConfiguration(logging_dir="logs"),
    )


def find_run(settings: Settings) -> tuple[Settings, bool]:
    """Return the settings with the folder of the run, if it is known, and True if there is a run to resume in it."""
    resume, folder = settings.resume, settings.output
    if resume not in (None, "auto"):
        if folder not in (None, Path(str(resume))):
            raise ValueError(f"output must be the folder that a run goes on in, {resume}; got {folder}")
        folder = Path(str(resume))
        if newest_state(folder) is None:
            raise FileNotFoundError(f"resume: there is no run in {folder} that could go on")
    if folder is None or newest_state(folder) is None:
        return settings, False
    if resume is None:
        raise ValueError(f"output: {folder} holds a run already: choose another, or go on with --resume {folder}")
    before = read_settings(folder, given=("dataset", "block"))
    differing = differences(settings, before)
    if "epochs" in differing and settings.epochs > before.epochs:
        differing.remove("epochs")  # more extend a run; its rates so far were not those of a shorter one
    if differing:
        raise ValueError(f"resume goes on with a run, but {', '.join(differing)} differ from {folder}: give the same")
    return replace(settings, output=folder), True
