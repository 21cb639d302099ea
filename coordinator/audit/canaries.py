"""The task that an audit trains: the user's data and model, and canaries that only an audit could notice.

A canary is an example whose gradient is one coordinate of its own. The model gets one more parameter per canary, and a
canary's loss is ``RAW_NORM * C`` times that parameter, up to its sign. Clipping brings the gradient to norm C along an
axis that nothing else touches, which is the strongest example the mechanism's guarantee covers. A canary that its coin
keeps out stays in the dataset and contributes zero, which is the adjacency of the mechanism.

The sign follows from the last bit of the parameter itself. So an observer of the released model knows it, and it is as
good as random from step to step. Two steps under one noise then differ, even if every example is in every batch.

Model and loss travel as ordinary ``module:function`` names in a folder. The dataset is of a kind of its own: workers
open the examples as in any run and add the canaries themselves (`workers/inputs/canaries.py`). So the fingerprint of a
file stays its own, and no function can pass other examples for it.
"""

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycloak.coordinator.audit.removals import largest_move
from raycloak.coordinator.config.losses import LossField
from raycloak.coordinator.config.run import ModelField, RunConfig
from raycloak.coordinator.config.section import Section
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.planning.model_source import loss_spec, model_source
from raycloak.coordinator.planning.references import descriptor, require_at_hand
from raycloak.metrics.errors import ConfigError, ModelError
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.inputs.datasets import CanaryDataset, Dataset, dataset_form
from raycloak.workers.inputs.descriptor import AuditedExamples, DatasetDescriptor
from raycloak.workers.models.models import LossFn, build_model, loss_function, read_flat
from raycloak.workers.models.text_model import check_text
from raycloak.workers.terms.mechanism import Mechanism

RAW_NORM = 2.0**10
"""The norm of a canary's gradient before clipping, in units of C: a missing or late clip cannot be overlooked."""

MODULE = "raycloak_audit_task"
_TASK_FILE = "task.json"
_EXAMPLES_FILE = "examples.json"
_LOADER = '''"""What one audit trains; written by `raycloak audit`."""

from pathlib import Path

from raycloak.coordinator.audit.canaries import CanaryTask

TASK = CanaryTask.read(Path(__file__).parent)
model, loss = TASK.make_model, TASK.loss
'''


class CanaryModel(nn.Module):
    """The user's model with one parameter per canary. Output rows are the model's, the canary's and the marker."""

    def __init__(self, inner: nn.Module, feature_shape: tuple[int, ...], canaries: int) -> None:
        super().__init__()
        self.inner = inner
        self.canaries = nn.Linear(canaries, 1, bias=False)
        nn.init.zeros_(self.canaries.weight)
        self._feature_shape = feature_shape

    def forward(self, features: Tensor) -> Tensor:
        count = len(features)
        marker = features[:, -1:].float()
        numbers = torch.arange(1, self.canaries.in_features + 1, device=marker.device)
        output = self.inner(features[:, :-1].reshape(count, *self._feature_shape))
        signs = 1 - 2 * (self.canaries.weight.detach().view(torch.int32) & 1)
        chosen = (marker.floor() == numbers) * signs.float()
        return torch.cat([output.reshape(count, -1), self.canaries(chosen), marker], dim=1)


