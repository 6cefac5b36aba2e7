"""Common mistakes raise one-line errors with the cause and a remedy."""

import re

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.cli import main


def insert(*block, **options):
    return va.insert_(nn.Sequential(nn.Conv2d(3, 16, 1)), *block, names="0", example_input=(1, 3, 14, 14), **options)


CONV = nn.Conv2d(3, 8, 1)


MISTAKES = [
    (lambda: insert(nn.ReLU()), "class, or a function such as lambda channels: block, got an instance of ReLU"),
    (lambda: insert(position="rope"), r"position must be .* such as va.Rope\(\), got 'rope'. Pass an instance"),
    (lambda: insert(position=va.Rope), "position must be .*, got <class .*Rope'>. Pass an instance"),
    (lambda: insert(pattern="window"), r"an instance such as va.Window\(7\).*, got 'window'"),
    (lambda: insert(pattern=va.Grid), r"va.Grid\(7\).*, got <class .*Grid'>"),
    (lambda: va.explore(CONV, torch.full((1, 3, 8, 8), 3.0), "a.html"), r"0…1, got 3.0…3.0. Pass .* normalize="),
    (lambda: insert(heads=4), "unexpected keyword argument 'heads'. Did you mean 'num_heads'"),
    (lambda: va.insert_("resnet18", stages=-1), "model must be a torch.nn.Module, got 'resnet18'. Create it first"),
    (lambda: va.insert_(nn.Conv2d, stages=-1), "model must be a torch.nn.Module, got <class .*. Pass an instance"),
    (lambda: va.insert_(CONV, layers="a"), "one of stages, names and where, got none. 'layers' would be passed to"),
    (lambda: va.load_checkpoint_(CONV, {}), "file must be a path .*, got dict. .*load_state_dict"),
    (lambda: va.timm_layer(nn.ReLU()), "block must be a class, .*, got an instance of ReLU"),
    (lambda: va.explore(CONV, "photo.jpg", "a.html"), "images must be a tensor .*, got 'photo.jpg'"),
    (lambda: va.capture(va.Attention2d(3, 1), (1, 1)).__enter__(), r"queries must .*points \(y, x\), .* got \(1, 1\)"),
    (lambda: insert("ese", reduction=4), "unknown option reduction: expected one of add_maxpool"),
    # The window size does not divide the feature map.
    (lambda: insert("halo"), r"HaloAttn does not \(AssertionError at \"_assert\(H % self.block_size == 0, ''\)\"\)"),
    (lambda: insert(lambda _: {}["window"]), "the block at '0' cannot be built for 16 channels: KeyError: 'window'"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_python_mistakes_raise_one_line_errors(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_the_table_of_relative_positions_has_the_size_of_the_feature_map():
    cases = (va.RelPosTable(), "full", (14, 14)), (va.RelPosTable((9, 9)), "full", (9, 9))
    for position, pattern, feat_size in (*cases, (va.RelPosDecomposed(), va.Window(7), None)):
        assert insert(position=position, pattern=pattern).blocks[0].options["position"].feat_size == feat_size


def test_a_lazy_block_is_counted_after_initialization():
    report = insert(nn.LazyConv2d, kernel_size=1)
    assert report.parameters == 16 * 16 + 16 + 16  # The parameters of the convolution, and a gate.


class Breaks(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(channels, channels, 1)

    def forward(self, x):
        if self.training:
            raise KeyError("window")
        return nn.functional.conv2d(x, self.weight)


def test_an_error_in_the_code_of_a_block_shows_its_line(image_folder, tmp_path, capsys):
    paths, words = ["--data", str(image_folder), "--output", str(tmp_path / "run")], "--block test_mistakes:Breaks"
    words += " --model tiny --epochs 1 --batch-size 8 --device cpu --names layer2"
    assert main(["train", *paths, *words.split()]) == 1
    assert re.search(r"Traceback .*test_mistakes\.py.*raise KeyError\(\"window\"\)", capsys.readouterr().err, re.DOTALL)
