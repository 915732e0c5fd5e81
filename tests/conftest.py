"""What all tests share."""

import os

# Nothing here may open a window; before pygame is imported
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("MPLBACKEND", "Agg")

import torch as th

# The machine's cores run tests side by side
th.set_num_threads(1)
