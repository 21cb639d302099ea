"""A service of collateral on loopback that speaks Intel's interface as PCCS does, and AMD's."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

from raycloak.attestation.core.evidence import Collateral


@dataclass
class CollateralSite:
    """The published collateral, which a test may change; ``asked`` are the paths of all requests.

    Attributes:
        answers: by path, instead of the honest answer: a status, or a function of the handler.
    """

    collateral: Collateral
    lists: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def honest(self, path: str) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of the answer."""
        found = self.collateral
        match path.removeprefix("/sgx/certification/v4").removeprefix("/tdx/certification/v4"):
            case "/pckcrl":
                return found.pck_crl.hex().encode(), {"SGX-PCK-CRL-Issuer-Chain": quote(found.pck_crl_issuer_chain)}
            case "/rootcacrl":
                return found.root_ca_crl, {}
            case "/tcb":
                body = _signed("tcbInfo", found.tcb_info, found.tcb_info_signature)
                return body, {"TCB-Info-Issuer-Chain": quote(found.tcb_info_issuer_chain)}
            case "/qe/identity":
                body = _signed("enclaveIdentity", found.qe_identity, found.qe_identity_signature)
                return body, {"SGX-Enclave-Identity-Issuer-Chain": quote(found.qe_identity_issuer_chain)}
        return self.lists[path], {}


def _signed(name: str, text: str, signature: bytes) -> bytes:
    return f'{{"{name}":{text}, "signature" : {json.dumps(signature.hex())}}}'.encode()


@contextmanager
def published(collateral: Collateral, context: Any = None) -> Iterator[CollateralSite]:
    """Serve ``collateral`` over HTTP, or under the TLS ``context``."""
    site = CollateralSite(collateral)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            site.asked.append(self.path)
            answer = site.answers.get(path)
            if callable(answer):
                answer(self)
                return
            if isinstance(answer, int):
                self.send_error(answer)
                return
            body, headers = site.honest(path)
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    site.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
