"""Training and evaluation of a network from settings."""

from __future__ import annotations

import math
import os
import shlex
import warnings
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from filelock import FileLock
from torch import nn

from vision_attn.errors import DataError
from vision_attn.networks.block_factories import get_block_factory
from vision_attn.networks.checkpoints.folder import load_model
from vision_attn.networks.safe import write_atomically
from vision_attn.text import shorten
from vision_attn.tools.training.data import DataSplit, exchange_parts, open_data, open_images
from vision_attn.tools.training.evaluation import BlockAblation, Evaluation, Scores
from vision_attn.tools.training.folder import newest_state, numbered_folder
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import Log, NetworkSetup, block_class, build_network
from vision_attn.tools.training.settings import (
    AUTO,
    MACHINE_SETTINGS,
    Settings,
    changes,
    make_settings,
    merge_settings,
    override,
    read_settings,
    refuse_creation,
)

#: Smallest number of validation images of which one is at most half a point of accuracy.
MIN_VALIDATION = 200
#: Seconds to wait for the lock on a folder, which worker processes of a killed run hold for a moment.
LOCK_TIMEOUT = 10


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    #: settings of the run, with the batch size and the folder
    settings: Settings
    #: network of the last epoch, in evaluation mode; ``load_model(folder)`` returns the network of the best epoch
    model: nn.Module
    #: shape of an input image, ``(c, h, w)``
    input_size: tuple[int, int, int]
    #: scores after the last epoch
    final: Scores
    #: scores of the epoch with the highest top-1 accuracy
    best: Scores
    #: scores of the last epoch with all blocks disabled; None without blocks
    ablation: BlockAblation | None
    #: rows of ``metrics.csv``: the metrics of each epoch
    history: list[dict[str, Any]]
    #: folder of the run
    folder: Path


def train(model: nn.Module | str | None = None, *, log: Log = print, **options: Any) -> Result:
    """Train an image classifier, with or without attention, and save the run in a folder.

    All randomness is determined by the seed, the epoch, the step and the process. On the CPU, the weights of an
    interrupted and resumed run are therefore bitwise identical to those of an uninterrupted run.

    Args:
        model: name of a timm model, or a timm network with inserted blocks, which is trained in place.
        log: function that is called with each line of the log, in the main process.
        **options: settings by name, such as ``data="flowers", epochs=10``. ``vision-attn train --help`` lists them.
            With ``resume=folder``, the other settings are read from the run in the folder.

    Returns:
        The network and its scores. The folder of the run, ``result.folder``, contains the settings, ``metrics.csv``,
        the best network for :func:`vision_attn.load_model`, and the state for resuming the run.

    Raises:
        ValueError: a setting is wrong, or names something that does not exist.
        DataError: the data is missing, empty or damaged.
        CheckpointError: the weights or the run to resume cannot be read or do not fit.
        TrainingError: the loss or a weight is not finite, or the folder cannot be written.
        Interrupted: training was stopped by Ctrl-C or SIGTERM; the run is saved.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for half, kind in ((half, kind) for half in ("train", "val") for kind in ("blue", "red")):
    ...     (root / half / kind).mkdir(parents=True)
    ...     Image.new("RGB", (32, 32), kind).save(root / half / kind / "1.png")
    >>> settings = {"data": root, "batch_size": 2, "epochs": 1, "output": root / "run", "device": "cpu"}
    >>> result = train("resnet20", names="layer3", log=lambda line: None, **settings)
    >>> result.input_size, len(result.history)
    ((3, 32, 32), 1)
    """
    if model is None or isinstance(model, nn.Module):
        return run_training(merge_settings(options), model, log)
    return run_training(merge_settings({"model": model, **options}), log=log)


