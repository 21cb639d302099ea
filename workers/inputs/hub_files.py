"""Public files of Hugging Face: from a folder, or from the cache of the hub's client, which downloads missing ones.

Nothing here imports the libraries before a model or tokenizer is asked for: they are an extra, and take seconds.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raycloak.metrics.errors import ConfigError

# All that a model or tokenizer is read from. Pickled weights are not: unpickling runs code.
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.jinja")


def public_folder(hf: str, base: Path | str, revision: str | None = None) -> Path:
    """Return the folder of a public model or tokenizer; it is downloaded if it is neither a folder nor cached.

    Args:
        base: folder that a relative path starts from.

    Raises:
        ConfigError: ``hf_missing`` without the libraries, ``not_cached`` if it is nowhere and cannot be downloaded.
    """
    require_libraries()
    require_folder(hf, base)
    folder = Path(base) / hf
    if folder.is_dir():
        return folder.resolve()
    download = library("huggingface_hub").snapshot_download
    problem = ""
    with quiet(transformers=False):
        # The cache first, so that no worker of a whole model asks the hub.
        for local in (True, False):
            try:
                found = Path(download(hf, revision=revision, local_files_only=local, allow_patterns=list(_FILES)))
            except Exception as error:  # noqa: BLE001 - a network fails in many ways
                problem = f"the hub's client has not cached it, and cannot fetch it ({type(error).__name__})"
                continue
            if not local or (found / "config.json").exists() or (found / "tokenizer_config.json").exists():
                return found
    raise _nowhere(hf, problem)


def require_folder(hf: str, base: Path | str) -> None:
    """Require the folder that ``hf`` names, unless it may be a name on the hub; ConfigError ``not_cached``."""
    is_path = hf.count("/") > 1 or hf.startswith((".", "/", "~"))
    if is_path and not (Path(base) / hf).is_dir():
        raise _nowhere(hf, "no folder has that path")


def _nowhere(hf: str, problem: str) -> ConfigError:
    return ConfigError(
        "not_cached",
        f"there is no model or tokenizer '{hf}': {problem}.",
        f"On each node, run 'hf download {hf}' with a connection, or name a folder that has its files.",
    )


def library(name: str) -> Any:
    """Import a module of Hugging Face, when it is needed and not before."""
    return import_module(name)


def require_libraries() -> None:
    """Require `transformers` and `peft`; ConfigError ``hf_missing``."""
    missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "hf_missing",
            f"models and tokenizers of Hugging Face need {' and '.join(missing)}.",
            "On every node, run: pip install 'raycloak[hf]'",
        )


@contextmanager
def quiet(transformers: bool = True) -> Iterator[None]:
    """Keep progress bars, logs and warnings of Hugging Face away; raycloak says what matters.

    Args:
        transformers: whether `transformers` is used inside; it takes a second to import.
    """
    hub = library("huggingface_hub.utils")
    with ExitStack() as restored, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not hub.are_progress_bars_disabled():
            hub.disable_progress_bars()
            restored.callback(hub.enable_progress_bars)
        if transformers:
            # A user's own process keeps its settings.
            logging = library("transformers.utils.logging")
            restored.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                restored.callback(logging.enable_progress_bar)
        yield
