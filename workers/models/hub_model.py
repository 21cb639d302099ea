"""Models from the Hugging Face hub or a folder, whole or with a LoRA adapter, by configuration.

Weights are safetensors, mapped into memory: the workers of a node share the pages of a frozen base.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import ConfigError, ModelError, is_out_of_memory
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.hub_files import library, public_folder, quiet
from raycloak.workers.inputs.text_data import Tokenizer
from raycloak.workers.models.dropout import silence_config
from raycloak.workers.models.lora import LoraSpec, adapted

Task = Literal["sequence_classification", "causal_lm", "token_classification"]

_PEFT_TASKS = {"sequence_classification": "SEQ_CLS", "causal_lm": "CAUSAL_LM", "token_classification": "TOKEN_CLS"}
_AUTO = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "causal_lm": "AutoModelForCausalLM",
    "token_classification": "AutoModelForTokenClassification",
}
_SHOWN = 12


class HubSpec(Message):
    """A model by configuration.

    Attributes:
        hf: folder, relative to the base folder or absolute, or a name on the hub.
        revision: branch, tag or commit on the hub.
        classes: outputs of the head; the checkpoint's own number if None.
        allow_remote_code: whether Python files that come with the model may run.
        lora: the adapter that is trained while all else but the head is frozen; None to train everything.
    """

    DOMAIN: ClassVar[str] = "raycloak/hub-model/v1"

    hf: str
    task: Task
    revision: str | None = None
    classes: int | None = None
    allow_remote_code: bool = False
    lora: LoraSpec | None = None

    def code_digest(self, base: Path | str) -> bytes:
        """Return a SHA-256 over all of the model but its weights and its place.

        It covers these fields, the model's ``config.json``, and its Python files where they may run.

        Raises:
            ConfigError, ModelError: as :func:`public_folder`.
        """
        folder = public_folder(self.hf, base, self.revision)
        fields = self.model_copy(update={"hf": "", "revision": None}).encode()
        code = sorted(folder.rglob("*.py")) if self.allow_remote_code else []
        named = [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in code]
        config = json.dumps(_config(folder, self.hf), sort_keys=True)
        return digest(
            length_prefixed("raycloak/hub-code/v1", fields, config, *(part for pair in named for part in pair))
        )

    def build(self, base: Path | str) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the model in evaluation mode, with sentences about what is new in it.

        New weights are drawn from torch's generator. A frozen base keeps the precision of its file and stays mapped;
        what is trained is float32.

        Raises:
            ModelError: ``no_head``, ``head_size``, ``remote_code``, ``target_modules``, ``weights_missing`` or
                ``model_unreadable``.
            ConfigError: ``hf_missing`` or ``not_cached``.
        """
        folder = public_folder(self.hf, base, self.revision)
        _check_code(_config(folder, self.hf), self.hf, self.allow_remote_code)
        with quiet():
            model, notes, drawn = self._load(folder)
            if drawn:
                notes = (*notes, f"drawn from the seed, since the checkpoint has none: {listed(drawn, _SHOWN)}.")
            if self.lora is None:
                return model.float(), notes
            return adapted(model, self.lora, _PEFT_TASKS[self.task]), notes

    def drawn(self, base: Path | str) -> tuple[str, ...]:
        """Return the names of the weights that the checkpoint does not have; errors as :meth:`build`."""
        with quiet():
            return self._load(public_folder(self.hf, base, self.revision))[2]

    def place(self, base: Path | str) -> str:
        """Return the hub name, or the absolute path of the folder."""
        folder = Path(base) / self.hf
        return str(folder.resolve()) if folder.is_dir() else self.hf

    def check_tokenizer(self, tokenizer: str | None, base: Path | str) -> None:
        """Refuse a tokenizer that gives words other ids than the one that lies beside the model.

        Args:
            tokenizer: of the data; None if it is no text.

        Raises:
            ConfigError: ``tokenizer_mismatch``, or as :meth:`Tokenizer.load`.
        """
        if tokenizer is None or tokenizer == self.hf:
            return
        beside = public_folder(self.hf, base, self.revision)
        if not (beside / "tokenizer.json").exists():
            return
        own, other = (Tokenizer.load(each, base) for each in (str(beside), tokenizer))
        if own.inner.get_vocab() != other.inner.get_vocab():
            raise ConfigError(
                "tokenizer_mismatch",
                f"the tokenizer '{tokenizer}' gives words other ids than the one of the model '{self.hf}'.",
                "Leave dataset.tokenizer out: the model's is then taken.",
            )

    def _load(self, folder: Path) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        """Return the model, sentences about what was changed in it, and the names that the checkpoint does not have."""
        transformers = library("transformers")
        trust = {"trust_remote_code": self.allow_remote_code, "local_files_only": True}
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **trust)
        except (ValueError, OSError, KeyError) as error:
            raise _unreadable(self.hf, error) from None
        # Before it is built: some layers keep the number for themselves.
        notes = silence_config(config)
        _check_head(config, self)
        if self.task != "causal_lm":
            _pad_as_tokenizer(config, folder)
        if self.classes is not None:
            config.num_labels = self.classes
        auto = getattr(transformers, _AUTO[self.task])
        _check_weights(folder, self.hf, _AUTO[self.task])
        try:
            model, info = auto.from_pretrained(
                folder,
                config=config,
                dtype="auto",
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **trust,
            )
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise _unreadable(self.hf, error) from None
        _check_loaded(model, info, self)
        return model, notes, tuple(sorted(info["missing_keys"]))


