"""The gateway against its own OpenAPI document: whatever comes in, it answers as it says.

Schemathesis makes requests that fit the document and requests that do not, and compares answers
with it: no 5xx, no status, media type or body that the document does not have.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from gateway_tools import PATIENT, QUICK
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from postroom.databases import migrate
from postroom.gateway.service import create_app
from served import Served

EXAMPLES = 1000 if os.environ.get("POSTROOM_GUARANTEES") == "big" else 30
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = [("/do/order", "POST"), ("/do/order/{key}", "GET")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = f"sqlite:///{tmp_path_factory.mktemp('schema') / 'gateway.db'}"
    asyncio.run(migrate.install(database))
    served = Served(create_app(database, "call:gateway_tools:say_yes", **PATIENT, **QUICK))
    yield served.url
    served.stop()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_comes_in_is_answered_as_the_document_says(
    url: str, path: str, method: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(schema[path][method].as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        seen[case.call_and_validate(checks=CHECKS, timeout=120).status_code] += 1

    run()
    print(f"{method} {path}, {mode.value}: {dict(seen)}")
    assert max(seen) < 500


@settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(body=st.binary(max_size=300), key=st.text(max_size=300), path=st.text(max_size=20))
def test_nothing_at_all_makes_it_fail(url: str, body: bytes, key: str, path: str) -> None:
    headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
    document = {"idempotency_key": key, path: [key]}
    with httpx.Client(base_url=url, timeout=120) as client:
        answers = (
            client.post("/do/order", content=body, headers=headers),
            client.post("/do/order", json=document),
            client.get(f"/do/order/{quote(path, errors='replace')}"),
        )
    assert all(answer.status_code < 500 for answer in answers)
