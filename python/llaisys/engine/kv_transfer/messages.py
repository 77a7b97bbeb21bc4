"""Messages between engines that transfer KV blocks, as typed msgpack. Nothing in them is executed.

A connection begins with Challenge, Hello and Welcome. Then the consumer sends Fetch; the producer
replies Found, followed by the bytes of the blocks unless both map the same memory; the consumer
sends Done.
"""

from __future__ import annotations

import hashlib
import hmac

from msgspec import Struct

from llaisys.processes.channel import decoder

VERSION = 1
NONCE_BYTES = 32
MAX_FRAME = 64 << 20  # bytes of a message: a prompt of 16 million tokens
MAX_HELLO = 4096  # bytes of a message before the peer is authenticated


class Challenge(Struct, tag="challenge", forbid_unknown_fields=True):
    nonce: bytes
    version: int = VERSION


class Hello(Struct, tag="hello", forbid_unknown_fields=True):
    """`proof`: see `proof_of`."""

    proof: bytes
    layout: str  # see `KvLayout`


class Welcome(Struct, tag="welcome", forbid_unknown_fields=True):
    """`error`: why the connection is closed; empty: none. Over a Unix socket the descriptors of the
    producer's host slots follow, one per rank."""

    error: str = ""


class Fetch(Struct, tag="fetch", forbid_unknown_fields=True):
    """Ask for the blocks of a published prompt from block `start` on."""

    request_id: str  # of the producer's request
    tokens: bytes  # the whole prompt: int32, little endian
    salt: str
    start: int
    max_blocks: int


class Found(Struct, tag="found", forbid_unknown_fields=True):
    """The blocks that follow `start`. Over a Unix socket they are in `slots` of the producer's host
    memory until Done; otherwise their bytes follow."""

    num_tokens: int  # of the prompt, from its beginning; 0: none
    slots: list[int]


class Done(Struct, tag="done", forbid_unknown_fields=True):
    """The blocks of the last Found are copied."""


def proof_of(token: bytes, challenge: Challenge, layout: str) -> bytes:
    """Return the proof that the sender knows the shared token."""
    text = challenge.nonce + layout.encode()
    return hmac.new(token, text, hashlib.sha256).digest()


decode_challenge = decoder(Challenge)
decode_hello = decoder(Hello)
decode_welcome = decoder(Welcome)
decode_fetch = decoder(Fetch)
decode_found = decoder(Found)
decode_done = decoder(Done)
