"""What the recipes read: image files, which may be damaged, data sets of images, runs, and options of blocks."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vision_attn as va
from vision_attn.errors import DataError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

#: Names of the folders of training and validation images, in any case, in the order of preference.
TRAINING, VALIDATION = ("train", "training"), ("val", "validation", "valid", "test", "testing")
#: Extensions of image files. Pillow opens the formats in ``UNSUPPORTED`` only with another package.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
UNSUPPORTED = (".heic", ".heif", ".avif", ".jxl", ".cr2", ".nef", ".dng")


def is_image(name: str | Path, extensions: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return True for a name with an image extension that does not start with a dot."""
    return str(name).lower().endswith(extensions) and not os.path.basename(name).startswith(".")


def open_image(file: Any) -> Image.Image:
    """Open an image file as RGB, rotated by its EXIF orientation, with the upper 8 bits of 16-bit pixels."""
    import numpy as np
    from PIL import Image, ImageOps

    with Image.open(file) as image:
        found = ImageOps.exif_transpose(image)
        # Pillow opens some 16-bit formats in a 32-bit mode, and would clip the values to 255.
        if found.mode.startswith("I;16") or (found.mode == "I" and image.format in ("PNG", "PPM")):
            found = Image.fromarray((np.asarray(found) // 256).astype(np.uint8))
        if found.mode in ("I", "F"):
            raise ValueError("32-bit pixels have no defined range")
        return found.convert("RGBA" if "transparency" in found.info else "RGB").convert("RGB")


def find_images(names: Sequence[Path]) -> list[Path]:
    """Return the given image files and all images in the given folders, each once."""
    if not names:
        raise ValueError("IMAGE is required: expected image files or folders of images, got none")
    found: list[Path] = []
    for name in names:
        if not name.exists():
            raise DataError(f"{name} does not exist. Expected an image file or a folder of images")
        inner = [file for file in sorted(name.rglob("*")) if is_image(file)] if name.is_dir() else [name]
        if not inner:
            raise DataError(f"{name} contains no images")
        found += inner
    return list(dict.fromkeys(found))


def load_images(files: Sequence[Path], transform: Callable[[Image.Image], Tensor]) -> Iterator[tuple[Path, Tensor]]:
    """Yield each file and its transformed image; skip damaged files with a warning, and raise an error at the end."""
    skipped = 0
    for file in files:
        try:
            image = transform(open_image(file))
        except Exception as error:  # Pillow raises many types of errors for damaged files
            skipped += 1
            reason = " ".join(str(error).split())
            warnings.warn(f"{file} cannot be read as an image ({reason}). It is skipped", stacklevel=2)
            continue
        yield file, image
    if skipped:
        raise DataError(f"{skipped} of {len(files)} images cannot be read")


class Folder:
    """Image folder ``CLASS/IMAGE``; hidden files and ``__MACOSX`` are ignored."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise DataError(f"{root}: no such folder. Expected a folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
        folders = sorted(path for path in root.glob("[!.]*") if path.is_dir() and path.name != "__MACOSX")
        self.classes = [path.name for path in folders]
        if len(folders) < 2:
            raise DataError(f"{root}: expected CLASS/IMAGE with at least 2 class folders, got {len(folders)}")
        walks = [[*os.walk(folder, followlinks=True)] for folder in folders]
        inner = {tuple(sorted(walk[0][1])) for walk in walks if not any(map(is_image, walk[0][2]))}
        if len(inner) == 1 and len(same := inner.pop()) > 1 and all(not any(map(is_image, w[0][2])) for w in walks):
            what = f"{root}: {' and '.join(self.classes[:3])} contain the same folders {', '.join(same[:6])}"
            raise DataError(f"{what}, so they are not classes. Name them train and val, or pass one of them")
        files = [sorted(Path(path, name) for path, _, names in walk for name in names) for walk in walks]
        self.samples = [(file, label) for label, found in enumerate(files) for file in found if is_image(file)]
        self.targets = [label for _, label in self.samples]
        unread = [file for found in files for file in found if is_image(file, UNSUPPORTED)]
        note = f"{len(unread)} {unread[0].suffix} files cannot be read. Convert them to JPEG" if unread else ""
        if empty := [name for label, name in enumerate(self.classes) if label not in {*self.targets}]:
            what = f"{root}: no images in the class folders {', '.join(empty[:6])}"
            raise DataError(f"{what}. {note or 'Add images or remove them'}")
        if note:
            warnings.warn(f"{root}: {note}", stacklevel=3)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        file, label = self.samples[row]
        return open_image(file), label


class Images:
    """Some images of a data set, transformed; the seed, the epoch and the image determine the augmentation."""

    def __init__(self, source: Any, rows: Sequence[int]) -> None:
        import torch

        self.source, self.rows = source, rows
        self.transform: Any = None
        #: seed of the augmentation; None if nothing is random
        self.seed: int | None = None
        #: number of the epoch, also for worker processes; -1 when they may end
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.rows[index]
        if reader := getattr(self.source, "reader", None):  # timm returns another image instead of a damaged image
            image, label = reader[row]
            if not hasattr(image, "convert"):
                with image as file:
                    image = open_image(file)
        else:
            image, label = self.source[row]
        if self.seed is not None:
            seed_all(self.seed, int(self.epoch), row)
        return self.transform(image.convert("RGB")), label

    def labels(self) -> list[int]:
        """Return the class of each image without decoding it."""
        reader = getattr(self.source, "reader", None)  # Hugging Face data sets
        labels = list(reader.dataset[reader.label_key]) if reader else self.source.targets
        return [int(labels[row]) for row in self.rows]

    def digest(self) -> str:
        """Return a hash of the names of the images, or of their classes in a data set without files."""
        samples = getattr(self.source, "samples", None)
        names = [Path(samples[row][0]).parts[-2:] for row in self.rows] if samples else self.labels()
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

    def start_worker(self, worker: int) -> None:
        """Ignore signals to the process group until training ends: the main process saves the run first."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if self.epoch < 0 else None)


def seed_all(*numbers: int) -> None:
    """Seed torch, NumPy and Python with a seed that depends only on these numbers."""
    import numpy as np
    from accelerate.utils import set_seed

    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def open_data(s: Any, fraction: float | None = 0.1) -> tuple[list[str], Images, Images]:
    """Return the classes, the training images and the validation images of the data set in the settings.

    Without validation images and ``val_fraction``, a fraction is held out; both parts are all images if it is None.
    """
    if s.dataset == "folder":
        root = Path(str(s.data)).expanduser()
        parts = {path.name.lower(): path for path in sorted(root.glob("*")) if path.is_dir()}
        train, val = (next(filter(None, map(parts.get, names)), None) for names in (TRAINING, VALIDATION))
        if val and not train and fraction:
            raise DataError(f"{root} contains no folder 'train': expected train/CLASS/IMAGE next to {val.name}")
        used = [train or val or root] if s.val_fraction or not val else [train or val, val]
        sources: list[Any] = [Folder(path) for path in dict.fromkeys(used)]
        kinds = [source.classes for source in sources]
    else:
        from timm.data import create_dataset

        name = s.dataset if "/" in s.dataset else f"torch/{s.dataset}"
        options = {"root": s.data and str(s.data.expanduser()), "is_training": True, "download": s.download}
        try:
            splits = [s.train_split, *([] if s.val_fraction else [s.val_split])]
            sources = [create_dataset(name, split=split, **options) for split in splits]
        except (AssertionError, ImportError, OSError, RuntimeError) as error:
            remedy = "Pass its folder as --data, or --download" if "hfds/" not in name else "pip install datasets"
            raise DataError(f"cannot read {name} in {s.data} ({error}). {remedy}") from error
        kinds = [list(getattr(one, "classes", None) or one.reader.class_to_idx) for one in sources]
    if only := sorted({*map(str, kinds[0])} ^ {*map(str, kinds[-1])}):
        raise DataError(f"classes of training and validation images differ: {', '.join(only[:6])} are in one only")
    rows: list[Sequence[int]] = [range(len(source)) for source in sources]
    if len(sources) == 1 and (held := s.val_fraction or fraction):
        rows = split_rows(Images(sources[0], rows[0]), list(map(str, kinds[0])), held, s.seed)
    return list(map(str, kinds[0])), Images(sources[0], rows[0]), Images(sources[-1], rows[-1])


def split_rows(images: Images, classes: Sequence[str], fraction: float, seed: int) -> list[Sequence[int]]:
    """Hold out a random fraction of each class; return the rows of the other images and of the held-out images."""
    import numpy as np

    labels, numbers = np.array(images.labels()), np.random.default_rng(seed)
    groups = [numbers.permutation(np.flatnonzero(labels == label)) for label in range(len(classes))]
    counts = [max(1, round(fraction * len(group))) for group in groups]
    if few := [name for name, group, n in zip(classes, groups, counts, strict=True) if len(group) <= n]:
        reason = f"cannot hold out {100 * fraction:.3g} % of the images: too few images of {', '.join(few[:6])}"
        raise DataError(f"{reason}. Add images, change --val-fraction, or add a folder val")
    halves = [np.split(group, [n]) for group, n in zip(groups, counts, strict=True)]
    return [sorted(np.concatenate([half[part] for half in halves]).tolist()) for part in (1, 0)]


def require_readable(parts: Sequence[Images]) -> None:
    """Decode every image file once, and list all damaged files in one error."""
    from tqdm import tqdm

    def find_damage(file: Path) -> str | None:
        try:
            open_image(file)
        except Exception as error:  # Pillow raises many types of errors for damaged files
            return f"{file} ({' '.join(str(error).split())})"
        return None

    files = [part.source.samples[row][0] for part in parts if isinstance(part.source, Folder) for row in part.rows]
    with ThreadPoolExecutor() as pool:
        bar = tqdm(pool.map(find_damage, files), "check images", len(files), leave=False, disable=None)
        damaged = [text for text in bar if text]
    if damaged:
        more = f" and {len(damaged) - 20} more" if len(damaged) > 20 else ""
        raise DataError(
            f"{len(damaged)} images cannot be read: {', '.join(damaged[:20])}{more}. Replace or remove them"
        )


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Parse options of a block.

    >>> parse_options(["num_heads=4", "pattern=Window(7)", "qk_norm=match"])
    {'num_heads': 4, 'pattern': Window(size=7, shift=0), 'qk_norm': 'match'}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not (name.isidentifier() and sign) or name in found:
            raise ValueError(f"--block-options must be distinct NAME=VALUE pairs such as num_heads=4, got {word!r}")
        found[name] = parse_option(text)
    return found


def parse_option(text: str) -> Any:
    """Return a literal, a pattern or position encoding with literal arguments, or the text. No other code is run."""
    kinds = {name: getattr(va, name) for name in dir(va) if name[0].isupper()}
    kinds = {name: kind for name, kind in kinds.items() if hasattr(kind, "__dataclass_fields__")}
    if name := next((name for name in kinds if text.lower() == name.lower()), None):
        example = f"{name}(7)" if name in ("Window", "Grid", "Neighborhood") else f"{name}(…)"
        raise ValueError(f"{text!r} requires arguments in parentheses. Did you mean {example!r}?")
    try:
        tree = ast.parse(text.removeprefix("va."), mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in kinds:
            named = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
            return kinds[tree.func.id](*map(ast.literal_eval, tree.args), **named)
        return ast.literal_eval(tree)
    except (SyntaxError, ValueError):
        if "(" in text and "->" not in text:
            raise ValueError(f"expected one of {', '.join(kinds)} with its arguments, got {text}") from None
        return text


def make_loader(acc: Any, images: Any, batch: int, workers: int | None, train: bool = False) -> Any:
    """Create a loader whose batches are divided among the processes."""
    import torch
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    if workers is None:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(16, cores, len(images) // 64)
    loader: Any = DataLoader(images, batch, shuffle=train, drop_last=train, num_workers=workers,
                        persistent_workers=workers > 0, pin_memory=torch.cuda.is_available(),
                        worker_init_fn=images.start_worker, generator=torch.Generator().manual_seed(0))  # fmt: skip
    return prepare_data_loader(loader, acc.device, acc.num_processes, acc.process_index, split_batches=True,
                               put_on_device=True, use_seedable_sampler=True, data_seed=images.seed)  # fmt: skip
