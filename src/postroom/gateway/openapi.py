"""The gateway's OpenAPI document: written by hand, from the same rules that check an order."""

from __future__ import annotations

from typing import Any

from postroom.gateway import orders
from postroom.idempotency.problems import HEADER, MEDIA_TYPE

__all__ = ["document"]

_JSON = "application/json"
# Any printable text is a key; in a header it is ASCII, and without commas unless it is quoted.
_KEY = {"type": "string", "minLength": 1, "maxLength": 255}
_HEADER_KEY = r'^([!#-+.-~-]([ -+.-~-]{0,253}[!-+.-~-])?|"([ !#-\[\]-~]|\\["\\]){1,255}")$'


def document(version: str, *, secured: bool) -> dict[str, Any]:
    """The document; `secured`: a bearer token is needed."""
    paths: dict[str, Any] = {
        "/do/order": {"post": _place(secured)},
        "/do/order/{key}": {"get": _look(secured)},
    }
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Postroom order gateway", "version": version},
        "paths": paths,
        "components": {
            "schemas": {"Order": _order(), "Request": _request(), "Problem": _problem()},
            **({"securitySchemes": schemes} if secured else {}),
        },
        **({"security": [{"token": []}]} if secured else {}),
    }


def _place(secured: bool) -> dict[str, Any]:
    body = {"schema": {"$ref": "#/components/schemas/Order"}}
    return {
        "operationId": "place_order",
        "summary": "Place an order. The same key and order again: what became of it.",
        "parameters": [
            {
                "name": HEADER,
                "in": "header",
                "description": "The client's name for it; or `idempotency_key` in the body.",
                "schema": {"type": "string", "pattern": _HEADER_KEY},
            },
            _wait(),
        ],
        "requestBody": {"required": True, "content": {_JSON: body}},
        "responses": {
            "202": _answer("Accepted now; it is on its way."),
            "200": _answer("Accepted before, or finished within `wait`: where it stands."),
            "400": _wrong("The body is no JSON object, or the key is missing or malformed."),
            "409": _wrong("The key belongs to another order."),
            "413": _wrong("The body is too large."),
            "415": _wrong("Content-Type is not application/json."),
            "422": _wrong("A field is wrong; it is named."),
            **_common(secured),
        },
    }


def _look(secured: bool) -> dict[str, Any]:
    return {
        "operationId": "find_order",
        "summary": "What became of an order.",
        "parameters": [
            {"name": "key", "in": "path", "required": True, "schema": _KEY},
            _wait(),
        ],
        "responses": {
            "200": _answer("Where it stands."),
            "400": _wrong("`wait` is wrong."),
            "404": _wrong("There is no order under this key."),
            **_common(secured),
        },
    }


def _common(secured: bool) -> dict[str, Any]:
    stranger = (
        {"401": _wrong("No token, or one that nobody has.")}
        if secured
        else {"421": _wrong("It has no tokens, and was not called at a loopback address.")}
    )
    page = {"403": _wrong("A browser sent it for a page of another site.")}
    return {
        **stranger,
        **page,
        "503": _wrong("The database does not answer: try again with the same key."),
    }


def _wait() -> dict[str, Any]:
    return {
        "name": "wait",
        "in": "query",
        "description": "Seconds to wait for the end of it.",
        "schema": {"type": "number", "minimum": 0, "maximum": 30},
    }


def _answer(text: str) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Request"}}}
    return {"description": text, "content": content}


def _wrong(text: str) -> dict[str, Any]:
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {"description": text, "content": content}


def _order() -> dict[str, Any]:
    shared: dict[str, Any] = {
        "symbol": {"type": "string", "pattern": f"^{orders.SYMBOL}$", "examples": ["AAPL"]},
        "side": {"enum": list(orders.SIDES)},
        "quantity": {"type": "integer", "minimum": 1, "maximum": orders.MOST_QUANTITY},
        "account": {"type": "string", "pattern": f"^{orders.ACCOUNT}$"},
        "time_in_force": {"enum": list(orders.TIMES_IN_FORCE), "default": "day"},
        "client_note": {"type": "string", "maxLength": orders.MOST_NOTE},
        "idempotency_key": {**_KEY, "type": ["string", "null"]},
    }
    price = {"type": "string", "pattern": f"^{orders.PRICE}$", "examples": ["101.25"]}
    needed = ["symbol", "side", "quantity", "order_type"]
    market = {**shared, "order_type": {"const": "market"}}
    limit = {**shared, "order_type": {"const": "limit"}, "limit_price": price}
    return {
        "oneOf": [
            _closed(market, needed),
            _closed(limit, [*needed, "limit_price"]),
        ]
    }


def _closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _request() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    error = {
        "type": ["object", "null"],
        "properties": {"code": text, "detail": text},
        "required": ["code", "detail"],
    }
    properties = {
        "idempotency_key": {"type": "string"},
        "client_order_id": {"type": "string", "format": "uuid"},
        "status": {"enum": ["accepted", "succeeded", "failed", "unknown"]},
        "finished": {"type": "boolean"},
        "attempts": {"type": "integer"},
        "order": {"type": "object"},
        "result": {},
        "last_error": error,
    }
    return _closed(properties, list(properties))


def _problem() -> dict[str, Any]:
    fault = {
        "type": "object",
        "properties": {"field": {"type": "string"}, "detail": {"type": "string"}},
        "required": ["field", "detail"],
    }
    properties = {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {"type": "array", "items": fault},
    }
    return _closed(properties, ["type", "title", "status", "detail"])
