from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SignedMessage(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ChallengeRequest(_message.Message):
    __slots__ = ("member_id", "role", "identity_key")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_KEY_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: str
    identity_key: bytes
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[str] = ..., identity_key: _Optional[bytes] = ...) -> None: ...

class ChallengeReply(_message.Message):
    __slots__ = ("challenge", "server_certificate")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    SERVER_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    server_certificate: bytes
    def __init__(self, challenge: _Optional[bytes] = ..., server_certificate: _Optional[bytes] = ...) -> None: ...

class AttestRequest(_message.Message):
    __slots__ = ("presentation", "channel_signature")
    PRESENTATION_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    presentation: SignedMessage
    channel_signature: bytes
    def __init__(self, presentation: _Optional[_Union[SignedMessage, _Mapping]] = ..., channel_signature: _Optional[bytes] = ...) -> None: ...

class AttestReply(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    def __init__(self, result: _Optional[bytes] = ...) -> None: ...

class ReleaseKeysRequest(_message.Message):
    __slots__ = ("member_id", "epoch", "virtual_workers", "seen")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    epoch: int
    virtual_workers: _containers.RepeatedScalarFieldContainer[int]
    seen: int
    def __init__(self, member_id: _Optional[str] = ..., epoch: _Optional[int] = ..., virtual_workers: _Optional[_Iterable[int]] = ..., seen: _Optional[int] = ...) -> None: ...

class ReleaseKeysReply(_message.Message):
    __slots__ = ("package", "proof", "slices", "extends", "evaluation")
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    package: SignedMessage
    proof: bytes
    slices: ReleaseKeysReply
    extends: _containers.RepeatedScalarFieldContainer[bytes]
    evaluation: ReleaseKeysReply
    def __init__(self, package: _Optional[_Union[SignedMessage, _Mapping]] = ..., proof: _Optional[bytes] = ..., slices: _Optional[_Union[ReleaseKeysReply, _Mapping]] = ..., extends: _Optional[_Iterable[bytes]] = ..., evaluation: _Optional[_Union[ReleaseKeysReply, _Mapping]] = ...) -> None: ...

class RosterRequest(_message.Message):
    __slots__ = ("member_id", "data_commitments")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_COMMITMENTS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    data_commitments: SignedMessage
    def __init__(self, member_id: _Optional[str] = ..., data_commitments: _Optional[_Union[SignedMessage, _Mapping]] = ...) -> None: ...

class RosterReply(_message.Message):
    __slots__ = ("roster", "presentations")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    PRESENTATIONS_FIELD_NUMBER: _ClassVar[int]
    roster: SignedMessage
    presentations: _containers.RepeatedCompositeFieldContainer[SignedMessage]
    def __init__(self, roster: _Optional[_Union[SignedMessage, _Mapping]] = ..., presentations: _Optional[_Iterable[_Union[SignedMessage, _Mapping]]] = ...) -> None: ...

class LogRequest(_message.Message):
    __slots__ = ("start", "limit", "member_id", "entry", "growth")
    START_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    start: int
    limit: int
    member_id: str
    entry: EntryInTree
    growth: TreeGrowth
    def __init__(self, start: _Optional[int] = ..., limit: _Optional[int] = ..., member_id: _Optional[str] = ..., entry: _Optional[_Union[EntryInTree, _Mapping]] = ..., growth: _Optional[_Union[TreeGrowth, _Mapping]] = ...) -> None: ...

class EntryInTree(_message.Message):
    __slots__ = ("sequence", "size")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    size: int
    def __init__(self, sequence: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class TreeGrowth(_message.Message):
    __slots__ = ("old_size", "size")
    OLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    old_size: int
    size: int
    def __init__(self, old_size: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class TreePath(_message.Message):
    __slots__ = ("size", "hashes")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    size: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, size: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LogReply(_message.Message):
    __slots__ = ("entries", "head", "inclusion", "consistency")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    INCLUSION_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedScalarFieldContainer[bytes]
    head: bytes
    inclusion: TreePath
    consistency: TreePath
    def __init__(self, entries: _Optional[_Iterable[bytes]] = ..., head: _Optional[bytes] = ..., inclusion: _Optional[_Union[TreePath, _Mapping]] = ..., consistency: _Optional[_Union[TreePath, _Mapping]] = ...) -> None: ...
