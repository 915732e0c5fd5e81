"""An episode of an agent as an animation: what it sees, does and gets."""

import io
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, unwrap_vec_normalize

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.validation import check_integer

if TYPE_CHECKING:
    from PIL import Image

_DEFAULT_FPS = 30.0
# Unless asked for more, an animation has at most this many frames
_MAX_FRAMES = 125
# Browsers slow down what is faster than 50 frames a second
_MIN_FRAME_TIME = 20
# The last frame stays for so long, in milliseconds, before the animation starts again
_LAST_FRAME_TIME = 1500
_N_COLORS = 64
_DPI = 100


@dataclass(frozen=True, eq=False)
class Recording:
    """
    One episode of T steps of the agent. The last line of a notebook's cell shows it as an animation.

    :param frames: the env's pictures, each of the state in which the action was chosen, (T, height, width, 3) uint8
    :param actions: the actions as the env got them, (T, d)
    :param rewards: the env's own rewards, neither normalized nor shaped, (T,)
    :param fps: steps for each second of the env's time; with repeated actions a step is several env steps, which
        ``Monitor`` or ``TimeLimit`` count where they are below the wrapper that repeats
    """

    frames: np.ndarray = field(repr=False)
    actions: np.ndarray = field(repr=False)
    rewards: np.ndarray = field(repr=False)
    fps: float

    @property
    def episode_return(self) -> float:
        """Sum of the rewards"""
        return float(self.rewards.sum())

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        return f"Recording({len(self)} steps, return {self.episode_return:.2f})"

    def save_gif(self, path: str | os.PathLike[str], every: int | None = None, width: int = 320) -> None:
        """
        Write the frames as a GIF that plays at the env's speed, with actions and rewards so far drawn below.

        :param path: the file
        :param every: takes each ``every``-th step, and always the last one; None: so that there are at most 125 frames
        :param width: width in pixels; the height follows
        :raises ImportError: Matplotlib or Pillow is missing
        """
        pictures, times = self._pictures(every, width)
        with atomic_write(path) as file:
            pictures[0].save(
                file, "GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=False
            )

    def _repr_png_(self) -> bytes:
        """An animated PNG: unlike a GIF, it moves in all that shows notebooks"""
        pictures, times = self._pictures(None, 320)
        file = io.BytesIO()
        pictures[0].save(file, "PNG", save_all=True, append_images=pictures[1:], duration=times, loop=0)
        return file.getvalue()

    def _pictures(self, every: int | None, width: int) -> tuple[list["Image.Image"], list[int]]:
        """
        :param every: takes each ``every``-th step, and the last one; None: so that they are not too many
        :param width: width in pixels
        :return: pictures with one palette, and for how many milliseconds each is shown
        """
        image = _import_pillow()
        every = -(-len(self) // _MAX_FRAMES) if every is None else check_integer("every", every, low=1)
        width = check_integer("width", width, low=100)
        steps = np.append(np.arange(0, len(self) - 1, every), len(self) - 1)
        height = round(width * self.frames.shape[1] / self.frames.shape[2])
        traces = _Traces(self, width)
        pictures = []
        for step in steps:
            frame = image.fromarray(self.frames[step]).resize((width, height), image.Resampling.BILINEAR)
            pictures.append(image.fromarray(np.concatenate([np.asarray(frame), traces.until(int(step))])))
        # One palette from pictures of the whole episode: what does not move keeps its colours, and costs nothing
        samples = [np.asarray(pictures[i]) for i in np.linspace(0, len(pictures) - 1, 8).astype(int)]
        # Other methods mix the large areas' colours with those of edges: white would not stay white
        palette = image.fromarray(np.concatenate(samples)).quantize(_N_COLORS, image.Quantize.MAXCOVERAGE, kmeans=1)
        pictures = [picture.quantize(palette=palette, dither=image.Dither.NONE) for picture in pictures]
        # GIFs count in hundredths of a second: round the sums, not each time
        starts = np.round(steps / self.fps * 100).astype(int) * 10
        times = [max(int(time), _MIN_FRAME_TIME) for time in np.diff(starts)]
        return pictures, [*times, _LAST_FRAME_TIME]


class _Traces:
    """
    The curves of actions and rewards. Matplotlib draws them whole and empty: each frame is put together from these two.

    :param recording: the episode
    :param width: width in pixels
    """

    def __init__(self, recording: Recording, width: int):
        figure_cls, canvas_cls = _import_matplotlib()
        figure = figure_cls(figsize=(width / _DPI, 1.6), dpi=_DPI)
        canvas = canvas_cls(figure)
        axes = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=50 / width, right=1 - 10 / width, top=0.96, bottom=0.2, hspace=0.2)
        last = len(recording) - 1
        lines = axes[0].plot(recording.actions, linewidth=0.9)
        lines += axes[1].plot(recording.rewards, linewidth=0.9, color="black")
        for axis, label in zip(axes, ("action", "reward"), strict=True):
            axis.set_xlim(0, max(last, 1))
            axis.margins(y=0.1)
            # What hardly changes, such as a torque at its limit, is drawn as a flat line with plain numbers beside it
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
        self._whole = np.asarray(canvas.buffer_rgba())[..., :3].copy()
        for line in lines:
            line.set_visible(False)
        canvas.draw()
        self._empty = np.asarray(canvas.buffer_rgba())[..., :3].copy()
        rows = len(self._empty)
        boxes = [axis.get_position() for axis in axes]
        self._columns = np.linspace(boxes[0].x0 * width, boxes[0].x1 * width, max(last, 1) + 1).round().astype(int)
        self._rows = [slice(round((1 - box.y1) * rows), round((1 - box.y0) * rows)) for box in boxes]

    def until(self, step: int) -> np.ndarray:
        """
        :param step: a step
        :return: the curves up to it, with a cursor, (height, width, 3) uint8
        """
        column = self._columns[step]
        picture: np.ndarray = self._empty.copy()
        picture[:, : column + 1] = self._whole[:, : column + 1]
        for rows in self._rows:
            picture[rows, column] = (200, 60, 60)
        return picture


