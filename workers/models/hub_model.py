"""Models from the Hugging Face hub or a folder, whole or with a LoRA adapter, by configuration.

Weights are safetensors, mapped into memory: the workers of a node share the pages of a frozen base.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import ConfigError, EvidenceError, ModelError, is_out_of_memory
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.hub_files import library, public_folder, quiet
from raycloak.workers.inputs.text_data import Tokenizer
from raycloak.workers.models.dropout import silence_config
from raycloak.workers.models.experts import stacks_of
from raycloak.workers.models.liger import require_fitting

Task = Literal["sequence_classification", "causal_lm", "token_classification"]

_PEFT_TASKS = {"sequence_classification": "SEQ_CLS", "causal_lm": "CAUSAL_LM", "token_classification": "TOKEN_CLS"}
_AUTO = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "causal_lm": "AutoModelForCausalLM",
    "token_classification": "AutoModelForTokenClassification",
}
_SHOWN = 12
_IN_LIGER = (
    "each worker computes RMSNorm, rotary embedding and SwiGLU in Liger's kernels, and compares them on its GPU with "
    "the model's own layers before anything is charged."
)
# Of files that run code when they are read.
_PICKLED = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})


class LoraSpec(Message):
    """A LoRA adapter, as `peft.LoraConfig` takes it.

    Attributes:
        target_modules: last parts of the names of the layers that it adapts; ``all-linear`` for all but the head;
            None for what PEFT adapts in this type of model.
        bias: which biases are trained beside it.
    """

    DOMAIN: ClassVar[str] = "raycloak/lora/v1"

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | Literal["all-linear"] | None
    bias: Literal["none", "all", "lora_only"]


class HubSpec(Message):
    """A model by configuration.

    Attributes:
        hf: folder, relative to the base folder or absolute, or a name on the hub.
        revision: branch, tag or commit on the hub.
        classes: outputs of the head; the checkpoint's own number if None.
        allow_remote_code: whether Python files that come with the model may run.
        lora: the adapter that is trained while all else but the head is frozen; None to train everything.
        use_liger_kernels: whether workers compute its frozen layers in the kernels of `raycloak.workers.models.liger`.
    """

    DOMAIN: ClassVar[str] = "raycloak/hub-model/v1"

    hf: str
    task: Task
    revision: str | None = None
    classes: int | None = None
    allow_remote_code: bool = False
    lora: LoraSpec | None = None
    use_liger_kernels: bool = Field(default=False, exclude_if=lambda used: not used)

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
            ModelError: ``no_head``, ``head_size``, ``remote_code``, ``target_modules``, ``weights_missing``,
                ``model_unreadable`` or ``liger_kernels``.
            ConfigError: ``hf_missing`` or ``not_cached``.
        """
        folder = public_folder(self.hf, base, self.revision)
        _check_code(_config(folder, self.hf), self.hf, self.allow_remote_code)
        with quiet():
            model, notes, drawn = self._load(folder)
            if drawn:
                notes = (*notes, f"drawn from the seed, since the checkpoint has none: {listed(drawn, _SHOWN)}.")
            if self.use_liger_kernels:
                require_fitting(model, adapted=self.lora is not None)
                notes = (*notes, _IN_LIGER)
            if self.lora is None:
                return model.float(), notes
            return adapted(model, self.lora, _PEFT_TASKS[self.task]), notes

    def require_data_alone(self, base: Path | str) -> None:
        """Require that the model is safetensors and settings, and brings no code of its own.

        Raises:
            EvidenceError: ``code_unlisted``, with the Python files or the pickled weights named.
            ConfigError, ModelError: as :func:`public_folder`.
        """
        folder = public_folder(self.hf, base, self.revision)
        pickled = sorted(each.name for each in folder.iterdir() if each.suffix in _PICKLED)
        if self.allow_remote_code or pickled:
            what = "with allow_remote_code may run code" if self.allow_remote_code else f"has {listed(pickled, _SHOWN)}"
            raise EvidenceError(
                "code_unlisted",
                f"the model {self.hf} {what}, which the policy's list of code cannot cover.",
                "Take a model of transformers itself, with its weights in safetensors and no pickle beside them.",
            )

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
            # A decoder reads a class at the last token that is no padding, so it pads as the tokenizer beside it.
            text = config.get_text_config()
            if getattr(text, "pad_token_id", None) is None and (folder / "tokenizer.json").exists():
                text.pad_token_id = Tokenizer.load(str(folder), folder).inner.pad_token_id
        if self.classes is not None:
            config.num_labels = self.classes
        auto = getattr(transformers, _AUTO[self.task])
        pickled = sorted(each.name for each in folder.glob("pytorch_model*.bin"))
        if pickled and next(folder.glob("*.safetensors"), None) is None:
            raise ModelError(
                "model_unreadable",
                f"{self.hf} has its weights in {listed(pickled, _SHOWN)}, which run code when they are read.",
                "If you trust their author, write them as safetensors once, in Python: "
                f"transformers.{_AUTO[self.task]}.from_pretrained(FOLDER).save_pretrained(FOLDER).",
            )
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


