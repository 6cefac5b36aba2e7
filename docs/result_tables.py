"""Recompute the differences in examples/experiments/results, and the intervals of the page in that folder from them.

    python docs/result_tables.py

A comment above a table of the page names the file and the measurement of each of its columns with intervals:
``<!-- stereo.json: real px -->``. The variant of a row is found by its means, or else by its label. With several files,
each row belongs to one file, and the headers of the columns name the variants.

Run it after a change of the rule for intervals, or of a file.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from vision_attn.recipes.differences import DECIMALS, Difference, compare_scores, plot

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples/experiments/results"
PAGE = FOLDER / "README.md"
#: variants by label, for rows without means and for variants with equal means
LABELS = {
    "no block": "plain",
    "convolution": "convolution",
    "convolution, 3×3": "convolution",
    "large kernel": "large-kernel",
    "attention without positions": "attention",
    "squeeze and excitation as a residual block": "se-residual",
    "MLP on the pooled features": "pooled-mlp",
    "the normalized shortcut": "norm-shortcut",
    "large kernel, 13×13": "large-kernel",
    "gated long convolution": "gated-convolution",
    "kernel over the complete feature map": "map-kernel",
    "squeeze and excitation": "se",
    "CBAM": "cbam",
    "coordinate attention": "coordinate",
    "averaging": "averaging",
}


def read_scores(recorded):
    """Return scores by measurement, variant and seed."""
    if "variants" in recorded:
        return {"top-1 %": {name: variant["scores"] for name, variant in recorded["variants"].items()}}
    found = {}
    for name, runs in recorded["runs"].items():
        if "options" not in recorded:  # denoise.json has one entry for each run
            variant, sigma, seed, _ = name.split(", ")
            for images in ("textured", "others"):
                found.setdefault(f"{sigma}, {images}", {}).setdefault(variant, {})[seed] = runs[images]
            continue
        for seed, run in runs.items():
            for metric, score in run.items():
                found.setdefault(metric, {}).setdefault(name, {})[seed] = score
    return found


def families(file, scores):
    """Yield the variants that are compared, the last of them with each of the others."""
    if file.stem == "adapters":
        for stage in ("layer1", "layer3"):
            yield {name: of for name, of in scores.items() if name == "head alone" or name.endswith(stage)}
    elif file.stem == "cifar-ways":  # the way that was selected is compared with the others
        first, *others = scores
        yield {name: scores[name] for name in (*others, first)}
    else:
        yield scores


def recompute(file):
    recorded = json.loads(file.read_text())
    scores = read_scores(recorded)
    for title in scores if isinstance(recorded["differences"], list) else recorded["differences"]:
        lower_is_better = title.endswith(("px", "steps"))
        differences = [
            asdict(difference)
            for family in families(file, scores[title])
            for difference in compare_scores(family, lower_is_better=lower_is_better)
        ]
        if isinstance(recorded["differences"], list):
            recorded["differences"] = differences
        else:
            recorded["differences"][title] = differences
    file.write_text(json.dumps(recorded, indent=1) + "\n")


def format_interval(difference, metric):
    digits = next((digits for unit, digits in DECIMALS.items() if metric.endswith(unit)), 2)
    limits = difference["low"], difference["high"]
    if any(limit and round(limit, digits) == 0 for limit in limits):  # shows on which side of zero it is
        digits += 1
    return " to ".join(f"{limit:.{digits}f}" for limit in limits).replace("-", "−")


class Recorded:
    """Means and differences of a file by variant."""

    def __init__(self, name):
        content = json.loads((FOLDER / name).read_text())
        self.differences, self.means = {}, {}
        for metric, variants in read_scores(content).items():
            found = content["differences"]
            found = found if isinstance(found, list) else found.get(metric, [])
            for difference in found:
                self.differences[metric, difference["variants"][1]] = difference
            for variant, scores in variants.items():
                values = [*scores.values()]
                for digits in (0, 1, 2):
                    mean = f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
                    self.means.setdefault(variant, set()).add(mean)

    def variant(self, cells):
        """Return the variant of a row; None for the variant that is compared with the others."""
        label, *rest = (cell.strip("* ").removeprefix("+ ") for cell in cells)
        means = {cell for cell in rest if " ± " in cell}
        compared = {variant for _, variant in self.differences}
        found = [variant for variant in self.means if means and means <= self.means[variant]]
        found = found or [variant for variant in self.means if means & self.means[variant]] or [LABELS[label]]
        (variant,) = found if len(found) == 1 else {LABELS[label]} & set(found)
        return variant if variant in compared else None


def fill(table, names, metrics):
    """Return the lines of a table with recomputed intervals."""
    header, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    files = [Recorded(name) for name in names]
    columns = [i for i, cell in enumerate(header) if " − " in cell and i] or range(1, len(header))
    for index, cells in enumerate(rows[1:]):
        for number, column in enumerate(columns):
            if len(files) > 1:
                file, metric, variant = files[index], metrics[0], LABELS[header[column].partition(" − ")[2]]
            else:
                file, metric, variant = files[0], metrics[number], files[0].variant(cells)
            if variant is not None:
                cells[column] = format_interval(file.differences[metric, variant], metric)
    return [table[0], table[1], *(f"| {' | '.join(cells)} |" for cells in rows[1:])]


def draw(name, compared):
    """Draw the differences of a file with one measurement."""
    titles = {variant: label for label, variant in reversed(LABELS.items())}
    shown = []
    for recorded in json.loads((FOLDER / f"{name}.json").read_text())["differences"]:
        other = recorded["variants"][1]
        shown.append(Difference(**{**recorded, "variants": (compared, titles.get(other, other))}))
    plot({"top-1 %": shown}, FOLDER / f"{name}.png")


def main():
    for file in sorted(FOLDER.glob("*.json")):
        recompute(file)
    draw("cifar", "attention")
    draw("positions", "attention with positions")
    lines, done = PAGE.read_text().splitlines(), []
    while lines:
        line = lines.pop(0)
        done.append(line)
        if found := re.fullmatch(r"<!-- ([\w., -]+\.json): (.*) -->", line):
            done.append(lines.pop(0))
            table = []
            while lines and lines[0].startswith("|"):
                table.append(lines.pop(0))
            done += fill(table, found[1].split(", "), found[2].split("; "))
    PAGE.write_text("\n".join(done) + "\n")


if __name__ == "__main__":
    main()
