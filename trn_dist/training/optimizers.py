"""Optimizers whose state is fp32 and exists before the first step, so that every step has the same graph.

The learning rate and the bias corrections reach the device as data, never as constants: no value of theirs makes a new
graph. Gradients are passed in by name, in fp32, because PyTorch refuses an fp32 `.grad` on a bf16 parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch

from trn_dist.errors import CheckpointError, ConfigError
from trn_dist.training.precision import round_stochastically

Rates = tuple[torch.Tensor, ...]
State = dict[str, torch.Tensor]

_MASTER = "master"
_APPLIED = "applied_steps"


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """The usual choice of what decays: weight matrices and embeddings, not biases and layer norms."""
    del name
    return parameter.dim() > 1


class Optimizer(ABC):
    """What the optimizers share: fp32 state by parameter name, master weights, rounding, and saving.

    Args:
        named_parameters: names and parameters, as `model.named_parameters()` gives them; frozen ones are left out.
        weight_decay: decoupled weight decay of the parameters that decay.
        decays: tells from a name and a parameter whether it decays.
        master_weights: keep an fp32 copy of the weights; the parameters are its rounding.
        stochastic_rounding: round updates to bf16 parameters at random, in code. On Neuron the hardware does it.

    Attributes:
        steps: number of steps taken, those that changed nothing included.
        applied: [1] fp32 on the device, the number of steps that changed the weights; bias corrections follow it.
        state: for each slot (such as `exp_avg`) a tensor per parameter name.

    Raises:
        ConfigError: no parameter wants a gradient, or master weights together with stochastic rounding.
    """

    slots: tuple[str, ...]

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        weight_decay: float = 0.01,
        decays: Callable[[str, torch.Tensor], bool] = is_matrix,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        if master_weights and stochastic_rounding:
            raise ConfigError(
                "master weights and stochastic rounding cancel each other: the fp32 copy already keeps what rounding "
                "would lose. Choose one"
            )
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        if not self.parameters:
            raise ConfigError("the optimizer was given no parameter that requires a gradient")
        self.weight_decay = weight_decay
        self.decaying = {name for name, parameter in self.parameters.items() if decays(name, parameter)}
        self.stochastic_rounding = stochastic_rounding
        self.steps = 0
        # One element, not none: torch_xla shares the buffers of scalars, which would cost one more graph.
        self.applied = torch.zeros(1, device=next(iter(self.parameters.values())).device)
        self.state = {
            slot: {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.parameters.items()}
            for slot in self.slots
        }
        if master_weights:
            self.state[_MASTER] = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @abstractmethod
    def rates(self, learning_rate: torch.Tensor, kept: torch.Tensor, count: torch.Tensor) -> Rates:
        """Returns what all parameters share in a step.

        Args:
            learning_rate: fp32 scalar on the device.
            kept: fp32 scalar, the share of a weight that decoupled decay leaves: 1 - learning rate * weight decay.
            count: fp32 scalar, the number of this step among those that are applied, from 1.
        """

    @abstractmethod
    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, rates: Rates, *, decays: bool
    ) -> tuple[torch.Tensor, State]:
        """Returns the new weight and state of one parameter, all fp32; changes nothing in place."""

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, torch.Tensor], learning_rate: float, *, apply: torch.Tensor | None = None
    ) -> None:
        """Updates every parameter.

        Args:
            gradients: for each parameter name its gradient, in the parameter's shape and any floating dtype.
            learning_rate: of this step.
            apply: boolean scalar on the device; where it is false, such as for gradients that are not finite, weights
                and state stay as they are. None stands for true.
        """
        self.steps += 1
        count = self.applied + 1.0
        host = torch.tensor([learning_rate, 1 - learning_rate * self.weight_decay])
        rate, kept = host.to(self.applied.device).unbind()
        rates = self.rates(rate, kept, count.squeeze(0))
        masters = self.state.get(_MASTER)
        for name, parameter in self.parameters.items():
            weight = masters[name] if masters else parameter.float()
            state = {slot: self.state[slot][name] for slot in self.slots}
            decays = name in self.decaying
            updated, new_state = self.update(weight, gradients[name].float(), state, rates, decays=decays)
            for slot, value in new_state.items():
                state[slot].copy_(_choose(apply, value, state[slot]))
            updated = _choose(apply, updated, weight)
            if masters:
                masters[name].copy_(updated)
            if self.stochastic_rounding and parameter.dtype == torch.bfloat16:
                updated = round_stochastically(updated)
            parameter.copy_(updated)
        self.applied.copy_(_choose(apply, count, self.applied))

    @torch.no_grad()
    def reset_master_weights(self) -> None:
        """Copies the parameters into the master weights, where there are any: call it after loading weights."""
        for name, master in self.state.get(_MASTER, {}).items():
            master.copy_(self.parameters[name])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the whole state under flat names, `<slot>.<parameter name>`."""
        tensors = {f"{slot}.{name}": tensor for slot, named in self.state.items() for name, tensor in named.items()}
        return {**tensors, _APPLIED: self.applied}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restores what `state_tensors` returned, and the number of steps.

        Raises:
            CheckpointError: names or shapes differ from this optimizer's.
        """
        mine = self.state_tensors()
        if mine.keys() != tensors.keys():
            different = sorted(mine.keys() ^ tensors.keys())
            raise CheckpointError(
                f"the saved optimizer state has {len(tensors)} tensors and this optimizer {len(mine)}; "
                f"they differ in {', '.join(different[:3])}{' ...' if len(different) > 3 else ''}. "
                "Resume with the optimizer and model that wrote it"
            )
        for name, tensor in mine.items():
            if tensor.shape != tensors[name].shape:
                raise CheckpointError(
                    f"the saved optimizer state {name} has shape {tuple(tensors[name].shape)}, "
                    f"this optimizer's has {tuple(tensor.shape)}"
                )
            tensor.copy_(tensors[name])
        self.steps = steps


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), the update of `torch.optim.AdamW`.

    Args:
        named_parameters: see `Optimizer`.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment; 1e-6 as in BERT's published recipe.
        **options: see `Optimizer`.
    """

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        decays: Callable[[str, torch.Tensor], bool] = is_matrix,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            named_parameters,
            weight_decay=weight_decay,
            decays=decays,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
        )
        self.betas, self.eps = betas, eps

    def rates(self, learning_rate: torch.Tensor, kept: torch.Tensor, count: torch.Tensor) -> Rates:
        """See `Optimizer.rates`."""
        first, second = (_bias_correction(beta, count) for beta in self.betas)
        return kept, learning_rate / first, second.sqrt()

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, rates: Rates, *, decays: bool
    ) -> tuple[torch.Tensor, State]:
        """See `Optimizer.update`."""
        kept, step_size, root_correction = rates
        moments = _advance_moments(state, gradient, self.betas)
        direction = moments["exp_avg"] / (moments["exp_avg_sq"].sqrt() / root_correction + self.eps)
        return (weight * kept if decays else weight) - step_size * direction, moments


