"""The known answer: the vector that this machine computes from a public synthetic batch, with public keys.

Machines of one numerics class agree on it. A machine that differs could put two different gradients under the same
noise, so it is refused at admission.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.metrics.errors import ConfigError, ModelError, RaycloakError, is_gpu_error, is_out_of_memory
from raycloak.workers.device.words import Words
from raycloak.workers.gradients.gradient_parts import named_operations
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.sum_engines import SumEngine
from raycloak.workers.inputs.augmentation import Versions
from raycloak.workers.inputs.datasets import ArrayDataset, Dataset, named_inputs_of
from raycloak.workers.inputs.named_inputs import packed
from raycloak.workers.inputs.units import Units
from raycloak.workers.models.losses import BUILT_IN_LOSSES
from raycloak.workers.models.models import device_of
from raycloak.workers.terms.loss import LOSSES_OF_CLASSES
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.streams import KeyStream
from raycloak.workers.virtual_worker import VirtualWorkerComputer

# Known to everybody: the answer must be reproducible, and there is nothing to protect in a synthetic batch.
_PUBLIC_KEY = Secret(bytes(32))


def _features(template: Dataset, count: int, vocabulary: int) -> np.ndarray:
    """Return public features in the form of ``template``: values in [0, 1), or any ids.

    Of several inputs by name, each is drawn as if it were alone.
    """
    if not (inputs := named_inputs_of(template)):
        return _fill(template.batch(np.empty(0, np.int64))[0], count, "features", vocabulary)
    parts = {
        each.name: _fill(np.empty((0, *each.shape), each.dtype), count, f"features {each.name}", each.vocabulary or 1)
        for each in inputs
    }
    return packed(parts, inputs)


def _fill(template: np.ndarray, count: int, name: str, integers_below: int) -> np.ndarray:
    shape = (count, *template.shape[1:])
    # Eight octets a value: the remainder of one alone would never reach the higher ids.
    stream = KeyStream(derive(_PUBLIC_KEY, Purpose.KNOWN_ANSWER, name)).bytes(8 * int(np.prod(shape)))
    words = np.frombuffer(stream, "<u8").reshape(shape)
    if np.issubdtype(template.dtype, np.floating):
        return (words % 256 / 256).astype(template.dtype)
    return (words % integers_below).astype(template.dtype)


def found_classes(
    module: nn.Module, loss: RowLoss, dataset: Dataset, vocabulary: int | None = None, deterministic: bool = True
) -> int:
    """Return the number of classes that integer labels may name, as the model's output shows it; at least 2.

    It is the size of the one axis that outputs have more than labels. A loss that fails on the last class of them, such
    as one of pairs, is taken to know two. Nobody's labels are read.

    Args:
        dataset: read for shapes and dtypes only.
        vocabulary: see :func:`known_answer`.
        deterministic: see `raycloak.workers.gradients.gradient_parts.named_operations`.

    Raises:
        ModelError: ``nondeterministic_op``.
    """
    return max(2, _outputs(module, loss, dataset, vocabulary, deterministic))


def _outputs(module: nn.Module, loss: RowLoss, dataset: Dataset, vocabulary: int | None, deterministic: bool) -> int:
    """Return the number of outputs for classes, as :func:`found_classes`; 1 for a head that knows no two."""
    _, labels = dataset.batch(np.empty(0, np.int64))
    if np.issubdtype(labels.dtype, np.floating):
        return 2
    with torch.no_grad(), named_operations(deterministic), warnings.catch_warnings(action="ignore"):
        device = device_of(module)
        output: Tensor = module(torch.tensor(_features(dataset, 1, vocabulary or 1), device=device))
        shape = list(output.shape[1:])
        # The first axis or the last, if the others are those of labels.
        others = ((shape[0], shape[1:]), (shape[-1], shape[:-1])) if shape else ()
        classes = next((size for size, rest in others if rest == list(labels.shape[1:])), 2)
        try:
            loss(output, torch.full((1, *labels.shape[1:]), max(2, classes) - 1, device=device))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # User code may raise anything at a label that is none for it.
            return 2
    return classes


def check_classes(
    module: nn.Module,
    loss: str,
    dataset: Dataset,
    classes: int | None,
    vocabulary: int | None = None,
    deterministic: bool = True,
) -> None:
    """Refuse data of more declared classes than model or loss knows, and one output; a function of public facts only.

    The labels beyond them would give no gradient, in silence, and each step would be charged. A single output has a
    loss of 0 whatever the model computes, so its one class would give none either. What a label means to the user's
    own loss is unknown here.

    Args:
        loss: name of the run's loss.
        dataset, vocabulary, deterministic: see :func:`found_classes`.
        classes: number of classes that the data is declared to have.

    Raises:
        ConfigError: ``labels_beyond_head``.
        ModelError: ``nondeterministic_op``.
    """
    if loss == "binary_cross_entropy" and classes is not None and classes > 2:
        raise ConfigError(
            "labels_beyond_head",
            f"the data has {classes} classes, and {loss} knows two: 0 and 1.",
            "Take loss: cross_entropy, and give the model one output for each class.",
        )
    _, labels = dataset.batch(np.empty(0, np.int64))
    if loss not in LOSSES_OF_CLASSES or np.issubdtype(labels.dtype, np.floating):
        return
    outputs = _outputs(module, RowLoss(BUILT_IN_LOSSES[loss]), dataset, vocabulary, deterministic)
    if outputs < 2:
        raise ConfigError(
            "labels_beyond_head",
            f"the model has one output, and {loss} needs one for each class.",
            "For yes or no take loss: binary_cross_entropy, or two outputs; for a number, loss: mse and float labels.",
        )
    if classes is not None and classes > outputs:
        raise ConfigError(
            "labels_beyond_head",
            f"the data has {classes} classes, and the model outputs for {outputs}.",
            "Give the model one output for each class of dataset.classes.",
        )


def known_answer(
    mechanism: Mechanism,
    engine: SumEngine,
    dataset: Dataset,
    parameters: np.ndarray,
    vocabulary: int | None = None,
    *,
    classes: int,
    words: Words[Any],
    versions: Versions | None = None,
) -> bytes:
    """Return the digest of the encoded, noised vector of one synthetic virtual worker.

    Args:
        dataset: read for shapes and dtypes only.
        parameters: the run's initial parameters, float32[d].
        vocabulary: public number of ids; needed where features are integers, which are drawn over all of them.
        classes: public number of classes; labels that are integers are drawn over all of them.
        words: that compute the vector; it is public, so it leaves their device.
        versions: that a step computes of each row.

    Returns:
        32 bytes.

    Raises:
        ModelError: ``known_answer``, with the text of the failure: no example is in reach of the model yet.
    """
    # A full batch: every row of every micro-batch is computed, and none is padding.
    count, rows_each = mechanism.micro_batch_size * mechanism.micro_batches, mechanism.rows_chosen
    # As many in each part of the slice, of which the first is drawn.
    units_known = count * mechanism.bands
    public = mechanism.model_copy(update={"num_examples": units_known, "virtual_workers": 1, "sample_rate": 1.0})
    rows = units_known * rows_each
    _, labels = dataset.batch(np.empty(0, np.int64))
    synthetic = ArrayDataset(_features(dataset, rows, vocabulary or 1), _fill(labels, rows, "labels", classes))
    # There are no rows without an example, so any may be the spare one.
    spare = synthetic.batch(np.zeros(1, np.int64))
    whole_units = Units(np.arange(rows), np.arange(rows_each, rows + 1, rows_each))
    units = None if rows_each == 1 else whole_units
    computer = VirtualWorkerComputer(public, engine, synthetic, spare, units, versions, words=words)
    keys = VirtualWorkerKeys(stream=_PUBLIC_KEY, data=_PUBLIC_KEY)
    whole = VectorRange(index=0, offset=0, length=mechanism.dimension)
    try:
        vector = computer.vector(0, keys, 0, bytes(32), bytes(32), parameters).values
        return digest(words.masked(vector, whole, ()).data)
    except RaycloakError:
        raise
    except Exception as error:
        # These say something of the machine, and their codes are known.
        if is_out_of_memory(error) or is_gpu_error(error):
            raise
        said = str(error).partition("\n")[0] or "it gives no reason"
        raise ModelError(
            "known_answer",
            f"the model passes the checks and fails on a batch of a step: {type(error).__name__}: {said}.",
            "Let the model hold its tensors as parameters or buffers, which follow it to a GPU.",
        ) from None
