"""Train an image classifier, with or without inserted attention, on one process or several, and resume it.

    vision-attn train --data flowers --model resnet18 --pretrained --stages -2 --freeze-backbone
    torchrun --standalone --nproc-per-node 4 -m vision_attn train …  # or accelerate launch -m vision_attn train …
    python my_train.py --data flowers --model resnet18 …              # a copy of this file with your changes

The flags are in ``settings.py``. Data sets, augmentation, optimizers, schedules and the moving average are timm's;
processes, precision and states are Accelerate's. All randomness follows from the seed, the epoch, the step or the
image, and the process, and the learning rate from the number of the step. An interrupted and resumed run is therefore
bitwise identical to an uninterrupted run.
"""

import copy
import json
import math
import shlex
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, broadcast, broadcast_object_list, gather_object
from timm.data import Mixup, create_transform, resolve_data_config
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torchvision.transforms import v2
from tqdm import tqdm

import vision_attn as va
from vision_attn import cli
from vision_attn.errors import CheckpointError, DataError, Interrupted, TrainingError
from vision_attn.networks.models import create_model
from vision_attn.recipes import runs
from vision_attn.recipes.data import make_loader, open_data, require_readable, seed_all
from vision_attn.recipes.settings import Evaluation, Settings, check, flag, parse_option, parse_options

#: Largest side of images that are padded and cropped for training. Larger images are photographs.
MAX_PAD_SIDE = 64
#: Steps between two checks of the loss and of signals on CUDA, where each check waits for the device.
CHECK_EVERY = 10

Log = Callable[[str], None]


def build_network(s: Settings, classes: list[str], side: int | None, log: Log, resumed: bool) -> tuple[Any, list[str]]:
    """Create the network with its blocks and weights; return it, and globs on the keys of a new classifier."""
    model: Any = create_model(str(s.model), num_classes=len(classes), pretrained=s.pretrained and not resumed)
    config = {"interpolation": "bilinear", **model.pretrained_cfg}
    native, classifier, wanted = config["input_size"], config["classifier"], s.img_size or side
    if not classifier:
        raise ValueError(f"--model: {s.model} has no classifier. Choose a network that classifies images")
    height, width = (wanted, wanted) if wanted else native[1:]
    if max(height, width) <= MAX_PAD_SIDE:  # small images are padded for training, and not cropped
        config |= {"crop_pct": 1.0, "crop_mode": "center"}
    model.pretrained_cfg, example = config | {"input_size": (3, height, width)}, (1, 3, height, width)
    try:
        with torch.no_grad():
            copy.deepcopy(model).eval()(torch.zeros(example))
    except Exception as error:  # networks raise many types of errors
        what = f"--img-size: {s.model} cannot process images of {height}×{width} ({error})"
        raise ValueError(f"{what}. This model needs --img-size {native[1]}") from error
    has_new_head = s.reset_head or (s.pretrained and config["num_classes"] != len(classes))
    if s.pretrained and not (has_new_head or resumed):
        what = f"the classifier of the pretrained weights is kept, because it has {len(classes)} classes, too"
        warnings.warn(f"{what}. Pass --reset-head if they are other classes", stacklevel=3)
    new = [f"{part}.*" for part in ([classifier] if isinstance(classifier, str) else classifier) if has_new_head]
    if s.stages or s.names:
        options = parse_options(s.block_options)
        options |= {"pattern": parse_option(s.pattern, "--pattern")} if s.pattern else {}
        where: Any = {"stages": s.stages or None, "names": s.names or None, "at": s.at, "example_input": example}
        try:
            log(str(va.insert_(model, runs.import_block(s.block), **where, **options)))
        except TypeError as error:  # an argument that the block does not accept
            given = "--pattern or --block-options do" if s.pattern else "--block-options do"
            raise ValueError(f"{given} not match --block {s.block}: {error}") from error
    if s.weights and not resumed:  # after the insertion, because the file may contain weights of the blocks
        report = va.load_checkpoint_(model, s.weights, skip=new, rename=s.rename or ())
        log(str(report))
        file = Path(report.file).with_name("config.json")  # in a folder of timm
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        known = [*report.classes] or (config.get("label_names") if isinstance(config, dict) else None)
        if known and known != classes and not new:
            expected, got = map(runs.shorten, (known, classes))
            raise ValueError(f"--weights are for the classes {expected}, got {got}. Pass --reset-head")
    for layer in (model.get_submodule(glob.removesuffix(".*")) for glob in new):
        # All classes are equally probable at first: https://arxiv.org/abs/2010.11929, section 3.2.
        for parameter in layer.parameters() if isinstance(layer, nn.Linear | nn.Conv2d) else ():
            nn.init.zeros_(parameter)
    if s.freeze_backbone:
        if not (s.stages or s.names or new):
            raise ValueError("--freeze-backbone leaves nothing to train. Pass --stages or --names, or --reset-head")
        log(f"frozen backbone: {va.freeze_backbone_(model, also_train=new):,} parameters are trained")
    return model, new


