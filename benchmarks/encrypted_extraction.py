"""How well a client reconstructs an adapter from its tokens: ``python benchmarks/encrypted_extraction.py``.

A projection of width 384 and rank 8 answers random tokens, hidden as always. The client solves for B·A by least
squares. Prints one JSON object: the relative error in the Frobenius norm by tokens over the width, the median of three
adapters.
"""

import hashlib
import json
import os
from statistics import median

import numpy as np

from raycloak.attestation.core.keys import Secret
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import BlockShape
from raycloak_lab.encrypted.projection import PackedProjection

WIDTH, RANK, TOKENS, ROWS = 384, 8, 64, 64
SHARES = (0.5, 1.0, 1.25, 2.0)


def main() -> None:
    keys = ClientKeys(BlockShape(TOKENS, RANK))
    worker = EvaluationKeys(keys.shape, keys.released)
    found = [errors(keys, worker, np.random.default_rng(seed)) for seed in range(3)]
    by_share = {str(share): median(each[index] for each in found) for index, share in enumerate(SHARES)}
    print(json.dumps({"width": WIDTH, "rank": RANK, "relative_error_by_tokens_over_width": by_share}))


def errors(keys, worker, rng) -> list[float]:
    down, up = rng.normal(size=(RANK, WIDTH)), rng.normal(size=(ROWS, RANK))
    projection = PackedProjection(down, up, keys.shape)
    rerandomiser = Rerandomiser(worker, Secret(os.urandom(32)))
    states = rng.normal(size=(int(max(SHARES) * WIDTH), WIDTH))
    deltas = []
    for start in range(0, len(states), TOKENS):
        batch, factors = keys.encrypt(states[start : start + TOKENS])
        applied = projection.apply(worker.read_batch(batch, WIDTH), worker)
        answer = rerandomiser.answer(hashlib.sha256(batch).digest(), "q", applied)
        deltas.append(keys.decrypt(answer, ROWS, factors, projection.gain))
    seen, exact = np.concatenate(deltas), up @ down
    solved = (np.linalg.lstsq(states[:n], seen[:n], rcond=None)[0].T for n in (int(s * WIDTH) for s in SHARES))
    return [float(np.linalg.norm(each - exact) / np.linalg.norm(exact)) for each in solved]


if __name__ == "__main__":
    main()
