"""Record an episode of an agent, and show it as an animation with its actions and rewards."""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, unwrap_vec_normalize

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.validation import check_integer

_DEFAULT_FPS = 30.0
# Number of frames in an animation, unless ``every`` is given
_MAX_FRAMES = 125
# In milliseconds; browsers slow down animations with shorter frames
_MIN_FRAME_TIME = 20
# In milliseconds, before the animation repeats
_LAST_FRAME_TIME = 1500
_N_COLORS = 64
# Of the plots below the frames
_DPI = 100
_CURSOR_COLOR = (200, 60, 60)
# Lines of actions beyond this number have no labels, which would cover them
_MAX_LABELS = 6


@dataclass(frozen=True, eq=False)
class Recording:
    """
    One episode of T agent steps. A notebook shows it as an animation.

    :param frames: The env's frame before each step, uint8 of shape (T, height, width, 3)
    :param actions: Actions as the env received them, of shape (T, action_dim)
    :param rewards: The env's own rewards, neither normalized nor shaped, of shape (T,)
    :param fps: Agent steps per second of the env's time. Where a wrapper repeats actions, an agent step is several env
        steps; they are counted if a ``Monitor`` or ``TimeLimit`` is inside that wrapper
    """

    frames: np.ndarray = field(repr=False)
    actions: np.ndarray = field(repr=False)
    rewards: np.ndarray = field(repr=False)
    fps: float

    @property
    def episode_return(self) -> float:
        """Sum of the rewards."""
        return float(self.rewards.sum())

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        return f"Recording({len(self)} steps, return {self.episode_return:.2f})"

    def save_gif(self, path: str | os.PathLike[str], every: int | None = None, width: int = 320) -> None:
        """
        Save the episode as a GIF that plays at the env's speed, with plots of the actions and rewards below the frames.

        :param path: GIF file to write
        :param every: Show each ``every``-th step, and always the last one; None for at most 125 frames
        :param width: Width in pixels, >= 100; the height follows from the frames' aspect ratio
        :raises ValueError: If ``every`` or ``width`` is not allowed
        """
        with atomic_write(path) as file:
            self._write(file, "GIF", every, width)

    def _repr_png_(self) -> bytes:
        """Return an animated PNG, which all notebook viewers play, unlike a GIF."""
        file = io.BytesIO()
        self._write(file, "PNG", None, 320)
        return file.getvalue()

    def _write(self, file: IO[bytes], file_format: str, every: int | None, width: int) -> None:
        """Write the animation, whose pictures all have the same palette."""
        every = -(-len(self) // _MAX_FRAMES) if every is None else check_integer("every", every, low=1)
        width = check_integer("width", width, low=100)
        steps = np.append(np.arange(0, len(self) - 1, every), len(self) - 1)
        height = round(width * self.frames.shape[1] / self.frames.shape[2])
        pictures = []
        for step, plots in zip(steps, _draw_plots(self, steps, width), strict=True):
            frame = Image.fromarray(self.frames[step]).resize((width, height), Image.Resampling.BILINEAR)
            pictures.append(Image.fromarray(np.concatenate([np.asarray(frame), plots])))
        # With one palette for the whole episode, pixels that do not move keep their color and compress well
        samples = [np.asarray(pictures[i]) for i in np.linspace(0, len(pictures) - 1, 8).astype(int)]
        # Other methods of Pillow mix the colors of areas and edges, so that white is not white
        palette = Image.fromarray(np.concatenate(samples)).quantize(_N_COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1)
        pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
        # GIFs store hundredths of a second. Round the start of each frame, so that rounding errors do not add up
        starts = np.round(steps / self.fps * 100).astype(int) * 10
        durations = [*(max(int(duration), _MIN_FRAME_TIME) for duration in np.diff(starts)), _LAST_FRAME_TIME]
        options: dict[str, Any] = {"append_images": pictures[1:], "duration": durations, "loop": 0, "optimize": False}
        pictures[0].save(file, file_format, save_all=True, **options)


def _draw_plots(recording: Recording, steps: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Draw the actions and rewards of an episode, in one picture for each of ``steps`` with a cursor there."""
    figure = Figure(figsize=(width / _DPI, 1.6), dpi=_DPI)
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=50 / width, right=1 - 10 / width, top=0.96, bottom=0.2, hspace=0.2)
    last = max(len(recording) - 1, 1)
    lines = axes[0].plot(recording.actions, linewidth=0.9)
    if 1 < len(lines) <= _MAX_LABELS:
        # Indices in the action
        spacing = {"handlelength": 0.8, "columnspacing": 0.8, "borderpad": 0.2}
        names = [str(idx) for idx in range(len(lines))]
        axes[0].legend(lines, names, loc="upper right", ncols=len(lines), fontsize=5.5, framealpha=0.6, **spacing)
    axes[1].plot(recording.rewards, linewidth=0.9, color="black")
    for axis, label in zip(axes, ("action", "reward"), strict=True):
        axis.set_xlim(0, last)
        axis.margins(y=0.1)
        # Draw a nearly constant curve as a flat line, with plain tick labels
        low, high = axis.get_ylim()
        span = max(high - low, 0.1 * max(abs(low), abs(high)))
        axis.set_ylim((low + high - span) / 2, (low + high + span) / 2)
        axis.ticklabel_format(useOffset=False)
        axis.tick_params(labelsize=6.5, length=2, pad=1.5, width=0.5)
        axis.set_ylabel(label, fontsize=7)
        axis.yaxis.set_label_coords(-36 / (width - 60), 0.5)
        axis.grid(linewidth=0.3)
        for spine in axis.spines.values():
            spine.set_linewidth(0.5)
    axes[1].set_xlabel(f"step    (return {recording.episode_return:.1f})", fontsize=7, labelpad=1)
    canvas.draw()
    plots = np.asarray(canvas.buffer_rgba())[..., :3]
    # Moving the cursor in the picture takes a fraction of the time that drawing the figure for each frame would
    area = figure.subplotpars
    rows = slice(round((1 - area.top) * len(plots)), round((1 - area.bottom) * len(plots)))
    columns = np.linspace(area.left * width, area.right * width, last + 1).round().astype(int)
    for step in steps:
        picture: np.ndarray = plots.copy()
        picture[rows, columns[step]] = _CURSOR_COLOR
        yield picture


def record_episode(
    model: BaseAlgorithm,
    env: gym.Env | VecEnv,
    seed: int | None = None,
    deterministic: bool = True,
    max_steps: int | None = None,
    width: int | None = 320,
) -> Recording:
    """
    Play one episode, and record its frames, actions and rewards.

    :param model: Any agent of SB3
    :param env: An env with ``render_mode="rgb_array"``, or a ``VecEnv`` of one such env, wrapped like the agent's
        training env. Do not pass the training env itself: it is reset. Statistics of ``VecNormalize`` are not updated
    :param seed: Seed of the episode; None continues the env's random numbers
    :param deterministic: Whether a stochastic policy uses its mean
    :param max_steps: Maximum number of agent steps; None plays to the end of the episode
    :param width: Maximum width of the frames in pixels, >= 100. Wider frames are scaled down, because 1,600 frames of
        600 x 400 pixels take a gigabyte. None keeps them as they are
    :return: The episode
    :raises ValueError: If an argument is not allowed, or the env does not render RGB arrays
    """
    env = _one_rendering_env(env)
    normalize = unwrap_vec_normalize(env)
    if normalize is None and model.get_vec_normalize_env() is not None:
        raise ValueError("env has no VecNormalize, but the env of the model has one: it needs normalized observations")
    max_steps = None if max_steps is None else check_integer("max_steps", max_steps, low=1)
    width = None if width is None else check_integer("width", width, low=100)
    if seed is not None:
        env.seed(check_integer("seed", seed, low=0))
    was_training = normalize is not None and normalize.training
    if normalize is not None:
        normalize.training = False
    monitored = env.env_is_wrapped(Monitor)[0]
    frames: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    n_env_steps: list[int] = []
    try:
        obs: Any = env.reset()
        state, start, return_so_far = None, np.ones(1, dtype=bool), 0.0
        while not (frames and start[0]) and len(frames) != max_steps:
            n_env_steps.append(_count_env_steps(env, len(frames)))
            frames.append(_render(env, width))
            action, state = model.predict(obs, state, start, deterministic)
            # Copy the action, because some envs change it in place
            actions.append(np.array(action[0]).ravel())
            obs, step_rewards, start, infos = env.step(action)
            reward = float((step_rewards if normalize is None else normalize.get_original_reward())[0])
            # The Monitor sees the rewards before all outer wrappers. At the end of the episode it reports their sum
            if monitored and ("episode" in infos[0] or not start[0]):
                episode_return = infos[0]["episode"]["r"] if start[0] else sum(env.get_attr("rewards")[0])
                reward = episode_return - return_so_far
                return_so_far = episode_return
            rewards.append(reward)
    finally:
        if normalize is not None:
            normalize.training = was_training
    fps = float(env.get_attr("metadata")[0].get("render_fps") or _DEFAULT_FPS)
    if len(frames) > 1:
        # Count up to the last frame: the step after it may be shorter, if the episode ends in it
        fps *= (len(frames) - 1) / (n_env_steps[-1] - n_env_steps[0])
    return Recording(np.stack(frames), np.stack(actions), np.array(rewards), fps)


def _count_env_steps(env: VecEnv, n_steps: int) -> int:
    """Return the env steps in the running episode. Each wrapper counts those it sees, the innermost one the most."""
    counts = [n_steps]
    if env.env_is_wrapped(Monitor)[0]:
        counts.append(len(env.get_attr("rewards")[0]))
    if env.env_is_wrapped(TimeLimit)[0]:
        counts.append(env.get_attr("_elapsed_steps")[0])
    return max(counts)


def _one_rendering_env(env: gym.Env | VecEnv) -> VecEnv:
    """Return the env as a ``VecEnv`` of one env that renders RGB arrays, or raise a ``ValueError``."""
    if isinstance(env, gym.Env):
        monitored = env if is_wrapped(env, Monitor) else Monitor(env)
        env = DummyVecEnv([lambda: monitored])
    elif not isinstance(env, VecEnv):
        raise ValueError(f"env={env!r} is not allowed, expected an environment or a VecEnv")
    if env.num_envs != 1:
        raise ValueError(f"env has num_envs={env.num_envs}, expected a VecEnv of one env")
    if env.render_mode != "rgb_array":
        raise ValueError(
            f"env has render_mode={env.render_mode!r}, expected an env made with "
            'gym.make(env_id, render_mode="rgb_array")'
        )
    return env


def _render(env: VecEnv, width: int | None) -> np.ndarray:
    """Return the env's current frame, at most ``width`` pixels wide, or raise a ``ValueError``."""
    (frame,) = env.get_images()
    if not (isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8):
        shape = getattr(frame, "shape", None)
        raise ValueError(f"env rendered {type(frame).__name__} of shape {shape}, expected (height, width, 3) uint8")
    if width is None or frame.shape[1] <= width:
        return frame
    size = (width, round(width * frame.shape[0] / frame.shape[1]))
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR))
