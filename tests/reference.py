"""Writes docs/reference/: a page for each group of public names of `raycloak`, from their signatures and docstrings.

`make reference` writes the pages; `test_reference.py` says whether they are up to date.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import raycloak
from raycloak.metrics.listing import all_listed
from raycloak.workers.inputs.descriptor import CONFIGURED
from tests.layout import ROOT

FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "training": (
        "Training",
        "Train a model, load it, and plan what it costs.",
        ["Trainer", "tunable", "load", "load_config", "make_plan", "Plan", "StepReport"],
    ),
    "configuration": (
        "Configuration",
        "The fields of a run. [Configuration](../configuration.md) explains them at length.",
        [
            "RunConfig",
            "DPConfig",
            "NoiseConfig",
            "DatasetConfig",
            "EvaluationConfig",
            "EarlyStoppingConfig",
            "LossConfig",
            "OptimizerConfig",
            "ParameterGroupConfig",
            "MeasurementsConfig",
            "ClassCountsConfig",
            "PrivateEvaluationConfig",
            "CheckpointConfig",
            "FailureConfig",
            "LedgerConfig",
            "LoggersConfig",
            "MasksConfig",
            "MLflowConfig",
            "WandbConfig",
            "TensorBoardConfig",
            "MetricsConfig",
            "PlacementConfig",
            "RingConfig",
        ],
    ),
    "sending": (
        "Sending data",
        "Encrypt examples for the attested workers of a training service. [Sending](../sending.md) explains it.",
        ["DataKeys", "DataTerms", "SentRun"],
    ),
    "data-and-models": (
        "Data and models",
        "The data that workers open, and the models that they build.",
        ["Dataset", "ArrayDataset", "DatasetDescriptor", "ModelSource"],
    ),
    "callbacks": (
        "Callbacks",
        "The reports that your own callback gets. [Extending raycloak](../extending.md) covers all your own code. The "
        "type of a field says what its value depends on: a `Fact` depends on no example; a `Physical` value is "
        "measured on a machine; a `Release` is computed from released values, or on public data.",
        [
            "Callback",
            "RunStarted",
            "EvaluationReport",
            "MeasurementReport",
            "CheckpointReport",
            "MembershipReport",
            "RunEnded",
        ],
    ),
    "loggers": (
        "Loggers",
        "Callbacks that log a run to a tracking tool. [Loggers](../loggers.md) has examples.",
        ["MLflowLogger", "WandbLogger", "TensorBoardLogger"],
    ),
    "by-hand": (
        "A step loop of your own",
        "The calls that `examples/actors_by_hand.py` uses.",
        ["by_hand", "HandLoop"],
    ),
    "service": (
        "The training service",
        "Your own loop over a service. [The training service](../service.md) explains it.",
        [
            "ServiceClient",
            "ServiceCredentials",
            "TrainingClient",
            "ServiceFuture",
            "TrainingConfig",
            "LoraConfig",
            "ModelConfig",
            "ClientStatus",
            "DpMetrics",
            "ForwardBackwardResult",
            "OptimStepResult",
            "Artifact",
            "LoadStateResult",
            "SampleResult",
            "Completion",
            "Progress",
            "ClientSummary",
            "Capabilities",
        ],
    ),
    "errors": (
        "Errors",
        "Every error that raycloak raises on purpose, with a stable code, one sentence, and what to do.",
        [name for name in raycloak.__all__ if name.endswith("Error")],
    ),
}
LAST = ("actors", "Actors and messages", "The parts of a run. `raycloak.by_hand` drives them.")
"""The page of every name that no other page has."""

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Guarantee):\s*(.*)$")
_ITEM = re.compile(r"^(\*{0,2}[\w`., *]+?): (.*)$")


def pages() -> dict[str, str]:
    """Return the text of each page, by file name."""
    placed = {name for _, _, names in PAGES.values() for name in names}
    rest = [name for name in raycloak.__all__ if name not in placed and name != "__version__"]
    groups = {**PAGES, LAST[0]: (*LAST[1:], rest)}
    written = {f"{file}.md": _page(title, about, names) for file, (title, about, names) in groups.items()}
    links = [
        f"| [{title}]({file}.md) | {', '.join(f'`{name}`' for name in names)} |"
        for file, (title, _, names) in groups.items()
    ]
    about = "Every public name of `raycloak`. `make reference` writes these pages from the docstrings."
    return {
        "README.md": "\n".join(["# Reference", "", about, "", "| page | names |", "|---|---|", *links, ""]),
        **written,
    }


def _page(title: str, about: str, names: list[str]) -> str:
    parts = [f"# {title}", "", about, ""]
    for name in names:
        parts += _entry(name, getattr(raycloak, name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(name: str, found: Any) -> Iterator[str]:
    """Yield the lines about one public name."""
    definition = _definition(found)
    yield from (f"## {name}", "")
    if isinstance(definition, ast.ClassDef):
        bases = [ast.unparse(base) for base in definition.bases if not ast.unparse(base).startswith("Generic")]
        header = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
        yield from _code([header, *(f"    {line}" for line in _fields(definition)), *_constructor(definition)])
    else:
        yield from _code([_header(definition)])
    yield from _text(inspect.getdoc(found) or "")
    if found is raycloak.DatasetConfig:
        yield from ("**Kinds:**", "", *_kinds(), "")
    if inspect.isclass(found):
        for method, value in _methods(found):
            yield from (f"### {name}.{method}", "")
            inner = _definition(value)
            inner.name = method  # a method may be another one's, under a name of its own
            decorated = {ast.unparse(each) for each in inner.decorator_list}
            if decorated & {"property", "cached_property"}:
                yield from _code([f"{method}: {ast.unparse(inner.returns)}" if inner.returns else method])
            else:
                yield from _code([_header(inner)])
            yield from _text(inspect.getdoc(getattr(value, "fget", value)) or "")


def _kinds() -> Iterator[str]:
    """Yield what each kind of dataset is, and the fields that not every kind takes, from the catalogue of kinds."""
    for name, kind in CONFIGURED.items():
        fields = [
            f"{verb} {all_listed([each if ' ' in each else f'`{each}`' for each in given])}"
            for verb, given in (("needs", kind.needs), ("may have", kind.takes), ("does not take", list(kind.refuses)))
            if given
        ]
        sentence = f" It {'; '.join(fields)}." if fields else ""
        text = f"* `{name}`: {kind.about.replace('``', '`')}.{sentence}"
        yield from textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _definition(found: Any) -> Any:
    source = textwrap.dedent(inspect.getsource(getattr(found, "fget", None) or getattr(found, "__func__", found)))
    return ast.parse(source).body[0]


def _header(definition: ast.FunctionDef) -> str:
    """Return a function's name, parameters and result, on as many lines as they need."""
    arguments = definition.args
    own = [each for each in (*arguments.posonlyargs, *arguments.args) if each.arg in ("self", "cls")]
    arguments.posonlyargs = [each for each in arguments.posonlyargs if each not in own]
    arguments.args = [each for each in arguments.args if each not in own]
    named = definition.returns and ast.unparse(definition.returns) != "None"
    result = f" -> {ast.unparse(definition.returns)}" if definition.returns and named else ""
    line = f"{definition.name}({', '.join(_parameters(arguments))}){result}"
    if len(line) <= 100:
        return line
    each = "".join(f"    {parameter},\n" for parameter in _parameters(arguments))
    return f"{definition.name}(\n{each}){result}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = list(zip(plain, defaults, strict=True))
    yield from (_parameter(*pair) for pair in pairs)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from (_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    given = f" = {ast.unparse(default)}" if default is not None else ""
    return f"{ast.unparse(argument)}{given}"


def _constructor(definition: ast.ClassDef) -> list[str]:
    """Return an empty line and the call that makes an object, of a class that writes its constructor out."""
    for each in definition.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            each.name, each.returns = definition.name, None
            return ["", *_header(each).splitlines()]
    return []


def _fields(definition: ast.ClassDef) -> list[str]:
    """Return the annotated fields of a class."""
    found = []
    for each in definition.body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            text = ast.unparse(each)
            if "ClassVar" not in text:
                found += textwrap.wrap(text, 112, subsequent_indent="    ", break_long_words=False)
    return found


def _methods(found: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties with a docstring, also those of raycloak's own base classes."""
    seen = set()
    for kind in found.__mro__:
        if not kind.__module__.startswith("raycloak.") or (kind is not found and kind.__name__ in raycloak.__all__):
            continue
        for name, value in vars(kind).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if name[0] != "_" and name not in seen and inspect.isfunction(function) and function.__doc__:
                seen.add(name)
                yield name, value


def _text(docstring: str) -> Iterator[str]:
    """Yield a docstring as Markdown: its sections become lists."""
    listed = False
    for line in docstring.splitlines():
        plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line.strip()).replace("``", "`")
        section = _SECTION.match(plain)
        if section and not line.startswith(" "):
            listed = section[1] != "Guarantee"
            yield f"**{section[1]}:** {section[2]}".rstrip()
            if listed:
                yield ""
        elif listed and line.startswith("    ") and not line.startswith("     ") and (item := _ITEM.match(plain)):
            label = item[1] if "`" in item[1] or " or " in item[1] else f"`{item[1]}`"
            yield f"* {label}: {item[2]}"
        elif listed and line.startswith("     "):
            yield f"  {plain}"
        else:
            if plain and not line.startswith(" "):
                listed = False
            yield plain
    yield ""


def _code(lines: list[str]) -> Iterator[str]:
    yield from ("```text", *lines, "```", "")


def main() -> None:
    """Write all pages."""
    written = pages()  # first, so that a docstring that cannot be written leaves the former pages
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        path.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
