"""What a trained agent of the zoo is worth: returns from fixed start states, and how right its critic is there."""

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
import yaml
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_td3x.rollout import EnvStep, shape_step, with_last_observations
from sb3_td3x.shaping import make_reward_shaping
from sb3_td3x.studies.arms import action_repeat, zoo_algorithms
from sb3_td3x.studies.records import Evaluations, TrainingReturns, ValueEstimate, env_file_name
from sb3_td3x.td3x import TD3X

# Agents that the zoo saves on the way
SAVED_AGENT = re.compile(r"rl_model_(\d+)_steps\.zip")


@dataclass(frozen=True)
class TrainedRun:
    """
    What the zoo left of a training.

    :param folder: the run's folder
    :param algo: name of the algorithm in the zoo
    :param env: id of the env
    """

    folder: Path
    algo: str
    env: str

    @property
    def settings_folder(self) -> Path:
        """Where the zoo wrote the run's settings"""
        return self.folder / env_file_name(self.env)

    @property
    def last_agent(self) -> Path:
        """The agent at the end of the training"""
        return self.folder / f"{env_file_name(self.env)}.zip"

    @property
    def best_agent(self) -> Path:
        """The best agent of the evaluations, if there were any"""
        return self.folder / "best_model.zip"

    def hyperparams(self) -> dict[str, Any]:
        """
        :return: those that the run was trained with, as in the YAML file
        """
        return dict(yaml.unsafe_load((self.settings_folder / "config.yml").read_text()))

    @property
    def action_repeat(self) -> int:
        """Env steps for each timestep that the zoo counts"""
        return action_repeat(self.hyperparams())

    def saved_agents(self) -> dict[int, Path]:
        """
        :return: the agents that were saved on the way, by env steps
        """
        found = ((SAVED_AGENT.fullmatch(path.name), path) for path in self.folder.glob("rl_model_*.zip"))
        return dict(sorted((int(match[1]) * self.action_repeat, path) for match, path in found if match))

    def make_env(self, n_envs: int, seed: int) -> VecEnv:
        """
        :param n_envs: number of envs
        :param seed: that of the first; the next has the next
        :return: the env that the zoo's ``enjoy`` would make, with the wrappers and statistics of the training
        """
        from rl_zoo3 import create_test_env, get_saved_hyperparams

        hyperparams, maybe_stats_path = get_saved_hyperparams(str(self.settings_folder), test_mode=True)
        args = yaml.unsafe_load((self.settings_folder / "args.yml").read_text())
        return create_test_env(
            self.env,
            n_envs=n_envs,
            stats_path=maybe_stats_path,
            seed=seed,
            should_render=False,
            env_kwargs=args["env_kwargs"] or hyperparams.pop("env_kwargs", {}),
            hyperparams=hyperparams,
            vec_env_cls=DummyVecEnv,
        )

    def load(self, path: Path, env: VecEnv) -> BaseAlgorithm:
        """
        :param path: an agent of this run
        :param env: where it shall play
        :return: the agent
        """
        cls = zoo_algorithms()[self.algo]
        # As in `enjoy`: no replay memory, and no learning rate, which may be a class that is not importable here
        kwargs: dict[str, Any] = {
            "custom_objects": {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0},
            "buffer_size": 1,
        }
        hyperparams = self.hyperparams()
        if hyperparams.get("optimize_memory_usage"):
            kwargs["optimize_memory_usage"] = False
        if "HerReplayBuffer" in str(hyperparams.get("replay_buffer_class", "")):
            kwargs["env"] = env
        if issubclass(cls, TD3X):
            # Trained here: its hook may be the user's own
            kwargs["trusted"] = True
        return cls.load(path, device="cpu", **kwargs)


def play_episodes(run: TrainedRun, agent: Path, n_episodes: int, seed: int) -> tuple[list[float], list[int]]:
    """
    Play deterministically, in one copy of the env for each episode.

    :param run: a training
    :param agent: one of its agents
    :param n_episodes: number of episodes
    :param seed: that of the first episode; the next has the next, so that episode i starts alike for all runs
    :return: the env's own returns, neither shaped nor normalized, and the lengths of the episodes
    """
    env = run.make_env(n_episodes, seed)
    player = _Player(run.load(agent, env), env)
    episodes: dict[int, tuple[float, int]] = {}
    while len(episodes) < n_episodes:
        player.step()
        for idx, info in enumerate(player.infos):
            # Wrappers for Atari end an episode at each lost life, the Monitor below them when the game is over. Each
            # copy of the env counts once: its next episode would depend on the length of its first
            if "episode" in info:
                episodes.setdefault(idx, (float(info["episode"]["r"]), int(info["episode"]["l"])))
    env.close()
    returns, lengths = zip(*(episodes[idx] for idx in range(n_episodes)), strict=True)
    return list(returns), list(lengths)


class _Player:
    """
    An agent that plays deterministically.

    :param model: the agent
    :param env: where it plays
    """

    def __init__(self, model: BaseAlgorithm, env: VecEnv):
        self.model = model
        self.env = env
        self.obs: Any = env.reset()
        self.rewards = np.zeros(env.num_envs, np.float32)
        self.dones = np.ones(env.num_envs, bool)
        self.infos: list[dict[str, Any]] = []
        # Of recurrent policies
        self._state: tuple[np.ndarray, ...] | None = None

    def step(self) -> np.ndarray:
        """
        :return: the actions, which have been taken
        """
        actions, self._state = self.model.predict(self.obs, self._state, self.dones, deterministic=True)
        self.obs, self.rewards, self.dones, self.infos = self.env.step(actions)
        return actions


def has_critic(algo: str) -> bool:
    """
    :param algo: name of an algorithm in the zoo
    :return: whether its agents have a Q critic of states and actions
    """
    return issubclass(zoo_algorithms()[algo], (TD3X, TD3, SAC, TQC, CrossQ))