def adapted(model: Any, lora: LoraSpec, task: str) -> nn.Module:
    """Return a `transformers` model with an adapter, and all else frozen but a head of classes.

    Args:
        task: as PEFT names it, such as ``SEQ_CLS``.

    Raises:
        ModelError: ``target_modules`` if it has no such layers, or PEFT cannot adapt them.
    """
    peft = library("peft")
    targets = lora.target_modules
    if targets is None:
        targets = tuple(peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type, ()))
    heads = []
    if task != "CAUSAL_LM":
        # The layers beside the body of a classifier.
        own = [name for name, layer in model.named_children() if next(layer.parameters(), None) is not None]
        heads = [name for name in own if name != model.base_model_prefix]
    layers = _layers(model, heads)
    stacks = [f"{name}.{own}" for name, layer in model.named_modules() for own in stacks_of(layer)]
    if targets == "all-linear":
        # A table of tokens is no linear layer.
        layers = [name for name in layers if not isinstance(model.get_submodule(name), nn.Embedding)]
    else:
        known = (*layers, *stacks)
        unknown = [each for each in targets if not _named(known, [each])]
        if unknown or not targets:
            why = f"it has no layer {', '.join(unknown)}" if unknown else "PEFT knows no layers to adapt in it"
            raise _refused(model, why, known)
        layers, stacks = _named(layers, targets), _named(stacks, targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        target_parameters=stacks or None,
        # From PEFT's own model down: their last names alone may be those of layers of the body.
        modules_to_save=[f"model.{name}" for name in heads] or None,
        bias=lora.bias,
        lora_dropout=0.0,
        task_type=task,
    )
    try:
        found: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        # It knows types of models some layers of which compute by other ways than their own.
        raise _refused(model, f"PEFT says: {str(error).partition('. ')[0]}", (*layers, *stacks)) from None
    for layer in found.modules():
        if isinstance(layer, peft.utils.ModulesToSaveWrapper):
            for head in layer.modules_to_save.values():
                # The head of a base in half precision: trained parameters are float32, and so must be what they meet.
                head.float().register_forward_pre_hook(_in_float32)
    return found


def _layers(model: Any, heads: Sequence[str]) -> list[str]:
    """Return the names of the layers that LoRA can adapt: plain products and tables, outside of a head.

    A layer that gives more than its product, as a router may, is none; nor is one whose weight another layer takes.
    """
    conv1d = library("transformers.pytorch_utils").Conv1D
    plain = (nn.Linear.forward, conv1d.forward, nn.Embedding.forward)
    head = model.get_output_embeddings()
    return [
        name
        for name, layer in model.named_modules()
        if type(layer).forward in plain
        and layer is not head
        and name.partition(".")[0] not in heads
        and not _is_taken_apart(model, name)
    ]


def _is_taken_apart(model: nn.Module, name: str) -> bool:
    """Return whether PEFT refuses a layer by its name: a fused operation of the model takes its weight alone."""
    peft = library("peft")
    try:
        library("peft.tuners.tuners_utils")._check_lora_target_modules_mamba(
            peft.LoraConfig(), model, name.rpartition(".")[2]
        )
    except ValueError:
        return True
    return False


def _named(names: Iterable[str], targets: Sequence[str]) -> list[str]:
    return [name for name in names if any(name == each or name.endswith(f".{each}") for each in targets)]


def _refused(model: nn.Module, why: str, names: Iterable[str]) -> ModelError:
    there = sorted({name.rpartition(".")[2] for name in names} - {""})
    return ModelError(
        "target_modules",
        f"LoRA cannot adapt {type(model).__name__}: {why.rstrip('.')}.",
        f"Set lora.target_modules to some of: {', '.join(there) or 'none there is'}.",
    )


def _in_float32(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.float() for each in inputs)
