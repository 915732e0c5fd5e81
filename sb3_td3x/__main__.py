"""Run the command line by ``python -m sb3_td3x``."""

import sys

from sb3_td3x.cli import main

if __name__ == "__main__":
    sys.exit(main())
