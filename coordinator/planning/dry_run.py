"""`raycloak plan`: the plan of a configuration, from the sizes of its data and model. It touches no budget.

`raycloak.coordinator.planning.plan` is pure; the files and the ledger that the command reads are opened here.
"""

from dataclasses import replace
from pathlib import Path

from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.planning.cross_check import checked
from raycloak.coordinator.planning.data_check import known_fingerprint, recorded_check
from raycloak.coordinator.planning.model_source import compute_mode, model_source
from raycloak.coordinator.planning.payer import PayingAccount, paying_account
from raycloak.coordinator.planning.plan import Plan, make_plan, with_notes
from raycloak.coordinator.planning.references import descriptor, evaluation_form, preflight, sealed_terms
from raycloak.metrics.errors import ConfigError
from raycloak.workers.evaluation import check_evaluation_form
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import slow_products
from raycloak.workers.gradients.row_memory import largest_rows
from raycloak.workers.gradients.sum_engines import check_measurable
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.inputs.models import build_noted, loss_function, parameter_count, trainable_tensors
from raycloak.workers.inputs.text_model import check_text


def plan_of(config: RunConfig, config_dir: Path) -> Plan:
    """Return the plan of ``config``, whose relative paths start at ``config_dir``.

    Guarantee: reads the data's public outline, the model and the ledger's accounts; charges and writes nothing.

    Raises:
        ConfigError, DatasetError, ModelError: the run cannot be made as configured; ``ledger_missing`` where it names
            an account.
        RefusedError: ``not_public`` or ``accountants_disagree``.
        BudgetError: ``account_unknown`` or ``account_mismatch`` for the named account.
    """
    if config.dataset is None or config.model is None:
        raise ConfigError("config", "a plan needs both dataset and model.", "Name them in the configuration.")
    preflight(config, config_dir)
    data = descriptor(config.dataset)
    opened = data.open_slices(config_dir)
    form = dataset_form(opened.examples)
    source = model_source(config.model)
    model, notes = build_noted(source, config_dir, config.seed, compute_mode(config))
    slow = slow_products(model, "cuda" if config.use_gpu else "cpu", config.cpu_capability)
    loss, _ = loss_function(config.loss, config_dir)
    split_ranges(trainable_tensors(model), config.aggregators)
    deterministic = not config.allow_nondeterministic
    if source.hub is not None:
        source.hub.check_tokenizer(data.tokenizer, config_dir)
    vocabulary = check_text(model, form, config.loss, opened.vocabulary, data.classes)
    check_trainable(model, form, loss, deterministic, vocabulary)
    sealed = sealed_terms(config, config_dir, "evaluation")
    if sealed is not None:
        check_evaluation_form(evaluation_form(sealed), form)
    rows = largest_rows(model, form, loss, deterministic, vocabulary)
    plan = make_plan(config, form.num_examples, parameter_count(model), _account(config), rows)
    for measurement in plan.measurements:
        check_measurable(measurement, form)
    mechanisms = (plan.mechanism, *(each.mechanism for each in plan.measurements))
    check_rows(model, form, loss, mechanisms, deterministic, vocabulary)
    found = recorded_check(known_fingerprint(data, opened, config_dir))
    return replace(checked(with_notes(plan, (*notes, *slow))), data_check=found)


def _account(config: RunConfig) -> PayingAccount | None:
    """Return the named account; None if the run opens its own."""
    if config.ledger.account is None:
        return None
    ledger = PrivacyLedger(config.ledger.url or home.ledger_url(), create=False)
    try:
        return paying_account(ledger.view(), config)
    finally:
        ledger.close()
