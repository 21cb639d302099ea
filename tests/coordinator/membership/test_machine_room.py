"""Hosting within the bound of each machine: found wherever there is one, and never beyond the bound."""

from hypothesis import example, given
from hypothesis import strategies as st

from raycloak.coordinator.membership.hosting import moved, rehost
from raycloak.coordinator.membership.machine_room import MachineRoom


@st.composite
def situations(draw):
    """Return workers on machines that have got some keys each, and any hosting so far."""
    count, workers = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    most = draw(st.integers(-(-count // workers), count))
    keys = st.frozensets(st.integers(0, count - 1), max_size=most)
    machines = {f"platform {i}": draw(keys) for i in range(draw(st.integers(1, workers)))}
    held = {}
    for i in range(workers):
        name = draw(st.sampled_from(sorted(machines)))
        held[f"worker-{i}"] = {name: machines[name]}
    hosts = draw(st.lists(st.sampled_from([*held, "gone"]), min_size=count, max_size=count))
    current = {name: tuple(v for v, host in enumerate(hosts) if host == name) for name in set(hosts)}
    return MachineRoom(most, held), current, count


def exists(room: MachineRoom, count: int) -> bool:
    """Return whether some hosting keeps to the bound, with no worker above it; by trying them all."""

    def rest(v: int, hosting: dict[str, tuple[int, ...]]) -> bool:
        if room.exceeded(hosting) is not None or any(len(hosted) > room.most for hosted in hosting.values()):
            return False
        return v == count or any(rest(v + 1, {**hosting, i: (*hosting[i], v)}) for i in hosting)

    return rest(0, dict.fromkeys(room.held, ()))


@given(situations())
@example((MachineRoom(2, {"worker-0": {"a": frozenset({0, 1})}, "worker-1": {"b": frozenset()}}), {}, 3))
def test_a_hosting_within_the_bound_is_found_wherever_there_is_one(situation):
    room, current, count = situation
    hosting = room.rehost(current, list(room.held), count)
    assert (hosting is not None) == exists(room, count)
    if hosting is not None:
        assert sorted(v for hosted in hosting.values() for v in hosted) == list(range(count))
        assert room.exceeded(hosting) is None
        assert hosting == room.rehost(current, sorted(room.held, reverse=True), count), "the order is nothing"


@given(st.integers(1, 12), st.integers(1, 5))
def test_placing_again_moves_nothing(count, workers):
    held = {f"worker-{i}": {f"platform {i}": frozenset()} for i in range(workers)}
    room = MachineRoom(-(-count // workers), held)
    hosting = room.rehost({}, list(held), count)
    again = MachineRoom(room.most, {i: {f"platform {i[7:]}": frozenset(hosting[i])} for i in held})
    assert moved(hosting, again.rehost(hosting, list(held), count)) == {}


def test_a_newcomer_takes_up_what_its_predecessor_on_the_machine_had():
    before = rehost({}, ["worker-0", "worker-1", "worker-2"], 9)
    held = {f"platform {i}": frozenset(before[f"worker-{i}"]) for i in range(3)}
    place = {"worker-1": "platform 1", "worker-2": "platform 2", "worker-3": "platform 0"}
    room = MachineRoom(3, {worker: {name: held[name]} for worker, name in place.items()})
    assert room.rehost(before, list(place), 9)["worker-3"] == before["worker-0"]


def test_a_gpu_counts_beside_the_platform_that_it_is_in():
    one = {"platform 0": frozenset[int](), "GPU 0": frozenset({0, 1})}
    room = MachineRoom(2, {"worker-0": one, "worker-1": {"platform 1": frozenset[int]()}})
    assert room.exceeded({"worker-0": (0, 1), "worker-1": (2, 3)}) is None
    assert room.exceeded({"worker-0": (0, 2), "worker-1": (1, 3)}) == "worker-0"
    assert room.rehost({}, ["worker-0", "worker-1"], 4) == {"worker-0": (0, 1), "worker-1": (2, 3)}
