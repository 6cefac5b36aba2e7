"""Several runs in one process: Accelerate keeps the device and the precision of the first one."""

import sys

import pytest


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Forget the device and the precision after each test, as a new process does."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
