"""What a key, a fingerprint, a record and an answer mean, decided without a database."""

import json
import math
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.errors import ConfigurationError
from postroom.idempotency import derive_key
from postroom.idempotency.canonical import canonical_json, fingerprint
from postroom.idempotency.exchange import Asked
from postroom.idempotency.keys import Seen, asked_of
from postroom.idempotency.policy import Policies, Policy
from postroom.idempotency.problems import PROBLEMS, openapi_responses
from postroom.idempotency.rules import (
    Answer,
    BadKey,
    Claim,
    Doubtful,
    Mine,
    Name,
    Other,
    Record,
    Replay,
    Running,
    judge,
    kept_headers,
    parse_key,
    scope_name,
    sent_elsewhere,
    storable,
)
from postroom.inbox import Received

NAME = Name("ada", "POST /orders", "k")
KEY = [("idempotency-key", "k")]


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("abc", "abc"),
        (' "abc" ', "abc"),
        ('"a\\"b\\\\c"', 'a"b\\c'),
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("x" * 255, "x" * 255),
        ('"k";a=1', "k"),
        ('"k;a=1"', "k;a=1"),
        ('"k"; a=-1.5;b; *c-d.e=to/k:en;f="x\\"y, z";g=?0;h=:aGk=:;i=@-7;j=%"f%c3%bc"', "k"),
    ],
)
def test_a_key_is_quoted_or_bare(header: str, key: str) -> None:
    assert parse_key([header]) == key


@pytest.mark.parametrize(
    "values",
    [[""], ['""'], ['"abc'], ['"a"b"'], ["x" * 256], ["a\tb"], ["é"], ["a", "a"], ['"\\n"'], [" "],
     ['"k";'], ['"k";A=1'], ['"k";a='], ['"k" ;a=1'], ['"k";a=?2'], ['"k";a="'], ['"k";a=1, "l"'],
     ['"k";a=1.2345'], ['"k";a=:?:'], ['"k";a=@1.5'], ['"k";a=%"%C3"']],
)  # fmt: skip
def test_what_is_no_key(values: list[str]) -> None:
    with pytest.raises(BadKey):
        parse_key(values)


def test_no_header_is_no_key() -> None:
    assert parse_key([]) is None


def test_a_quoted_and_a_bare_key_are_the_same() -> None:
    assert parse_key(["k-1"]) == parse_key(['"k-1"'])


# ── Fingerprints ───────────────────────────────────────────────────────────────────────────────

JSON = "application/json; charset=utf-8"
ORDER = b'{"symbol": "ABC", "quantity": 100, "note": "\\u00e9"}'


def of(body: bytes = ORDER, **other: str) -> str:
    told = {"method": "POST", "path": "/orders", "query": "a=1&b=2", "content_type": JSON} | other
    return fingerprint(body=body, **told)


@pytest.mark.parametrize(
    "body",
    [
        b'{"quantity":100,"symbol":"ABC","note":"\xc3\xa9"}',
        b'{"note": "\\u00E9",\n "quantity": 100.0, "symbol": "ABC"}',
        b'{"note": "\\u00E9", "quantity": 1e2, "symbol": "ABC"}',
        b'{"note": "\\u00E9", "quantity": 1000.00e-1, "symbol": "ABC"}',
    ],
)
def test_json_is_compared_by_what_it_says(body: bytes) -> None:
    assert of(body) == of()


@pytest.mark.parametrize(
    "body",
    [
        b'{"symbol": "ABC", "quantity": "100", "note": "\\u00e9"}',
        b'{"symbol": "ABC", "quantity": 100.0000000000000000000000001, "note": "\\u00e9"}',
        b'{"symbol": "ABC", "quantity": 100, "note": "\\u00e9", "quantity": 100}',
        b'{"symbol": "ABC", "quantity": 100}',
        b"",
    ],
)
def test_another_body_is_another_request(body: bytes) -> None:
    assert of(body) != of()


def test_method_path_query_and_chosen_headers_belong_to_it() -> None:
    assert of(query="b=2&a=1") == of()
    others = [of(method="PATCH"), of(path="/orders/1"), of(query="a=1"), of(content_type="")]
    others.append(fingerprint("POST", "/orders", "a=1&b=2", ORDER, JSON, [("Prefer", "x")]))
    assert len({of(), *others}) == 6
    assert of(b"raw", content_type="text/plain") != of(b"raw ", content_type="text/plain")


