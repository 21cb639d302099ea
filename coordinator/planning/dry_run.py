"""`raycloak plan`: the plan of a configuration, from the sizes of its data and model. It touches no budget.

`raycloak.coordinator.planning.plan` is pure; the files and the ledger that the command reads are opened here.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.aggregation.rule_trial import try_rule
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.entries import Head
from raycloak.coordinator.ledger.known_data import check_unknown
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import PLANNED, RegistrationTerms
from raycloak.coordinator.ledger.view import LedgerView
from raycloak.coordinator.planning.correlated_noise import settled
from raycloak.coordinator.planning.cross_check import checked
from raycloak.coordinator.planning.data_check import recorded_check
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.coordinator.planning.model_source import compute_mode, loss_spec, micro_batch_bytes, model_source
from raycloak.coordinator.planning.outlook import with_account
from raycloak.coordinator.planning.own_metrics import own_metrics, try_metrics
from raycloak.coordinator.planning.payer import (
    PayingAccount,
    account_of,
    data_name,
    existing_account,
    opening_terms,
    payers_ledger,
    small_cap,
)
from raycloak.coordinator.planning.plan import Plan, make_plan, plan_mechanism, with_notes
from raycloak.coordinator.planning.public_split import public_split
from raycloak.coordinator.planning.references import descriptor, evaluation_form, sealed_terms
from raycloak.coordinator.vaults.machine_ledger import MachineLedger
from raycloak.metrics.errors import ConfigError
from raycloak.workers.evaluation import Scorer, check_evaluation_form, metric_of
from raycloak.workers.gradients.clipping import check_batch
from raycloak.workers.gradients.environment import own_flags, widest_shared
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import slow_products
from raycloak.workers.gradients.placement import bytes_over
from raycloak.workers.gradients.row_memory import FEWEST_ROWS, largest_rows, scored_rows
from raycloak.workers.gradients.sum_engines import check_measurable
from raycloak.workers.inputs.augmentation import Versions
from raycloak.workers.inputs.datasets import DatasetForm, SteadyDataset
from raycloak.workers.inputs.descriptor import OpenedDataset, require_nobody_in_both
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.known_answer import check_classes
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.liger import require_gpu
from raycloak.workers.models.models import (
    LARGEST_IN_DRIVER,
    LossFn,
    build_noted,
    is_left_to_workers,
    loss_function,
    parameter_count,
    trainable_tensors,
    twin_of,
)
from raycloak.workers.models.text_model import check_text
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
    facts = _facts_of(config, config_dir)
    model, form, loss = facts.model, facts.form, facts.loss
    left: tuple[str, ...] = (_left_to_workers(facts.largest_rows),) if is_left_to_workers(model) else ()
    slow = _slow_products(model, config)
    split_ranges(trainable_tensors(model), config.first_aggregators)
    spec = optimizer_spec(config.optimizer, config_dir)
    if (augment := descriptor(config.dataset).augment) is not None:
        Versions(augment, form, config_dir)
    config = settled(config, *facts.sizes)
    groups = try_rule(spec, trainable_tensors(model), config.planned_steps, config_dir)
    if (split := public_split(config, config_dir)) is not None:
        split.check(model, config.loss_name)
        split.require_features(facts.opened.features)
        assert config.evaluation is not None, "there is a split"
        require_nobody_in_both(facts.opened.units, split.units, config.evaluation.dataset.unit)
        metrics = own_metrics(config.evaluation.metrics, (), config_dir)
        if left and metrics:
            left += ("evaluation.metrics need its outputs, so the driver runs it on the evaluation split, on a CPU.",)
        elif left:
            check_evaluation_form(split.form, form)
            left += ("the workers measure it on the evaluation split.",)
        elif metrics:
            # A twin: the model that is checked stays in train mode.
            twin = twin_of(model)
            rows = scored_rows(twin.eval(), split.form, loss, facts.vocabulary, micro_batch_bytes(config))
            try_metrics(metrics, Scorer(twin, loss, metric_of(config.loss_name), rows), split.examples)
    sealed = sealed_terms(config, config_dir, "evaluation")
    if sealed is not None:
        check_evaluation_form(evaluation_form(sealed), form)
    plan = _paid(config, config_dir, facts)
    check_batch(plan.mechanism)
    for measurement in plan.measurements:
        check_measurable(measurement, form)
    if not left:
        check_rows(model, form, loss, _mechanisms(plan), not config.allow_nondeterministic, facts.vocabulary)
    beside = (f"evaluation.dataset: {each}" for each in (split.left_out if split else ()))
    noted = with_notes(plan, (*facts.notes, *slow, *left), (*facts.opened.left_out, *beside))
    return replace(
        checked(noted),
        features=facts.opened.features_text(form),
        data_check=recorded_check(facts.data.fingerprint),
        groups=groups,
        gpu_bytes=_gpu_bytes(model, config),
    )


def mechanism_of(config: RunConfig, config_dir: Path) -> Mechanism:
    """Return the mechanism of :func:`plan_of`, whatever is left in the account that pays.

    Raises:
        ConfigError, DatasetError, ModelError, BudgetError: as :func:`plan_of` for data, model and account; also
            ``account_known`` for data that is declared public, and that an account of the ledger pays for.
    """
    facts = _facts_of(config, config_dir)
    with payers_ledger(config) as ledger:
        view, name, paying = _payer(ledger, config, config_dir, facts.data)
        if paying is None and config.dataset is not None and config.dataset.public:
            check_unknown(name, facts.data, view.known)
    return plan_mechanism(config, *facts.sizes, paying, facts.largest_rows)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Data, model and loss of a configuration, which fit each other.

    Attributes:
        notes: about how the model was built.
        sizes: numbers of examples and of trainable parameters.
        vocabulary, largest_rows, data: as a worker finds them.
    """

    opened: OpenedDataset
    model: nn.Module
    notes: tuple[str, ...]
    form: DatasetForm
    loss: LossFn
    sizes: tuple[int, int]
    vocabulary: int | None
    largest_rows: int
    data: DataMarks


