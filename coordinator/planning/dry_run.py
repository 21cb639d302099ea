"""`raycloak plan`: the plan of a configuration, from the sizes of its data and model. It touches no budget.

`raycloak.coordinator.planning.plan` is pure; the files and the ledger that the command reads are opened here.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.aggregation.rule_trial import try_rule
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.entries import Head
from raycloak.coordinator.ledger.view import LedgerView
from raycloak.coordinator.planning.cross_check import checked
from raycloak.coordinator.planning.data_check import recorded_check
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.coordinator.planning.model_source import compute_mode, model_source
from raycloak.coordinator.planning.outlook import with_account
from raycloak.coordinator.planning.own_metrics import own_metrics, try_metrics
from raycloak.coordinator.planning.payer import PayingAccount, account_of, data_place, existing_account, ledger_to_read
from raycloak.coordinator.planning.plan import Plan, make_plan, with_notes
from raycloak.coordinator.planning.public_split import PublicSplit, public_split
from raycloak.coordinator.planning.references import descriptor, evaluation_form, sealed_terms
from raycloak.metrics.errors import ConfigError
from raycloak.workers.evaluation import Scorer, check_evaluation_form, metric_of
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import slow_products
from raycloak.workers.gradients.row_memory import largest_rows
from raycloak.workers.gradients.sum_engines import check_measurable
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.inputs.fingerprint import dataset_fingerprint
from raycloak.workers.inputs.models import build_model, build_noted, loss_function, parameter_count, trainable_tensors
from raycloak.workers.inputs.text_model import check_text
from raycloak.workers.known_answer import check_classes
from raycloak.workers.terms.mechanism import Mechanism


def plan_of(config: RunConfig, config_dir: Path) -> Plan:
    """Return the plan of ``config``, whose relative paths start at ``config_dir``.

    Guarantee: reads the data's public outline, its fingerprint where it has one, a public split, the model and the
    ledger's accounts; charges and writes nothing.

    Raises:
        ConfigError, DatasetError, ModelError: the run cannot be made as configured; ``ledger_missing`` where it names
            an account.
        RefusedError: ``not_public`` or ``accountants_disagree``.
        BudgetError: why the account that pays would refuse the run, such as ``account_unknown`` or ``cap_exceeded``.
    """
    if config.dataset is None or config.model is None:
        raise ConfigError("config", "a plan needs both dataset and model.", "Name them in the configuration.")
    first_look(config, config_dir)
    data = descriptor(config.dataset)
    opened = data.open_slices(config_dir)
    form = dataset_form(opened.examples)
    source = model_source(config.model)
    model, notes = build_noted(source, config_dir, config.seed, compute_mode(config))
    device = "cuda" if config.use_gpu else "cpu"
    slow = slow_products(model, device, config.cpu_capability)
    loss, _ = loss_function(config.loss, config_dir)
    split_ranges(trainable_tensors(model), config.aggregators)
    spec = optimizer_spec(config.optimizer, config_dir)
    try_rule(spec, trainable_tensors(model), config.sized(form.num_examples).planned_steps, config_dir)
    deterministic = not config.allow_nondeterministic
    if source.hub is not None:
        source.hub.check_tokenizer(data.tokenizer, config_dir)
    vocabulary = check_text(model, form, config.loss, opened.vocabulary, data.classes)
    if (split := public_split(config, config_dir)) is not None:
        split.check(model, config.loss)
        _try_metrics(config, config_dir, split)
    check_trainable(model, form, loss, deterministic, vocabulary)
    check_classes(model, config.loss, opened.examples, data.classes, vocabulary, deterministic)
    sealed = sealed_terms(config, config_dir, "evaluation")
    if sealed is not None:
        check_evaluation_form(evaluation_form(sealed), form)
    rows = largest_rows(model, form, loss, deterministic, vocabulary, device)
    sizes = form.num_examples, parameter_count(model)
    fingerprint = dataset_fingerprint(data, opened, config_dir)
    plan = _paid(config, config_dir, fingerprint, lambda account: make_plan(config, *sizes, account, rows))
    for measurement in plan.measurements:
        check_measurable(measurement, form)
    check_rows(model, form, loss, _mechanisms(plan), deterministic, vocabulary)
    return replace(checked(with_notes(plan, (*notes, *slow))), data_check=recorded_check(fingerprint))


def _try_metrics(config: RunConfig, config_dir: Path, split: PublicSplit) -> None:
    """Call the user's own metrics on the untrained model; ConfigError as `try_metrics`."""
    assert config.evaluation is not None, "there is a split"
    if metrics := own_metrics(config.evaluation.metrics, (), config_dir):
        # A model of its own: the one that is checked stays in train mode.
        model = build_model(model_source(config.model), config_dir, config.seed)
        loss, _ = loss_function(config.loss, config_dir)
        try_metrics(metrics, Scorer(model, loss, metric_of(config.loss)), split.examples)


def _paid(
    config: RunConfig, config_dir: Path, fingerprint: bytes, planned: Callable[[PayingAccount | None], Plan]
) -> Plan:
    """Return a plan for the account that pays, with what that account has left for it."""
    data = data_place(config.dataset, config_dir)
    with ledger_to_read(config) as ledger:
        view = ledger.view() if ledger else LedgerView(b"", 0, Head(), ())
        name = account_of(view, config, data, fingerprint)
        paying = existing_account(view, config, name)
        plan = planned(paying)
        asked = name, _mechanisms(plan), fingerprint, config.ledger.prepaid
        outlook = ledger.outlook(*asked) if ledger and paying else None
        return with_account(plan, name, view, outlook)


def _mechanisms(plan: Plan) -> tuple[Mechanism, ...]:
    return (plan.mechanism, *(each.mechanism for each in plan.measurements))
