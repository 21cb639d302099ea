"""Rating of TDX platforms, on TCB info that nobody would sign."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.core.evidence import Refusal
from raycloak.attestation.tdx.platform import TdxPlatform, read_platform
from raycloak.attestation.tdx.quote import TdxQuote, parse_quote
from raycloak.attestation.tdx.rating import TdxRating, rate
from raycloak.attestation.tdx.rules import TdxRules
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, Session

RULES = TdxRules()
Documents = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def quote(session: Session) -> TdxQuote:
    return parse_quote(session.platform.quote(bytes(64), MEASUREMENT))


@pytest.fixture(scope="module")
def platform(quote: TdxQuote) -> TdxPlatform:
    return read_platform(quote.chain_pem)


@pytest.fixture
def documents(session: Session) -> Documents:
    collateral = session.collateral.tdx[0]
    return json.loads(collateral.tcb_info), json.loads(collateral.qe_identity)


def code(quote: TdxQuote, platform: TdxPlatform, documents: Documents) -> str | None:
    try:
        rate(quote, platform, *documents, RULES)
    except EvidenceError as error:
        return error.code
    return None


def test_the_first_level_that_applies_gives_the_status(
    quote: TdxQuote, platform: TdxPlatform, documents: Documents
) -> None:
    tcb_info, qe_identity = documents
    best = tcb_info["tcbLevels"][0]
    above, below = copy.deepcopy(best), copy.deepcopy(best)
    above["tcb"]["sgxtcbcomponents"][15]["svn"] += 1
    below["tcb"]["pcesvn"] -= 1
    above["tcbStatus"], below["tcbStatus"] = "Revoked", "OutOfDate"
    tcb_info["tcbLevels"] = [above, best, below]
    expected = TdxRating("UpToDate", "UpToDate", "UpToDate", ())
    assert rate(quote, platform, tcb_info, qe_identity, RULES) == expected
    tcb_info["tcbLevels"] = [above, below]
    assert code(quote, platform, documents) == "tcb_status"


@pytest.mark.parametrize("part", ["sgxtcbcomponents", "tdxtcbcomponents", "pcesvn"])
def test_every_version_counts(quote: TdxQuote, platform: TdxPlatform, documents: Documents, part: str) -> None:
    tcb = documents[0]["tcbLevels"][0]["tcb"]
    if part == "pcesvn":
        tcb[part] += 1
    else:
        tcb[part][2]["svn"] += 1
    assert code(quote, platform, documents) == "tcb_unacceptable"


def test_the_module_is_rated_with_its_own_identity(
    quote: TdxQuote, platform: TdxPlatform, documents: Documents
) -> None:
    tcb_info, _ = documents
    tcb_info["tcbLevels"][0]["tcb"]["tdxtcbcomponents"][0]["svn"] = 255
    assert code(quote, platform, documents) is None
    module = tcb_info["tdxModuleIdentities"][0]
    module["tcbLevels"][0]["tcbStatus"] = "OutOfDate"
    assert code(quote, platform, documents) == "tcb_status"
    for field, value in (("mrsigner", "11" * 48), ("attributes", "01" + "00" * 7), ("id", "TDX_02")):
        changed = copy.deepcopy(documents)
        changed[0]["tdxModuleIdentities"][0][field] = value
        assert code(quote, platform, changed) == "tcb_unacceptable"


def test_the_quoting_enclave_is_rated_too(quote: TdxQuote, platform: TdxPlatform, documents: Documents) -> None:
    level = documents[1]["tcbLevels"][0]
    level["tcbStatus"] = "SWHardeningNeeded"
    assert code(quote, platform, documents) == "tcb_status"
    level["tcb"]["isvsvn"] = 255
    assert code(quote, platform, documents) == "tcb_unacceptable"


def test_an_accepted_status_of_one_part_hides_none_of_another(
    quote: TdxQuote, platform: TdxPlatform, documents: Documents
) -> None:
    tcb_info, qe_identity = documents
    tcb_info["tcbLevels"][0]["tcbStatus"] = "SWHardeningNeeded"
    laxer = TdxRules(tcb_statuses=("UpToDate", "SWHardeningNeeded"))
    assert rate(quote, platform, *documents, laxer).worst == "SWHardeningNeeded"
    qe_identity["tcbLevels"][0]["tcbStatus"] = "ConfigurationNeeded"
    with pytest.raises(EvidenceError, match=r"tcb_status.*ConfigurationNeeded"):
        rate(quote, platform, *documents, laxer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-300, 300) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_documents_of_any_shape_are_rated_or_refused(
    session: Session, quote: TdxQuote, platform: TdxPlatform, data: st.DataObject
) -> None:
    collateral = session.collateral.tdx[0]
    changed = json.loads(collateral.tcb_info), json.loads(collateral.qe_identity)
    node: Any = changed[data.draw(st.integers(0, 1))]
    while True:
        names = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        name = data.draw(st.sampled_from(names))
        if not isinstance(node[name], dict | list) or not node[name] or data.draw(st.booleans()):
            break
        node = node[name]
    node[name] = data.draw(JSON)
    assert code(quote, platform, changed) in {None, Refusal.TCB_UNACCEPTABLE, Refusal.TCB_STATUS}
