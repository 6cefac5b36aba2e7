"""A run from its settings: the data, the network, and then training or evaluation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast_object_list,
    set_seed,
)
from torch import nn

from vision_attn.errors import DataError
from vision_attn.networks.models.folder import load_model
from vision_attn.networks.safe import write_atomically
from vision_attn.text import shorten
from vision_attn.tools.training.data import InMemory, Source, Workers, open_data, open_images
from vision_attn.tools.training.evaluation import Disabled, Evaluation, Normalize, Scores
from vision_attn.tools.training.folder import (
    alone_in,
    clear,
    newest_state,
    numbered_folder,
    refuse_another_run,
    refuse_old_run,
    settings_of_run,
)
from vision_attn.tools.training.loop import Trainer, check_optimizer_settings
from vision_attn.tools.training.network import Network, block_class, build_network, prepare_network
from vision_attn.tools.training.settings import Settings, differences, write_settings

__all__ = ["Result", "evaluate_network", "train"]


@dataclass(frozen=True)
class Result:
    """What a run led to."""

    #: the network as it was evaluated last, on the CPU in evaluation mode, with ``classes`` and ``pretrained_cfg``
    model: nn.Module
    #: shape of an image in a batch, as it takes it
    shape: tuple[int, ...]
    #: after the last epoch, or of the weights as they were where nothing was trained
    final: Scores
    #: of the epoch with the highest top-1; ``load_model(folder)`` gives the network of that epoch
    best: Scores
    #: with all blocks disabled, where there are some
    disabled: Disabled | None
    #: of ``metrics.csv``: a row for each epoch
    rows: list[dict[str, Any]]
    #: of training, without evaluation, in seconds
    seconds: float
    #: of the run; None where nothing was trained
    folder: Path | None


def train(
    settings: Settings | None = None,
    *,
    model: nn.Module | str | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Result:
    """Train an image classifier, with attention in it or not, and leave the run in a folder.

    Every random choice follows from the seed, the epoch, the step and the process. So a run that was stopped anywhere
    and is resumed ends with the weights of one that was not.

    Args:
        settings: what to do; or give each setting by its name, as ``vision-attn train --help`` lists them.
        model: the name of a network, or a network of timm's, with its blocks inserted; it is trained in place.
        say: told each line of the log, on the main process.
        **options: settings by their names: ``data="flowers", epochs=10, insert="layer3"``.

    Returns:
        The network and how well it does. The folder of the run, ``result.folder``, has its settings, ``metrics.csv``,
        ``curves.png``, the best network, which :func:`vision_attn.load_model` reads, and the state to go on from.

    Raises:
        ValueError: settings that are not what they may be, or that name what does not exist.
        DataError: the data is missing, empty or damaged.
        CheckpointError: weights, or the run to resume, cannot be read or do not fit.
        TrainingError: the loss or a weight is no longer finite, or the folder cannot be written.
        Interrupted: Ctrl-C or SIGTERM came while it trained; the run is saved.

    >>> import tempfile
    >>> result = train(dataset="digit-pairs", model="digit_pairs", epochs=1, batch_size=25_000, device="cpu",
    ...                output=tempfile.mkdtemp(), say=lambda line: None)
    >>> result.model.classes, len(result.rows)
    (('different', 'same'), 1)
    """
    if settings is not None and options:
        raise ValueError(f"settings and options exclude each other: give {', '.join(options)} in the settings")
    given = None if isinstance(model, str) else model
    settings = settings or Settings(**options, **({"model": model} if isinstance(model, str) else {}))
    accelerator, log = start(settings, say)
    check_optimizer_settings(settings)
    settings, resumed = placed(settings)
    with accelerator.main_process_first():  # what is downloaded is downloaded once
        eval_source, source = (open_data(settings, train=half) for half in (False, True))
        if only := sorted(set(source.classes) ^ set(eval_source.classes)):
            raise DataError(f"{shorten(only)}: classes of {source.name} or of {eval_source.name}, and not of both")
        check_batch(settings, len(source), accelerator.num_processes)
        if given is None:
            network = build_network(settings, source, log, resumed=resumed)
        else:
            network = prepare_network(given, settings, source, log)
    eval_data = opened(eval_source, settings, network, accelerator, log)
    train_data = opened(source, settings, network, accelerator, log, train=True)
    log(f"{settings.epochs:,} epochs of {len(source) // settings.batch_size:,} steps of {settings.batch_size} images")

    main = accelerator.is_main_process
    if settings.output is None:  # now that nothing is refused any more
        made = broadcast_object_list([numbered_folder() if main else None])[0]
        settings = replace(settings, output=made)
    folder = Path(str(settings.output))
    with alone_in(folder) if main else nullcontext():
        trainer = Trainer(settings, accelerator, log, network, folder, source.classes, train_data, eval_data)
        if main:
            if not resumed:
                clear(folder)
            write_atomically(folder / "settings.yaml", write_settings(settings))
            if network.report:
                write_atomically(folder / "inserted.txt", f"{network.report}\n".encode())
        if resumed:
            trainer.restore()
        else:
            trainer.save()
        accelerator.project_configuration.logging_dir = str(folder / "logs")
        accelerator.init_trackers("vision_attn", config={key: str(value) for key, value in settings.as_dict().items()})
        final, seen = trainer.train()
        for tracker in accelerator.trackers:
            tracker.finish()
    disabled = trainer.evaluation.without_blocks(trainer.evaluated, final, seen)
    if disabled:
        log(str(disabled))
    rows = trainer.progress.rows
    best = rows[trainer.progress.best]
    scores = Scores(*(best[key] for key in ("eval_loss", "eval_top1", "eval_top5", "branch_share")))
    log(f"best epoch, {best['epoch']}: {scores}, in {folder / 'model'}")
    model = trainer.network_now()
    vars(model)["classes"] = source.classes
    return Result(model, network.shape, final, scores, disabled, rows, trainer.progress.seconds, folder)


def evaluate_network(settings: Settings, path: Path | None = None, *, say: Callable[[str], None] = print) -> Result:
    """Evaluate a network on the data of settings: that in a folder of a run or of ``save_model``, else the settings'."""
    accelerator, log = start(settings, say)
    source = open_data(settings, train=False)
    if path is None:
        network = build_network(settings, source, log)
    else:
        refuse_old_run(path)
        model = load_model(path, block=None if settings.block == "attention" else block_class(settings.block))
        if list(model.classes or source.classes) != list(source.classes):
            raise ValueError(
                f"{path} was trained for the classes {shorten(model.classes)}; {source.name} has "
                f"{shorten(source.classes)}: name the folders alike"
            )
        network = prepare_network(model, settings, source, log)
    evaluation = Evaluation(
        accelerator,
        Normalize(network.config["mean"], network.config["std"]).to(accelerator.device),
        opened(source, settings, network, accelerator, log),
        settings.batch_size // accelerator.num_processes,
    )
    model = network.model.to(accelerator.device).eval()
    scores, seen = evaluation(model)
    log(str(scores))
    if settings.report_classes:
        folder = settings.output or path or Path("evaluation")
        evaluation.report_classes(folder, seen, source.classes)
    disabled = evaluation.without_blocks(model, scores, seen)
    if disabled:
        log(str(disabled))
    return Result(model, network.shape, scores, scores, disabled, [], 0.0, None)


