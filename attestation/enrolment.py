"""Who may take part beside whom: no GPU serves two members, and a platform serves as many workers as the policy says.

Evidence that is genuine can be shown by somebody else than its machine's owner. Counting machines and GPUs, and listing
them in the policy, is what limits how many members one machine can pretend to be.
"""

from collections import defaultdict
from collections.abc import Iterable

from attestation.appraisal import Appraisal
from attestation.evidence import Refusal, refuse
from attestation.policy import Policy


def check_enrolment(members: Iterable[Appraisal], policy: Policy) -> None:
    """Judge members who take part at the same time; each member is given once.

    Guarantee: returns only if every GPU belongs to one member, and no platform has more workers than
    ``workers_per_platform``.

    Raises:
        EvidenceError: ``peer_not_bound``.
    """
    gpus: dict[bytes, str] = {}
    workers: dict[bytes, list[str]] = defaultdict(list)
    for member in members:
        for gpu in member.gpus:
            owner = gpus.setdefault(gpu.platform_id, member.member_id)
            if owner != member.member_id:
                refuse(Refusal.PEER_NOT_BOUND, f"a GPU of '{member.member_id}' is enrolled by '{owner}' already")
        if member.role == "worker":
            workers[member.platform_id].append(member.member_id)
    most = policy.workers_per_platform
    for platform, names in workers.items():
        if most is not None and len(names) > most:
            who = f"'{names[-1]}' is worker {len(names)} on platform {platform.hex()[:32]}"
            refuse(Refusal.PEER_NOT_BOUND, f"{who}, where workers_per_platform is {most}")
