"""The checkpoints of a run: written so that they can be used and gone on from, and read to do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vision_attn.checkpoints import read_checkpoint, save_adapter
from vision_attn.training.evaluation import Normalize
from vision_attn.training.network import Network
from vision_attn.training.optimizer import optimizer_bytes
from vision_attn.training.resume import refuse_other_data, refuse_other_settings
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.settings import Settings
from vision_attn.training.state import TrainingState, weights

__all__ = ["Saving"]


class Saving:
    """Saves a run, and restores it."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        state: TrainingState,
        network: Network,
        normalize: Normalize,
        classes: tuple[str, ...],
        images: int,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.state = state
        self.network = network
        #: what each checkpoint says of its run
        self.about = {
            "settings": settings.as_dict(),
            "classes": list(classes),
            "train_images": images,
            "input_size": [normalize.mean.numel(), *network.size],
            "mean": normalize.mean.flatten().tolist(),
            "std": normalize.std.flatten().tolist(),
        }

    @property
    def last(self) -> Path:
        """Of the checkpoint to go on from."""
        return self.folder.path / "last.pth"

    def open(self) -> None:
        """Make the folder, if there is room for what will be in it, and write what is known before training."""
        best = sum(value.nbytes for value in self.state.model.state_dict().values())
        last = best * (1 if self.state.ema is None else 2) + optimizer_bytes(self.state.optimizer, self.settings)
        self.folder.open(clear=self.settings.resume is None, last_bytes=last, best_bytes=best)
        self.folder.write_settings(self.settings.as_dict())
        if self.network.inserted is not None:
            self.folder.write_text("inserted.txt", f"{self.network.inserted}\n")
        self.folder.write_metrics(self.state.progress.rows)  # a run may be killed before its last one is written

    def save_last(self) -> None:
        """Write all that is needed to go on from here."""
        self.folder.save("last.pth", {**self.state.content(), **self.about})

    def save_best(self) -> None:
        """Write the weights that count, and the blocks by themselves where all else is as it came."""
        model = self.state.evaluated
        self.folder.save("best.pth", {"model": weights(model), **self.about, "epoch": self.state.progress.epoch})
        if self.settings.freeze_backbone and self.network.inserted is not None:
            save_adapter(model, self.folder.path / "adapter.safetensors", also=self.network.new_head)

    def restore(self, path: Path) -> None:
        """Become what a checkpoint holds, if it is one of the same run."""
        content: dict[str, Any] = read_checkpoint(path)
        self.state.refuse_other_content(content, path)
        refuse_other_settings(self.settings, content["settings"], path)
        refuse_other_data(self.about, content, path)
        self.state.load(content)
