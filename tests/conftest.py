"""What all tests share."""

import os
import signal

# Nothing here may open a window; before pygame is imported
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("MPLBACKEND", "Agg")

# A shell starts jobs in the background with Ctrl-C ignored, which child processes would inherit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch as th

# The machine's cores run tests side by side
th.set_num_threads(1)