def run_training(settings: Settings, model: nn.Module | None = None, log: Log = print) -> Result:
    """Train the network of the settings or a given network."""
    if model is not None:
        refuse_creation(settings, model)
    accelerator = make_accelerator(settings)
    main = accelerator.is_main_process
    log = log if main else (lambda line: None)

    # The main process decides, because the others may not see the folder.
    settings, state = broadcast_object_list([find_run(settings) if main else None])[0]
    # The main process is first, so that downloads occur once, and only this process prints warnings.
    with accelerator.main_process_first(), nullcontext() if main else warnings.catch_warnings(action="ignore"):
        prepared = prepare_run(settings, accelerator.num_processes, model, log, resumed=state is not None)
    settings, source, held_out, network = prepared
    data = open_images(source, settings, network.config, accelerator.device, train=True)
    data = exchange_parts(data, len(source))
    evaluation = Evaluation(held_out, settings, network, accelerator)
    log(f"{network}\n{len(source):,} training images of {source.name}, {data.storage}")
    log(f"{len(held_out):,} validation images of {held_out.name}, {evaluation.data.storage}")
    steps, epochs = len(source) // settings.batch, f"{settings.epochs:,} epoch{'s' * (settings.epochs > 1)}"
    log(f"{epochs} of {steps:,} steps of {settings.batch} images on {accelerator.device}")
    if settings.output is None:  # after all checks
        settings = replace(settings, output=broadcast_object_list([numbered_folder() if main else None])[0])
    folder = Path(str(settings.output))
    folder.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(folder / ".lock", timeout=LOCK_TIMEOUT) if main else nullcontext(),
        closing(data),
        closing(evaluation.data),
    ):
        trainer = Trainer(settings, network, data, evaluation, log)
        if main:
            write_atomically(folder / "settings.yaml", settings.to_yaml())
        if state is None:
            trainer.save()
        saved = broadcast_object_list([state or newest_state(folder)])[0]
        if not all(gather_object([(saved / "progress.json").exists()])):
            raise DataError(f"{saved} does not exist on every machine. All machines must share the folder of --output")
        if state is not None:
            trainer.restore()
        accelerator.project_configuration.logging_dir = str(folder / "logs")
        accelerator.init_trackers("vision_attn", config={key: str(value) for key, value in settings.as_dict().items()})
        final, predictions = trainer.train()
        for tracker in accelerator.trackers:
            tracker.finish()
        ablation = evaluation.compare_without_blocks(trainer.evaluated, final, predictions)
    history, row = trainer.progress.history, trainer.progress.history[trainer.progress.best]
    best = Scores(row["eval_loss"], row["eval_top1"], row["eval_top5"], row["residual_ratio"])
    log(f"{ablation}\n" * bool(ablation) + f"best epoch, {row['epoch']}: {best}, in {folder / 'model'}")
    if settings.has_blocks:
        log("Do the blocks help? The ablation only shows how much the network relies on them. Train with and without:")
        log(compare_command(settings, folder))
    if len(held_out) < MIN_VALIDATION:
        points = f"{100 / len(held_out):.1f} points of top-1"
        log(f"One of the {len(held_out)} validation images is {points}. Use more images to measure small differences.")
    model = trainer.get_network_to_save()
    return Result(settings, model, network.config["input_size"], final, best, ablation, history, folder)