@th.no_grad()
def q1_values(model: BaseAlgorithm, obs: Any) -> np.ndarray:
    """
    :param model: an agent with a Q critic: td3x, or SB3's TD3, DDPG, SAC, TQC, CrossQ
    :param obs: observations of a batch, as the policy sees them
    :return: Q1(s, π(s)) for each, π deterministic; of TQC the mean of the first critic's quantiles
    """
    policy: Any = model.policy
    actions, _ = model.predict(obs, deterministic=True)
    policy.set_training_mode(False)
    tensors, _ = policy.obs_to_tensor(obs)
    scaled = th.as_tensor(policy.scale_action(actions), device=model.device, dtype=th.float32)
    values = policy.critic(tensors, scaled)
    # A tuple of critics, or for TQC (batch, critic, quantile)
    first = values[0] if isinstance(values, tuple) else values[:, 0]
    return np.asarray(first.mean(dim=1).cpu())


def estimate_value(run: TrainedRun, agent: Path, timesteps: int, n_states: int, seed: int) -> ValueEstimate:
    """
    :param run: a training
    :param agent: one of its agents
    :param timesteps: env steps before the agent was saved
    :param n_states: number of start states, one episode from each
    :param seed: that of the first start state
    :return: what its critic says of them, and what it gets
    """
    env = run.make_env(n_states, seed)
    model: Any = run.load(agent, env)
    player = _Player(model, env)
    estimated = q1_values(model, player.obs)
    hook = make_reward_shaping(getattr(model, "reward_shaping", None))
    vec_normalize = unwrap_vec_normalize(env)
    learned_normalized = vec_normalize is not None and _normalizes_rewards(run.hyperparams())
    returns, discounts = np.zeros(n_states), np.ones(n_states)
    running = np.ones(n_states, bool)
    while running.any():
        obs = player.obs
        actions = player.step()
        rewards, dones = player.rewards, player.dones
        if hook is not None:
            before, after = _original(obs, vec_normalize), _original(player.obs, vec_normalize)
            after = with_last_observations(after, dones, player.infos, vec_normalize)
            step = EnvStep(before, actions, rewards, after, dones, player.infos)
            # A termination that only the hook declares ends the sum too: nothing was learned from beyond it
            shaped = shape_step(hook, step, model.gamma, model.num_timesteps)
            rewards, dones = shaped.rewards, shaped.dones
        if learned_normalized:
            assert vec_normalize is not None
            rewards = _normalized(rewards, vec_normalize)
        returns += np.where(running, discounts * rewards, 0.0)
        discounts *= model.gamma
        # What the hook declares not terminal was cut all the same
        running &= ~(dones | player.dones)
    env.close()
    return ValueEstimate(timesteps, float(estimated.mean()), float(returns.mean()), n_states)


def estimate_values(run: TrainedRun, timesteps: int, n_states: int, seed: int) -> list[ValueEstimate] | None:
    """
    :param run: a training
    :param timesteps: its length in env steps
    :param n_states: number of start states
    :param seed: that of the first
    :return: an estimate for each agent that was saved on the way, and for the last one; with ``VecNormalize``, whose
        statistics are those of the end, for the last one alone. None: the algorithm has no Q critic
    """
    if not has_critic(run.algo):
        return None
    agents = {} if run.hyperparams().get("normalize") else run.saved_agents()
    agents[timesteps] = run.last_agent
    return [estimate_value(run, path, steps, n_states, seed) for steps, path in sorted(agents.items())]


def read_evaluations(run: TrainedRun) -> Evaluations:
    """
    :param run: a training
    :return: its evaluations on the way, by env steps
    """
    path = run.folder / "evaluations.npz"
    if not path.exists():
        return Evaluations([], [])
    with np.load(path) as content:
        return Evaluations((content["timesteps"] * run.action_repeat).tolist(), content["results"].tolist())


def read_training_returns(folder: Path) -> TrainingReturns:
    """
    :param folder: folder of a run
    :return: its episodes so far, those of all envs by the time of their end, by env steps
    """
    if not any(folder.glob("*monitor.csv")):
        return TrainingReturns([], [])
    episodes = load_results(str(folder))
    return TrainingReturns(episodes["l"].cumsum().astype(int).tolist(), episodes["r"].astype(float).tolist())


def agent_timesteps(path: Path) -> int:
    """
    :param path: an agent
    :return: timesteps of its training as the zoo counts; 0: it is not there or not whole
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return int(json.loads(archive.read("data"))["num_timesteps"])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return 0


def _normalizes_rewards(hyperparams: dict[str, Any]) -> bool:
    """
    :param hyperparams: as in the zoo's YAML
    :return: whether the agent learned from normalized rewards
    """
    normalize = hyperparams.get("normalize", False)
    if isinstance(normalize, str):
        # The zoo's notation
        normalize = eval(normalize)
    return bool(normalize.get("norm_reward", True)) if isinstance(normalize, dict) else bool(normalize)


def _original(obs: Any, vec_normalize: VecNormalize | None) -> Any:
    """
    :param obs: observations as the policy sees them
    :param vec_normalize: what normalized them, if anything did
    :return: what a shaping hook sees
    """
    return obs if vec_normalize is None else vec_normalize.unnormalize_obs(obs)


def _normalized(rewards: np.ndarray, vec_normalize: VecNormalize) -> np.ndarray:
    """
    :param rewards: rewards as of the env, or shaped
    :param vec_normalize: with the statistics of the training
    :return: what the critic learned from
    """
    vec_normalize.norm_reward = True
    normalized = vec_normalize.normalize_reward(rewards)
    vec_normalize.norm_reward = False
    return normalized