def test_a_slash_at_the_end_is_another_spelling() -> None:
    def asked(path: str) -> object:
        return asked_of(Seen("POST", path, headers=KEY), "POST /orders", Policy(), "ada")

    one, other = asked("/orders"), asked("/orders/")
    assert isinstance(one, Asked)
    assert isinstance(other, Asked)
    assert (one.name, one.fingerprint) == (other.name, other.fingerprint)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"0.10", b"0.1"),
        (b"-0.0", b"0"),
        (b"1e400", b"1" + b"0" * 400),
        (b"12.5e1", b"125"),
        (b"1e999999999", b"10e999999998"),
        (b"[1.5, 100]", b"[15e-1,1e2]"),
        (b"1e39", b"1" + b"0" * 39),
        (b"-1e40", b"-1" + b"0" * 40),
        (b"9" * 5000, b"9" * 5000 + b".0"),
        (b"1" * 41 + b"0", b"1" * 41 + b"e1"),
    ],
)
def test_numbers_are_compared_by_value(one: bytes, other: bytes) -> None:
    assert canonical_json(one) == canonical_json(other) is not None


@pytest.mark.parametrize("number", [b"1e4000", b"1e-4000", b"1e30", b"9" * 4000, b"0.1", b"-0e9"])
def test_a_few_letters_never_stand_for_many(number: bytes) -> None:
    body = b"[" + b",".join([number] * 1000) + b"]"
    found = canonical_json(body)
    assert found is not None
    assert len(found) < 10 * len(body)


def test_what_is_no_json_is_compared_by_its_bytes() -> None:
    for body in (b"{", b"NaN", b"\xff", b"[" * 100_000, b'{"a":1,"a":2}'):
        assert canonical_json(body) is None


# However slow the machine is.
SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@SLOWLY
@given(_JSON, _JSON)
def test_equal_documents_and_only_they_are_equal(one: object, other: object) -> None:
    def told(value: object, **how: object) -> bytes | None:
        return canonical_json(json.dumps(value, allow_nan=True, **how).encode())  # type: ignore[arg-type]

    first = told(one)
    if first is not None:
        assert first == told(one, indent=3, ensure_ascii=False)
        # Python takes True for 1; JSON does not.
        assert (first == told(other)) == (json.dumps(one) == json.dumps(other) or same(one, other))


def same(one: object, other: object) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) in (int, float) and type(other) in (int, float) and one == other


# ── Derived keys ───────────────────────────────────────────────────────────────────────────────


def test_one_derivation_for_everybody() -> None:
    id = uuid.UUID(int=7)
    assert derive_key("order-17", "charge") == "order-17:charge"
    assert derive_key("billing", id, 3) == f"billing:{id}:3"
    assert derive_key("a:b", "c") == "a%3Ab:c" != derive_key("a", "b", "c")
    received = Received(str(id), "t", "orders", None, "", {}, b"", 2)
    assert received.key_for("billing", "charge") == f"{id}:billing:charge"
    assert NAME.derive("charge") == "ada:POST%20/orders:k:charge"
    # Written down: a retry after an upgrade must carry the same key.
    long = "sha256%8c4d6c6f1d37e8b7e6a8bf39a53eb1e2"
    assert derive_key("x" * 300).startswith("sha256%")
    assert len(derive_key("x" * 300)) == len(long) + 32


_PARTS = st.lists(st.text(min_size=1), min_size=1, max_size=4)


@SLOWLY
@given(_PARTS, _PARTS)
def test_other_parts_are_another_key(one: list[str], other: list[str]) -> None:
    if any("\x00" in part for part in one + other):
        return
    assert (derive_key(*one) == derive_key(*other)) == (one == other)
    assert 1 <= len(derive_key(*one)) <= 255


@pytest.mark.parametrize("parts", [(), ("",), ("a", None), (1.5,), (True,), ("a\x00",)])
def test_what_no_key_is_made_of(parts: tuple[object, ...]) -> None:
    with pytest.raises(ConfigurationError):
        derive_key(*parts)  # type: ignore[arg-type]


def test_tenant_and_principal_are_not_mixed_up() -> None:
    assert scope_name(("a", "b:c")) != scope_name(("a:b", "c")) != scope_name("a:b:c")


# ── Records ────────────────────────────────────────────────────────────────────────────────────


def record(**other: object) -> Record:
    usual = {
        "owner": "them", "epoch": 3, "status": "pending", "mode": "external", "fingerprint": "f",
        "attempts": 1, "lease_left_us": 2_000_000, "response_status": 201,
        "response_headers": '[["location", "/1"]]', "response_body": b"{}", "body_absent": None,
        "recovery_point": None, "progress": None, "request": None,
    }  # fmt: skip
    return Record(**(usual | other))  # type: ignore[arg-type]


def test_a_fresh_claim_is_mine() -> None:
    found = judge(record(owner="me"), NAME, "f", "me")
    assert found == Mine(Claim(NAME, "me", 3), 1)


@pytest.mark.parametrize("status", ["pending", "completed", "failed", "indeterminate"])
def test_the_fingerprint_is_compared_before_the_state(status: str) -> None:
    assert judge(record(status=status), NAME, "other", "me") == Other()