def _facts_of(config: RunConfig, config_dir: Path) -> _Facts:
    """Open and check data and model, as the workers of a run do."""
    assert config.dataset is not None, "a plan needs data"
    data, source = descriptor(config.dataset), model_source(config.model)
    opened = data.open_slices(config_dir)
    form = opened.form
    if isinstance(opened.examples, SteadyDataset):
        # As the workers do before the first step: a void example, or one that changes, is found here.
        opened.examples.read_rest()
    model, notes = build_noted(source, config_dir, config.seed, compute_mode(config))
    loss, _ = loss_function(loss_spec(config.loss), config_dir)
    if source.hub is not None:
        source.hub.check_tokenizer(data.tokenizer, config_dir)
        if source.hub.use_liger_kernels:
            require_gpu(_device(config))
    fed_by_name(model, form.inputs)
    vocabulary = check_text(model, form, config.loss_name, opened.vocabulary, data.classes)
    deterministic = not config.allow_nondeterministic
    if is_left_to_workers(model):
        rows = FEWEST_ROWS
    else:
        with opened.naming_features(form):
            check_trainable(model, form, loss, deterministic, vocabulary)
        check_classes(model, config.loss_name, opened.examples, data.classes, vocabulary, deterministic)
        of_device = _device(config), micro_batch_bytes(config)
        rows = largest_rows(model, form, loss, deterministic, vocabulary, *of_device)
    return _Facts(
        opened=opened,
        model=model,
        notes=notes,
        form=form,
        loss=loss,
        sizes=(form.population, parameter_count(model)),
        vocabulary=vocabulary,
        largest_rows=rows,
        data=data_marks(data, opened, config_dir),
    )


def _slow_products(model: nn.Module, config: RunConfig) -> tuple[str, ...]:
    if config.cpu_capability != "auto":
        return slow_products(model, _device(config), config.cpu_capability)
    slow = slow_products(model, _device(config), widest_shared([own_flags()]))
    return tuple(f"{each} The plan takes the CPUs of the run's nodes to be like this machine's." for each in slow)


def _left_to_workers(rows: int) -> str:
    return (
        f"it has over {LARGEST_IN_DRIVER / 1e9:.0f} GB, so this plan did not run it: each worker checks it before "
        f"anything is charged, and measures how many rows it holds at once; here {rows} are assumed."
    )


def _gpu_bytes(model: nn.Module, config: RunConfig) -> tuple[int, ...]:
    """Return the bytes on each GPU of a worker; ModelError ``unsplittable_model`` if they cannot share the model."""
    if not config.use_gpu:
        return ()
    # A share of a GPU holds a whole model, and a worker that nobody gives a number of them has at most one.
    return tuple(bytes_over(model, max(1, int(config.placement.resources_per_worker.get("GPU", 1)))))


def _device(config: RunConfig) -> str:
    return "cuda" if config.use_gpu else "cpu"


def _paid(config: RunConfig, config_dir: Path, facts: _Facts) -> Plan:
    """Return a plan for the account that pays, with what that account has left for it."""
    with payers_ledger(config) as ledger:
        view, name, paying = _payer(ledger, config, config_dir, facts.data)
        plan = make_plan(config, *facts.sizes, paying, facts.largest_rows)
        # A run of this plan has no id and no manifest yet.
        run = RegistrationTerms(
            run_id="(planned)",
            account=name,
            mechanisms=_mechanisms(plan),
            manifest_digest=b"",
            data=facts.data,
            public=config.dataset is not None and config.dataset.public,
            prepaid=config.ledger.prepaid,
            opens=opening_terms(config, paying, plan.mechanism.accountant),
            lineage=PLANNED,
        )
        # Also of an account that the run would open: the ledger may refuse it.
        outlook = ledger.outlook(run) if ledger else None
        warning = small_cap(config, paying)
        asks = (f"{warning} raycloak run asks for --yes.",) if warning else ()
        with_payer = with_account(plan, name, view, outlook if paying else None)
        form = facts.form
        alone = form.units is not None and form.units == form.num_examples
        only = (f"every {plan.mechanism.unit} has one row, so it protects what an example does.",) if alone else ()
        return replace(with_payer, warnings=(*with_payer.warnings, *only, *asks))


def _payer(
    ledger: PrivacyLedger | MachineLedger | None, config: RunConfig, config_dir: Path, data: DataMarks
) -> tuple[LedgerView, str, PayingAccount | None]:
    """Return the view of the ledger, the name of the account that pays, and it; None if the run is to open it."""
    view = ledger.view() if ledger else LedgerView(b"", 0, Head(), ())
    name = account_of(view, config, data, data_name(config.dataset, config_dir))
    return view, name, existing_account(view, config, name)


def _mechanisms(plan: Plan) -> tuple[Mechanism, ...]:
    return (plan.mechanism, *(each.mechanism for each in plan.measurements))