def start(settings: Settings, say: Callable[[str], None]) -> tuple[Accelerator, Callable[[str], None]]:
    """What a run asks of the machine, and who says its lines."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    if settings.amp == "float16" and on_cpu:
        raise ValueError("amp: float16 needs CUDA, whose gradients it scales: on the CPU use bfloat16")
    there = ["all", *map(str, get_available_trackers())]  # accelerate would leave out one whose package is missing
    for name in settings.log_with:
        if name not in there:
            raise ValueError(f"log_with: {name!r} is not installed, or no tracker that accelerate knows: {there}")
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs, and Accelerate does not set
    set_seed(settings.seed, deterministic=settings.deterministic)
    fast = "no" if on_cpu else "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    precision = {"no": "no", "bfloat16": "bf16", "float16": "fp16"}[settings.amp] if settings.amp else fast
    # A process may run several times, each in its own precision, and Accelerate keeps the first one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        # As a plugin: the plain argument yields to a variable of the environment, and so would dynamo's.
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.grad_accum_steps, sync_with_dataloader=False),
        dynamo_backend="no",
        log_with=list(settings.log_with) or None,
        # A backbone that is frozen for some epochs has no gradients that processes could wait for.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=settings.freeze_epochs > 0)],
        project_config=ProjectConfiguration(logging_dir=str(settings.output or "runs")),
    )
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ValueError(
            f"the launcher asks for {accelerator.distributed_type.value}, and a run needs the whole network in each "
            "process: launch it with torchrun, or set up accelerate for plain processes"
        )
    return accelerator, say if accelerator.is_main_process else (lambda line: None)


def placed(settings: Settings) -> tuple[Settings, bool]:
    """The settings with the folder of the run to go on with, if any, and whether there is one."""
    if settings.resume is None:
        if settings.output and not settings.overwrite:
            refuse_another_run(settings.output)
        return settings, False
    folder = settings.output if settings.resume == "auto" else Path(settings.resume)
    if folder is None or settings.output not in (None, folder):
        raise ValueError(f"output must be the folder that a run goes on in, {settings.resume}; got {settings.output}")
    refuse_old_run(folder)
    # One answer for all processes, also where the folder reaches them at different times.
    if not broadcast_object_list([newest_state(folder) is not None])[0]:
        if settings.resume != "auto":
            raise FileNotFoundError(f"resume: there is no run in {folder}: give the folder of one, or --resume auto")
        return settings, False
    before = settings_of_run(folder, trusted=True)
    differing = differences(settings, before)
    if settings.epochs > before.epochs:
        differing.remove("epochs")  # more extend a run; its rates so far were not those of a shorter one
    if differing:
        raise ValueError(
            f"resume goes on with the same run, but {', '.join(differing)} differ from {folder}/settings.yaml: give the "
            "same, or begin a new run from its weights with --weights"
        )
    return replace(settings, output=folder), True


def check_batch(settings: Settings, images: int, processes: int) -> None:
    """Refuse a batch that the images do not fill, or that the processes cannot share."""
    if settings.batch_size > images:
        raise ValueError(f"batch_size must be at most the {images} training images; got {settings.batch_size}")
    pairs = 2 if settings.mixup or settings.cutmix else 1
    if settings.batch_size % (parts := processes * math.lcm(settings.grad_accum_steps, pairs)):
        raise ValueError(
            f"batch_size must be a multiple of {parts}, for {processes} processes, {settings.grad_accum_steps} parts and "
            f"{'pairs to mix' if pairs > 1 else 'no pairs'}; got {settings.batch_size}"
        )


def opened(
    source: Source, settings: Settings, network: Network, accelerator: Accelerator, log: Callable[[str], None],
    *, train: bool = False,
) -> InMemory | Workers:  # fmt: skip
    """The images of a source, of which is said how many there are and how they are kept."""
    data = open_images(source, settings, network.config, accelerator.device, train=train)
    size = "×".join(map(str, network.config["input_size"]))
    log(f"{'training' if train else 'evaluation'}: {len(data):,} images of {source.name} at {size}, {data.kept}")
    return data
