"""A run from its settings: the data, the network, and then training or evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    set_seed,
)

from vision_attn.errors import DataError
from vision_attn.networks.safe import read_file
from vision_attn.text import shorten
from vision_attn.tools.training.checkpoint import checkpoint_to_resume
from vision_attn.tools.training.data import Source, open_data, open_images, varied
from vision_attn.tools.training.evaluation import Normalize, evaluate, evaluate_closed, report_classes
from vision_attn.tools.training.images import Images
from vision_attn.tools.training.loop import Result, Trainer
from vision_attn.tools.training.network import build_network, refuse_other_classes
from vision_attn.tools.training.run_folder import RunFolder
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.step import check_optimizer_settings
from vision_attn.tools.training.trained import Trained

__all__ = ["train"]


def train(settings: Settings, say: Callable[[str], None] = print, *, trained: Trained | None = None) -> Result:
    """Train a network, or evaluate it where ``settings.test_only``.

    Every epoch's order, crops and flips follow from the seed and the epoch alone, so that a run that was interrupted
    and resumed ends with the weights of one that was not, and the same run on more processes sees the same batches.
    Where ``settings.deterministic``, torch is told to use deterministic kernels alone, and goes on to in this process.

    Args:
        settings: what to do.
        say: told each line of the log, on the main process.
        trained: what is evaluated, in the place of the network that the settings describe.

    Returns:
        The network and how well it does.

    Raises:
        ValueError: settings that name what does not exist.
        DataError: the data is missing, empty or damaged.
        CheckpointError: weights or the run to resume cannot be read or do not fit.
        TrainingError: the loss or a weight is no longer a number, or a checkpoint cannot be written.
        OSError: the output folder cannot be written, or there is no such run to resume.
        Interrupted: Ctrl-C or SIGTERM came while it trained; the run is saved.
    """
    accelerator = make_accelerator(settings)
    log = say if accelerator.is_main_process else (lambda line: None)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs, and Accelerate does not set
    set_seed(settings.seed, deterministic=settings.deterministic)
    checkpoint = None
    if not settings.test_only:
        check_optimizer_settings(settings)
        path = checkpoint_to_resume(settings)
        checkpoint = read_file(path) if path else None

    with accelerator.main_process_first():  # what is downloaded is downloaded once
        source = open_data(settings, train=False)
        train_source = None if settings.test_only else open_data(settings, train=True)
    # Outside, where what one process refuses all of them refuse.
    if train_source is not None:
        check_halves(train_source, source)
        check_batch(settings, len(train_source), accelerator.num_processes)
        if source.held_out:  # as it is noted, test_only evaluates on the same images
            settings = replace(settings, val_split=str(settings.val_share))
        if checkpoint is None and not settings.overwrite and not settings.numbered:
            RunFolder(settings.folder).refuse_another_run()
    with accelerator.main_process_first():
        if trained is not None:
            refuse_other_classes("the network", trained.classes, source)
            network = trained.network
        else:
            network = build_network(settings, source, log, None, checkpoint.content if checkpoint else None)

    model = network.model.to(accelerator.device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)
    normalize = Normalize(network.mean, network.std, source.channels).to(accelerator.device)
    log(
        f"{settings.model}: {network.parameters:,} parameters, {len(source.classes)} classes, images of "
        f"{'×'.join(map(str, network.size))}, mean {rounded(network.mean)}, std {rounded(network.std)}, "
        f"on {accelerator.device}"
    )

    vary = None if settings.test_only else varied(settings, network.size, network.mean)
    how_kept: dict[str, Any] = {"workers": settings.workers, "cache": settings.cache_images}
    data = open_images(source, network.size, accelerator.device, **how_kept)
    log(f"evaluation: {describe(source, data)}")
    if train_source is None:
        at_once = settings.images_at_once(accelerator.num_processes)
        score, seen = evaluate(model, normalize, data, batch_size=at_once, accelerator=accelerator)
        log(str(score))
        if settings.report_classes:
            report_classes(RunFolder(settings.folder), seen, source.classes, accelerator)
        closed = evaluate_closed(model, normalize, data, score, seen, batch_size=at_once, accelerator=accelerator)
        if closed:
            log(str(closed))
        return Result(network, model, normalize, final=score, best=score, closed=closed, seconds=0.0)
    train_data = open_images(train_source, network.size, accelerator.device, **how_kept, vary=vary)
    log(f"training: {describe(train_source, train_data)}")
    steps, over = divmod(len(train_data), settings.batch_size)
    left_out = f", {over:,} of them left out, others each time" if over else ""
    epochs = f"{settings.epochs:,} epoch{'s' if settings.epochs > 1 else ''}"
    log(f"{epochs}, each of {steps:,} steps of {settings.batch_size} images{left_out}")
    trainer = Trainer(settings, accelerator, log, network, normalize, source.classes, train_data, data)
    try:
        return trainer.train(checkpoint)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


def make_accelerator(settings: Settings) -> Accelerator:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    if settings.amp_dtype == "float16" and on_cpu:
        raise ValueError("amp_dtype: float16 needs CUDA, whose gradients it scales: on the CPU use bfloat16")
    there = ["all", *map(str, get_available_trackers())]  # accelerate would leave out one whose package is missing
    for name in settings.log_with:
        if name not in there:
            raise ValueError(
                f"log_with: {name!r} is not installed, or no tracker that accelerate knows; there are {there}"
            )
    # A process may run several times, each in its own precision, and Accelerate keeps the first one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}[settings.amp_dtype] if settings.amp else "no",
        # As a plugin: the plain argument yields to a variable of the environment, and so would dynamo's.
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.grad_accum_steps, sync_with_dataloader=False),
        dynamo_backend="no",
        log_with=list(settings.log_with) or None,
        project_config=ProjectConfiguration(logging_dir=str(settings.folder / "logs")),
    )
    kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in kinds:
        raise ValueError(
            f"the launcher asks for {accelerator.distributed_type.value}, and a run needs the whole network in each "
            "process: launch it with torchrun, or set up accelerate for plain processes"
        )
    return accelerator


def check_halves(train: Source, evaluation: Source) -> None:
    only = sorted(set(train.classes) ^ set(evaluation.classes))
    if only:
        raise DataError(f"{shorten(only)}: classes of {train.name} or of {evaluation.name}, and not of both")


def check_batch(settings: Settings, images: int, processes: int) -> None:
    """Refuse a batch that the images do not fill, or that the processes cannot share."""
    if settings.batch_size > images:
        raise ValueError(
            f"batch_size must be at most the {images} training images; got {settings.batch_size}: give a smaller "
            "--batch-size"
        )
    shared = {f"processes ({processes}) times grad_accum_steps": processes * settings.grad_accum_steps}
    if settings.mixup or settings.cutmix:
        shared["two for each process, as mixup and cutmix make pairs"] = 2 * processes
    for why, parts in shared.items():
        if settings.batch_size % parts:
            raise ValueError(f"batch_size must be a multiple of {parts}, {why}; got {settings.batch_size}")


def describe(source: Source, images: Images) -> str:
    """How many images of what, and how they are kept."""
    return f"{len(images):,} images of {source.name}, {images.kept}"


def rounded(values: Sequence[float]) -> str:
    return "/".join(f"{value:.4g}" for value in values)