def prepare_run(
    settings: Settings, processes: int, model: nn.Module | None, log: Log, *, resumed: bool
) -> tuple[Settings, DataSplit, DataSplit, NetworkSetup]:
    """Open the data and build the network; return the settings with a batch size that fits."""
    held_out, source = (open_data(settings, train=half) for half in (False, True))
    if only := sorted(set(source.classes) ^ set(held_out.classes)):
        raise DataError(f"classes of {source.name} and {held_out.name} differ: {shorten(only)} are only in one of them")
    parts = processes * math.lcm(settings.grad_accum_steps, 2 if settings.mixup or settings.cutmix else 1)
    if settings.batch_size is None:
        fitting = 2 ** int(math.log2(min(settings.batch, max(2, len(source) // 8))))  # at least eight steps per epoch
        settings = replace(settings, batch_size=max(parts, fitting // parts * parts))
    if settings.batch > len(source) or settings.batch % parts:
        multiple = "" if parts == 1 else f" and a multiple of {parts}"
        limits = f"at most {len(source)}, the number of training images{multiple}"
        raise ValueError(f"batch_size must be {limits}, got {settings.batch}")
    return settings, source, held_out, build_network(settings, source, log, model=model, resumed=resumed)


def compare_command(settings: Settings, folder: Path) -> str:
    """Return the command line that compares a run with the same run without its blocks and with other blocks.

    >>> compare_command(Settings(names="layer3", block="cbam"), Path("runs/train-1"))
    "vision-attn compare --config runs/train-1 --output runs/train-1/compare --variants plain 'cbam=--block cbam'"
    """
    words = ["vision-attn", "compare", "--config", str(folder), "--output", str(folder / "compare")]
    if settings.dataset.startswith("hfds/"):  # not read from a file, because it can download code
        words += ["--dataset", settings.dataset]
    if settings.block != "attention":
        words += ["--variants", "plain", f"{settings.block.rpartition(':')[2]}=--block {settings.block}"]
    return shlex.join(words)


def evaluate(given: Mapping[str, Any], folder: Path, *, log: Log = print) -> Scores:
    """Evaluate the network in the folder of a run or of ``save_model``, on the validation images of the run or others.

    Args:
        given: settings by name, which override the settings of the run. If ``data`` is another folder ``CLASS/IMAGE``,
            all of its images are used.
        folder: the folder.
        log: function that is called with each line of the log, in the main process.
    """
    run = read_settings(folder, given) if (folder / "settings.yaml").is_file() else Settings()
    settings = make_settings(**override(vars(run), {**given, "freeze_backbone": False}))
    data, own = ((one.dataset, one.data and one.data.expanduser().resolve()) for one in (settings, run))
    if data != own:  # the run held out none of these images
        settings = replace(settings, val_fraction=given.get("val_fraction"))
    accelerator = make_accelerator(settings)
    log = log if accelerator.is_main_process else (lambda line: None)
    source = open_data(settings, train=False, default_fraction=0.1 if data == own else None)
    model = load_model(folder, block=get_block_factory(block_class(settings.block)))
    classes = vars(model)["classes"] or source.classes
    if classes != source.classes:
        found = f"expected {shorten(classes)}, got {shorten(source.classes)}"
        raise ValueError(f"classes of {source.name} differ from those of {folder}: {found}. Rename the folders")
    network = build_network(settings, source, log, model=model)
    evaluation = Evaluation(source, settings, network, accelerator)
    log(f"{network}\n{len(source):,} images of {source.name} on {accelerator.device}")
    model = network.model.to(accelerator.device).eval()
    scores, predictions = evaluation(model)
    ablation = evaluation.compare_without_blocks(model, scores, predictions)
    log(f"{scores}\n{ablation}" if ablation else str(scores))
    return scores


def make_accelerator(settings: Settings) -> Accelerator:
    """Seed the process and create the accelerator; mixed precision is the default on CUDA only."""
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    for name, value in (("device", "cuda"), ("amp", "float16")):  # the gradients of float16 are scaled on CUDA only
        if on_cpu and getattr(settings, name) == value:
            raise ValueError(f"{name}={value} requires a CUDA device, and none is available")
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS, not set by Accelerate
    set_seed(settings.seed, deterministic=settings.deterministic)
    default = "no" if on_cpu else "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # Several runs in one process may have different precisions, but Accelerate keeps the first one.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    return Accelerator(
        cpu=on_cpu,
        mixed_precision={None: default, "no": "no", "bfloat16": "bf16", "float16": "fp16"}[settings.amp],
        # Environment variables take precedence over the plain argument, but not over the plugin or dynamo_backend.
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.grad_accum_steps, sync_with_dataloader=False),
        dynamo_backend="no",
        log_with=list(settings.log_with) or None,
        project_config=ProjectConfiguration(logging_dir="logs"),
    )


def find_run(settings: Settings) -> tuple[Settings, Path | None]:
    """Return the settings with the folder of the run, if it is known, and the state in it from which to resume."""
    resume, folder = settings.resume, settings.output
    if resume not in (None, AUTO):
        if folder not in (None, resume):
            raise ValueError(f"output must be the folder of resume={resume}, got {folder}")
        folder = resume
        if newest_state(folder) is None:
            raise FileNotFoundError(f"resume: {folder} does not contain a run")
    state = folder and newest_state(folder)
    if folder is None or state is None:
        return settings, None
    if resume is None:
        raise ValueError(f"output: {folder} already contains a run. Choose another folder or pass --resume {folder}")
    before = read_settings(folder, given=("dataset", "block"))
    settings = replace(settings, batch_size=settings.batch_size or before.batch_size)
    differing = changes(settings, before).keys() - MACHINE_SETTINGS
    if settings.epochs > before.epochs:
        differing -= {"epochs"}  # a larger number extends the run
    if differing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(differing))
        raise ValueError(f"resume: these settings differ from {folder}: {flags}. Pass the same values")
    return replace(settings, output=folder), state