class Lamb(Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's direction, scaled per parameter by ||weight|| / ||direction||.

    Parameters that do not decay (biases, layer norms) take the direction unscaled, as the published large-batch BERT
    recipes do.

    Args:
        named_parameters: see `Optimizer`.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        trust_clip: bound the ratio by 1, as the tutorial's LAMB runs do.
        **options: see `Optimizer`.
    """

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        trust_clip: bool = True,
        weight_decay: float = 0.01,
        decays: Callable[[str, torch.Tensor], bool] = is_matrix,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            named_parameters,
            weight_decay=weight_decay,
            decays=decays,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
        )
        self.betas, self.eps, self.trust_clip = betas, eps, trust_clip

    def rates(self, learning_rate: torch.Tensor, kept: torch.Tensor, count: torch.Tensor) -> Rates:
        """See `Optimizer.rates`."""
        del kept  # decay is part of LAMB's direction
        first, second = (_bias_correction(beta, count) for beta in self.betas)
        return learning_rate, first, second

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, rates: Rates, *, decays: bool
    ) -> tuple[torch.Tensor, State]:
        """See `Optimizer.update`."""
        learning_rate, mean_correction, square_correction = rates
        moments = _advance_moments(state, gradient, self.betas)
        root = (moments["exp_avg_sq"] / square_correction).sqrt()
        direction = moments["exp_avg"] / mean_correction / (root + self.eps)
        if not decays:
            return weight - learning_rate * direction, moments
        direction = direction + self.weight_decay * weight
        weight_norm, direction_norm = weight.norm(), direction.norm()
        ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0)
        if self.trust_clip:
            ratio = ratio.clamp(max=1.0)
        return weight - learning_rate * ratio * direction, moments


def _bias_correction(beta: float, count: torch.Tensor) -> torch.Tensor:
    """1 - beta ** count, to fp32 precision also where beta is near 1."""
    return -torch.expm1(count * math.log(beta))


def _advance_moments(state: State, gradient: torch.Tensor, betas: tuple[float, float]) -> State:
    """Returns the next running means of the gradient and of its square."""
    return {
        "exp_avg": state["exp_avg"] * betas[0] + gradient * (1 - betas[0]),
        "exp_avg_sq": state["exp_avg_sq"] * betas[1] + gradient.square() * (1 - betas[1]),
    }


def _choose(apply: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new if apply is None else torch.where(apply, new, old)
