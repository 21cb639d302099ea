"""The report of `raycloak model check`, from a run on the public outline of a configuration's data if there is one."""

from pathlib import Path

from torch import nn

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.model_source import loss_spec, model_source
from raycloak.coordinator.planning.references import descriptor
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.model_report import ModelReport, report_on
from raycloak.workers.known_answer import check_classes
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.models import ModelSource, build_unchecked, loss_function
from raycloak.workers.models.text_model import check_text


def report_by_type(target: str, base: Path) -> tuple[ModelReport, tuple[str, ...]]:
    """Return the report on ``module:function`` by its layers' types alone, and notes about how it was built.

    Raises:
        ConfigError, ModelError: the model cannot be built.
    """
    model, notes = build_unchecked(ModelSource.of(target), base, 0)
    return report_on(model), notes


def report_in_a_run(config: RunConfig, base: Path) -> tuple[ModelReport, tuple[str, ...]]:
    """Return the report on the model of ``config``, also run on synthetic examples of its dataset's form.

    Without a dataset the types alone are judged.

    Raises:
        ConfigError, DatasetError, ModelError: model, loss or dataset cannot be opened, or do not fit each other.
    """
    model, notes = build_unchecked(model_source(config.model), base, config.seed)
    if config.dataset is None:
        return report_on(model), notes
    described = descriptor(config.dataset)
    opened = described.open_slices(base)
    form, (loss, _) = opened.form, loss_function(loss_spec(config.loss), base)
    fed_by_name(model, form.inputs)
    vocabulary = check_text(model, form, config.loss_name, opened.vocabulary, described.classes)
    deterministic = not config.allow_nondeterministic

    def check(probe: nn.Module) -> None:
        check_trainable(probe, form, loss, deterministic, vocabulary)
        check_classes(probe, config.loss_name, opened.examples, described.classes, vocabulary, deterministic)

    return report_on(model, check), notes
