"""Hostile values, for every field of every message.

The messages are those of the route table and the events inside them, so that a field that is added
to the protocol is attacked automatically.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from ingest.protocol import messages as wire
from ingest.server.route_table import ROUTES, RouteEntry

EVENTS = (wire.Start, wire.LogAction, wire.Decision, wire.LogReturns, wire.End)
GOOD: dict[str, Any] = {
    "obs": [0.1, 0.2, 0.3, 0.4],
    "action": 1,
    "reward": 1.0,
    "action_logp": -0.5,
    "policy_version": 0,
    "events": [],
    "actions": [],
}
OPEN = "attacked"
"""An episode that is open while it is attacked."""


def fields_of(kind: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = kind.__struct_fields__
    return names


def good(kind: Any) -> dict[str, Any]:
    """A valid message of that kind."""
    return {name: GOOD[name] for name in fields_of(kind) if name in GOOD}


def message_routes() -> list[RouteEntry]:
    return [route for route in ROUTES if isinstance(route.body, type)]


JSON_VALUES: dict[str, bytes] = {
    "null": b"null",
    "true": b"true",
    "minus one": b"-1",
    "2^64": b"18446744073709551616",
    "2^63": b"9223372036854775808",
    "400 digits": b"9" * 400,
    "1e999": b"1e999",
    "-1e999": b"-1e999",
    "1e-999": b"1e-999",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "0x10": b"0x10",
    "a half": b"0.5",
    "empty text": b'""',
    "1 MB of text": b'"' + b"x" * 1_000_000 + b'"',
    "traversal": b'"../../../etc/passwd"',
    "NUL": b'"a\\u0000b"',
    "lone surrogate": b'"\\ud800"',
    "reversed surrogates": b'"\\udc00\\ud800"',
    "bad UTF-8": b'"\xff\xfe"',
    "line breaks": b'"a\\nERROR forged\\r\\u2028"',
    "markup": b'"<script>alert(1)</script>"',
    "empty list": b"[]",
    "empty object": b"{}",
    "900 levels": b"[" * 900 + b"]" * 900,
    "100,000 levels": b"[" * 100_000,
    "300,000 numbers": b"[" + b"0," * 300_000 + b"0]",
    "mixed list": b'[1,"a",null,{},[[]]]',
    "huge shape": b'{"dtype":"float32","shape":[4000000000,4000000000],"data":""}',
    "negative shape": b'{"dtype":"float32","shape":[-4],"data":"AAAAAAAAAAAAAAAAAAAAAA=="}',
    "bad base64": b'{"dtype":"float32","shape":[4],"data":"!!!"}',
    "short base64": b'{"dtype":"float32","shape":[4],"data":"AAAA"}',
    "NaN as bytes": b'{"dtype":"float32","shape":[4],"data":"'
    + base64.b64encode(struct.pack("<4f", *[float("nan")] * 4))
    + b'"}',
    "object dtype": b'{"dtype":"O","shape":[4],"data":"AAAAAAAAAAA="}',
    "odd dtype": b'{"dtype":">f8,(2,3)i4","shape":[4],"data":""}',
    "odd keys": b'{"__class__":"x","":1,"__proto__":{}}',
    "a list of objects": b"[" + b'{"a":1},' * 1_000 + b"{}]",
}

MSGPACK_VALUES: dict[str, bytes] = {
    "nil": b"\xc0",
    "reserved": b"\xc1",
    "true": b"\xc3",
    "uint64": b"\xcf" + b"\xff" * 8,
    "int64": b"\xd3\x80" + b"\x00" * 7,
    "NaN": b"\xcb\x7f\xf8" + b"\x00" * 6,
    "infinity": b"\xca\x7f\x80\x00\x00",
    "bytes": b"\xc4\x03abc",
    "no bytes": b"\xc4\x00",
    "1 MB of bytes": b"\xc6\x00\x0f\x42\x40" + b"\x00" * 1_000_000,
    "4 GB of bytes, they say": b"\xc6\xff\xff\xff\xff",
    "bad UTF-8": b"\xa3\xff\xfe\xfd",
    "half a surrogate": b"\xa3\xed\xa0\x80",
    "4 GB of text, they say": b"\xdb\xff\xff\xff\xff",
    "4 G items, they say": b"\xdd\xff\xff\xff\xff",
    "4 G fields, they say": b"\xdf\xff\xff\xff\xff",
    "empty list": b"\x90",
    "empty map": b"\x80",
    "100,000 levels": b"\x91" * 100_000 + b"\xc0",
    "900 levels": b"\x91" * 900 + b"\xc0",
    "a million empty lists": b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000,
    "two million empty maps": b"\xdd\x00\x1e\x84\x80" + b"\x80" * 2_000_000,
    "extension": b"\xc7\x03\x05abc",
    "time stamp": b"\xd6\xff\x00\x00\x00\x00",
    "bad time stamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "4 GB extension, they say": b"\xc9\xff\xff\xff\xff\x01",
    "map with number keys": b"\x82\x01\x02\x03\x04",
    "map with list keys": b"\x81\x90\x01",
    "map with the same key twice": b"\x82\xa1a\x01\xa1a\x02",
    "array of a wrong type": msgspec.msgpack.encode({"dtype": 4, "shape": "x", "data": 1.5}),
    "array of a huge shape": msgspec.msgpack.encode(
        {"dtype": "float32", "shape": [2**62, 2**62], "data": b""}
    ),
    "object array": msgspec.msgpack.encode({"dtype": "object", "shape": [1], "data": b"\0" * 8}),
    "raw NaN": b"\xc4\x10" + struct.pack("<4f", *[float("nan")] * 4),
    "raw, one byte short": b"\xc4\x0f" + b"\x00" * 15,
}


def json_bodies(kind: Any) -> Iterator[tuple[str, bytes]]:
    """(name, JSON body): each hostile value in each field, and at the top."""
    for label, value in JSON_VALUES.items():
        yield f"{kind.__name__} = {label}", value
        for name in fields_of(kind):
            rest = {key: item for key, item in good(kind).items() if key != name}
            text = msgspec.json.encode(rest)[1:-1]
            comma = b"," if text else b""
            yield (
                f"{kind.__name__}.{name} = {label}",
                b'{"%s":%s%s%s}'
                % (
                    name.encode(),
                    value,
                    comma,
                    text,
                ),
            )


def msgpack_bodies(kind: Any) -> Iterator[tuple[str, bytes]]:
    """(name, msgpack body): each hostile value in each field, and at the top."""
    for label, value in MSGPACK_VALUES.items():
        yield f"{kind.__name__} = {label}", value
        for name in fields_of(kind):
            rest = {key: item for key, item in good(kind).items() if key != name}
            packed = b"".join(
                msgspec.msgpack.encode(key) + msgspec.msgpack.encode(item)
                for key, item in rest.items()
            )
            head = bytes([0x80 + len(rest) + 1]) + msgspec.msgpack.encode(name)
            yield f"{kind.__name__}.{name} = {label}", head + value + packed


def event_bodies(packed: bool) -> Iterator[tuple[str, bytes]]:
    """(name, batch): each hostile field of each kind of event, inside `POST /v1/events`."""
    for kind in EVENTS:
        tag = str(kind.__struct_config__.tag)
        for label, body in msgpack_bodies(kind) if packed else json_bodies(kind):
            if " = " in label and "." not in label.partition(" = ")[0]:
                continue  # the event as a whole is not a map
            if packed:
                event = bytes([body[0] + 1]) + msgspec.msgpack.encode("type")
                event += msgspec.msgpack.encode(tag) + body[1:]
                yield f"events: {label}", b"\x81\xa6events\x91" + event
            else:
                yield f"events: {label}", b'{"events":[{"type":"%s",%s]}' % (tag.encode(), body[1:])


def whole_of_lists(packed: bool) -> bytes:
    """A batch of the maximum size, most of which is empty lists."""
    event = {"type": "log_action", "episode_id": OPEN, "action": 0}
    if packed:
        lists = b"\xdd" + (7_900_000).to_bytes(4, "big") + b"\x90" * 7_900_000
        return msgspec.msgpack.encode({"events": [event | {"obs": msgspec.Raw(lists)}]})
    lists = b"[" + b"[]," * 2_600_000 + b"[]]"
    return msgspec.json.encode({"events": [event | {"obs": msgspec.Raw(lists)}]})


def path_of(route: RouteEntry) -> str:
    return route.path.replace("{id}", OPEN)
