"""Classify images with a trained network.

vision-attn predict runs/train-1 photo.jpg more-photos --top 3 --output found.csv
python my_predict.py runs/train-1 photo.jpg        # a copy of this file with your changes
"""

from typing import Any

import torch
from tqdm import tqdm

from vision_attn import cli
from vision_attn.recipes.data import find_images, open_image
from vision_attn.recipes.runs import check_writable, load_run, write_csv
from vision_attn.recipes.settings import Prediction


def predict(p: Prediction) -> list[list[Any]]:
    """Print the most probable classes of each image; return the file, and the classes and their probabilities."""
    device = p.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_run(p.run, p.block, "predict RUN IMAGE").float().to(device)
    names = model.classes or tuple(map(str, range(model.num_classes)))
    files, top = find_images(p.images), min(p.top, len(names))
    if p.output:
        check_writable(p.output, files)
    rows: list[list[Any]] = []
    for first in tqdm(range(0, len(files), p.batch_size), "predict", leave=False, disable=None):
        batch = files[first : first + p.batch_size]
        with torch.inference_mode():
            images = torch.stack([model.transform(open_image(file)) for file in batch]).to(device)
            scores, labels = model(images).float().softmax(1).topk(top)
        for file, *found in zip(batch, scores.tolist(), labels.tolist(), strict=True):
            best = [(names[label], score) for score, label in zip(*found, strict=True)]
            tqdm.write(cli.escape(f"{file}: {', '.join(f'{name} {100 * score:.1f} %' for name, score in best)}"))
            rows.append([file, *(cell for name, score in best for cell in (name, f"{score:.6f}"))])
    if p.output:
        columns = [f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability")]
        write_csv(p.output, [["image", *columns], *rows])
    return rows


if __name__ == "__main__":
    cli.run_script("predict", predict)
