"""The gateway against its own OpenAPI document: whatever comes in, it answers as it says."""

from pathlib import Path

import pytest
from gateway_tools import Served
from hypothesis import HealthCheck, settings

from postroom.databases import migrate
from postroom.gateway.exchange import create_exchange
from postroom.gateway.service import create_app

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

EXAMPLES = 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> object:
    import asyncio

    folder = tmp_path_factory.mktemp("schema")
    database = f"sqlite:///{folder / 'gateway.db'}"
    asyncio.run(migrate.install(database))
    served = Served(create_app(database))
    yield served.url
    served.stop()


@pytest.fixture
def api(url: str) -> object:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_whatever_comes_in_is_answered_as_the_document_says(case: object) -> None:
    case.call_and_validate()  # type: ignore[attr-defined]


def test_the_exchange_is_a_stand_in_and_no_part_of_the_contract(tmp_path: Path) -> None:
    assert create_exchange(str(tmp_path / "book.db")).routes