def make_transforms(s: Settings, config: dict[str, Any]) -> tuple[Any, Any]:
    """Return timm's transforms for training and for evaluation, from Pillow images to the input of the network."""
    found = resolve_data_config(pretrained_cfg=config)
    evaluation, size = create_transform(**found), found["input_size"][1:]
    random = {"scale": (s.crop_scale, 1.0), "hflip": s.hflip, "auto_augment": s.aa, "color_jitter": None}
    random |= {"re_prob": s.reprob, "re_mode": "pixel", "is_training": True, "separate": True}
    try:
        crop, *others = create_transform(**found, **random)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"--aa must be a policy of timm such as rand-m9-mstd0.5, got {s.aa!r} ({error})") from error
    if max(size) <= MAX_PAD_SIDE:
        shift = [v2.RandomCrop(size, 4)] if s.crop_scale < 1 else []
        crop = v2.Compose([*evaluation.transforms[:-2], *shift, v2.RandomHorizontalFlip(s.hflip)])
    return v2.Compose([crop, *others]), evaluation


def make_accelerator(s: Any) -> Accelerator:
    """Create the accelerator; mixed precision is the default on CUDA only."""
    on_cpu = s.device == "cpu" or not torch.cuda.is_available()
    for name, value in (("device", "cuda"), ("amp", "float16")):  # the gradients of float16 are scaled on CUDA only
        if on_cpu and getattr(s, name) == value:
            raise ValueError(f"--{name} {value} requires a CUDA device, and none is available")
    if missing := {*s.log_with} - {one.value for one in get_available_trackers()}:
        raise ValueError(f"--log-with {min(missing)} is not installed. Install it: pip install {min(missing)}")
    default = "no" if on_cpu else "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    amp = {None: default, "no": "no", "bfloat16": "bf16", "float16": "fp16"}[s.amp]
    plugin = GradientAccumulationPlugin(s.grad_accum_steps, sync_with_dataloader=False)
    acc = Accelerator(cpu=on_cpu, mixed_precision=amp, gradient_accumulation_plugin=plugin, dynamo_backend="no",
                      log_with=[*s.log_with] or None, project_dir="logs")  # fmt: skip
    if (acc.device.type == "cpu") is not on_cpu:  # of an earlier run: Accelerate has one device in each process
        raise ValueError(f"--device: this process already uses {acc.device.type}. Start another process")
    return acc


def score(network: nn.Module, loader: Any, acc: Accelerator) -> tuple[dict[str, float], Tensor]:
    """Return the mean loss and the top-1 accuracy in percent over all images, and all predictions."""
    if acc.num_processes > 1:  # the statistics of batch norms differ between processes: use those of the first
        for buffer in network.buffers():
            broadcast(buffer)
    found = []
    network.eval()
    for images, labels in tqdm(loader, "evaluate", leave=False, disable=None if acc.is_main_process else True):
        with torch.no_grad(), acc.autocast():
            logits = network(images).float()
        logits, labels = acc.gather_for_metrics((logits, labels))  # every image once
        loss, predicted = F.cross_entropy(logits, labels, reduction="none").double(), logits.argmax(1)
        found.append(torch.stack([loss, predicted == labels, predicted], 1))
    table = torch.cat(found)
    return {"loss": table[:, 0].mean().item(), "top1": 100 * table[:, 1].mean().item()}, table[:, 2]


