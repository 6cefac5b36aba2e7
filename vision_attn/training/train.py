"""A run from its settings: the data, the network, and then training or evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from vision_attn.training.data import Source, open_data
from vision_attn.training.errors import DataError
from vision_attn.training.evaluation import Normalize, evaluate
from vision_attn.training.loop import Result, Run
from vision_attn.training.network import build_network
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
        TrainingError: the loss is no longer a number.
        OSError: the output folder cannot be written.
    """
    accelerator = make_accelerator(settings)
    log = say if accelerator.is_main_process else (lambda line: None)
    set_seed(settings.seed)

    with accelerator.main_process_first():  # what is downloaded is downloaded once
        source = open_data(settings, train=False)
        train_source = None if settings.test_only else open_data(settings, train=True)
        if train_source is not None:
            check_halves(train_source, source)
            check_batch(settings.batch_size, len(train_source), accelerator.num_processes)
            if not (settings.resume or settings.overwrite):
                RunFolder(settings.folder).refuse_another_run()
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

    data = source.read(network.size).to(accelerator.device)
    log(f"evaluation: {len(data):,} images of {source.name}")
    if train_source is None:
        score = evaluate(model, normalize, data, accelerator=accelerator)
        log(str(score))
        return Result(network, model, normalize, final=score, best=score, seconds=0.0)
    train_data = train_source.read(network.size).to(accelerator.device)
    log(f"training: {len(train_data):,} images of {train_source.name}")
    return Run(settings, accelerator, log, network, normalize, source.classes, train_data, data).go()


def make_accelerator(settings: Settings) -> Accelerator:
    if settings.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda; got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    # A process may run several times, each in its own precision, and Accelerate keeps the first one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerator = Accelerator(
        cpu=settings.device == "cpu",
        mixed_precision="bf16" if settings.amp else "no",
        log_with="tensorboard" if settings.tensorboard else None,
        project_dir=settings.folder if settings.tensorboard else None,
    )
    if settings.device not in (None, accelerator.device.type):
        raise ValueError(f"device must be {accelerator.device.type}, as the launcher chose it; got {settings.device!r}")
    return accelerator


def check_halves(train: Source, evaluation: Source) -> None:
    if train.classes != evaluation.classes:
        only = sorted(set(train.classes) ^ set(evaluation.classes))
        raise DataError(
            f"{train.name} and {evaluation.name} hold other classes; in one of them only: {', '.join(only[:6])}"
        )


def check_batch(batch_size: int, images: int, processes: int) -> None:
    if batch_size > images:
        raise ValueError(f"batch_size must be at most the {images} training images; got {batch_size}")
    if batch_size % processes:
        raise ValueError(f"batch_size must be a multiple of the {processes} processes; got {batch_size}")


def rounded(values: Sequence[float]) -> str:
    return "/".join(f"{value:.4g}" for value in values)
