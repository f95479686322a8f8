"""Messages, their bytes, and the codecs that make them smaller."""

from fedfactor.wire.codecs import Codec, FedPAQ, Float16, Float32, Int8, TopK
from fedfactor.wire.message import (
    BadMessage,
    Bytes,
    Message,
    Parcel,
    Room,
    decode,
    encode,
    expect,
    finite,
    read_weights,
)

__all__ = [
    "BadMessage",
    "Bytes",
    "Codec",
    "FedPAQ",
    "Float16",
    "Float32",
    "Int8",
    "Message",
    "Parcel",
    "Room",
    "TopK",
    "decode",
    "encode",
    "expect",
    "finite",
    "read_weights",
]
