"""Exports of a trained model, in the formats that other libraries open: safetensors, torch, Hugging Face and PEFT."""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_model

from raycloak.coordinator.runs.released_model import ReleasedModel
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error, require_absent
from raycloak.workers.inputs.hub_files import library, quiet
from raycloak.workers.inputs.text_data import Tokenizer
from raycloak.workers.models.text_model import is_peft, is_transformer

Format = Literal["safetensors", "torch", "hf", "peft"]
FORMATS: tuple[Format, ...] = ("safetensors", "torch", "hf", "peft")


@dataclass(frozen=True, slots=True)
class Exported:
    """A model as it was written.

    Attributes:
        out: the file, or the folder of ``hf`` and ``peft``.
        opened_by: a line of Python that opens it.
        tensors: how many were written.
    """

    out: Path
    format: Format
    opened_by: str
    tensors: int


def known_format(name: str) -> Format:
    """Return ``name`` if it is a format; ConfigError ``usage`` otherwise."""
    for form in FORMATS:
        if name == form:
            return form
    raise ConfigError("usage", f"there is no format '{name}'.", f"Formats: {', '.join(FORMATS)}.")


def export(model: ReleasedModel, form: Format, out: Path) -> Exported:
    """Write ``model`` to ``out``, which appears as a whole; the module is not to be used afterwards.

    ``safetensors`` and ``torch`` have every tensor of the module. ``hf`` is a folder for ``from_pretrained``; there an
    adapter is merged into its base, in the base's precision. ``peft`` is a folder with the adapter alone.

    Raises:
        ConfigError: ``export_format`` if the model has no such form; ``out_exists``; ``out`` if it cannot be written.
    """
    kind, is_text = type(model.module).__name__, is_transformer(model.module)
    if form == "peft" and not is_peft(model.module):
        whole = "hf" if is_text else "safetensors or --format torch"
        raise ConfigError("export_format", f"{kind} has no adapter of PEFT.", f"Use --format {whole}.")
    if form == "hf" and not (is_peft(model.module) or is_text):
        raise ConfigError(
            "export_format", f"{kind} is no model of transformers.", "Use --format safetensors or --format torch."
        )
    require_absent(out)
    draft = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        # Before the libraries are asked, whose errors name no remedy.
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if form in ("hf", "peft"):
            draft.unlink()
            draft.mkdir(mode=0o700)
        tensors, opened_by = _WRITERS[form](model, draft, out)
        draft.replace(out)
    except OSError as error:
        raise file_error("out", "write", out, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        draft.unlink(missing_ok=True)
    return Exported(out, form, opened_by, tensors)


def _write_safetensors(model: ReleasedModel, draft: Path, out: Path) -> tuple[int, str]:
    # A tied tensor is written once, under one of its names.
    save_model(model.module, str(draft), metadata={"format": "pt", "model_digest": model.model_digest})
    return len(model.module.state_dict()), f"safetensors.torch.load_model(module, '{out}')"


def _write_torch(model: ReleasedModel, draft: Path, out: Path) -> tuple[int, str]:
    state: Mapping[str, torch.Tensor] = model.module.state_dict()
    # A view of a mapped file would be written with all of its storage.
    torch.save({name: _own(tensor.detach().cpu()) for name, tensor in state.items()}, draft)
    return len(state), f"module.load_state_dict(torch.load('{out}', weights_only=True))"


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_hf(model: ReleasedModel, draft: Path, out: Path) -> tuple[int, str]:
    with quiet():
        module: Any = model.module
        if is_peft(module):
            module = module.merge_and_unload()
        # Off while it trained, where nothing is generated; a model that writes text is slow without it.
        module.config.use_cache = True
        module.save_pretrained(draft)
        if model.tokenizer is not None:
            Tokenizer.load(model.tokenizer, model.base).inner.save_pretrained(draft)
    return len(module.state_dict()), f"transformers.{type(module).__name__}.from_pretrained('{out}')"


def _write_peft(model: ReleasedModel, draft: Path, out: Path) -> tuple[int, str]:
    with quiet():
        module: Any = model.module
        state = library("peft").get_peft_model_state_dict(module, save_embedding_layers=False)
        if (hub := model.source.hub) is not None:
            # Another reader would draw others.
            if lost := [name for name in hub.drawn(model.base) if f"base_model.model.{name}" not in state]:
                raise ConfigError(
                    "export_format",
                    f"{', '.join(lost)} was drawn from the seed and is frozen, so an adapter alone does not have it.",
                    "Use --format hf, which writes the whole model.",
                )
            config = module.peft_config[module.active_adapter]
            # A snapshot in the hub's cache is a path of this machine; a folder is one in any case.
            config.base_model_name_or_path = hub.place(model.base)
            config.revision = hub.revision
        # Without a look at the hub for whether the base's table of tokens has grown: it is frozen, or LoRA adapts it.
        module.save_pretrained(draft, save_embedding_layers=False)
    return len(state), f"peft.PeftModel.from_pretrained(base, '{out}')"


_WRITERS = {"safetensors": _write_safetensors, "torch": _write_torch, "hf": _write_hf, "peft": _write_peft}
"""Each writes a model, which is to lie at ``out``, to a draft; returns the number of tensors, and what opens it."""
