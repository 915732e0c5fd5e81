"""PyTorch's fused Adam without its overhead, on parameters in one tensor or in many."""

from collections.abc import Iterable
from typing import Any

import torch as th
from torch import nn
from torch.utils.dlpack import from_dlpack

# In elements: each parameter begins on a cache line, as if allocated separately
_ALIGNMENT = 16
# On a CPU, averages below the second number become zero every so many steps. In between none falls below 1e-38, where
# CPUs are slow
_FLUSH_FREQ = 64
_FLUSHED = 1e-35


class FlatParameters:
    """
    Move parameters into one tensor. They remain ``nn.Parameter`` with their names and shapes, but their numbers and
    gradients are parts of that tensor.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], with_grad: bool):
        self.parameters = list(parameters)
        size = sum(_padded(parameter.numel()) for parameter in self.parameters)
        self.data = th.zeros(size, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        for parameter, view in zip(self.parameters, self.views(self.data), strict=True):
            parameter.data = view.copy_(parameter.data)
        self.grad = th.zeros_like(self.data) if with_grad else None
        if self.grad is not None:
            for parameter, view in zip(self.parameters, self.views(self.grad), strict=True):
                parameter.grad = view

    def views(self, flat: th.Tensor) -> list[th.Tensor]:
        """
        Return the part of each parameter in a tensor laid out like ``data``.

        :return: its parts, in the shapes of the parameters
        """
        views = []
        start = 0
        for parameter in self.parameters:
            views.append(_own_storage(flat[start : start + parameter.numel()].view(parameter.shape)))
            start += _padded(parameter.numel())
        return views

    def stack(self, parameters: list[nn.Parameter], flat: th.Tensor) -> th.Tensor:
        """
        Return the parts of parameters that follow each other, and have one shape, as one tensor.

        :param flat: a tensor laid out like ``data``
        :return: the parts, (n, ...)
        """
        first = next(idx for idx, parameter in enumerate(self.parameters) if parameter is parameters[0])
        start = sum(_padded(parameter.numel()) for parameter in self.parameters[:first])
        size, shape = parameters[0].numel(), parameters[0].shape
        rows = flat[start : start + len(parameters) * _padded(size)].view(len(parameters), -1)
        return rows[:, :size].view(len(parameters), *shape)


class FlatAdam:
    """
    Do the steps of an Adam or AdamW optimizer on flat parameters in one operation. The optimizer itself stays valid:
    its state is made of views of flat tensors, and its options are read at each step.

    :param parameters: all of its parameters, with gradients
    """

    def __init__(self, optimizer: th.optim.Optimizer, parameters: FlatParameters):
        self.optimizer = optimizer
        self._parameters = parameters
        self._exp_avg = th.zeros_like(parameters.data)
        self._exp_avg_sq = th.zeros_like(parameters.data)
        self._steps = th.zeros(len(parameters.parameters), device=parameters.data.device)
        # False after a layer was frozen for a while
        self._has_equal_steps = True
        self._lr = _lr_tensor(parameters.data.device)
        self._views = [
            {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            for step, exp_avg, exp_avg_sq in zip(
                self._steps.unbind(),
                parameters.views(self._exp_avg),
                parameters.views(self._exp_avg_sq),
                strict=True,
            )
        ]

    def has_equal_steps(self) -> bool:
        """Return whether all parameters have had the same number of updates, so that one operation is enough."""
        self._adopt_state()
        return self._has_equal_steps

    @property
    def state(self) -> list[th.Tensor]:
        """What a step changes besides the parameters"""
        return [self._exp_avg, self._exp_avg_sq, self._steps]

    def prepare(self) -> None:
        """Take over the optimizer's state and learning rate, which a CUDA graph does not do."""
        self._adopt_state()
        if self._lr is not None:
            self._lr.fill_(self.optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Update all parameters from their gradients (Kingma and Ba 2015, algorithm 1)."""
        if not (self._lr is not None and th.cuda.is_current_stream_capturing()):
            self.prepare()
        data, grad = self._parameters.data, self._parameters.grad
        assert grad is not None
        parts = [[data], [grad], [self._exp_avg], [self._exp_avg_sq], [self._views[0]["step"]]]
        if not self._has_equal_steps:
            states = [[views[name] for views in self._views] for name in ("exp_avg", "exp_avg_sq", "step")]
            parts = [self._parameters.views(data), self._parameters.views(grad), *states]
        _adam(self.optimizer, self._lr, *parts)
        if self._has_equal_steps:
            self._steps.fill_(self._views[0]["step"])

    def _adopt_state(self) -> None:
        """Take over a state that was loaded into the optimizer, or that belongs to another ``FlatAdam``."""
        state = self.optimizer.state
        is_new = False
        for parameter, views in zip(self._parameters.parameters, self._views, strict=True):
            entry = state[parameter]
            if entry.get("exp_avg") is views["exp_avg"]:
                continue
            for key, view in views.items():
                if key in entry:
                    view.copy_(entry[key])
                else:
                    view.zero_()
            entry.update(views)
            is_new = True
        if is_new:
            self._has_equal_steps = len(set(self._steps.tolist())) == 1


class FusedAdam:
    """Do the steps of an Adam or AdamW optimizer on some of its parameters. The state is the optimizer's own."""

    def __init__(self, optimizer: th.optim.Optimizer, parameters: list[nn.Parameter]):
        self.optimizer = optimizer
        of_optimizer = set(optimizer.param_groups[0]["params"])
        # Not those of layers that have replaced others
        self._parameters = [it for it in parameters if it in of_optimizer]
        self._lr = _lr_tensor(parameters[0].device)

    @property
    def state(self) -> list[th.Tensor]:
        """What a step changes besides the parameters"""
        return [tensor for it in self._parameters for tensor in self.optimizer.state.get(it, {}).values()]

    def prepare(self) -> None:
        """Take over the learning rate, which a CUDA graph does not do."""
        if self._lr is not None:
            self._lr.fill_(self.optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Update all parameters that have gradients (Kingma and Ba 2015, algorithm 1)."""
        if not (self._lr is not None and th.cuda.is_current_stream_capturing()):
            self.prepare()
        updated = [it for it in self._parameters if it.grad is not None]
        if not updated:
            return
        for parameter in updated:
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = th.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = th.zeros_like(parameter), th.zeros_like(parameter)
        states = [self.optimizer.state[it] for it in updated]
        names = ("exp_avg", "exp_avg_sq", "step")
        grads: list[Any] = [it.grad for it in updated]
        _adam(self.optimizer, self._lr, list(updated), grads, *([state[name] for state in states] for name in names))


Optimizer = th.optim.Optimizer | FlatAdam | FusedAdam
Parameters = FlatParameters | list[nn.Parameter]


def make_fast(optimizer: th.optim.Optimizer, parameters: Parameters) -> Optimizer:
    """
    Return an object that does the optimizer's steps faster where that is possible, else the optimizer itself.

    :param parameters: the parameters that are learned
    """
    fast = _fast_class(optimizer, parameters)
    return optimizer if fast is None else fast(optimizer, parameters)


def is_made_of(made: Optimizer, optimizer: th.optim.Optimizer, parameters: Parameters) -> bool:
    """
    Return whether ``make_fast`` would still return ``made``.

    :param made: a result of ``make_fast``
    """
    fast = _fast_class(optimizer, parameters)
    return made is optimizer if fast is None else isinstance(made, fast) and made.optimizer is optimizer


def _fast_class(optimizer: th.optim.Optimizer, parameters: Parameters) -> Any:
    """Return the class for an optimizer; None: it does more than the fused kernel, or a layer was replaced."""
    if not _is_fused_adam(optimizer):
        return None
    if not isinstance(parameters, FlatParameters):
        return FusedAdam
    of_optimizer = optimizer.param_groups[0]["params"]
    return FlatAdam if {*map(id, of_optimizer)} == {*map(id, parameters.parameters)} else None


def _is_fused_adam(optimizer: th.optim.Optimizer) -> bool:
    """Return whether the optimizer does nothing else than Adam's or AdamW's fused kernel."""
    if type(optimizer) not in (th.optim.Adam, th.optim.AdamW) or len(optimizer.param_groups) != 1:
        return False
    (group,) = optimizer.param_groups
    is_watched = (
        "step" in vars(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )
    return bool(group["fused"]) and not (group["amsgrad"] or group["capturable"] or is_watched)


def _adam(
    optimizer: th.optim.Optimizer,
    lr: th.Tensor | None,
    parameters: list[th.Tensor],
    grads: list[th.Tensor],
    exp_avgs: list[th.Tensor],
    exp_avg_sqs: list[th.Tensor],
    steps: list[th.Tensor],
) -> None:
    """Do one step with the optimizer's options; the learning rate is a tensor where CUDA graphs are possible."""
    (group,) = optimizer.param_groups
    beta1, beta2 = group["betas"]
    kernel = th._fused_adamw_ if group["decoupled_weight_decay"] else th._fused_adam_
    with th.no_grad():
        th._foreach_add_(steps, 1)
        kernel(
            parameters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=group["lr"] if lr is None else lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
        )
        if steps[0].is_cpu and int(steps[0]) % _FLUSH_FREQ == 0:
            # Averages decay to such numbers where gradients have become zero, as in ReLUs that no longer fire. They do
            # not change parameters: Adam's eps is far larger
            for average in (*exp_avgs, *exp_avg_sqs):
                average.copy_(nn.functional.hardshrink(average, _FLUSHED))


def _lr_tensor(device: th.device) -> th.Tensor | None:
    """Return memory for a learning rate on a GPU, because a CUDA graph would keep the number it was captured with."""
    return th.zeros((), device=device) if device.type == "cuda" else None


def _padded(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _own_storage(view: th.Tensor) -> th.Tensor:
    """
    Return a contiguous part of a tensor on the same memory, but with a storage that holds nothing else: a pickle of a
    tensor contains its whole storage. On devices other than CPUs and CUDA's return ``view`` itself.
    """
    if view.device.type not in ("cpu", "cuda"):
        return view
    alone: th.Tensor = from_dlpack(view)
    return alone
