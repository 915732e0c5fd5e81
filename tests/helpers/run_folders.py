"""A small run's folder as RL Zoo leaves it, without the time that the zoo takes."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from envs import CountingEnv, counting_vec_env, tiny
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.zoo.run_files import read_zoo_yaml

ENV = "TD3XCounting-v0"
gym.register(ENV, CountingEnv)


def make_run_folder(parent: Path) -> Path:
    """Train an agent in a normalized env and save it with its settings."""
    folder = parent / f"{ENV}_1"
    settings = folder / ENV
    settings.mkdir(parents=True)
    env = VecNormalize(counting_vec_env(2))
    model = TD3X("MlpPolicy", env, **tiny()).learn(20)
    model.save(folder / ENV)
    model.save(folder / "best_model")
    env.save(str(settings / "vecnormalize.pkl"))
    config = {"normalize": "dict(norm_obs=True)", "policy": "MlpPolicy", "policy_kwargs": "dict(net_arch=[8])"}
    (settings / "config.yml").write_text(yaml.dump(OrderedDict(config)))
    args = {"algo": "td3x", "env": ENV, "env_kwargs": None, "wandb_tags": [], "tuple": (1, 2)}
    (settings / "args.yml").write_text(yaml.dump(OrderedDict(args)))
    return folder


def change(folder: Path, name: str, **changed: Any) -> None:
    """Change settings in ``config.yml`` or ``args.yml``."""
    path = folder / ENV / name
    path.write_text(yaml.dump({**read_zoo_yaml(path, trusted=True), **changed}))
