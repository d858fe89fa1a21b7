"""Litestar: the header and the problems of keys in its generated OpenAPI.

    app = Litestar([place], middleware=[DefineMiddleware(IdempotencyMiddleware, keys=keys)])
    describe(app, keys)

The middleware is that of `postroom.idempotency.asgi`; a route has its turn by `turn_of(request)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litestar.openapi.spec import (
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    Reference,
    Schema,
)

from postroom.idempotency import problems
from postroom.idempotency.keys import Keys
from postroom.idempotency.policy import Policy

if TYPE_CHECKING:
    from litestar import Litestar

__all__ = ["describe"]


def describe(app: Litestar, keys: Keys) -> None:
    """Have the header and the problems of keys shown in the schema; after all routes are there."""
    for path, item in (app.openapi_schema.paths or {}).items():
        for method in ("post", "patch", "put", "delete"):
            operation = getattr(item, method)
            if operation is not None and (found := keys.find(method.upper(), path)) is not None:
                _describe(operation, found[1])


def _describe(operation: Operation, policy: Policy) -> None:
    parameters = operation.parameters = list(operation.parameters or ())
    if not any(getattr(each, "name", "").lower() == "idempotency-key" for each in parameters):
        wanted = problems.openapi_header(policy)
        parameters.append(
            Parameter(
                name=wanted["name"],
                param_in=wanted["in"],
                required=wanted["required"],
                description=wanted["description"],
                schema=_schema(wanted["schema"]),
            )
        )
    responses = operation.responses = dict(operation.responses or {})
    for code, wanted in problems.openapi_responses(policy).items():
        theirs = responses.setdefault(code, OpenAPIResponse(description=wanted["description"]))
        if not isinstance(theirs, OpenAPIResponse):  # a reference, which others share
            continue
        theirs.content = dict(theirs.content or {}) | {
            kind: OpenAPIMediaType(schema=_schema(content["schema"]))
            for kind, content in wanted["content"].items()
        }
        theirs.headers = dict(theirs.headers or {}) | {
            name: OpenAPIHeader(schema=_schema(header["schema"]))
            for name, header in wanted.get("headers", {}).items()
        }


def _schema(wanted: dict[str, Any]) -> Schema:
    """The same schema in Litestar's words."""
    inner = wanted.get("properties", {})
    properties: dict[str, Reference | Schema] = {name: _schema(inner[name]) for name in inner}
    return Schema(
        type=OpenAPIType(wanted["type"]),
        properties=properties or None,
        required=wanted.get("required"),
        enum=wanted.get("enum"),
        const=wanted.get("const"),
        min_length=wanted.get("minLength"),
        max_length=wanted.get("maxLength"),
    )
