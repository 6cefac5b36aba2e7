"""Mistakes that people make: each is said in a line, with what was expected and the way out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vision_attn as va
from vision_attn.tools.cli import main


def network(channels=16):
    return nn.Sequential(nn.Conv2d(3, channels, 1), nn.ReLU())


def insert(*block, **options):
    return va.insert_(network(), *block, names="0", example_input=(1, 3, 14, 14), **options)


def capture_tokens():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 1).eval()
    assert len(va.swap_(model)) == 1
    with va.capture(model):
        model(torch.randn(1, 9, 32))


class Raises(nn.Module):
    def __init__(self, channels):
        super().__init__()
        raise KeyError("window")


IN_PYTHON = {
    "a misspelt argument": (lambda: insert(num_head=4), "argument 'num_head': did you mean 'num_heads'"),
    "a misspelt block": (lambda: insert("cbma"), r"block must be a class or function .*cbam.*; got 'cbma'"),
    "a module for a class": (lambda: insert(nn.ReLU()), "block must be a class or function .* got a ReLU"),
    "what timm would drop": (lambda: insert("ese", reduction=4), "takes no reduction, only add_maxpool"),
    "a map that windows do not divide": (
        lambda: insert("halo"), r"HaloAttn does not \(AssertionError at \"_assert\(H % self.block_size == 0, ''\)\"\)",
    ),
    "a block that raises": (lambda: insert(Raises), "the block at '0', for 16 channels: KeyError: 'window'"),
    "maps of a sentence": (
        capture_tokens, "no attention on feature maps to capture. layers.0.self_attn: it attends to 9 tokens in a row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", IN_PYTHON)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_mistakes_in_python(mistake):
    make, message = IN_PYTHON[mistake]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_lazy_block_is_counted_once_it_has_values():
    report = insert(nn.LazyConv2d, kernel_size=1)
    assert report.parameters == 16 * 16 + 16 + 16  # its own, and a gate


class Breaks(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(channels, channels, 1)

    def forward(self, x):
        if self.training:
            raise KeyError("window")
        return F.conv2d(x, self.weight)


TRAIN = "train --data {images} --model tiny --img-size 32 --epochs 1 --batch-size 8 --device cpu --output {folder}/run"
TRAIN += " --insert layer2"
ON_THE_COMMAND_LINE = {
    "explore {images}/val/red/0.png --model tiny": (2, "no attention to look into: give vit_tiny_patch16_224"),
    "explore {folder}/none.png --model tiny": (1, "images: there is no {folder}/none.png"),
    "inspect torchvision:resnet999": (2, "there is no 'torchvision:resnet999'; close to it: resnet"),
    f"{TRAIN} --block-options num_head=4": (2, "'num_head': did you mean 'num_heads'?"),
    f"{TRAIN} --block test_mistakes:Breaks": (1, "block test_mistakes:Breaks raised KeyError ('window') in line "),
}


@pytest.mark.parametrize("command", ON_THE_COMMAND_LINE)
def test_mistakes_on_the_command_line_are_a_line_without_a_traceback(command, image_folder, tmp_path, capsys):
    code, message = ON_THE_COMMAND_LINE[command]
    places = {"images": image_folder, "folder": tmp_path}
    assert main(command.format(**places).split()) == code
    said = capsys.readouterr().err
    assert message.format(**places) in said
    assert "Traceback" not in said
