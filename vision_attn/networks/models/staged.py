"""What our own networks share: stages one after the other, a pooled head, and what timm asks of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import create_classifier
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn

__all__ = ["StagedNetwork"]


class StagedNetwork(nn.Module):
    """Stages, pooled over the map and read out linearly, as timm's networks are.

    A network makes its stages, which ``feature_info`` names, then its head by :meth:`add_head`, and runs the stages in
    :meth:`run_stages`. What comes before them is its :meth:`stem`, what comes after them its :meth:`norm_features`.
    """

    #: the name of the classifier, which differs between families of checkpoints
    classifier_name = "fc"
    if TYPE_CHECKING:  # torch.jit.script reads annotations of a class, and does not know modules
        fc: nn.Module
        global_pool: nn.Module

    def __init__(self, widths: Sequence[int], reductions: Sequence[int], stage: str) -> None:
        super().__init__()
        self.num_features = widths[-1]
        self.grad_checkpointing = False
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": width, "reduction": reduction, "module": f"{stage}{number}"}
            for number, (width, reduction) in enumerate(zip(widths, reductions, strict=True), start=1)
        ]

    def add_head(self, num_classes: int, drop_rate: float, global_pool: str) -> None:
        """Pooling, dropout and a classifier."""
        self.drop_rate = drop_rate
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def stem(self, x: Tensor) -> Tensor:
        """What comes before the stages."""
        return x

    def run_stages(self, x: Tensor) -> Tensor:
        """All stages, each by its name, since torch.jit.script takes no others."""
        raise NotImplementedError

    def norm_features(self, x: Tensor) -> Tensor:
        """What comes after the stages: ``(b, num_features, h, w)``."""
        return x

    def classify(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_classifier(self) -> nn.Module:
        """The classifier; an identity where there is none."""
        return self.get_submodule(self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Begin with a new classifier, and with other pooling: ``"avg"``, ``"max"``, ``"avgmax"``, … as timm has it."""
        if global_pool is None:
            global_pool = str(self.global_pool.pool_type)
        if num_classes and not global_pool:
            raise ValueError(
                f"global_pool must be given with num_classes={num_classes}: '' is for the map, without any"
            )
        weight = next(self.parameters())
        factory = {"device": weight.device, "dtype": weight.dtype}
        self.num_classes = num_classes
        pool, classifier = create_classifier(self.num_features, num_classes, pool_type=global_pool, **factory)
        self.global_pool = pool.train(self.training)
        self.add_module(self.classifier_name, classifier.train(self.training))
        self.head_hidden_size = self.num_features * pool.feat_mult()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute what is inside of the stages anew in the backward pass, in the place of keeping it."""
        self.grad_checkpointing = enable

    def stages(self) -> list[nn.Module]:
        return [self.get_submodule(entry["module"]) for entry in self.feature_info]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps after the stages, with what :meth:`forward_features` gives before them.

        Args:
            x: images, ``(b, in_chans, h, w)``.
            indices: stages by index; the last so many if a number, all when None.
            norm: whether the map of the last stage is normalised, where the network has a norm there.
            stop_early: whether stages after the last one asked for are left out.
            output_fmt: ``"NCHW"``.
            intermediates_only: whether the maps are given alone.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW'; got {output_fmt!r}")
        stages = self.stages()
        taken, last = feature_take_indices(len(stages), indices)
        run = stages[: last + 1] if stop_early else stages
        maps = []
        x = self.stem(x)
        for index, stage in enumerate(run):
            x = checkpoint_seq([stage], x) if self.grad_checkpointing else stage(x)
            y = self.norm_features(x) if index == len(stages) - 1 else x
            if index in taken:
                maps.append(y if norm else x)
        return maps if intermediates_only else (y, maps)

    def forward_features(self, x: Tensor) -> Tensor:
        """The map that the head is given, ``(b, num_features, ⌈h / 4⌉, ⌈w / 4⌉)``.

        Args:
            x: images, ``(b, in_chans, h, w)``.
        """
        x = self.stem(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():  # type: ignore[attr-defined]
            x = checkpoint_seq(self.stages(), x)
        else:
            x = self.run_stages(x)
        return self.norm_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What the network gives for the map of :meth:`forward_features`.

        Args:
            x: that map, ``(b, num_features, h, w)``.
            pre_logits: whether to leave out the classifier.
        """
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.classify(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
