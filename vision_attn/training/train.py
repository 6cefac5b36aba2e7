"""A run from its settings: the data, the network, and then training or evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, set_seed

from vision_attn.errors import DataError
from vision_attn.training.data import Source, open_data, open_images
from vision_attn.training.determinism import deterministic_kernels
from vision_attn.training.evaluation import Normalize, evaluate, evaluate_closed
from vision_attn.training.images import Images
from vision_attn.training.loop import Result, Run
from vision_attn.training.network import build_network
from vision_attn.training.optimizer import check_optimizer_name
from vision_attn.training.resume import checkpoint_to_resume
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.settings import Settings

__all__ = ["train"]


def train(settings: Settings, say: Callable[[str], None] = print) -> Result:
    """Train a network, or evaluate it where ``settings.test_only``.

    Every epoch's order, crops and flips follow from the seed and the epoch alone, so that a run that was interrupted
    and resumed ends with the weights of one that was not, and the same run on more processes sees the same batches.

    Args:
        settings: what to do.
        say: told each line of the log, on the main process.

    Returns:
        The network and how well it does.

    Raises:
        ValueError: settings that name what does not exist.
        DataError: the data is missing, empty or damaged.
        CheckpointError: weights or the run to resume cannot be read or do not fit.
        TrainingError: the loss or a weight is no longer a number, there is no memory for a step, or a checkpoint cannot
            be written.
        OSError: the output folder cannot be written, or there is no such run to resume.
        Interrupted: Ctrl-C or SIGTERM came while it trained; the run is saved.
    """
    with deterministic_kernels(settings.deterministic):
        return build_and_run(settings, say)


def build_and_run(settings: Settings, say: Callable[[str], None]) -> Result:
    if settings.tensorboard:
        import_module("tensorboard")  # or Accelerate leaves its events out
    accelerator = make_accelerator(settings)
    log = say if accelerator.is_main_process else (lambda line: None)
    set_seed(settings.seed)
    checkpoint = None
    if not settings.test_only:
        check_optimizer_name(settings)
        checkpoint = checkpoint_to_resume(settings)

    with accelerator.main_process_first():  # what is downloaded is downloaded once
        source = open_data(settings, train=False)
        train_source = None if settings.test_only else open_data(settings, train=True)
    # Outside, where what one process refuses all of them refuse.
    if train_source is not None:
        check_halves(train_source, source)
        check_batch(settings, len(train_source), accelerator.num_processes)
        if not (settings.resume or settings.overwrite):
            RunFolder(settings.folder).refuse_another_run()
    with accelerator.main_process_first():
        network = build_network(settings, source, log)

    model = network.model.to(accelerator.device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)
    normalize = Normalize(network.mean, network.std, source.channels).to(accelerator.device)
    log(
        f"{settings.model}: {network.parameters:,} parameters, {len(source.classes)} classes, images of "
        f"{'×'.join(map(str, network.size))}, mean {rounded(network.mean)}, std {rounded(network.std)}, "
        f"on {accelerator.device}"
    )

    how_kept: dict[str, Any] = {"workers": settings.workers, "cache": settings.cache_images}
    data = open_images(source, network.size, accelerator.device, **how_kept)
    log(f"evaluation: {describe(source, data)}")
    if train_source is None:
        at_once = settings.images_at_once(accelerator.num_processes)
        how: dict[str, Any] = {"batch_size": at_once, "accelerator": accelerator}
        score, predicted = evaluate(model, normalize, data, **how)
        log(str(score))
        worth = evaluate_closed(model, normalize, data, score, predicted, **how)
        if worth:
            log(str(worth))
        return Result(network, model, normalize, final=score, best=score, closed=worth, seconds=0.0)
    train_data = open_images(
        train_source,
        network.size,
        accelerator.device,
        **how_kept,
        crop_scale=settings.crop_scale if settings.train_crop == "resized" else None,
    )
    log(f"training: {describe(train_source, train_data)}")
    log(f"an epoch: {steps_of(settings, len(train_source))}")
    return Run(settings, accelerator, log, network, normalize, source.classes, train_data, data).go(checkpoint)


def make_accelerator(settings: Settings) -> Accelerator:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    if settings.amp_dtype == "float16" and on_cpu:
        raise ValueError("amp_dtype: float16 needs CUDA, whose gradients it scales: on the CPU use bfloat16")
    # A process may run several times, each in its own precision, and Accelerate keeps the first one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}[settings.amp_dtype] if settings.amp else "no",
        # As a plugin: the plain argument yields to a variable of the environment, and so would dynamo's.
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.grad_accum_steps, sync_with_dataloader=False),
        dynamo_backend="no",
        log_with="tensorboard" if settings.tensorboard else None,
        project_dir=settings.folder if settings.tensorboard else None,
    )
    kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in kinds:
        raise ValueError(
            f"the launcher asks for {accelerator.distributed_type.value}, and a run needs the whole network in each "
            "process: launch it with torchrun, or set up accelerate for plain processes"
        )
    if settings.device not in (None, accelerator.device.type):
        raise ValueError(f"device must be {accelerator.device.type}, as the launcher chose it; got {settings.device!r}")
    if settings.sync_bn and accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        raise ValueError("sync_bn: torch synchronises batch norms of several processes on CUDA only")
    return accelerator


def check_halves(train: Source, evaluation: Source) -> None:
    for one, other in ((train, evaluation), (evaluation, train)):
        missing = [name for name in other.classes if name not in one.classes]
        if missing:
            raise DataError(
                f"{one.name} lacks classes that {other.name} has: {', '.join(missing[:6])}"
                f"{', …' if len(missing) > 6 else ''}: both need the same class folders"
            )


def check_batch(settings: Settings, images: int, processes: int) -> None:
    batch_size, parts = settings.batch_size, processes * settings.grad_accum_steps
    if batch_size > images:
        raise ValueError(
            f"batch_size must be at most the {images} training images; got {batch_size}: give a smaller --batch-size"
        )
    if batch_size % parts:
        raise ValueError(
            f"batch_size must be a multiple of {parts}, processes ({processes}) times grad_accum_steps "
            f"({settings.grad_accum_steps}); got {batch_size}"
        )
    if (settings.mixup or settings.cutmix) and batch_size % (2 * processes):
        raise ValueError(
            f"batch_size must be a multiple of {2 * processes}, as mixup and cutmix make pairs in each process; "
            f"got {batch_size}"
        )


def describe(source: Source, images: Images) -> str:
    """How many images of what, and how they are kept."""
    return f"{len(images):,} images of {source.name}, {images.kept}"


def steps_of(settings: Settings, images: int) -> str:
    """How many steps an epoch has, and how many images are too few for one more: others in each epoch."""
    steps, over = divmod(images, settings.batch_size)
    left_out = f", {over:,} of them left out, others each time" if over else ""
    return f"{steps:,} steps of {settings.batch_size} images{left_out}"


def rounded(values: Sequence[float]) -> str:
    return "/".join(f"{value:.4g}" for value in values)