def canary_signs(parameters: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return +1 or -1 for each canary: the sign of its gradient if its parameter has this value; any shape."""
    return 1 - 2 * (parameters.view(np.int32).astype(np.int64) & 1)


class CanaryTask(Section):
    """The data needed to build dataset, model and loss of an audit in any process.

    Attributes:
        base: absolute folder that names of the audited configuration start from.
        feature_shape, output_shape: shapes of one example.
        vocabulary: number of ids that integer features are; None for other features.
        included: the coins. Secret, like the examples: the file has mode 0600.
        raw_norm: norm of a canary's gradient before clipping.
    """

    base: str
    dataset: DatasetConfig
    model: ModelField
    loss_function: LossField
    feature_shape: tuple[int, ...]
    vocabulary: int | None
    output_shape: tuple[int, ...]
    included: tuple[bool, ...]
    raw_norm: float

    @classmethod
    def of(cls, config: RunConfig, base: Path, included: Sequence[bool]) -> "CanaryTask":
        """Make the task of an audit of ``config``.

        Raises:
            ConfigError: ``config`` if it names no dataset or model. DatasetError and ModelError as a run.
        """
        if config.dataset is None or config.model is None:
            raise ConfigError("config", "an audit needs both dataset and model.", "Name them in the configuration.")
        if config.dataset.kind == "sealed":
            raise ConfigError("config", "an audit takes no sealed dataset.", "Audit it where it is in the clear.")
        if config.dataset.augment is not None:
            raise ConfigError(
                "config",
                "an audit's canaries have no versions, and the configuration computes some of each row.",
                "Audit it with --set dataset.augment=null.",
            )
        require_at_hand(config.dataset, "an audit")
        opened = descriptor(config.dataset).open_slices(base)
        form = opened.form
        inner = build_model(model_source(config.model), base, config.seed)
        zeros = np.zeros((2, *form.feature_shape), form.feature_dtype)
        try:
            with torch.no_grad():
                output_shape = tuple(inner(torch.from_numpy(zeros)).shape[1:])
        except Exception as error:
            raise ModelError(
                "model_input",
                f"the model fails on features of zero: {type(error).__name__}.",
                "Let it take features of the dataset's shape.",
            ) from error
        task = cls(
            base=str(base.resolve()),
            dataset=config.dataset,
            model=config.model,
            loss_function=config.loss,
            feature_shape=form.feature_shape,
            vocabulary=check_text(inner, form, config.loss_name, opened.vocabulary, descriptor(config.dataset).classes),
            output_shape=output_shape,
            included=tuple(bool(each) for each in included),
            raw_norm=RAW_NORM * config.dp_config.max_grad_norm,
        )
        task.check(config.seed)
        return task

    @classmethod
    def read(cls, folder: Path) -> "CanaryTask":
        """Read the task that :meth:`write` wrote."""
        return cls.model_validate_json((folder / _TASK_FILE).read_bytes())

    def write(self, folder: Path) -> None:
        """Write the task and its loader to ``folder``, private to this user, so that a configuration can name it."""
        audited = AuditedExamples(base=self.base, dataset=descriptor(self.dataset), included=self.included)
        for name, content in ((_TASK_FILE, self.model_dump_json().encode()), (_EXAMPLES_FILE, audited.encode())):
            path = folder / name
            # Before the content, which others could otherwise read for a moment.
            path.touch(mode=0o600)
            path.write_bytes(content)
        (folder / f"{MODULE}.py").write_text(_LOADER, encoding="utf-8")

    def check(self, seed: int) -> None:
        """Refuse a model under which canaries would be invisible.

        Guarantee: at the initial parameters each kind of canary has the gradient that this module describes. An
        included one has its own axis alone, an excluded one has none.

        Raises:
            ModelError: ``canary_gradient``.
        """
        # The caller's random state stays as it is.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            gradients = GradientParts(self.make_model(), self.loss)
        count = len(self._examples)
        both = [self.included.index(kind) for kind in (True, False) if kind in self.included]
        features, labels = self.make_dataset().batch(np.array(both, np.int64) * self._rows_each + count)
        with warnings.catch_warnings():
            # torch warns that no input needs a gradient, which is intended: only parameters do.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            rows = gradients.rows(torch.from_numpy(features), torch.from_numpy(labels))
        found = torch.cat([row.flatten(1) for row in rows], dim=1)
        expected = torch.zeros_like(found)
        for row, number in enumerate(both):
            expected[row, number - len(self.included)] = self.raw_norm if self.included[number] else 0.0
        if not torch.equal(found, expected):
            raise ModelError(
                "canary_gradient",
                "the model or loss gives an example of zeros a gradient that is not finite, so canaries would be "
                "invisible.",
                "Audit the same configuration with a model that accepts features of zero.",
            )

    def described(self) -> DatasetDescriptor:
        """Return the descriptor of the dataset, for a worker whose base folder :meth:`write` wrote to."""
        key = self.dataset.fingerprint_key
        return DatasetDescriptor(
            kind="canaries",
            path=_EXAMPLES_FILE,
            vocabulary=self.vocabulary,
            public=self.dataset.public,
            fingerprint_key=str(Path(self.base) / key) if key else None,
            unit=self.dataset.unit_name,
            rows_per_unit=self._rows_each,
        )

    def make_dataset(self) -> CanaryDataset:
        """Build the dataset: the user's examples, then the canaries."""
        return CanaryDataset(self._examples, np.array(self.included), self._rows_each)

    def make_model(self) -> CanaryModel:
        """Build the model. The user's is drawn first, so that its initial parameters are as in the audited run."""
        inner, _ = model_source(self.model).drawing(self.base)()
        return CanaryModel(inner, self.feature_shape, len(self.included))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the user's loss of an example, and ``raw_norm`` times the output of a canary: [n]."""
        marker = output[:, -1]
        own = self._inner_loss(output[:, :-2].reshape(len(output), *self.output_shape), labels)
        if own.shape != marker.shape:
            return own  # refused by the caller, which asked for one loss per example
        return torch.where((marker >= 0) & (marker < 1), own, self.raw_norm * output[:, -2])

    def largest_move(self, mechanism: Mechanism, last: NDArray[np.float32], config: RunConfig) -> float:
        """Measure removals in the user's own model; see :func:`raycloak.coordinator.audit.removals.largest_move`.

        Args:
            last: float32[d], the last parameters of this task's model.
        """
        module = build_model(model_source(self.model), Path(self.base), config.seed)
        return largest_move(
            module,
            self._inner_loss,
            dataset_form(self._examples),
            mechanism,
            (read_flat(module), last[: -len(self.included)]),
            deterministic=not config.allow_nondeterministic,
            vocabulary=self.vocabulary,
        )

    @property
    def _rows_each(self) -> int:
        return descriptor(self.dataset).rows_per_unit

    @cached_property
    def _examples(self) -> Dataset:
        return descriptor(self.dataset).open(self.base)

    @cached_property
    def _inner_loss(self) -> LossFn:
        found, _ = loss_function(loss_spec(self.loss_function), self.base)
        return found
