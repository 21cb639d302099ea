"""The released model of a run, as a module with its weights: from a run directory or from a sealed package.

A run directory has the weights of its last finished step, a package those of its own step: their average, where the run
keeps one. A package needs a reader's trust store and key. Neither has the model's code or its frozen base, so the model
is built again and compared.

To build a model may mean to run Python that the run directory names. A directory from elsewhere names what somebody
else likes, so its reader has to allow that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import nn

from raycloak.attestation.sealed.package_keys import load_recipient_key
from raycloak.coordinator.checkpoints.reader import package_at, weights_of
from raycloak.coordinator.checkpoints.storage import is_package
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig, load_config
from raycloak.coordinator.planning.model_source import loss_spec, model_source
from raycloak.coordinator.record.folder import AUDIT, RunFolder
from raycloak.coordinator.record.run_list import find_run
from raycloak.metrics.errors import ConfigError, ModelError, RefusedError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.models.models import (
    ModelSource,
    build_model,
    load_flat,
    loss_function,
    tensor_contents,
    trainable_tensors,
)
from raycloak.workers.models.text_model import TextModel
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import Manifest, TensorSpec
from raycloak.workers.terms.model_digest import dimension, frozen_digest, model_digest, split_flat, tensor_digests


@dataclass(frozen=True, slots=True)
class ReleasedModel:
    """A trained model.

    Attributes:
        module: in evaluation mode, with the released weights; a bare `transformers` or PEFT model where it is one.
        source: of the model.
        base: folder that its relative paths start from.
        tokenizer: folder or hub name of the tokenizer that made its examples; None for other data.
        model_digest: hexadecimal digest of the released weights.
    """

    module: nn.Module
    source: ModelSource
    base: Path
    tokenizer: str | None
    manifest: Manifest
    model_digest: str


@dataclass(frozen=True, slots=True)
class Keys:
    """The two files that a reader of packages has: a trust store, and a recipient's private key."""

    trust: Path
    key: Path

    @classmethod
    def of(cls, trust: str | Path | None, key: str | Path | None) -> "Keys | None":
        """Return both; None without either, ConfigError ``package_keys`` with one of them."""
        if trust is None and key is None:
            return None
        if trust is None or key is None:
            raise _keys_needed("only one of trust and key is given")
        return cls(Path(trust), Path(key))


@dataclass(frozen=True, slots=True)
class _Described:
    """A description of the model: how to build it, where its paths start, and the tokenizer that goes with it.

    Attributes:
        is_own: whether the caller may be taken to know its code: it named the configuration, or the run is of its own
            state folder.
        loss: the configuration's; None where only a function is given.
    """

    source: ModelSource
    base: Path
    seed: int
    tokenizer: str | None
    is_own: bool
    loss: LossSpec | None


def load(
    path: str | Path,
    *,
    model_init_fn: Callable[[], nn.Module] | None = None,
    config: RunConfig | str | Path | None = None,
    trust: str | Path | None = None,
    key: str | Path | None = None,
    run_code: bool = False,
) -> nn.Module:
    """Return the trained model of a run directory or a sealed package, in evaluation mode.

    Guarantee: the weights have the digest that the run stated, and everything frozen is what the run trained on.

    Guarantee: no Python that a run directory names is run, unless the directory is one of this state folder, ``config``
    names the same, or ``run_code`` allows it. A Hugging Face model by configuration with a built-in loss runs none.

    Args:
        path: run directory, run name, beginning of an id, or ``last``; or folder, file or s3:// URL of a package,
            which needs ``trust`` and ``key``.
        model_init_fn: the model's function, where the run was given it in Python.
        config: configuration, or its file, that names the model; a run directory has its own.
        trust: trust store of a package's reader.
        key: private key file of one of a package's recipients.
        run_code: whether Python may run that a run directory from elsewhere names.

    Raises:
        ConfigError: ``not_a_run``, ``run_unknown``, ``run_ambiguous``, ``no_weights``, ``model_needed`` or
            ``package_keys``; as the model's source.
        ModelError: ``runs_code``; ``model_mismatch`` if the model that is built here is not the run's.
        RefusedError: ``weights_changed``; EvidenceError, why a package is refused.
    """
    return released_model(path, model_init_fn, config, Keys.of(trust, key), run_code).module


