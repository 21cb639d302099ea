"""The resource definitions of KubeRay, and what they say of a document."""

from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = ROOT.parent / "shared" / "crds"


def closed(schema):
    """Return ``schema`` with every unknown field an error, as the API server's strict validation has it."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(part) for key, part in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


@cache
def validator(resource):
    path = DEFINITIONS / f"ray.io_{resource}.yaml"
    if not path.exists():
        pytest.skip(f"the resource definitions of KubeRay are not at {path}")
    definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    (served,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    return jsonschema.Draft202012Validator(closed(served["schema"]["openAPIV3Schema"]))


def accepted(resource, document):
    return not list(validator(resource).iter_errors(document))


def repeated_keys(schema, value):
    """Return lists whose items must differ in the keys that the definition names, and do not."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return [found for key in value if key in properties for found in repeated_keys(properties[key], value[key])]
    if not isinstance(value, list):
        return []
    keys = schema.get("x-kubernetes-list-map-keys", [])
    named = [tuple(item.get(key) for key in keys) for item in value] if keys else []
    inner = [found for item in value for found in repeated_keys(schema.get("items", {}), item)]
    return inner + [name for name in set(named) if named.count(name) > 1]


def complaints(resource, document):
    """Return what a definition has against a document; empty if it is accepted."""
    errors = [f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in validator(resource).iter_errors(document)]
    return errors + [f"repeated: {each}" for each in repeated_keys(validator(resource).schema, document)]
