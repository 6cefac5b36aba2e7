"""Runs with random settings that are interrupted in random ways and resumed: equal to the undisturbed run, or refused.

Another number of processes is left out: it sums the loss in another order, so the weights differ in the last bit.
"""

import csv
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MINUTES = 10
SETTINGS = {
    "--opt": ["adamw", "sgd", "muon", "lamb"], "--ema": [None, "0.9"], "--mixup": [None, "0.2"],
    "--cutmix": [None, "1.0"], "--aa": [None, "rand-m9"], "--reprob": [None, "0.5"], "--grad-accum-steps": [None, "2"],
    "--layer-decay": [None, "0.7"], "--attention-lr": [None, "0.01"], "--clip-grad": [None, "1.0"],
    "--warmup-epochs": ["0", "0.5"], "--workers": ["0", "1"], "--img-size": ["16", "72"], "--amp": [None, "bfloat16"],
    "--block-options": [None, "attn_drop=0.2", "position=Rope()"], "--val-fraction": [None, "0.3"],
}  # fmt: skip
SIGNALS = {"SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"}
CHANGES = {"renamed class": "the classes differ", "missing image": "the images changed"}
INTERRUPTIONS = [*sorted(SIGNALS), "full disk", *CHANGES]


def start(words, limit=None):
    def set_limit():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = [sys.executable, "-m", "vision_attn", "train", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=set_limit)


def disturb(kind, words, folder, chance):
    """Start or resume a run and interrupt it; return its exit status and its output."""
    if kind in CHANGES:
        has_state = any(Path(words[words.index("--output") + 1]).glob("state/[0-9]*"))  # the state knows the data
        moved = [folder / part / "red" for part in ("train", "val")]
        moved = moved if kind == "renamed class" else [next(path.iterdir()) for path in moved]
        for path in moved:
            path.rename(path.with_name(f".{path.name}" if path.is_file() else "crimson"))
        process = start(words)
        text = process.communicate()[0]
        for path in moved:
            path.with_name(f".{path.name}" if path.suffix else "crimson").rename(path)
        assert (CHANGES[kind] in text) is has_state, text
        return process.returncode, text
    process, delay = start(words, 4_000 if kind == "full disk" else None), chance.uniform(2, 9)
    try:
        text = process.communicate(timeout=None if kind == "full disk" else delay)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(getattr(signal, kind))
        text = process.communicate()[0]
    return process.returncode, text


def result(run):
    with open(run / "metrics.csv") as file:
        rows = [{key: value for key, value in row.items() if "second" not in key} for row in csv.DictReader(file)]
    return rows, (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_interrupted_runs_equal_the_undisturbed_run(image_folder, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance, end, number = random.Random(seed), time.monotonic() + 60 * MINUTES, 0
    while time.monotonic() < end:
        number += 1
        data = shutil.copytree(image_folder, tmp_path / f"data{number}")
        words = ["--model", "test_resnet", "--stages", "0", "--epochs", "3", "--batch-size", "16", "--lr", "0.002"]
        words += ["--device", "cpu"]
        for flag, choices in SETTINGS.items():
            value = chance.choice(choices)
            words += [] if value is None else [flag, value]
        words += ["--data", str(data / "train" if "--val-fraction" in words else data)]
        process = start([*words, "--output", str(tmp_path / f"whole{number}")])
        text = process.communicate()[0]
        if "is not finite" in text:  # such settings end every run
            print(f"{' '.join(words)}: not finite")
            continue
        assert process.returncode == 0, f"{' '.join(words)}\n{text}"
        disturbed, history = tmp_path / f"disturbed{number}", []
        resumed = [*words, "--output", str(disturbed), "--resume", "auto"]
        for kind in chance.choices(INTERRUPTIONS, k=chance.randint(1, 4)):
            code, text = disturb(kind, resumed, data, chance)
            history.append(f"{kind}: exit {code}")
            assert "Traceback" not in text, f"{' '.join(words)}\n{history}\n{text}"
            if kind in CHANGES and "the classes differ" not in text:  # this step trained with other data
                break
        else:
            process = start(resumed)
            text = process.communicate()[0]
            assert process.returncode == 0, f"{' '.join(words)}\n{history}\n{text}"
            assert result(disturbed) == result(tmp_path / f"whole{number}"), f"{' '.join(words)}\n{history}"
        print(f"{' '.join(words)}: {', '.join(history)}")
