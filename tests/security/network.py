"""What a hub may answer.  The hub is a real server on loopback, asked by the real client."""

from __future__ import annotations

from tests.checkpoint.test_hub import MODEL
from tests.hub_server import Hub
from tests.security.rows import HubRow, Words


def failing(match: str, kind: int | str, *, gated: bool = False, private: bool = False) -> object:
    def make(hub: Hub) -> Words:
        hub.add("org/name", MODEL, gated=gated, private=private)
        if match:
            hub.fail(match, kind)
        return ["load", "org/name"]

    return make


def row(what: str, told: str, match: str = "", kind: int | str = 0, **options: bool) -> HubRow:
    return HubRow(of="hub", what=what, told=told, code=2, make=failing(match, kind, **options))  # type: ignore[arg-type]  # a function of a hub


def hostile_header(hub: Hub) -> Words:
    hub.add("org/name", {**MODEL, "model.safetensors": b"\xff" * 8 + b"{}"})
    return ["inspect", "org/name"]


def page(hub: Hub) -> Words:
    hub.add("org/name", {**MODEL, "model.safetensors": b"<!DOCTYPE html><p>Log in"})
    return ["inspect", "org/name"]


def bad_index(hub: Hub) -> Words:
    index = b'{"weight_map": {"a": "../../../etc/passwd"}}'
    hub.add("org/name", {"model.safetensors.index.json": index, "config.json": b"{}"})
    return ["load", "org/name"]


def climbing_name(hub: Hub) -> Words:
    return ["inspect", "org/../../etc"]


HUB: list[HubRow] = [
    row("401", "does not accept the token (401)", "/api/models", 401),
    row("403", "gives no right to read it (403)", "/api/models", 403),
    row("404", "shows no such model", "/api/models", 404),
    row("429", "too many requests (429)", "/api/models", 429),
    row("500", "the hub answered with status 500", "/api/models", 500),
    row("503 for a file", "the hub answered with status 503", "config.json", 503),
    row("a gated model", "the model is gated", gated=True),
    row("a private model", "it does not exist, or it is private", private=True),
    row("a login page for an answer", "gave a malformed answer: GET http", "/api/models", "html"),
    row("a body half as long as announced", "model.safetensors:", "/store/", "short"),
    row("a connection that drops half way, each time", "model.safetensors:", "/store/", "drop"),
    HubRow(
        of="hub",
        what="a header of 2^64 bytes",
        told="should have 18446744073709551615 bytes",
        code=2,
        make=hostile_header,
    ),
    HubRow(of="hub", what="an HTML page in a file's place", told="this is an HTML page", code=2, make=page),
    HubRow(of="hub", what="an index that climbs out", told="holds a path separator", code=2, make=bad_index),
    HubRow(
        of="hub", what="a model's name that climbs out", told="not a possible model name", code=2, make=climbing_name
    ),
]
