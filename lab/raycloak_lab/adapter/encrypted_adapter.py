"""An encoder whose adapter is elsewhere: forward passes ask its worker for each adapted projection, encrypted.

The client runs the public base model. It sends encrypted inputs of the adapted layers, and adds the decrypted deltas.
"""

import inspect
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.keys.run_secret import load_secret
from raycloak.attestation.policy.policy import Policy, load_policy, simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.config import home
from raycloak.coordinator.evidence.sources import collateral_of
from raycloak.metrics.errors import ModelError, ProtocolError
from raycloak_lab.adapter import places
from raycloak_lab.adapter.connection import AdapterAddress
from raycloak_lab.adapter.session import AdapterSession, Traffic

Progress = Callable[[int, int], None]
"""Called with the finished blocks and all blocks of a forward pass."""

# A call puts its hooks and the shared parts into the model, where every thread would meet them.
_CALLS = threading.Lock()


class EncryptedAdapter:
    """A Hugging Face encoder with an adapter that stays at its server; experimental.

    It hides the client's hidden states from the server, even from one whose enclave is broken. It does not hide the
    adapter from the client, and nothing proves that the deltas are right. See docs/encrypted-adapters.md.

    Calls of a process take turns. While one runs, the base model must not be called by itself in another thread.

    Args:
        base_model: the public encoder that the adapter was trained on, at this client. Its dropout must be off.
        address: printed by ``raycloak-lab adapter serve``: ``KEY@host:port``.
        policy: file or `Policy` that the worker's evidence must meet; None accepts SIMULATED evidence of this home.
        collateral: file to judge it by, where the policy names no collateral service.
        progress: called as a forward pass proceeds.

    Raises:
        ConfigError: ``adapter_address``, or a policy or collateral that cannot be used.
        ModelError: ``adapter_base`` if the model lacks a projection, or has it in another shape.
        EvidenceError: why the worker is refused. ProtocolError, RefusedError: why the server refuses.

    Attributes:
        simulated: whether the worker's evidence is SIMULATED, which proves nothing about a machine.
    """

    def __init__(
        self,
        base_model: nn.Module,
        address: str,
        *,
        policy: Policy | str | Path | None = None,
        collateral: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        # Every refused handshake would be a line.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        known, judged_by = _terms(policy, collateral)
        identity = IdentityKey.from_seed(load_secret(places.identity_file()))
        self._model = base_model
        self._progress = progress
        self._session = AdapterSession(
            AdapterAddress.parse(address), identity, places.adapters_folder() / "sessions", known, judged_by
        )
        try:
            self._layers = _layers(base_model, self._session)
            self._shared = _shared(base_model, self._session.shared)
            self._known: dict[Hashable, _Reading] = {}
        except BaseException:
            self._session.close()
            raise
        self.simulated = self._session.evidence_class == "simulated"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the adapted model returns, without gradients.

        Tokens that a two-dimensional ``attention_mask`` hides are not sent: nothing reads their deltas.

        Raises:
            BudgetError: ``tokens_spent``. The server's other refusals. RefusedError: ``adapter_closed`` behind `close`.
            ModelError: ``states_not_finite`` if an adapted layer reads numbers that are not finite; ``adapter_base`` in
                training mode.
        """
        _require_eval(self._model)
        given = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments
        mask = {**given, **kwargs}.get("attention_mask")
        with _CALLS, torch.no_grad(), _replaced(self._model, self._shared):
            reading = self._reading(args, kwargs)
            blocks = sum(-(-int(_sent(each, mask).sum()) // self._session.block_tokens) for each in reading.shapes)
            done = count(1)

            def tell() -> None:
                if self._progress is not None:
                    self._progress(next(done), blocks)

            with _hooked(self._layers, _Pass(self._session, reading.inputs, mask, tell).add):
                return self._model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: ModelError ``generation_refused``."""
        raise ModelError(
            "generation_refused",
            "each generated token would take one round trip a layer, some eight seconds for a model of 32 layers.",
            "Use an encoder, or TLS into an attested enclave, where generation is fast.",
        )

    @property
    def tokens_left(self) -> int:
        """The tokens that the projection with the least left will still answer, when the server last said so."""
        return self._session.tokens_left

    @property
    def traffic(self) -> Traffic:
        """The blocks, bytes and seconds of this session so far."""
        return self._session.traffic

    def close(self) -> None:
        """End the session; the worker drops the keys."""
        self._session.close()

    def _reading(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Reading":
        """Return which layers read one and the same tensor in calls of this kind, by a bare pass before the first.

        Only a pass can tell: two layers of one block may share an input, as query and value do, or not. It costs the
        base model's forward pass, and nothing is sent.
        """
        kind = tuple((name, _kind(each)) for name, each in (*enumerate(args), *kwargs.items()))
        if kind in self._known:
            return self._known[kind]
        seen: list[torch.Tensor] = []
        inputs: dict[str, int] = {}

        def note(name: str, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            # Kept in a list, so that no later tensor takes the place of one in memory.
            inputs[name] = next((index for index, each in enumerate(seen) if each is given), len(seen))
            if inputs[name] == len(seen):
                seen.append(given)
            return output

        with _hooked(self._layers, note):
            self._model(*map(_copied, args), **{name: _copied(each) for name, each in kwargs.items()})
        found = self._known[kind] = _Reading(inputs, [each.shape[:-1] for each in seen])
        return found


@dataclass(frozen=True, slots=True)
class _Reading:
    """The findings of a bare pass.

    Attributes:
        inputs: number of the tensor that each layer reads, by the layer's name.
        shapes: of each such tensor's tokens, by its number.
    """

    inputs: Mapping[str, int]
    shapes: Sequence[torch.Size]


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _kind(value: Any) -> Hashable:
    """Return what arguments have in common with which layers read the same tensors: shape and type, or a setting."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return value if _is_setting(value) else type(value).__name__


def _copied(value: Any) -> Any:
    """Return a copy of what a model could change, such as a cache."""
    return value if isinstance(value, torch.Tensor) or _is_setting(value) else deepcopy(value)


def _sent(shape: torch.Size, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which tokens of a tensor to send, bool of shape [tokens]: all but those that a mask of its shape hides."""
    if mask is not None and mask.shape == shape:
        return mask.reshape(-1).bool().cpu()
    return torch.ones(shape.numel(), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class _Pending:
    """The deltas that came with another layer's, and the tensor that they are of."""

    given: torch.Tensor
    delta: torch.Tensor


class _Pass:
    """A forward pass: asks once for all layers that read one tensor, and tells each block that is done."""

    def __init__(
        self,
        session: AdapterSession,
        inputs: Mapping[str, int],
        mask: torch.Tensor | None,
        tell: Callable[[], None],
    ) -> None:
        self._session, self._inputs, self._mask, self._tell = session, inputs, mask, tell
        self._pending: dict[str, _Pending] = {}

    def add(self, name: str, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return a layer's output with its delta."""
        waiting = self._pending.pop(name, None)
        if waiting is None or waiting.given is not given:
            waiting = self._asked(name, given)
        return output + waiting.delta.to(output)

    def _asked(self, name: str, given: torch.Tensor) -> _Pending:
        width = self._session.projections[name].width_in
        mine = self._inputs.get(name)
        names = [
            each
            for each, number in self._inputs.items()
            if number == mine and self._session.projections[each].width_in == width
        ] or [name]
        rows = _sent(given.shape[:-1], self._mask)
        sent = given.reshape(-1, width)[rows].cpu().double().numpy()
        for each, found in self._session.deltas(sent, names, self._tell).items():
            delta = torch.zeros(rows.numel(), self._session.projections[each].width_out, dtype=torch.float64)
            delta[rows] = torch.from_numpy(found)
            self._pending[each] = _Pending(given, delta.reshape(*given.shape[:-1], -1))
        return self._pending.pop(name)


@contextmanager
def _hooked(
    layers: dict[str, nn.Module], function: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Pass the name, input and output of each layer to ``function`` inside the block; its result is the output."""
    handles = [
        layer.register_forward_hook(lambda _, args, output, name=name: function(name, args[0], output))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced(model: nn.Module, parts: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Put other parameters into the model inside the block, wherever it has them."""
    taken = {id(own): parts[name] for name, own in model.named_parameters() if name in parts}
    places = [
        (module, name, own)
        for module in model.modules()
        for name, own in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(own) in taken
    ]
    try:
        for module, name, own in places:
            # Not its values alone: autocast remembers the values of a parameter that it has cast.
            module.register_parameter(name, taken[id(own)])
        yield
    finally:
        for module, name, own in places:
            module.register_parameter(name, own)


def _layers(model: nn.Module, session: AdapterSession) -> dict[str, nn.Module]:
    found = dict(model.named_modules())
    layers: dict[str, nn.Module] = {}
    for name, described in session.projections.items():
        layer = found.get(name)
        shape = (described.width_out, described.width_in)
        if not isinstance(layer, nn.Linear) or tuple(layer.weight.shape) != shape:
            raise ModelError(
                "adapter_base",
                f"the model has no linear layer '{name}' of shape {list(shape)}, which the adapter adapts.",
                "Load the base model that the adapter was trained on, of the same class.",
            )
        layers[name] = layer
    _require_eval(model)
    return layers


def _require_eval(model: nn.Module) -> None:
    if model.training:
        raise ModelError(
            "adapter_base", "the model is in training mode, where dropout changes it.", "Call model.eval() first."
        )


def _shared(model: nn.Module, content: bytes) -> dict[str, nn.Parameter]:
    """Return the parts that take the place of the model's own; ModelError ``adapter_base`` if it has none such."""
    if not content:
        return {}
    try:
        found = load(content)
    except SafetensorError:
        raise ProtocolError("malformed", "the server's shared parts are no safetensors file.") from None
    own = dict(model.named_parameters())
    for name, each in found.items():
        if name not in own or own[name].shape != each.shape:
            raise ModelError(
                "adapter_base",
                f"the model has no parameter '{name}' of shape {list(each.shape)}, which the adapter's owner shares.",
                "Load the base model that the adapter was trained on, of the same class.",
            )
    return {name: nn.Parameter(each.to(own[name]), requires_grad=False) for name, each in found.items()}


def _terms(policy: Policy | str | Path | None, collateral: str | Path | None) -> tuple[Policy, CollateralBundle]:
    known = load_policy(Path(policy)) if isinstance(policy, str | Path) else policy
    current = collateral_of(known, str(collateral) if collateral else None, Path())
    if current is not None and known is not None:
        return known, current()
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    return known or simulated_policy(vendor, code_measurement()), vendor.collateral(int(time.time()))
