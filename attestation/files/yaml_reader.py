"""Reads YAML that people write: plain types only, no aliases, and no key twice in one mapping."""

from pathlib import Path
from typing import Any

import yaml

from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error


def read_yaml(path: Path, code: str) -> Any:
    """Parse the document in ``path``; ConfigError ``code`` if it cannot be read, and as :func:`parse_yaml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise file_error(code, "read", path, error) from None
    except UnicodeDecodeError as error:
        raise ConfigError(code, f"{path} is not YAML: {error}.", "Save it as UTF-8 text.") from None
    return parse_yaml(text, str(path), code)


def parse_yaml(text: str, name: str, code: str) -> Any:
    """Parse the document in ``text``, which errors call ``name``.

    Raises:
        ConfigError: ``code`` if it is not YAML, names a key twice, or repeats a part by an alias; with the line.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        remedy = (
            f"Look at line {mark.line + 1}, column {mark.column + 1}." if mark else "Write its values out, plainly."
        )
        raise ConfigError(code, f"{name} is not YAML: {problem or str(error).splitlines()[0]}.", remedy) from None


class _PlainLoader(yaml.SafeLoader):
    """A loader that refuses aliases, and a mapping that names a key twice, of which YAML would take the last one.

    Aliases of aliases can make a document of a few lines grow beyond any memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias is not allowed; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            # Compared as text, because a key may be a list, which has no hash.
            name, mark = repr(self.construct_object(key, deep=True)), key.start_mark
            if name in lines:
                problem = f"the key {name} is given twice, in lines {lines[name]} and {mark.line + 1}"
                raise yaml.constructor.ConstructorError(None, None, problem, mark)
            lines[name] = mark.line + 1
        return super().construct_mapping(node, deep)
