"""Reports: what the user's own code is told about a run, field by field with its privacy class.

Hides how a class declares that it holds nothing secret. The type of a field says what its value may depend on: `Fact`,
`Physical` or `Release`. A class with a field of any other type cannot be defined.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from raycloak.metrics.privacy_class import PrivacyClass

T = TypeVar("T")
C = TypeVar("C")

Fact = Annotated[T, PrivacyClass.DATA_INDEPENDENT]
Physical = Annotated[T, PrivacyClass.PHYSICAL]
Release = Annotated[T, PrivacyClass.RELEASED]

_CLASSES: dict[type, Mapping[str, PrivacyClass]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def report(cls: type[C]) -> type[C]:
    """Make a frozen dataclass whose fields may all be shown outside the run.

    Guarantee: each field of the class has a declared privacy class, and none is secret. The types are the declaration:
    that a value keeps to its field's class is up to the code that makes the report.

    Raises:
        TypeError: a field without a class, or a secret one.
    """
    made = dataclass(frozen=True, slots=True)(cls)
    classes = {name: _class_of(made, name, hint) for name, hint in get_type_hints(made, include_extras=True).items()}
    _CLASSES[made] = MappingProxyType(classes)
    return made


def classes_of(kind: type) -> Mapping[str, PrivacyClass]:
    """Return the privacy class of each field of a report; TypeError if ``kind`` was not declared to be one."""
    if kind not in _CLASSES:
        raise TypeError(f"{kind.__name__} is no report")
    return _CLASSES[kind]


def _class_of(made: type, name: str, hint: Any) -> PrivacyClass:
    found = [each for each in get_args(hint)[1:] if isinstance(each, PrivacyClass)]
    if len(found) != 1 or not found[0].exportable:
        raise TypeError(f"{made.__name__}.{name} is not declared to be a Fact, Physical or a Release")
    return found[0]
