"""The section: the base of a configuration's parts, and the words in which a wrong field is refused.

The same words are said wherever a section is made: by its class in Python, or of plain data by :func:`validated`.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from raycloak.metrics.errors import ConfigError, RaycloakError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

S = TypeVar("S", bound="Section")

DESCRIBED_IN = "docs/configuration.md"


class Section(BaseModel):
    """The base of all sections: frozen, no unknown fields, no infinities, no booleans for numbers.

    Raises:
        ConfigError: ``config``, with every wrong field named on one line.
    """

    # No error repeats a value: it may be a secret in the wrong place.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise self.refusal(error) from None

    # Else pydantic would make each inner section by this constructor too, which names the fields of one section alone.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def refusal(cls, error: ValidationError) -> RaycloakError:
        """Return what is raised for wrong fields that its class was called with."""
        return wrong_fields(cls, error)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name].annotation if info.field_name else None
        if isinstance(value, bool) and kind is not bool and value not in get_args(kind):
            raise ValueError(f"{str(value).lower()} is not a valid value here")
        return value


def validated(section: type[S], raw: Any, described_in: str = DESCRIBED_IN) -> S:
    """Return a section from plain data; errors as :class:`Section`."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        raise wrong_fields(section, error, described_in) from None


def wrong_fields(section: type[Section], error: ValidationError, described_in: str = DESCRIBED_IN) -> ConfigError:
    """Return the refusal that names every wrong field of a section."""
    fields = [(_field_of(each["loc"]), each) for each in error.errors()]
    found = ((field, problem_of(section, field, each)) for field, each in fields)
    wrong = "; ".join(f"{field}: {problem}" if field else problem for field, problem in found)
    return ConfigError("config", wrong if wrong.endswith("?") else f"{wrong}.", f"See {described_in}.")


_USUAL_NAMES = {
    "batch_size": "expected_batch_size",
    "batchsize": "expected_batch_size",
    "clip_norm": "max_grad_norm",
    "clipping_norm": "max_grad_norm",
    "delta": "target_delta",
    "epochs": "steps",
    "epsilon": "target_epsilon",
    "file": "path",
    "lr": "learning_rate",
    "max_steps": "steps",
    "noise": "noise_multiplier",
    "num_steps": "steps",
    "r": "rank",
    "vocab_size": "vocabulary",
    "workers": "num_workers",
}
"""The names that other libraries give to our fields."""


ALTERNATIVES = frozenset(
    {
        ("model", "hub"),
        ("model", "function"),
        ("loss", "named"),
        ("loss", "with_settings"),
        ("loss", "several"),
        ("micro_batch_bytes", "bytes"),
    }
)
"""Fields with alternatives and the tags of these: pydantic also tells which one it tried."""


def _field_of(place: tuple[int | str, ...]) -> str:
    # Of alternatives for a field, pydantic also tells which one was tried.
    return ".".join(str(part) for part in place if (place[0], part) not in ALTERNATIVES)


def problem_of(section: type[Section], field: str, error: "ErrorDetails") -> str:
    """Return what is wrong with a field, in our own words where it is no field at all."""
    if error["type"] != "extra_forbidden":
        return error["msg"].removeprefix("Value error, ")
    return f"there is no such field{_meant(section, field)}"


def _meant(section: type[Section], unknown: str) -> str:
    """Return a question about the field that an unknown one is most like: beside it, or of its name elsewhere."""
    names = list(field_names(section))
    parent, _, last = unknown.rpartition(".")
    # Without the names that a user gives, such as that of a dataset of a service.
    fields = {part for name in names for part in name.split(".")}
    kept = ".".join(part for part in parent.split(".") if part in fields)
    beside = {
        short: f"{parent}.{short}".lstrip(".")
        for above, _, short in (name.rpartition(".") for name in names)
        if above == kept
    }
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    usual = [name for name in names if name.rpartition(".")[2] == _USUAL_NAMES.get(last)]
    near = [beside[name] for name in get_close_matches(last, beside, n=1, cutoff=0.7)]
    contained = [name for short, name in beside.items() if last in short.split("_") or short in last.split("_")]
    for found in (usual, near, elsewhere, contained):
        # Of several, the one beside it is meant, or else the one of the whole and not of a part.
        own = [name for name in found if name.rpartition(".")[0] == kept]
        least = min((name.count(".") for name in found), default=0)
        if len(meant := own or [name for name in found if name.count(".") == least]) == 1:
            return f"; did you mean {meant[0]}?"
    return f"; {parent} has {', '.join(beside)}" if parent and beside else ""


def field_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a section and of those below it."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for below in _sections_of(field.annotation):
            yield from field_names(below, f"{prefix}{name}.")


def _sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_of(argument)
