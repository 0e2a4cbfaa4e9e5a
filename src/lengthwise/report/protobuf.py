"""Protocol Buffers' wire format, as far as execution traces need it: numbers, text, and messages in messages."""

from collections.abc import Iterable

_VARINT, _LENGTH_DELIMITED = 0, 2


def varint(number: int) -> bytes:
    """Encode a number from 0 in seven bits a byte, lowest first; every byte but the last has its top bit set."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def number(field: int, value: int) -> bytes:
    """Encode an integer, enumeration or flag; zero is written too, as members of a oneof need it."""
    return varint(field << 3 | _VARINT) + varint(value)


def content(field: int, value: bytes | str) -> bytes:
    """Encode text, bytes or an encoded message."""
    value = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | _LENGTH_DELIMITED) + delimited(value)


def numbers(field: int, values: Iterable[int]) -> bytes:
    """Encode a repeated integer, packed."""
    return content(field, b"".join(map(varint, values)))


def delimited(message: bytes) -> bytes:
    """Put the length of a message before it, by which messages follow one another in a file."""
    return varint(len(message)) + message
