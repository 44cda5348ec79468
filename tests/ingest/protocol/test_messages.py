"""Messages as their bytes: a field that equals its default is not sent, however it was made."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import pytest
from msgspec.structs import FieldInfo, fields

from ingest.protocol import messages as wire
from ingest.protocol.messages import JSON, MSGPACK

Message: TypeAlias = type[msgspec.Struct]
SENT: list[Message] = [
    kind
    for kind in vars(wire).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__struct_config__.omit_defaults
]
EQUAL = [
    (kind, field)
    for kind in SENT
    for field in fields(kind)
    if isinstance(field.default, (int, float, str, bytes, tuple))
]
NEEDED: dict[str, Any] = {
    "obs": [0.0],
    "action": 1,
    "action_logp": -0.5,
    "policy_version": 1,
    "reward": 1.0,
    "events": [],
    "actions": [],
}


def another(value: Any) -> Any:
    """An object that is equal, and another one where Python makes one."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def made(kind: Message, **given: Any) -> msgspec.Struct:
    """A message with its required fields and `given`."""
    needed = {
        field.name: NEEDED.get(field.name, "x")
        for field in fields(kind)
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    }
    return kind(**(needed | given))


@pytest.mark.parametrize("encoding", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("kind", "field"), EQUAL, ids=[f"{kind.__name__}.{field.name}" for kind, field in EQUAL]
)
def test_a_computed_value_that_equals_its_default_is_left_out(
    kind: Message, field: FieldInfo, encoding: str
) -> None:
    """A collector from before the field takes the message, because the field is not in it."""
    plain, computed = made(kind), made(kind, **{field.name: another(field.default)})
    assert computed == plain
    assert wire.encode(computed, encoding) == wire.encode(plain, encoding)


def test_the_messages_with_defaults_of_numbers_are_all_tried() -> None:
    """The list above is found by type, so it has to find what is known to be there."""
    floats = {
        f"{kind.__name__}.{field.name}" for kind, field in EQUAL if type(field.default) is float
    }
    assert floats >= {f"{name}.pass_prob" for name in ("LogAction", "Decision", "GetAction")}
    assert floats >= {"ActionBatch.wait"}


def test_another_value_is_sent() -> None:
    """Only the default is left out."""
    sent = msgspec.json.decode(wire.encode(made(wire.Decision, pass_prob=0.5), JSON))
    assert sent["pass_prob"] == 0.5
