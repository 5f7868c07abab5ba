"""Signed statements: what is accepted, and that nothing else is."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope

from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import PublicKey, SigningKey

OURS, OTHER = SigningKey.generate(), SigningKey.generate()
FACTS = {"sequence": 2**60 + 1, "loss": 0.1, "text": "é", "none": None, "list": [1, {"a": False}]}
SAID = dsse.statement("https://example.org/test/v1", [("adapter", "ab" * 32)], FACTS)
SIGNED = dsse.sign(SAID, OURS)


def refused(data: bytes, words: str = ".", key: PublicKey = OURS.public) -> None:
    with pytest.raises(UserError, match=words):
        dsse.verify(data, key)


def resigned(payload: Any, payload_type: str = dsse.STATEMENT) -> bytes:
    """Signed by our key, whatever it is."""
    text = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    envelope = Envelope(text, payload_type, {})
    envelope.sign(OURS.signer)
    return json.dumps(envelope.to_dict(), separators=(",", ":")).encode()


def test_round_trip_keeps_whole_numbers_and_is_one_line() -> None:
    assert dsse.verify(SIGNED, OURS.public) == dsse.peek(SIGNED) == SAID
    assert b"\n" not in SIGNED


def test_another_key_a_swapped_payload_or_a_second_signature_is_refused() -> None:
    refused(dsse.sign(SAID, OTHER), "signed by key")
    claimed = json.loads(dsse.sign(SAID, OTHER))
    claimed["signatures"][0]["keyid"] = OURS.public.keyid
    refused(json.dumps(claimed, separators=(",", ":")).encode(), "does not fit")
    other = json.loads(dsse.sign({**SAID, "predicate": {"a": 1}}, OURS))
    mine = json.loads(SIGNED)
    refused(json.dumps({**mine, "payload": other["payload"]}, separators=(",", ":")).encode(), "does not fit")
    envelope = {**mine, "signatures": mine["signatures"] + json.loads(dsse.sign(SAID, OTHER))["signatures"]}
    refused(json.dumps(envelope, separators=(",", ":")).encode(), "exactly one")
    refused(json.dumps({**mine, "signatures": []}, separators=(",", ":")).encode(), "exactly one")


def test_every_changed_byte_is_refused() -> None:
    for place in range(len(SIGNED)):
        for flip in (1, 0x20, 0x80):
            refused(SIGNED[:place] + bytes([SIGNED[place] ^ flip]) + SIGNED[place + 1 :])
    for end in range(0, len(SIGNED), 7):
        refused(SIGNED[:end])
    for extra in (b"\n", b" ", b"}", b"\0"):
        refused(SIGNED + extra)
        refused(extra + SIGNED)


def test_types_of_payloads_are_checked() -> None:
    refused(resigned(SAID, "application/json"), "type")
    for wrong in (
        b"[]", b"\xff", b"{}", b'{"a":1,"a":2}', b"[" * 100_000,
        {**SAID, "_type": "https://in-toto.io/Statement/v0.1"}, {**SAID, "predicate": {}}, {**SAID, "predicate": [1]},
        {**SAID, "predicateType": ""}, {**SAID, "subject": []}, {**SAID, "subject": "x"}, {**SAID, "more": 1},
        {**SAID, "subject": [{"name": "a", "digest": {}}]}, {**SAID, "subject": [{"name": "a"}]},
        {**SAID, "subject": [{"name": "a", "digest": {"sha256": "AB" * 32}}]},
        {**SAID, "subject": [{"name": "a", "digest": {"sha256": "ab"}}]},
        {**SAID, "subject": [{"name": "a", "digest": {"sha256": 1}}]},
        {**SAID, "subject": None}, {**SAID, "subject": {"name": "a"}},
        {"predicate_type" if name == "predicateType" else name: value for name, value in SAID.items()},
        {**SAID, "subject": [{"name": None, "digest": {"sha256": "ab" * 32}}]},
    ):  # fmt: skip
        refused(resigned(wrong))
    for number in ("NaN", "-Infinity", "1e999", "1" * 5000):
        refused(resigned(json.dumps(SAID).replace("0.1", number).encode()))


def test_repeated_keys_and_long_envelopes_are_refused() -> None:
    refused(SIGNED[:-1] + b',"payload":"e30="}', "repeated")
    refused(b'{"payload":"' + b"A" * dsse.MAX_BYTES + b'"}', "longer")
    with pytest.raises(UserError, match="longer"):
        dsse.sign({**SAID, "predicate": {"a": "b" * dsse.MAX_BYTES}}, OURS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"x", "\ud800"])
def test_only_plain_values_are_signed(value: Any) -> None:
    with pytest.raises(UserError):
        dsse.sign({**SAID, "predicate": {"a": value}}, OURS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("e30="),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["payload", "payloadType", "signatures", "keyid", "sig"])


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200) | st.dictionaries(NAMES, JSON, max_size=4).map(lambda it: json.dumps(it).encode()))
def test_bytes_are_refused_in_words(data: bytes) -> None:
    refused(data)


@settings(deadline=None, max_examples=60)
@given(JSON, st.sampled_from(["keyid", "sig", "more"]))
def test_signatures_of_any_type_are_refused_in_words(value: Any, name: str) -> None:
    fields = json.loads(SIGNED)
    fields["signatures"][0][name] = value
    refused(json.dumps(fields, separators=(",", ":")).encode())


def test_payload_that_is_not_canonical_base64_is_refused() -> None:
    fields = json.loads(SIGNED)
    payload = json.dumps(SAID, sort_keys=True, separators=(",", ":")).encode()
    text = b64encode(payload).decode()
    fields["payload"] = text.rstrip("=") if text.endswith("=") else text + "="
    refused(json.dumps(fields, separators=(",", ":")).encode())
