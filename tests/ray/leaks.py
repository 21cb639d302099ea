"""The secrets that must not leave a worker, and a search for them wherever bytes of a run may lie.

A needle is bytes under a name. Needles are long or distinctive enough that none is found by chance: at least 8 bytes
that a key, a float64 or several numbers of the run fix.
"""

import base64
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.keys.release import RunKeys
from raycloak.coordinator.cluster.processes import Process, descendants, process_table
from raycloak.workers.gradients.clipping import micro_batches
from raycloak.workers.inputs.datasets import Dataset, slice_digest, slice_ids
from raycloak.workers.models.models import load_flat, read_flat
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.receipt import data_root
from raycloak.workers.vectors.ring import RingSpec, encode_into, ring_dtype
from raycloak.workers.vectors.sampling import draw_ids, unit_places

Needles = Mapping[str, bytes]
WINDOW = 32


def key_needles(name: str, raw: bytes) -> dict[str, bytes]:
    """Return a key as it is, in hexadecimal and in base 64."""
    return {
        f"{name}, raw": raw,
        f"{name}, hexadecimal": raw.hex().encode(),
        f"{name}, base 64": base64.b64encode(raw)[:40],
    }


def array_needles(name: str, values: np.ndarray) -> dict[str, bytes]:
    """Return stretches of an array's bytes from its begin, middle and end, where no two neighbours are equal."""
    size = WINDOW // values.itemsize
    flat = np.ascontiguousarray(values).ravel()
    starts = [start for start in range(0, len(flat) - size + 1, size) if _distinct(flat[start : start + size])]
    assert starts, f"{name} has no stretch that could not be found by chance"
    chosen = {starts[0], starts[len(starts) // 2], starts[-1]}
    return {f"{name}, from {start}": flat[start : start + size].tobytes() for start in sorted(chosen)}


def number_needles(name: str, values: np.ndarray) -> dict[str, bytes]:
    """Return several numbers as 64 and 32 bit words, and as text with commas and spaces."""
    numbers = [int(value) for value in values[:8]]
    assert len(numbers) >= 4
    return {
        f"{name}, int64": np.array(numbers, np.int64).tobytes(),
        f"{name}, int32": np.array(numbers, np.int32).tobytes(),
        f"{name}, JSON": ", ".join(map(str, numbers)).encode(),
        f"{name}, compact JSON": ",".join(map(str, numbers)).encode(),
        f"{name}, words": " ".join(map(str, numbers)).encode(),
    }


def float_needles(name: str, value: float) -> dict[str, bytes]:
    """Return a float64 as bytes and as text; nine digits, so that rounding in the last ones does not hide it."""
    return {f"{name}, float64": np.float64(value).tobytes(), f"{name}, text": f"{value:.12f}"[:11].encode()}


def worker_needles(worker) -> dict[str, bytes]:
    """Return all secrets of a ``TrainWorker`` that has just finished a step; to be called in its process.

    Its keys, and for each virtual worker it hosts the sampled ids, their number, the losses, the clear sum and its
    encoding, with and without noise, as its own classes compute them.
    """
    needles = {}
    attester = worker._attester
    needles |= key_needles("mask agreement key", attester.agreement._key.private_bytes_raw())
    needles |= key_needles("identity key", attester.identity._key.private_bytes_raw())
    for (peer, _), pair in worker._peers._pairs.items():
        needles |= key_needles(f"pair secret with {peer}", pair.secret.reveal())
    member = worker._stage
    query, step, model, root = member._hosted._place
    assert query == "gradient", "the last thing computed was a training step"
    sizes, clear = [], []
    for (_, v), keys in member._keys.items():
        found, size, total = _virtual_worker(worker, v, keys, step, model, root)
        needles |= found
        sizes.append(size)
        clear.append(total)
    needles |= array_needles("unmasked sum of the hosted vectors", words_of(member._hosted._words))
    needles |= array_needles("clear sum of the hosted sums", np.sum(clear, axis=0))
    return needles | number_needles("realised batch sizes", np.array(sizes))


def words_of(vector) -> np.ndarray:
    """Return the words of a vector that a worker on a CPU has in pieces."""
    return np.concatenate([piece.vector for piece in vector])


def run_needles(manifest: Manifest, dataset: Dataset, secret: Secret, digests: Sequence[bytes]) -> dict[str, bytes]:
    """Return what the run secret gives, for every step of a run: keys, sampled ids and realised batch sizes.

    Args:
        digests: of the parameters each step started from.
    """
    mechanism = manifest.computation.mechanism
    keys_of = RunKeys(secret, manifest.run_id)
    context = manifest.key_context
    needles = key_needles("run secret", secret.reveal())
    slices = [slice_ids(v, mechanism.virtual_workers, mechanism.num_examples) for v in range(mechanism.virtual_workers)]
    digests_of = [slice_digest(dataset, own) for own in slices]
    root = data_root(
        [
            derive(keys_of.of(context, v, 0).data, Purpose.DATA_COMMITMENT, each).reveal()
            for v, each in enumerate(digests_of)
        ]
    )
    for step, model in enumerate(digests):
        sizes = []
        for v in range(mechanism.virtual_workers):
            keys = keys_of.of(context, v, step // manifest.computation.epoch_steps)
            place = (mechanism.query, step, model, digests_of[v], root)
            drawn_by = derive(keys.stream, Purpose.SAMPLING, *place)
            noise = derive(keys.stream, Purpose.NOISE, *place)
            named = {"stream": keys.stream, "data": keys.data, "sampling": drawn_by, "noise": noise}
            for name, key in named.items():
                needles |= key_needles(f"{name} key of {v} in step {step}", key.reveal())
            ids = draw_ids(
                drawn_by, slices[v], mechanism.sample_rate, mechanism.micro_batch_size * mechanism.micro_batches
            )
            needles |= number_needles(f"sampled ids of {v} in step {step}", ids)
            sizes.append(len(ids))
        needles |= number_needles(f"realised batch sizes of step {step}", np.array(sizes))
    return needles


def _virtual_worker(worker, v, keys, step, model, root):
    member, workload = worker._stage, worker._stage.planned.workload
    computer, mechanism = member.planned.computers["gradient"], member.planned.mechanism
    data = computer.slice(v)
    context = (mechanism.query, step, model, data.digest, root)
    purposes = Purpose.SAMPLING, Purpose.PLACES, Purpose.NOISE
    sampling, placing, noise = (derive(keys.stream, purpose, *context) for purpose in purposes)
    capacity = mechanism.micro_batch_size * mechanism.micro_batches
    ids = draw_ids(sampling, data.ids, mechanism.sample_rate, capacity)
    parameters = read_flat(workload.module)
    places = unit_places(placing, mechanism.micro_batch_size, mechanism.micro_batches)
    drawn, present = np.full(capacity, data.ids[0]), np.arange(capacity) < len(ids)
    drawn[: len(ids)] = ids
    rows = computer._dataset, drawn[:, None], present[:, None], mechanism
    batches = micro_batches(*rows, places=places, spare=computer._spare)
    clear = torch.cat(computer._engine.clipped_sum(parameters, batches)).numpy()
    encoded = np.empty(mechanism.dimension, ring_dtype(mechanism.ring_bits))
    encode_into(clear, RingSpec(mechanism.ring_bits, mechanism.gamma_log2, mechanism.clamp), encoded)
    again = computer.vector(v, keys, step, model, root, parameters)
    assert again.tag == member._hosted.tags[v], "these are the values the worker used"
    losses = _losses(workload, ids)
    needles = {}
    named = {"stream": keys.stream, "data": keys.data, "sampling": sampling, "places": placing, "noise": noise}
    for name, key in named.items():
        needles |= key_needles(f"{name} key of {v}", key.reveal())
    needles |= array_needles(f"clear sum of {v}, float64", clear)
    needles |= array_needles(f"clear sum of {v}, float32", clear.astype(np.float32))
    needles |= array_needles(f"encoded sum of {v} without noise", encoded)
    needles |= array_needles(f"encoded sum of {v} with noise", words_of(again.values))
    needles |= number_needles(f"sampled ids of {v}", ids)
    needles |= array_needles(f"losses of {v}", losses.astype(np.float32))
    needles |= float_needles(f"mean loss of {v}", float(losses.mean()))
    return needles, len(ids), clear


def _losses(workload, ids) -> np.ndarray:
    import torch

    features, labels = (torch.tensor(part) for part in workload.dataset.batch(ids))
    load_flat(workload.module, read_flat(workload.module))
    with torch.no_grad():
        return workload.loss.loss_fn(workload.module(features), labels).double().numpy()


def leaks(needles: Needles, places: Iterable[tuple[str, bytes]]) -> list[str]:
    """Return ``needle in place`` for every needle found in any of ``places``."""
    return [f"{name} in {place}" for place, content in places for name, needle in needles.items() if needle in content]


def files_below(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every regular file below ``folders``; those that vanish meanwhile are left out."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            try:
                if path.is_file() and not path.is_symlink():
                    yield str(path), path.read_bytes()
            except OSError:
                continue


def places_of_run(home: Path, session: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the object stores and files that a run leaves outside its vaults."""
    yield from object_stores(session.name)
    yield from files_below(home, session)


def memory_of_actors(session: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the memory of every process of Ray's that is an actor's."""
    for process in ray_processes(session.name):
        if process.title.startswith("ray::") and process.title != "ray::IDLE":
            yield from memory_of(process)


def what_ray_has(session: Path) -> Iterator[tuple[str, bytes]]:
    """Yield all that is in files and processes of the Ray session that Ray itself writes and runs.

    The own process is left out, since it has the needles.
    """
    yield from files_below(session)
    yield from object_stores(session.name)
    for process in ray_processes(session.name):
        if process.pid == os.getpid():
            continue
        for kind in ("environ", "cmdline"):
            with suppress(OSError):
                yield f"{kind} of {program(process)}", Path(f"/proc/{process.pid}/{kind}").read_bytes()
        yield from _nameless_files(process)
        yield from memory_of(process)


def _nameless_files(process: Process) -> Iterator[tuple[str, bytes]]:
    """Yield the sealed memory and deleted files that a process holds open."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("/memfd:") or (target.endswith(" (deleted)") and not _is_plasma(target)):
                    for extent in _extents(descriptor):
                        yield f"open file of {program(process)}", extent


def ray_processes(session: str) -> list[Process]:
    """Return the processes of the Ray session that Ray itself runs: its own and its workers, not what these start."""
    table = process_table()
    own = [each for each in table if session in each.title and program(each) in ("gcs_server", "raylet")]
    assert {program(each) for each in own} == {"gcs_server", "raylet"}
    raylets = {each.pid for each in own if program(each) == "raylet"}
    heads = [each for each in table if session in each.title and "/ray/dashboard/dashboard.py" in each.title]
    return [
        *own,
        *(each for each in table if each.parent in raylets),
        *heads,
        *descendants([each.pid for each in heads], table),
    ]


def program(process: Process) -> str:
    """Return the name of a process's program."""
    return Path(process.title.partition(" ")[0]).name


def memory_of(process: Process) -> Iterator[tuple[str, bytes]]:
    """Yield what a process has written into its memory, which takes root; of what it reserved, only pages it has."""
    proc = Path(f"/proc/{process.pid}")
    try:
        regions = [line.split() for line in (proc / "maps").read_text().splitlines()]
        with open(proc / "mem", "rb", 0) as memory, open(proc / "pagemap", "rb", 0) as pages:
            for place, rights, *_ in regions:
                start, end = (int(each, 16) // mmap.PAGESIZE for each in place.split("-"))
                if not rights.startswith("rw") or rights[3] == "s":
                    continue
                pages.seek(8 * start)
                # The upper two bits: it is in memory, or in swap.
                present = np.frombuffer(pages.read(8 * (end - start)), np.uint64) >> np.uint64(62) != 0
                edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]]).astype(np.int8)))
                try:
                    yield (
                        f"memory of {program(process)}",
                        b"".join(
                            os.pread(
                                memory.fileno(), int(behind - first) * mmap.PAGESIZE, int(start + first) * mmap.PAGESIZE
                            )
                            for first, behind in edges.reshape(-1, 2)
                        ),
                    )
                except OSError:
                    continue
    except OSError:
        return  # it has ended


def object_stores(session: str) -> Iterator[tuple[str, bytes]]:
    """Yield the memory of every object store of the Ray session: live objects, and what deleted ones left behind.

    Plasma maps a file that has no name any more, so it is opened through the raylet's descriptor.
    """
    for process in process_table():
        if "raylet" not in Path(process.title.split(" ")[0]).name or session not in process.title:
            continue
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if _is_plasma(target):
                for extent in _extents(descriptor):
                    yield f"object store {target}", extent


def _is_plasma(target: str) -> bool:
    return any(part in target for part in ("plasma", "/dev/shm/"))


def _extents(path: Path) -> Iterator[bytes]:
    """Return the extents of a sparse file that were ever written."""
    with open(path, "rb", buffering=0) as file:
        end, position = os.fstat(file.fileno()).st_size, 0
        while position < end:
            try:
                begin = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:
                return
            position = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            yield os.pread(file.fileno(), position - begin, begin)


def _distinct(stretch: np.ndarray) -> bool:
    return bool(np.all(stretch != 0)) and len(np.unique(stretch)) == len(stretch)