def released_model(
    path: str | Path,
    model_init_fn: Callable[[], nn.Module] | None = None,
    config: RunConfig | str | Path | None = None,
    keys: Keys | None = None,
    run_code: bool = False,
) -> ReleasedModel:
    """Return the trained model with all that an export needs; arguments and errors as :func:`load`."""
    if is_package(str(path)):
        described = _described(config, model_init_fn)
        manifest, flat = _package(str(path), keys)
        _require_allowed(described, manifest, run_code)
        return _built(described, manifest, flat)
    folder = RunFolder.open(find_run(str(path)))
    if (folder.path / AUDIT).exists():
        raise ConfigError(
            "no_weights",
            f"the run in {folder.path} is an audit, whose model has canaries.",
            "Name a run of the configuration: raycloak runs list",
        )
    described = _described(config, model_init_fn, folder)
    manifest, weights = _manifest(folder), folder.path / "parameters.safetensors"
    if not weights.exists():
        raise _no_weights(folder)
    flat = _tensors(manifest, weights, None)
    _require_allowed(described, manifest, run_code)
    try:
        return _built(described, manifest, flat)
    except ConfigError as error:
        if error.code != "module_function" or described.base.is_dir():
            raise
        raise ConfigError(
            "model_needed",
            f"{described.base}, where the run found its model, is gone, as the folder of a Ray job goes.",
            "Name the run's configuration: --config CONFIG, or config= in Python.",
        ) from None


def model_at(run: Path, parameters: Path, model_digest: str) -> ReleasedModel:
    """Return the model of the run directory ``run`` with released weights that lie in a file.

    Precondition: the run is the caller's own, since its code runs.

    Guarantee: the weights have ``model_digest``, and everything frozen is what the run trained on.

    Args:
        parameters: safetensors, as a run directory has it and as a package opens to.
        model_digest: of a model that the run released, in hexadecimal digits; the file's own word counts nothing.

    Raises:
        ConfigError: ``not_a_run``, ``no_weights`` or ``model_needed``; as the model's source.
        ModelError: ``model_mismatch``. RefusedError: ``weights_changed``.
    """
    folder = RunFolder.open(run)
    described = _described(None, None, folder)
    manifest = _manifest(folder)
    return _built(described, manifest, _tensors(manifest, parameters, model_digest))


def with_weights(model: ReleasedModel, parameters: Path, model_digest: str) -> ReleasedModel:
    """Return ``model`` with other released weights of its run, in the same module; as :func:`model_at`.

    Raises:
        ConfigError: ``no_weights``. RefusedError: ``weights_changed``; the module then has the weights it had.
    """
    flat = _tensors(model.manifest, parameters, model_digest)
    load_flat(model.module, flat)
    return replace(model, model_digest=model_digest)


def _described(
    config: RunConfig | str | Path | None, function: Callable[[], nn.Module] | None, folder: RunFolder | None = None
) -> _Described:
    """Return what the caller says of the model, or else the run directory."""
    base, is_own = Path.cwd(), config is not None
    if isinstance(config, str | Path):
        base, config = Path(config).resolve().parent, load_config(Path(config))
    elif config is None and folder is not None:
        # Of the state folder, whose runs this user made.
        is_own = folder.path.resolve().is_relative_to((home.home_path() / "runs").resolve())
        base, config = folder.base, folder.config()
    named = config.model if config is not None else None
    if function is None and named is None:
        raise ConfigError(
            "model_needed",
            "only weights are there, and nothing says which model they are of.",
            "Name the run's configuration as config, or give the model's function as model_init_fn.",
        )
    dataset = config.dataset if config is not None else None
    return _Described(
        source=model_source(named) if function is None else ModelSource.of(function),
        base=base,
        seed=config.seed if config is not None else 0,
        tokenizer=dataset.tokenizer if dataset is not None else None,
        is_own=is_own,
        loss=loss_spec(config.loss) if config is not None else None,
    )


def _require_allowed(described: _Described, manifest: Manifest, run_code: bool) -> None:
    """Refuse to run Python that only a run directory from elsewhere names; ModelError ``runs_code``."""
    loss, source, named = manifest.computation.loss, described.source, []
    if source.hub is not None and source.hub.allow_remote_code:
        named.append(f"the Python files of {source.hub.hf}")
    if source.hub is None and source.function is None:
        named.append(source.name)
    # A built-in loss, or several that are added up, has terms.
    if not loss.terms:
        named.append(loss.name)
    # Whoever names the configuration names its loss as well, and a manifest may state another one.
    if run_code or not named or (described.is_own and described.loss == loss):
        return
    raise ModelError(
        "runs_code",
        f"to build this model, Python would run that the run names: {' and '.join(named)}, from {described.base}.",
        "Read it; then allow it: --run-code, or run_code=True in Python. Or name a configuration of your own.",
    )


