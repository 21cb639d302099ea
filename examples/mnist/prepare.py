"""Make what the recipes in this folder read: ``python examples/mnist/prepare.py FOLDER``.

FOLDER holds ``train.npz`` and ``test.npz`` with ``images`` uint8 [N, 28, 28] and ``labels`` uint8 [N]; nothing is
downloaded. Written beside this file, to ``data/``: the two files as they are, for the CNN, and
``scattering_train.npz`` and ``scattering_test.npz`` with ``features`` float32 [N, 201] and ``labels``.

Guarantee: the features of an image depend on that image and on public constants alone, so they cost no privacy.
The constants (mean, directions and scales) are fitted on another, public data set of digits: scikit-learn's 1,797
scans of 8 x 8 pixels, none of which is in MNIST. Nothing is fitted on the images of FOLDER.

Needs the extra ``examples``. Takes about seven minutes on one core.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kymatio.torch import Scattering2D
from numpy.typing import NDArray
from recipes import FEATURES
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

DATA = Path(__file__).resolve().parent / "data"
BLOCK = 500
BIAS = 0.3
"""The constant coordinate; every image's other coordinates have norm 1."""

ROOT_OFFSET = 1e-4
SCALE_POWER = -0.2
"""A direction is scaled by its public deviation to this power: a step towards equal deviations."""


@dataclass(frozen=True)
class PublicBasis:
    """Constants of the features, in float32.

    Attributes:
        mean: [3969]. directions: [3969, 200], each already scaled.
    """

    mean: Tensor
    directions: Tensor


def rooted(images: Tensor) -> Tensor:
    """Square roots of the scattering coefficients of [n, 28, 28] pixels in [0, 1]: two scales, eight angles, [n, 3969].

    The root brings large and small coefficients closer together.
    """
    scattering = Scattering2D(J=2, shape=(28, 28), L=8)
    blocks = [scattering(block.contiguous()).flatten(1) for block in images.split(BLOCK)]
    return (torch.cat(blocks).clamp(min=0) + ROOT_OFFSET).sqrt()


def public_basis() -> PublicBasis:
    """The principal directions of scikit-learn's digits, enlarged to 20 x 20 pixels in the middle of 28 x 28."""
    small = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    large = functional.interpolate(small, size=(20, 20), mode="bicubic").clamp(0, 1)
    coefficients = rooted(functional.pad(large, (4, 4, 4, 4)).squeeze(1))
    mean = coefficients.mean(0)
    _, deviations, directions = torch.linalg.svd((coefficients - mean).double(), full_matrices=False)
    kept = FEATURES - 1
    scales = (deviations[:kept] / deviations[0]) ** SCALE_POWER
    return PublicBasis(mean, (directions[:kept].T * scales).float())


def features(images: NDArray[np.uint8], basis: PublicBasis) -> NDArray[np.float32]:
    """[n, 201]: coordinates in the basis, brought to norm 1, and the constant."""
    coordinates = (rooted(torch.from_numpy(images).float() / 255) - basis.mean) @ basis.directions
    normed = functional.normalize(coordinates)
    return torch.cat([normed, torch.full((len(normed), 1), BIAS)], dim=1).numpy()


def main(source: Path) -> None:
    """Write all four files."""
    DATA.mkdir(exist_ok=True)
    basis = public_basis()
    for split in ("train", "test"):
        shutil.copyfile(source / f"{split}.npz", DATA / f"{split}.npz")
        with np.load(source / f"{split}.npz", allow_pickle=False) as archive:
            images, labels = archive["images"], archive["labels"]
        np.savez(DATA / f"scattering_{split}.npz", features=features(images, basis), labels=labels)
        print(f"{split}: {len(images)} images, {FEATURES} features each")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
