"""
A module that runs until it ends, or until the process that started it ends::

    python -m sb3_td3x.studies.child_process rl_zoo3.train --algo td3x ...

The parent holds the standard input of this process open. When it is closed, which no kill can prevent, this process
ends itself and the processes of its envs. So no training continues, and writes into a study, after the study was
killed.
"""

import os
import runpy
import signal
import sys
import threading

import _sb3_td3x_autoload as autoload


def end_with_parent() -> None:
    """Wait until the standard input is closed, then kill this process and, if it leads a process group, the group."""
    while os.read(0, 1024):
        pass
    if os.name == "posix" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run the module that the first argument names, with the other arguments."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    autoload.install(force=True)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
