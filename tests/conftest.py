"""Settings for all tests."""

import os
import signal

# Open no windows. This must be set before pygame is imported
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("MPLBACKEND", "Agg")

# A shell ignores Ctrl-C in background jobs. Child processes would inherit this
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch as th
from hypothesis import settings

# Hypothesis tries the same examples in every run
settings.load_profile("ci")

# pytest-xdist runs tests in parallel
th.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests, and the processes that they start, unless only the tests for GPUs run."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