def describe(scores: dict[str, float]) -> str:
    return f"top-1 {scores['top1']:.2f} %, loss {scores['loss']:.4f}"


def score_blocks(network: nn.Module, loader: Any, acc: Accelerator, log: Log) -> dict[str, float]:
    """Evaluate a network, and log its scores with and without its blocks."""
    scores, predictions = score(network, loader, acc)
    log(describe(scores))
    if va.inserted_blocks(network):
        with va.disabled(network):
            without, others = score(network, loader, acc)
        changed = f"{int((predictions != others).sum())} of {len(others)} predictions change"
        difference = f"{without['top1'] - scores['top1']:+.2f}"
        log(f"ablation, with the blocks disabled: {describe(without)} (top-1 {difference}); {changed}")
    return scores


def best_epoch(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the first epoch with the highest accuracy, and the lowest loss among these.

    >>> scores = enumerate([(80, 0.5), (90, 0.9), (90, 0.4), (90, 0.4)])
    >>> best_epoch([{"epoch": epoch, "eval_top1": top1, "eval_loss": loss} for epoch, (top1, loss) in scores])["epoch"]
    2
    """
    return max(history, key=lambda row: (row["eval_top1"], -row["eval_loss"]))


def train(s: Settings, log: Log = cli.print_escaped) -> list[dict[str, Any]]:
    """Train a network, save the run in a folder, and return the rows of ``metrics.csv``."""
    given, s = s, check(s)
    if s.opt not in list_optimizers():
        raise ValueError(f"--opt: timm has no optimizer {s.opt!r}.{cli.did_you_mean(str(s.opt), list_optimizers())}")
    if s.lr is None:
        raise ValueError(f"--lr is required for --opt {s.opt}: only sgd and adamw have a default")
    acc = make_accelerator(s)
    main, device, log = acc.is_main_process, acc.device, acc.on_main_process(log)
    with ExitStack() as stack:
        # The main process decides on the folder, and is the first to read data and weights: downloads occur once.
        folder, state, progress = broadcast_object_list([runs.claim_folder(s, stack) if main else None])[0]
        with acc.main_process_first(), warnings.catch_warnings(action=None if main else "ignore"):
            classes, train_set, val_set = open_data(s)
            side = getattr(getattr(train_set.source, "data", None), "shape", (0, None))[1]
            seed_all(s.seed)
            model, new_head = build_network(s, classes, side, log, resumed=state is not None)
        data = {"classes": classes, "images": [len(train_set), len(val_set)],
                "digests": [train_set.digest(), val_set.digest()],
                "held_out": train_set.source is val_set.source}  # fmt: skip
        if any(other != data for other in gather_object([data])):
            found = f"{data['images']} training and validation images of {runs.shorten(classes)}"
            raise DataError(f"the data differs between machines: one has {found}. Copy the same --data to all")
        if state is not None:
            runs.compare_data(progress, data)
            if (before := progress["processes"]) != (now := acc.num_processes):
                log(f"resumed by {now} processes instead of {before}: the result depends on their number")
        elif main:
            require_readable([*train_set.files, *val_set.files])
        parts = acc.num_processes * math.lcm(s.grad_accum_steps, 2 if s.mixup or s.cutmix else 1)
        fitting = min(128, len(train_set) // 8) // parts * parts  # at least eight steps per epoch
        least = min(4, len(train_set)) // parts * parts  # batch norms require several images
        batch = s.batch_size or progress.get("batch") or max(parts, fitting, least)
        if batch > len(train_set) or batch % parts:
            limit = f"at most {len(train_set)}, the number of training images, and a multiple of {parts}"
            remedy = ". Restore the images of --data and the number of processes" if state else ""
            raise ValueError(f"--batch-size must be {limit}, got {batch}{remedy}")
        progress = {"data": data, **progress, "processes": acc.num_processes, "batch": batch}
        (train_set.transform, val_set.transform), train_set.seed = make_transforms(s, model.pretrained_cfg), s.seed
        loader = make_loader(acc, train_set, batch, s.workers, train=True)
        val_loader, steps = make_loader(acc, val_set, batch, s.workers), len(loader)
        for images in (train_set, val_set):
            stack.callback(images.epoch.fill_, -1)  # worker processes may end

        plain = copy.deepcopy(model).eval()  # for saving, without the wrappers for mixed precision and processes
        layout = torch.channels_last if s.channels_last else torch.contiguous_format
        model.to(device, memory_format=layout)
        # timm's schedules compute one learning rate for all groups, and multiply it by the lr_scale of each group.
        rates: Any = {"weight_decay": s.weight_decay, "attention_lr": s.attention_lr, "layer_decay": s.layer_decay}
        groups = [{**g, "lr": s.lr, "lr_scale": g["lr"] / s.lr} for g in va.parameter_groups(model, s.lr, **rates)]
        try:
            optimizer = create_optimizer_v2(groups, opt=str(s.opt), lr=s.lr)
        except Exception as error:  # some optimizers require CUDA or another package
            raise ValueError(f"--opt {s.opt} is not available: {error}") from error
        if getattr(optimizer, "is_second_order", False):
            raise ValueError(f"--opt {s.opt} requires second derivatives. Choose another optimizer")
        warmup: Any = {"warmup_epochs": s.warmup_epochs, "warmup_lr": s.lr / 100, "warmup_prefix": True}
        lengths: Any = {"num_epochs": s.epochs - s.warmup_epochs, "updates_per_epoch": steps, "step_on_epochs": False}
        schedule: Any = create_scheduler_v2(optimizer, "cosine", **lengths, **warmup)[0]
        ema = None if s.ema is None else ModelEmaV3(model, s.ema, use_warmup=True)
        network: Any = model if ema is None else ema.module  # to evaluate and save
        wrapped, optimizer = acc.prepare(model, optimizer)
        forward = torch.compile(wrapped) if s.compile else wrapped
        if ema is not None:
            acc.prepare_model(ema.module, evaluation_mode=True)  # so that its state is saved
        mix = Mixup(s.mixup, s.cutmix, label_smoothing=0.0, num_classes=len(classes)) if s.mixup or s.cutmix else None

        if main:
            runs.write_file(folder / "settings.json", json.dumps(asdict(given), indent=1, default=str))
        path = state or runs.save_state(acc, folder, progress)
        if not all(gather_object([path.exists()])):
            what = f"the state in {folder} does not exist on every machine"  # the same message on all machines
            raise DataError(f"{what}. All machines must share the folder of --output")
        if state is not None:
            try:
                acc.load_state(str(state))
            except Exception as error:  # a damaged state can cause any error; no code in it is run
                raise CheckpointError(f"{state} is damaged, so the run cannot be resumed: {error}") from error
            log(f"resumed at epoch {progress['epoch'] + 1}, step {progress['step']}, from {state}")
        size, (c, h, w) = sum(p.numel() for p in model.parameters()), model.pretrained_cfg["input_size"]
        log(f"{s.model}: {size:,} parameters, input {c}×{h}×{w}, {len(classes)} classes, {len(train_set):,} training "
            f"and {len(val_set):,} validation images")  # fmt: skip
        if progress["epoch"] >= s.epochs:
            log(f"all {s.epochs} epochs are complete; a larger --epochs continues the run")
        log(f"{s.epochs:,} epoch{'s' * (s.epochs > 1)} of {steps:,} steps of {batch} images on {device}, in {folder}")
        acc.project_configuration.logging_dir = str(folder / "logs")
        acc.init_trackers("vision_attn", config={key: str(value) for key, value in asdict(s).items()})
        received = runs.catch_signals(stack)

        for epoch in range(progress["epoch"], s.epochs):
            first, total, begin = progress["step"], torch.tensor(progress["loss"], device=device), time.perf_counter()
            train_set.epoch.fill_(epoch)
            loader.set_epoch(epoch)
            batches, hidden = skip_first_batches(loader, first) if first else loader, None if main else True
            bar = tqdm(batches, f"epoch {epoch + 1}/{s.epochs}", steps, initial=first, leave=False, disable=hidden)
            model.train()
            for step, (images, labels) in enumerate(bar, first):
                seed_all(s.seed, epoch, step, acc.process_index)  # a resumed step is the same
                schedule.step_update(epoch * steps + step)
                if mix:
                    images, labels = mix(images, labels)
                images = images.contiguous(memory_format=layout)
                for x, y in zip(images.chunk(s.grad_accum_steps), labels.chunk(s.grad_accum_steps), strict=True):
                    with acc.accumulate(wrapped):  # gradients are averaged over the chunks
                        loss = F.cross_entropy(forward(x).float(), y, label_smoothing=s.label_smoothing)
                        acc.backward(loss)
                        if acc.sync_gradients and s.clip_grad:
                            acc.clip_grad_norm_(model.parameters(), s.clip_grad)
                        optimizer.step()
                        optimizer.zero_grad()
                    total += loss.detach() / s.grad_accum_steps
                if ema is not None:
                    ema.update(model, step=epoch * steps + step)
                if device.type == "cpu" or step + 1 == steps or (step + 1) % CHECK_EVERY == 0:
                    stop, summed = acc.reduce(torch.stack([total.new_tensor(len(received)), total]), "mean").tolist()
                    progress |= {"step": step + 1, "loss": summed}
                    bar.set_postfix(loss=f"{summed / (step + 1):.4f}", refresh=False)
                    at, last = f"step {step + 1} of {steps} of epoch {epoch + 1}", stop or step + 1 == steps
                    norm = nn.utils.get_total_norm(model.parameters()) if last else 0.0
                    if not (finite := math.isfinite(summed)) or not math.isfinite(norm):
                        what = f"{'a weight' if finite else 'the loss'} is not finite at {at}, with --lr {s.lr:.3g}"
                        remedy = "Use a lower --lr, more --warmup-epochs or --clip-grad"
                        raise TrainingError(f"{what}. {remedy}. The last valid state is in {folder}")
                    if stop:
                        runs.save_state(acc, folder, progress)
                        what = f"interrupted; saved after {at}. Continue with --resume {folder}"
                        raise Interrupted(received[0] if received else signal.SIGTERM, what if main else "")
            seconds = time.perf_counter() - begin
            scores, _ = score(network, val_loader, acc)
            speed, rate = (steps - first) * batch / max(seconds, 1e-9), optimizer.param_groups[0]
            row = {"epoch": epoch + 1, "lr": rate["lr"] / rate["lr_scale"], "train_loss": progress["loss"] / steps}
            row |= {f"eval_{key}": value for key, value in scores.items()} | {"images_per_second": round(speed)}
            history = [*progress["history"], row]
            progress |= {"epoch": epoch + 1, "step": 0, "loss": 0.0, "history": history}
            log(f"epoch {epoch + 1}/{s.epochs}: train loss {row['train_loss']:.4f}, {describe(scores)}, "
                f"{seconds:.0f} s, {speed:.0f} images/s")  # fmt: skip
            acc.log(row, step=epoch + 1)
            plain.load_state_dict(network.state_dict())
            if main and best_epoch(history) is row:
                va.save_model(plain, folder / "model", classes=classes)
                if s.freeze_backbone and va.inserted_blocks(plain):
                    about = {"input_size": plain.pretrained_cfg["input_size"], "classes": classes}
                    va.save_adapter(plain, folder / "adapter.safetensors", also=new_head, metadata=about)
            if main:
                runs.write_csv(folder / "metrics.csv", [list(row), *(list(one.values()) for one in history)])
            runs.save_state(acc, folder, progress)
        for tracker in acc.trackers:
            tracker.finish()

        # One network has one score: that of the best epoch, which is saved.
        va.load_checkpoint_(plain, folder / "model" / "model.safetensors")
        log(f"best epoch, {best_epoch(progress['history'])['epoch']}, in {folder / 'model'}:")
        score_blocks(plain.to(device, memory_format=layout), val_loader, acc, log)
        if (s.stages or s.names) and not runs.has_blocks(s.weights):
            command = shlex.join(["vision-attn", "compare", "--config", f"{folder}", "--output", f"{folder}/compare"])
            if s.block != "attention":
                words = ["--block", s.block, *(["--pattern", s.pattern] if s.pattern else [])]
                words += ["--block-options", *s.block_options] if s.block_options else []
                command += f" --variants plain {shlex.quote(f'trained={shlex.join(words)}')}"
            log(f"Do the blocks help? Train with and without them:\n{command}")
    return progress["history"]


def evaluate(e: Evaluation, log: Log = cli.print_escaped) -> dict[str, float]:
    """Evaluate the network of a run on its validation images, or on other images that it was not trained on."""
    run = runs.require_run(e.run, "evaluate RUN")
    given = {name: value for name, value in vars(e).items() if value not in (None, ()) and name != "run"}
    own = runs.read_settings(run, [*map(flag, given)]) if (run / "settings.json").is_file() else Settings()
    # The trackers and the device of the run are not required.
    s = replace(own, **{"log_with": (), "device": "cpu" if own.device == "cpu" else None, **given})
    if s.amp == "float16" and (s.device == "cpu" or not torch.cuda.is_available()):
        s = replace(s, amp=None)
    if s.data is None and not s.dataset.startswith("hfds/"):
        raise ValueError("--data is required: a folder of images. Example: --data flowers")
    sources = [(one.dataset, one.data and one.data.expanduser().resolve()) for one in (s, own)]
    same = sources[0] == sources[1]  # otherwise, the run held out none of the images
    acc = make_accelerator(s)
    log = acc.on_main_process(log)
    state = runs.newest_state(run)
    trained, held = runs.read_progress(state)["data"]["digests"] if state else (None, None)
    classes, train_set, val_set = open_data(s) if same else open_data(replace(s, val_fraction=None), None)
    if trained and not same and train_set.digest() == val_set.digest():  # the folder of the run may have moved
        with suppress(DataError):
            if (again := open_data(s))[1].digest() == trained:
                classes, train_set, val_set = again
    changed = same and train_set.digest() != trained and val_set.digest() != held
    if trained and (val_set.digest() == trained or changed):
        warnings.warn(f"the run was trained on some of the images of {s.data}: scores are too high", stacklevel=2)
    model = runs.load_run(e.run, e.block, "evaluate RUN").float()
    known = model.classes or [*map(str, range(model.num_classes))]
    if {*classes} <= {*known}:  # folders are sorted by name
        val_set.order = [known.index(name) for name in classes]
    elif model.classes or len(known) != len(classes):
        expected, got = map(runs.shorten, (known, classes))
        raise ValueError(f"--data: expected the classes of {run}, {expected}, got {got}. Rename the folders")
    val_set.transform = model.transform
    val_set.epoch.fill_(-1)  # worker processes may end
    log(f"{len(val_set):,} images of {len(classes)} classes on {acc.device}")
    batch = s.batch_size or max(1, 128 // acc.num_processes) * acc.num_processes
    return score_blocks(model.to(acc.device), make_loader(acc, val_set, batch, s.workers), acc, log)


if __name__ == "__main__":
    cli.run_script("train", train)
