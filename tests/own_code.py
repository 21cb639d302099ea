"""Code of a user's own, as it stands beside a configuration: rules, schedules, metrics and callbacks, good and bad."""

import torch
from torch import Tensor

import raycloak


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an interpolated momentum."""

    def __init__(self, params, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"], group["beta"])

    def update(self, parameter: Tensor, rate: float, beta: float) -> None:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        parameter.sub_(torch.lerp(parameter.grad, momentum, beta).sign(), alpha=rate)
        momentum.lerp_(parameter.grad, 0.01)


class OfBiases(Lion):
    """Moves the tensors that are named ``b``, and nothing else."""

    def __init__(self, params, lr: float, counts: bool = False) -> None:
        super().__init__(params, lr)
        self.counts, self.steps = counts, 0

    def step(self) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name.rpartition(".")[2] == "b":
                    self.steps += self.counts
                    parameter.sub_(parameter.grad, alpha=1 + self.steps)


class Draws(Lion):
    def update(self, parameter: Tensor, rate: float, beta: float) -> None:
        parameter.add_(torch.randn_like(parameter))


class CountsOutside(Lion):
    """Counts its steps where no package looks."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        super().step()

    def update(self, parameter: Tensor, rate: float, beta: float) -> None:
        parameter.sub_(parameter.grad, alpha=rate / self.steps)


class CountsInWholeNumbers(Lion):
    def update(self, parameter: Tensor, rate: float, beta: float) -> None:
        self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


class KeepsAverages(Lion):
    """Keeps state under the name that a run keeps averages under."""

    def update(self, parameter: Tensor, rate: float, beta: float) -> None:
        self.state[parameter]["averaged_weights"] = parameter.clone()


class Couples(Lion):
    """Divides by the norm of all tensors together."""

    def step(self) -> None:
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = sum(parameter.grad.square().sum() for parameter in given).sqrt()
        for parameter in given:
            parameter.sub_(parameter.grad / norm)


class Explodes(Lion):
    def update(self, parameter: Tensor, rate: float, beta: float) -> None:
        parameter.fill_(torch.inf)


def no_rule(params, lr):
    return None


def ramp(step: int, steps: int) -> float:
    return (step + 1) / steps


def falls_below_zero(step: int, steps: int) -> float:
    return 1.0 - step


def of_one(step: int) -> float:
    return 1.0


_calls = iter(range(1_000_000))


def moves(step: int, steps: int) -> float:
    return 1.0 + next(_calls)


def predicted_first(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of examples that are predicted to be of class 0; it spoils what it was given."""
    share = (outputs.argmax(1) == 0).double().mean().item()
    outputs.zero_()
    labels.zero_()
    return share


def largest_label(outputs: Tensor, labels: Tensor) -> Tensor:
    assert len(outputs) == len(labels)
    assert not outputs.requires_grad
    return labels.max()


def words(outputs: Tensor, labels: Tensor) -> str:
    return "much"


def undefined(outputs: Tensor, labels: Tensor) -> float:
    return float("nan")


def of_outputs(outputs: Tensor) -> float:
    return 1.0


class Told(raycloak.Callback):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list = []

    def on_run_begin(self, started) -> None:
        self.told.append(started)

    def on_step_end(self, report) -> None:
        self.told.append(report)

    def on_evaluation(self, report) -> None:
        self.told.append(report)

    def on_measurement(self, report) -> None:
        self.told.append(report)

    def on_checkpoint(self, report) -> None:
        self.told.append(report)

    def on_membership(self, report) -> None:
        self.told.append(report)

    def on_run_end(self, ended) -> None:
        self.told.append(ended)


class Fails(Told):
    def on_step_end(self, report) -> None:
        super().on_step_end(report)
        raise KeyError("row 17")


class Misnamed(raycloak.Callback):
    def on_epoch(self, report) -> None:
        pass


class TakesNothing(raycloak.Callback):
    def on_step_end(self) -> None:
        pass


class NeedsSomething(raycloak.Callback):
    def __init__(self, place) -> None:
        pass
