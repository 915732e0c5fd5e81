"""An episode of an agent as a GIF."""

from pathlib import Path

from sb3_td3x.animation import Recording, record_episode
from sb3_td3x.zoo.runs import ZooRun


def animate(
    folder: Path,
    path: Path,
    best: bool = False,
    seed: int = 100_000,
    every: int | None = None,
    width: int = 400,
    trusted: bool = False,
) -> Recording:
    """
    Record one episode of an agent at the env's speed, with its actions and rewards.

    :param path: GIF file to write
    :param best: whether to take the best agent of the evaluations instead of the last one
    :param every: show each ``every``-th step; None: about 125 frames
    :param trusted: whether the run may execute code
    :raises ValueError: this is no run's folder, or it needs to be trusted
    """
    run = ZooRun(folder, trusted)
    env = run.make_env(seed=seed)
    try:
        model = run.load_agent(run.best_agent if best else run.last_agent, env)
        recording = record_episode(model, env, seed=seed, width=width)
    finally:
        env.close()
    recording.save_gif(path, every, width)
    return recording
