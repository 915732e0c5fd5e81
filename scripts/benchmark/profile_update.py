"""
Where the time of an update goes: PyTorch's profile of ``train()`` of TD3X and SB3's TD3, in a cell of ``speed.py``.

    python scripts/benchmark/profile_update.py bipedal-256 --threads 1
    python scripts/benchmark/profile_update.py carracing --updates 4
"""

import argparse
from dataclasses import replace

import torch as th
from cells import CELLS
from peers import LEARNING_STARTS, fill, make_model

from sb3_td3x.studies.options import at_least

# Large enough for batches from everywhere in the memory, and quickly filled
BUFFER_SIZE = 10_000
N_ROWS = 15


def main() -> None:
    """Print a table for each peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", choices=list(CELLS))
    parser.add_argument(
        "--updates", type=at_least(1), default=100, help="profiled updates, after as many to warm up (default: 100)"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="PyTorch threads (default: 1)")
    args = parser.parse_args()
    th.set_num_threads(args.threads)
    cell = replace(CELLS[args.cell], buffer_size=BUFFER_SIZE)
    for peer in ("td3x", "sb3"):
        model = make_model(peer, cell, {}, "cpu")
        assert model.replay_buffer is not None
        fill(model.replay_buffer)
        model.learn(LEARNING_STARTS)
        model.train(gradient_steps=args.updates, batch_size=cell.batch_size)
        with th.profiler.profile(activities=[th.profiler.ProfilerActivity.CPU]) as profile:
            model.train(gradient_steps=args.updates, batch_size=cell.batch_size)
        print(f"{peer}, {args.updates} updates of {cell.name}, {args.threads} threads")
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=N_ROWS, max_name_column_width=40))


if __name__ == "__main__":
    main()
