"""
Measure what a checkpoint costs, with a full replay buffer of a million transitions of BipedalWalker::

    python scripts/benchmark/checkpoint.py
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from stable_baselines3.common.env_util import make_vec_env

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.checkpoint import ResumableCheckpoint


def main() -> None:
    """Measure checkpoints and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000, help="size of the full replay buffer")
    parser.add_argument("--save-freq", type=int, default=10_000, help="env timesteps between two checkpoints")
    parser.add_argument("--checkpoints", type=int, default=20, help="number of checkpoints to measure")
    parser.add_argument("--steps", type=int, default=500, help="env timesteps of training to measure")
    args = parser.parse_args()

    env = make_vec_env("BipedalWalker-v3", seed=0)
    model = TD3X("MlpPolicy", env, buffer_size=args.transitions, learning_starts=100, seed=0, device="cpu")
    # The first updates take longer
    model.learn(300)
    start = time.perf_counter()
    model.learn(args.steps, reset_num_timesteps=False)
    step_seconds = (time.perf_counter() - start) / args.steps

    replay_buffer = model.replay_buffer
    assert isinstance(replay_buffer, PackedReplayBuffer)
    rows, rng = replay_buffer.blocks["rows"], np.random.default_rng(0)
    for part in np.array_split(rows, max(len(rows) // 100_000, 1)):
        part[...] = rng.standard_normal(part.shape, dtype=np.float32)
    replay_buffer.full = True

    seconds = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        callback = ResumableCheckpoint(folder, args.save_freq)
        callback.init_callback(model)
        callback.on_training_start({"callback": callback}, {})
        for _ in range(args.checkpoints + 1):
            # Pretend that the training took so many steps
            replay_buffer.pos = (replay_buffer.pos + args.save_freq) % args.transitions
            model.num_timesteps += args.save_freq
            start = time.perf_counter()
            callback.on_rollout_start()
            seconds.append(time.perf_counter() - start)
        callback.on_training_end()
        start = time.perf_counter()
        TD3X.resume(folder, env, device="cpu")
        resume_seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    first, *others = seconds
    median = statistics.median(others)
    print(f"training: {1 / step_seconds:.0f} steps/s, {step_seconds * args.save_freq:.1f} s for {args.save_freq} steps")
    print(
        f"first checkpoint, with the whole replay buffer: {first:.2f} s; the folder at the end: {size / 2**20:.0f} MiB"
    )
    print(f"others: median {median:.3f} s, longest {max(others):.3f} s")
    print(f"share of training time: {100 * median / (step_seconds * args.save_freq):.2f}%")
    print(f"resuming: {resume_seconds:.1f} s")


if __name__ == "__main__":
    main()
