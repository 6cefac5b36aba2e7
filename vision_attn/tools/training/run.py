"""A run from its settings: the data, the network, and then training or evaluation."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, broadcast_object_list, set_seed
from filelock import FileLock
from torch import nn

from vision_attn.errors import DataError
from vision_attn.networks.insertion.makers import get_maker
from vision_attn.networks.models.folder import load_model
from vision_attn.networks.safe import write_atomically
from vision_attn.text import shorten
from vision_attn.tools.training.data import Source, open_data, open_images
from vision_attn.tools.training.evaluation import Disabled, Evaluation, Scores, normalization
from vision_attn.tools.training.folder import newest_state, numbered_folder
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import Network, Say, block_class, build_network, prepare_network, refuse_block
from vision_attn.tools.training.settings import Settings, differences, read_settings, write_settings

#: Seconds for which a run waits for its folder: workers of one that was killed hold it until they notice.
PATIENCE = 10


@dataclass(frozen=True)
class Result:
    """What a run led to."""

    #: the network as it was evaluated last, in evaluation mode; ``load_model(folder)`` gives that of the best epoch
    model: nn.Module
    #: shape of an image that it takes, ``(c, h, w)``
    input_size: tuple[int, int, int]
    #: after the last epoch, or of the weights as they were where nothing was trained
    final: Scores
    #: of the epoch with the highest top-1
    best: Scores
    #: with all blocks disabled, where there are some
    disabled: Disabled | None
    #: of ``metrics.csv``: a row for each epoch
    rows: list[dict[str, Any]]
    #: of the run; None where nothing was trained
    folder: Path | None


def train(
    settings: Settings | None = None, *, model: nn.Module | str | None = None, say: Say = print, **options: Any
) -> Result:
    """Train an image classifier, with attention in it or not, and leave the run in a folder.

    Every random choice follows from the seed, the epoch, the step and the process. So a run that was stopped anywhere
    and is resumed ends with the weights of one that was not.

    Args:
        settings: what to do; or give each setting by its name, as ``vision-attn train --help`` lists them.
        model: the name of a network, or a network of timm's with its blocks inserted, which is trained in place.
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
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for half, kind in ((half, kind) for half in ("train", "val") for kind in ("blue", "red")):
    ...     (root / half / kind).mkdir(parents=True)
    ...     Image.new("RGB", (32, 32), kind).save(root / half / kind / "1.png")
    >>> settings = {"data": root, "batch_size": 2, "epochs": 1, "output": root / "run", "device": "cpu"}
    >>> result = train(model="resnet20", insert="layer3", say=lambda line: None, **settings)
    >>> result.input_size, len(result.rows)
    ((3, 32, 32), 1)
    """
    given = model if isinstance(model, nn.Module) else None
    options |= {"model": model} if isinstance(model, str) else {}
    if settings is not None and options:
        raise ValueError(f"settings and options exclude each other: give {', '.join(options)} in the settings")
    settings, resumed = placed(settings or Settings(**options))
    accelerator = make_accelerator(settings)
    log = say if accelerator.is_main_process else (lambda line: None)
    with accelerator.main_process_first():  # what is downloaded is downloaded once
        held_out, source = (open_data(settings, train=half) for half in (False, True))
        if only := sorted(set(source.classes) ^ set(held_out.classes)):
            raise DataError(f"{shorten(only)}: classes of {source.name} or of {held_out.name}, and not of both")
        check_batch(settings, len(source), accelerator.num_processes)
        if given is None:
            network = build_network(settings, source, log, resumed=resumed)
        else:
            network = prepare_network(Network(given), settings, source, log)
    evaluation = evaluator(held_out, settings, network, accelerator, log)
    data = open_images(source, settings, network.config, accelerator.device, train=True)
    log(f"training: {len(source):,} images of {source.name}, {data.kept}")
    log(f"{settings.epochs:,} epochs of {len(source) // settings.batch_size:,} steps of {settings.batch_size} images")

    main = accelerator.is_main_process
    if settings.output is None:  # now that nothing is refused any more
        settings = replace(settings, output=broadcast_object_list([numbered_folder() if main else None])[0])
    folder = Path(str(settings.output))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", timeout=PATIENCE) if main else nullcontext():
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
            final, seen = trainer.train()
        except Exception as error:
            refuse_block(error, settings.block)
            raise
        for tracker in accelerator.trackers:
            tracker.finish()
        disabled = evaluation.without_blocks(trainer.evaluated, final, seen)
    rows, row = trainer.progress.rows, trainer.progress.rows[trainer.progress.best]
    best = Scores(row["eval_loss"], row["eval_top1"], row["eval_top5"], row["branch_share"])
    log(f"{disabled}\n" * bool(disabled) + f"best epoch, {row['epoch']}: {best}, in {folder / 'model'}")
    return Result(trainer.network_now(), network.config["input_size"], final, best, disabled, rows, folder)


def evaluate(settings: Settings, path: Path | None = None, *, say: Say = print) -> Result:
    """Evaluate, on the data of the settings, the network in a folder of a run or of ``save_model``, else theirs."""
    accelerator = make_accelerator(settings)
    log = say if accelerator.is_main_process else (lambda line: None)
    source = open_data(settings, train=False)
    if path is None:
        network = build_network(settings, source, log)
    else:
        model = load_model(path, block=get_maker(block_class(settings.block)))
        classes = vars(model)["classes"] or source.classes
        if classes != source.classes:
            has = f"{source.name} has {shorten(source.classes)}"
            raise ValueError(f"{path} was trained for the classes {shorten(classes)}; {has}: name the folders alike")
        network = prepare_network(Network(model), settings, source, log)
    evaluation = evaluator(source, settings, network, accelerator, log)
    model = network.model.to(accelerator.device).eval()
    scores, seen = evaluation(model)
    disabled = evaluation.without_blocks(model, scores, seen)
    log(f"{scores}\n{disabled}" if disabled else str(scores))
    return Result(model, network.config["input_size"], scores, scores, disabled, [], None)


def evaluator(source: Source, settings: Settings, network: Network, accelerator: Accelerator, log: Say) -> Evaluation:
    """What evaluates on the images of a source."""
    data = open_images(source, settings, network.config, accelerator.device)
    size = "×".join(map(str, network.config["input_size"]))
    log(f"evaluation: {len(source):,} images of {source.name} at {size}, {data.kept}, on {accelerator.device}")
    return Evaluation(accelerator, normalization(network.config), data, settings.batch_size)


def make_accelerator(settings: Settings) -> Accelerator:
    """What a run asks of the machine; half precision unasked on CUDA alone."""
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    for name, value in (("device", "cuda"), ("amp", "float16")):  # whose gradients CUDA alone has scaled
        if on_cpu and getattr(settings, name) == value:
            raise ValueError(f"{name}: {value} was asked for and there is no CUDA device: leave --{name} out")
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs, and Accelerate does not set
    set_seed(settings.seed, deterministic=settings.deterministic)
    usual = "no" if on_cpu else "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # A process may run several times, each in its own precision, and Accelerate keeps the first one's.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    return Accelerator(
        cpu=on_cpu,
        mixed_precision={None: usual, "no": "no", "bfloat16": "bf16", "float16": "fp16"}[settings.amp],
        # As a plugin: the plain argument yields to a variable of the environment, and so would dynamo's.
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.grad_accum_steps, sync_with_dataloader=False),
        dynamo_backend="no",
        log_with=list(settings.log_with) or None,
        # A backbone that is frozen for some epochs has no gradients that processes could wait for.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=settings.freeze_epochs > 0)],
        project_config=ProjectConfiguration(logging_dir="logs"),
    )


def placed(settings: Settings) -> tuple[Settings, bool]:
    """The settings with the folder of the run, where it is known, and whether there is one to go on with in it."""
    resume, folder = settings.resume, settings.output
    if resume not in (None, "auto"):
        if folder not in (None, Path(resume)):
            raise ValueError(f"output must be the folder that a run goes on in, {resume}; got {folder}")
        folder = Path(resume)
    if folder is None:
        return settings, False
    if newest_state(folder) is None:
        if resume not in (None, "auto"):
            raise FileNotFoundError(f"resume: there is no run in {folder} that could go on")
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


def check_batch(settings: Settings, images: int, processes: int) -> None:
    """Refuse a batch that the images do not fill, or that the processes cannot share."""
    parts = processes * math.lcm(settings.grad_accum_steps, 2 if settings.mixup or settings.cutmix else 1)
    if settings.batch_size > images or settings.batch_size % parts:
        limits = f"at most the {images} training images, and a multiple of {parts} to be divided"
        raise ValueError(f"batch_size must be {limits}; got {settings.batch_size}")