def _manifest(folder: RunFolder) -> Manifest:
    manifest = folder.manifest()
    if manifest is None:
        raise _no_weights(folder)
    return manifest


def _tensors(manifest: Manifest, path: Path, wanted: str | None) -> np.ndarray:
    """Return the weights in a file, float32[d] in canonical order.

    Their digest is ``wanted``, or without it the one that the file states.
    """
    tensors = manifest.computation.tensors
    flat = np.empty(dimension(tensors), np.float32)
    try:
        with safe_open(path, framework="numpy") as file:
            # One by one: the file's and the vector's would be two copies of the model.
            for each, part in zip(tensors, split_flat(flat, tensors), strict=True):
                found = file.get_tensor(each.name)
                if (found.dtype, found.shape) != (flat.dtype, each.shape):
                    raise SafetensorError(f"{each.name} is another tensor")
                np.copyto(part, found.reshape(-1))
            is_whole, stated = len(file.keys()) == len(tensors), (file.metadata() or {}).get("model_digest")
    except OSError as error:
        raise file_error("no_weights", "read", path, error) from None
    except SafetensorError:
        is_whole, stated = False, None
    if not is_whole or _digest(manifest, flat) != (stated if wanted is None else wanted):
        raise RefusedError(
            "weights_changed",
            f"{path} does not hold the tensors that the run wrote.",
            "Restore the file, or load a sealed package of the run.",
        )
    return flat


def _package(path: str, keys: Keys | None) -> tuple[Manifest, np.ndarray]:
    """Return the run's manifest and the weights of a package."""
    if keys is None:
        raise _keys_needed(f"{path} is a sealed package, which opens with a trust store and a recipient's key")
    own = load_recipient_key(keys.key)
    with package_at(path, keys.trust) as package:
        return package.run_manifest, weights_of(package, package.unwrap(own), package.exported)


def _built(described: _Described, manifest: Manifest, flat: np.ndarray) -> ReleasedModel:
    """Build the model, require it to be the run's, and give it the weights.

    Raises:
        ModelError: ``model_mismatch``, or as :func:`raycloak.workers.models.models.build_noted`.
    """
    computation = manifest.computation
    module = build_model(described.source, described.base, described.seed)
    found = trainable_tensors(module)
    for wanted, tensor in zip_longest(computation.tensors, found):
        if wanted != tensor:
            raise _other_model(f"tensor {_shown(tensor)} stands where the run trained {_shown(wanted)}")
    # Before the mode is changed, which is one of the values that the digest covers.
    loss_fn, _ = loss_function(computation.loss, described.base)
    if frozen_digest(tensor_contents(module, loss_fn)) != computation.frozen:
        raise _other_model("a frozen tensor, or a value that a layer or the loss holds, is another one")
    load_flat(module, flat)
    inner = module.model if isinstance(module, TextModel) else module
    return ReleasedModel(
        module=inner.eval(),
        source=described.source,
        base=described.base,
        tokenizer=described.tokenizer,
        manifest=manifest,
        model_digest=_digest(manifest, flat),
    )


def _digest(manifest: Manifest, flat: np.ndarray) -> str:
    tensors = manifest.computation.tensors
    return model_digest(tensors, tensor_digests(flat, tensors)).hex()


def _shown(tensor: TensorSpec | None) -> str:
    return "none" if tensor is None else f"'{tensor.name}' {list(tensor.shape)}"


def _other_model(why: str) -> ModelError:
    return ModelError(
        "model_mismatch",
        f"the model that is built here is not the one that the run trained: {why}.",
        "Build it from the run's own code, base and seed, with the library versions of the run.",
    )


def _keys_needed(why: str) -> ConfigError:
    return ConfigError(
        "package_keys",
        f"{why}.",
        "Give trust and key; 'raycloak package keygen' and 'raycloak package trust' make them.",
    )


def _no_weights(folder: RunFolder) -> ConfigError:
    return ConfigError(
        "no_weights",
        f"the run in {folder.path} is marked {folder.record.status} and has written no weights yet.",
        "Name another run: raycloak runs list"
        if folder.record.status == "void"
        else "They are written when a run ends or stops: wait for it, or run 'raycloak run CONFIG --resume'.",
    )
