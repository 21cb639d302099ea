"""The conclusion of an execution: its result, its last package, its model on disk and its evidence log."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from raycloak.coordinator.ledger.view import data_standing
from raycloak.coordinator.record.outcome import Ending, Evaluation, Finished
from raycloak.coordinator.training.admitted import AdmittedRun
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.steps import Training
from raycloak.metrics.errors import RunFailedError


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Concludes an execution, whether it ended or failed; ``training`` moves on until then."""

    order: Order
    admitted: AdmittedRun
    training: Training

    def conclude(self, ending: Ending) -> Finished:
        """Seal and write the last model, commit the last step and export the log.

        A generated secret is destroyed if the run is complete.

        Raises:
            RunFailedError: ``stopped`` if no step was finished.
        """
        training = self.training
        training.seal()
        self._close_checkpoints()
        finished = self.finished(ending)
        if finished is None:
            raise RunFailedError("stopped", "the run was stopped before its first step", _RESUME)
        training.runner.commit()
        if self.order.assignment.charges:
            # Packages cannot be opened any more once the secret is gone: the model must be on disk before.
            self._write(finished.parameters)
            if ending is Ending.STOPPED:
                export_log(self.order)
            else:
                finish_log(self.order, destroy=self.order.config.secret_retention == "run")
        return finished

    def salvage(self) -> Finished | None:
        """Seal, commit and write what a failed execution has.

        Returns:
            The result so far; None if no step was finished.
        """
        try:
            with suppress(RunFailedError):  # The model itself may have been lost; earlier packages stay.
                self.training.seal()
            self._close_checkpoints()
        finally:
            # Whatever keeps the model from being sealed: its steps were released.
            self.training.runner.commit()
        if self.training.finished_steps == 0:
            return None
        parameters = self.training.parameters()
        # Before the ledger is asked, which may be what is lost.
        self._write(parameters)
        return self._result(None, parameters, self.training.evaluated)

    def finished(self, ending: Ending | None = None) -> Finished | None:
        """Return the result so far, measured if it was not yet; None before the first step is done."""
        if self.training.finished_steps == 0:
            return None
        return self._result(ending, self.training.parameters(), self.training.evaluate)

    def charged(self) -> tuple[int, float]:
        """Return the run's charged steps, and the epsilon of all runs of its account, by the ledger's record.

        Zero before the first charge of a run that opens its account.
        """
        accounts = self.order.session.control.ledger.view().accounts
        account = next((each for each in accounts if each.name == self.admitted.run.account), None)
        if account is None:
            return 0, 0.0
        own = (run.charged_steps for run in account.runs if run.run_id == self.order.session.run_id)
        return next(own, 0), account.spent_epsilon

    def _result(
        self, ending: Ending | None, parameters: np.ndarray, evaluate: Callable[[], Evaluation | None]
    ) -> Finished:
        admitted, training = self.admitted, self.training
        view = self.order.session.control.ledger.view()
        account = next(each for each in view.accounts if each.name == admitted.run.account)
        (run,) = (run for run in account.runs if run.run_id == self.order.session.run_id)
        return Finished(
            manifest=admitted.manifest,
            plan=admitted.plan,
            parameters=parameters,
            model_digest=training.model.digest,
            steps=training.finished_steps,
            most_hosted=self.order.session.control.orchestrator.most_hosted(),
            workers=len(admitted.membership.members.workers),
            charged={each.query: each.charged for each in run.queries},
            charged_epsilon=account.spent_epsilon,
            account=account.name,
            data=data_standing(view, account.name),
            evaluation=evaluate(),
            released=self.order.folder.released(),
            evidence_class=admitted.evidence_class,
            outcomes=tuple(training.outcomes),
            measurement_outcomes=tuple(training.measurement_outcomes),
            colocated=admitted.colocated,
            ending=ending,
            rollback_witness=admitted.rollback_witness,
        )

    def _write(self, parameters: np.ndarray) -> None:
        self.order.folder.write_parameters(self.admitted.manifest, parameters, self.training.model.digest)

    def _close_checkpoints(self) -> None:
        if self.training.checkpoints is not None:
            self.training.checkpoints.close(self.order.config.failure.step_deadline_s)


def export_log(order: Order) -> None:
    """Export the evidence log of a run that may be resumed."""
    order.session.control.orchestrator.export_log(_log(order))


def finish_log(order: Order, *, destroy: bool) -> None:
    """End the evidence log for good and export it; a generated secret is destroyed if asked."""
    order.session.control.orchestrator.finish((), _log(order), destroy)


def end_log(order: Order, *, destroy: bool) -> None:
    """End the log of a failed execution and destroy a generated secret, or leave both for a resume."""
    if destroy:
        finish_log(order, destroy=True)
    else:
        export_log(order)


def _log(order: Order) -> str:
    return str(order.folder.path / "evidence.jsonl")


_RESUME = "Resume it: raycloak run CONFIG --resume"