def _check_weights(folder: Path, hf: str, auto: str) -> None:
    """Require weights in safetensors; ModelError ``model_unreadable``, with how others are converted."""
    pickled = sorted(each.name for each in folder.glob("pytorch_model*.bin"))
    if pickled and next(folder.glob("*.safetensors"), None) is None:
        raise ModelError(
            "model_unreadable",
            f"{hf} has its weights in {listed(pickled, _SHOWN)}, which run code when they are read.",
            "If you trust their author, write them as safetensors once, in Python: "
            f"transformers.{auto}.from_pretrained(FOLDER).save_pretrained(FOLDER).",
        )


def _config(folder: Path, hf: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(hf, error) from None
    if not isinstance(found, dict):
        raise _unreadable(hf, ValueError("config.json is no object"))
    return {name: value for name, value in found.items() if name not in ("_name_or_path", "transformers_version")}


def _check_code(config: dict[str, Any], hf: str, allowed: bool) -> None:
    """Refuse a model with its own Python files; ModelError ``remote_code``."""
    named = config.get("auto_map") or {}
    if named and not allowed:
        raise ModelError(
            "remote_code",
            f"{hf} comes with Python code of its own ({listed(sorted(map(str, named.values())), _SHOWN)}).",
            "Read it; model.allow_remote_code: true then runs it in every worker, and its digest is in the manifest.",
        )
    if any("--" in str(name) for name in named.values()):
        raise ModelError(
            "remote_code",
            f"{hf} takes its Python code from another repository, which no digest covers.",
            "Copy the code into the model's folder.",
        )


def _check_head(config: Any, spec: HubSpec) -> None:
    """Refuse a type of model that has no head for the task; ModelError ``no_head``."""
    auto = library("transformers.models.auto.modeling_auto")
    tables = {
        "sequence_classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "token_classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "causal_lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    remote = spec.allow_remote_code and _AUTO[spec.task] in (getattr(config, "auto_map", None) or {})
    # An encoder's head for causal language modelling is for decoders made of it: it saw both sides of every token.
    encoder = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    decoder = not encoder and not config.is_encoder_decoder
    has = [task for task, table in tables.items() if type(config) in table and (task != "causal_lm" or decoder)]
    if spec.task not in has and not remote:
        raise ModelError(
            "no_head",
            f"{spec.hf} is a model of type {config.model_type}, which has no head for {spec.task}.",
            f"Tasks that it has a head for: {listed(has, _SHOWN) or 'none'}.",
        )


def _pad_as_tokenizer(config: Any, folder: Path) -> None:
    """Let a classifier whose configuration names no padding pad as the tokenizer that lies beside it.

    A decoder reads a text's class at its last token that is no padding, so both have to agree.
    """
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None and (folder / "tokenizer.json").exists():
        text.pad_token_id = Tokenizer.load(str(folder), folder).inner.pad_token_id


def _check_loaded(model: Any, info: dict[str, Any], spec: HubSpec) -> None:
    """Refuse a checkpoint that lacks weights of the body, or has a head of another size.

    Raises:
        ModelError: ``head_size`` or ``weights_missing``.
    """
    if info["mismatched_keys"]:
        name = min(name for name, *_ in info["mismatched_keys"])
        raise ModelError(
            "head_size",
            f"the checkpoint has another shape of {name} than a model with {model.config.num_labels} classes.",
            "Set model.classes to the checkpoint's number, or take a checkpoint without a head.",
        )
    body = f"{model.base_model_prefix}."
    lost = sorted(name for name in info["missing_keys"] if name.startswith(body) and "pooler" not in name)
    if lost:
        raise ModelError(
            "weights_missing",
            f"the checkpoint {spec.hf} lacks {listed(lost, _SHOWN)}.",
            "Take a whole checkpoint of this type of model.",
        )


def _unreadable(hf: str, error: Exception) -> ModelError:
    # A model by configuration is public, so the text of the error names nothing of an example.
    said = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return ModelError(
        "model_unreadable",
        f"{hf} cannot be loaded: {said}.",
        f"It needs a config.json and weights in safetensors. If it is a hub name, run 'hf download {hf}'.",
    )
