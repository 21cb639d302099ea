"""Reads YAML that people write: plain types only, and no key twice in one mapping."""

from pathlib import Path
from typing import Any

import yaml

from metrics.errors import ConfigError


def read_yaml(path: Path, code: str) -> Any:
    """The document in ``path``.

    Raises:
        ConfigError: ``code`` if it cannot be read, is not YAML, or names a key twice.
    """
    try:
        return yaml.load(path.read_text(), Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(code, f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(code, f"{path} is not YAML: {str(error).splitlines()[0]}.") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, where YAML would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(map(repr, keys))) != len(keys):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