def test_states_and_what_they_mean() -> None:
    assert judge(record(), NAME, "f", "me") == Running(2.0)
    assert judge(record(lease_left_us=-1), NAME, "f", "me") == Doubtful(3, lost=True)
    assert judge(record(lease_left_us=-1, mode="resume"), NAME, "f", "me") == Running(0.0)
    committed_without_answer = record(lease_left_us=None, mode="same")
    assert judge(committed_without_answer, NAME, "f", "me") == Doubtful(3, lost=True)
    assert judge(record(status="indeterminate"), NAME, "f", "me") == Doubtful(3)
    found = judge(record(status="completed"), NAME, "f", "me")
    assert isinstance(found, Replay)
    assert (found.answer.status, found.answer.body) == (201, b"{}")
    assert found.answer.headers == (("location", "/1"),)


def test_answers_that_are_kept() -> None:
    kept = [status for status in range(100, 600) if storable(status)]
    assert {200, 201, 202, 204, 301, 302, 303, 307, 400, 402, 404, 410, 415, 422} <= set(kept)
    assert not {100, 401, 403, 408, 409, 425, 429, 500, 502, 503, 504} & set(kept)


def test_a_redirect_is_an_answer_unless_the_request_is_to_be_sent_again() -> None:
    def told(status: int, *places: str) -> bool:
        headers = tuple(("Location", place) for place in places)
        return sent_elsewhere(Answer(status, headers), "/app/pay me")

    assert told(307, "/app/pay%20me/")
    assert told(301, "https://shop.example/app/pay%20me?x=1")
    assert not told(302, "/app/pay%20me"), "post, redirect, get"
    assert not told(307, "/receipts/17")
    assert not told(308)
    assert not told(301, "http://[broken")


def test_headers_that_are_kept() -> None:
    headers = [("Content-Type", "x"), ("Set-Cookie", "s"), ("X-Mine", "1"), ("ETag", "e")]
    assert kept_headers(headers) == (("content-type", "x"), ("etag", "e"))
    assert ("x-mine", "1") in kept_headers(headers, ["X-Mine"])
    assert "set-cookie" not in dict(kept_headers(headers, ["Set-Cookie"]))


# ── Policies ───────────────────────────────────────────────────────────────────────────────────


def test_policies_are_found_by_method_and_path() -> None:
    pay, rest = Policy(required=True), Policy()
    found = Policies({"POST /orders/{id}/pay": pay}, default=rest)
    assert found.find("POST", "/orders/7/pay") == ("POST /orders/{id}/pay", pay)
    for method, path in (
        ("POST", "//orders/7//pay"),
        ("POST", "/orders/7/pay\n"),
        ("post", "/orders/7/pay/"),
    ):
        assert found.find(method, path) == ("POST /orders/{id}/pay", pay), "as routers may read it"
    assert found.find("POST", "/orders/7/8/pay") == ("POST /orders/7/8/pay", rest)
    assert found.find("GET", "/orders/7/pay") is None
    for unfit in ("/" + "x" * 300, "/a\x00"):
        assert found.find("POST", unfit) == ("POST *", rest), "as every database takes it"
    assert Policies({"PUT /x": pay}).find("POST", "/x") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "both"},
        {"mismatch_status": 400},
        {"lease_seconds": 0},
        {"lease_seconds": math.inf},
        {"keep_seconds": math.inf},
        {"keep_seconds": math.nan},
        {"wait_seconds": -1},
        {"wait_seconds": math.nan},
    ],
)
def test_a_policy_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no route"):
        Policies({"/orders": Policy()}).check()


@pytest.mark.parametrize(
    "path",
    ["/orders/<int:id>/pay", "/orders/<id>/pay", "/orders?dry=1", "/orders#new", "/my orders"],
)
def test_a_route_that_no_path_could_match_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"such as .POST /orders/\{id\}/pay"):
        Policies({f"POST {path}": Policy()}).check()


def test_every_problem_has_a_type_of_its_own_in_the_openapi() -> None:
    shown = openapi_responses(Policy(required=True, mismatch_status=409))
    assert sorted(shown) == ["400", "401", "409", "413", "503"]
    text = json.dumps(shown)
    assert all(f"urn:postroom:problem:{kind}" in text for kind in PROBLEMS)
    assert "422" in openapi_responses(Policy())


def test_litestar_shows_header_and_problems() -> None:
    from litestar import Litestar, post

    from postroom.idempotency import SHARED, Keys
    from postroom.idempotency.litestar import describe

    @post("/orders")
    async def place() -> None:
        """Places an order."""

    @post("/other")
    async def other() -> None:
        """Has no keys."""

    policies = {"POST /orders": Policy(required=True)}
    app = Litestar([place, other])
    describe(app, Keys("sqlite:///shop.db", scope=SHARED, policies=policies))
    paths = app.openapi_schema.to_schema()["paths"]
    shown = paths["/orders"]["post"]
    [header] = shown["parameters"]
    assert (header["name"], header["required"]) == ("Idempotency-Key", True)
    text = json.dumps(shown["responses"])
    for name in PROBLEMS:
        assert f"urn:postroom:problem:{name}" in text
    assert shown["responses"]["201"]
    assert "urn:postroom" not in json.dumps(paths["/other"])
