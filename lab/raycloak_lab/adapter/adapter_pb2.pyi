from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Projection(_message.Message):
    __slots__ = ("name", "width_in", "width_out", "gain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WIDTH_IN_FIELD_NUMBER: _ClassVar[int]
    WIDTH_OUT_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    width_in: int
    width_out: int
    gain: float
    def __init__(self, name: _Optional[str] = ..., width_in: _Optional[int] = ..., width_out: _Optional[int] = ..., gain: _Optional[float] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("adapter_digest", "parameter_set", "tokens", "rank", "projections", "tokens_left", "shared")
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    adapter_digest: bytes
    parameter_set: bytes
    tokens: int
    rank: int
    projections: _containers.RepeatedCompositeFieldContainer[Projection]
    tokens_left: int
    shared: bytes
    def __init__(self, adapter_digest: _Optional[bytes] = ..., parameter_set: _Optional[bytes] = ..., tokens: _Optional[int] = ..., rank: _Optional[int] = ..., projections: _Optional[_Iterable[_Union[Projection, _Mapping]]] = ..., tokens_left: _Optional[int] = ..., shared: _Optional[bytes] = ...) -> None: ...

class SignedMessage(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("contract", "policy", "challenge")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    contract: bytes
    policy: bytes
    challenge: bytes
    def __init__(self, contract: _Optional[bytes] = ..., policy: _Optional[bytes] = ..., challenge: _Optional[bytes] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("session", "presentation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PRESENTATION_FIELD_NUMBER: _ClassVar[int]
    session: str
    presentation: SignedMessage
    def __init__(self, session: _Optional[str] = ..., presentation: _Optional[_Union[SignedMessage, _Mapping]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("session", "fingerprint", "package", "proof", "extends", "sealed_keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_KEYS_FIELD_NUMBER: _ClassVar[int]
    session: str
    fingerprint: bytes
    package: SignedMessage
    proof: bytes
    extends: _containers.RepeatedScalarFieldContainer[bytes]
    sealed_keys: bytes
    def __init__(self, session: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., package: _Optional[_Union[SignedMessage, _Mapping]] = ..., proof: _Optional[bytes] = ..., extends: _Optional[_Iterable[bytes]] = ..., sealed_keys: _Optional[bytes] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("session", "sequence", "fingerprint", "projections", "batch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    fingerprint: bytes
    projections: _containers.RepeatedScalarFieldContainer[str]
    batch: bytes
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., projections: _Optional[_Iterable[str]] = ..., batch: _Optional[bytes] = ...) -> None: ...

class ApplyReply(_message.Message):
    __slots__ = ("answers", "tokens_left")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedScalarFieldContainer[bytes]
    tokens_left: int
    def __init__(self, answers: _Optional[_Iterable[bytes]] = ..., tokens_left: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