def record_episode(
    model: BaseAlgorithm,
    env: gym.Env | VecEnv,
    seed: int | None = None,
    deterministic: bool = True,
    max_steps: int | None = None,
    width: int | None = 320,
) -> Recording:
    """
    Play one episode and keep what happens.

    :param model: an agent of SB3
    :param env: an env with ``render_mode="rgb_array"``, or a ``VecEnv`` of one such env, wrapped as the agent's; it is
        stepped, so do not hand over the one that is trained in. Statistics of ``VecNormalize`` are used, not updated
    :param seed: seed of the env's next episode; None: goes on with its random numbers
    :param deterministic: whether a stochastic policy takes its mean
    :param max_steps: stop after so many steps of the agent, with repeated actions several env steps each; None: at the
        episode's end
    :param width: wider frames are made so many pixels wide, since 1,600 frames of 600 x 400 take a gigabyte;
        None: frames as they come
    :return: the episode
    :raises ValueError: an argument is not allowed; says which
    :raises ImportError: Pillow or a package of the env's for drawing is missing
    """
    env = _one_rendering_env(env)
    normalize = unwrap_vec_normalize(env)
    if normalize is None and model.get_vec_normalize_env() is not None:
        raise ValueError("env has no VecNormalize, but the env of the model has: its observations would mean nothing")
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
            frames.append(_picture(env, width))
            action, state = model.predict(obs, state, start, deterministic)
            # Some envs change the action in place
            actions.append(np.array(action[0]).ravel())
            obs, step_rewards, start, infos = env.step(action)
            reward = float((step_rewards if normalize is None else normalize.get_original_reward())[0])
            # The Monitor knows the rewards below all other wrappers; at the episode's end it tells their sum
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
        # Until the last picture: nothing tells how long a step is that an episode's end cuts short
        fps *= (len(frames) - 1) / (n_env_steps[-1] - n_env_steps[0])
    return Recording(np.stack(frames), np.stack(actions), np.array(rewards), fps)


def _count_env_steps(env: VecEnv, n_steps: int) -> int:
    """
    :param env: the env, within an episode
    :param n_steps: steps of the agent so far
    :return: env steps so far: of all counts the highest, which is the lowest wrapper's
    """
    counts = [n_steps]
    if env.env_is_wrapped(Monitor)[0]:
        counts.append(len(env.get_attr("rewards")[0]))
    if env.env_is_wrapped(TimeLimit)[0]:
        counts.append(env.get_attr("_elapsed_steps")[0])
    return max(counts)


def _one_rendering_env(env: gym.Env | VecEnv) -> VecEnv:
    """
    :param env: what the caller gave
    :return: a ``VecEnv`` of one env that can be asked for pictures
    """
    if isinstance(env, gym.Env):
        monitored = env if is_wrapped(env, Monitor) else Monitor(env)
        env = DummyVecEnv([lambda: monitored])
    elif not isinstance(env, VecEnv):
        raise ValueError(f"env={env!r} is not allowed, expected an environment or a VecEnv")
    if env.num_envs != 1:
        raise ValueError(f"env has num_envs={env.num_envs}, expected a VecEnv of one env")
    if env.render_mode != "rgb_array":
        raise ValueError(
            f'env has render_mode={env.render_mode!r}, expected one made with render_mode="rgb_array", as '
            'gym.make(env_id, render_mode="rgb_array")'
        )
    return env


def _picture(env: VecEnv, width: int | None) -> np.ndarray:
    """
    :param env: the env
    :param width: the largest width, in pixels; None: any
    :return: what it looks like now, (height, width, 3) uint8
    """
    (frame,) = env.get_images()
    if not (isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8):
        shape = getattr(frame, "shape", None)
        raise ValueError(f"env drew {type(frame).__name__} of shape {shape}, expected (height, width, 3) uint8")
    if width is None or frame.shape[1] <= width:
        return frame
    image = _import_pillow()
    size = (width, round(width * frame.shape[0] / frame.shape[1]))
    return np.asarray(image.fromarray(frame).resize(size, image.Resampling.BILINEAR))


def _import_pillow() -> Any:
    """
    :return: the module ``PIL.Image``
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(_MISSING.format("Pillow")) from error
    return Image


def _import_matplotlib() -> tuple[Any, Any]:
    """
    :return: the classes of figures and of their canvases without a window
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_MISSING.format("Matplotlib")) from error
    return Figure, FigureCanvasAgg


_MISSING = 'Animations need {}: pip install "sb3-td3x[studies]"'
