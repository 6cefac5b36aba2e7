"""Which checkpoint a run goes on from, and whether it is one of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from vision_attn.errors import CheckpointError
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.settings import Settings

__all__ = ["checkpoint_to_resume", "refuse_other_data", "refuse_other_settings"]


def checkpoint_to_resume(settings: Settings) -> Path | None:
    """The checkpoint to go on from, as the main process sees it; None to begin."""
    if settings.resume is None:
        return None
    path = settings.folder / "last.pth" if settings.resume == "auto" else Path(settings.resume)
    # One answer for all processes, also where the folder reaches them at different times.
    found: bool = broadcast_object_list([path.exists()])[0]
    if found:
        return path
    if settings.resume != "auto":
        raise FileNotFoundError(
            f"resume: there is no {path} yet: to go on where there is one and begin where there is none, give "
            "--resume auto and the folder as --output"
        )
    left = RunFolder(settings.folder)
    if left.files and left.read_settings() is None:
        left.refuse_another_run()
    elif left.files:
        refuse_other_settings(settings, left.read_settings(), left.path)
    return None


def refuse_other_settings(settings: Settings, others: object, place: Path) -> None:
    """Refuse to go on with a run that would have come to something else."""
    try:
        differences = settings.differences(others)
    except ValueError as error:
        raise CheckpointError(f"{place} is damaged, or of another version of vision_attn: {error}") from error
    if differences:
        raise ValueError(
            f"resume goes on with the same run, but {', '.join(differences)} differ from {place}: give the same "
            "settings, or begin a new run from its weights with --weights"
        )


def refuse_other_data(about: Mapping[str, Any], others: Mapping[str, Any], place: Path) -> None:
    """Refuse to go on with other images: those of each step follow from how many there are."""
    if about["classes"] != others["classes"]:
        raise ValueError(f"resume goes on with the same data, but {place} is of other classes: give the same --data")
    if about["train_images"] != others["train_images"]:
        raise ValueError(
            f"resume goes on with the same data, but {place} is of {others['train_images']:,} training images and "
            f"there are {about['train_images']:,}: give the same --data, or begin a new run from its weights with "
            "--weights"
        )
