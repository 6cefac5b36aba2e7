"""Fixtures of several test files: drawn examples, a small folder of images, and the real data.

Slow imports are in the fixtures: pytest-xdist loads this file before it starts the processes that run the tests.
"""

import gc
import multiprocessing
import shutil
import signal
import socket
from pathlib import Path

import pytest
from hypothesis import settings

gc.disable()  # imports stay in memory; enabled again before the first test

#: Examples are the same in every run. Tests marked ``thorough`` draw new ones; a failure prints how to reproduce it.
settings.register_profile("reproducible", derandomize=True, database=None, deadline=None)
random_examples = {"derandomize": False, "max_examples": 300, "print_blob": True}
settings.register_profile("random", settings.get_profile("reproducible"), **random_examples)
settings.load_profile("reproducible")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file in one process, as far as possible, because they share imports and fixtures."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(scope="session", autouse=True)
def fast_tests():
    """Use one thread, because tensors are small, and exclude imported objects from garbage collection."""
    import tiny  # noqa: F401 - a network that timm knows by this name
    import torch

    torch.set_num_threads(1)
    gc.set_threshold(10_000)  # networks consist of many objects
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed also records a stack trace for each kind of GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def signals():
    """Handle Ctrl-C and hangup as in a terminal, also in child processes: nohup and background jobs ignore them."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def no_network():
    """Fail the test on a connection to another machine, even if the code catches errors."""
    connect = socket.socket.connect

    def connect_here(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("localhost", "127.0.0.1", "::1"):
            pytest.fail(f"a connection to {address} was attempted")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_here)
        yield


@pytest.fixture(scope="session")
def keras(tmp_path_factory):
    """Import Keras with the torch backend and temporary settings; skip the test if it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        patch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        module = pytest.importorskip("keras")
    if module.backend.backend() != "torch":
        pytest.skip("keras was already imported with another backend")
    return module


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """Write a folder of noisy images of three colors, which a small network learns quickly."""
    import numpy as np
    from PIL import Image

    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for channel, name in enumerate(("blue", "green", "red")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 100, (32, 32, 3))
                pixels[:, :, 2 - channel] += 120
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def real_data():
    """Return the folder next to the repository with CIFAR and model-zoo checkpoints; skip the test if it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "zoo").is_dir():
        pytest.skip("the real images and model-zoo checkpoints are not available")
    return folder


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        # A worker of a data loader, which the traceback of an interrupted run keeps, was forked with the pipes of the
        # browser. Playwright would wait for it to end.
        gc.collect()
        for worker in multiprocessing.active_children():
            worker.terminate()
            worker.join()
        browser.close()
