"""`postroom keys`: what became of requests, and how a person ends a doubt."""

import json

import pytest
from commands import Here
from house_tools import House

from postroom import signals
from postroom.idempotency import SHARED, Keys, Policy, idempotent


def make_some(url: str) -> None:
    keys = Keys(url, scope=SHARED)

    @idempotent("charge", key="order", keys=keys, scope="who")
    def charge(order: str, who: str, canary: str = "canary-body") -> dict[str, str]:
        if order == "lost":
            raise ConnectionError("the bank at https://u:canary-pass@bank does not answer")
        return {"order": order, "answer": canary}

    charge("17", "ada")
    charge("17", "bob")
    for who in ("ada", "bob"):
        with pytest.raises(ConnectionError):
            charge("lost", who)
    keys.close()


HOSTILE = "POST /x/\x1b]0;pwned\x07\x1b[2Jok\nPOST /pay fake \x9b31m\u202e"


def test_a_name_that_others_chose_does_nothing_to_a_terminal(house: House, here: Here) -> None:
    """Such as a path: without a policy the operation is the path, decoded."""
    keys = Keys(house.url, scope=SHARED)

    @idempotent(HOSTILE, key="order", keys=keys)
    def charge(order: str) -> str:
        if order == "lost":
            raise ConnectionError
        return order

    charge("17")
    with pytest.raises(ConnectionError):
        charge("lost")
    keys.close()
    url = ("--database", house.url)
    resolve = ("resolve", HOSTILE, "lost", "--not-done", "--reason", "asked")
    for words in (("list",), ("show", HOSTILE, "17"), resolve):
        done = here("keys", *words, *url)
        assert all(line.isprintable() for line in done.stdout.split("\n")), done.stdout
        assert r"\x1b]0;pwned\x07\x1b[2Jok\nPOST /pay fake \x9b31m\u202e" in done.stdout
    told = [here("keys", "show", HOSTILE, "none", *url)]
    assert told[0].returncode != 0
    assert told[0].stderr.strip("\n").isprintable(), told[0].stderr
    for words in (("list",), ("show", HOSTILE, "17")):
        text = here("keys", *words, *url, "--json").stdout
        document = json.loads(text)
        assert (document[0] if words == ("list",) else document)["operation"] == HOSTILE
        assert text.strip("\n").isprintable(), text


def test_what_is_in_doubt_catches_the_eye(
    house: House, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_some(house.url)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = here("keys", "list", "--database", house.url).stdout
    assert "\x1b[1;31mindeterminate" in text


def test_from_list_to_resolve(house: House, here: Here) -> None:
    url = ("--database", house.url)
    assert here("keys", "list", *url).stdout == "There are no keys.\n"
    make_some(house.url)
    text = here("keys", "list", *url).stdout
    assert "canary" not in text
    found = json.loads(here("keys", "list", "--status", "indeterminate", *url, "--json").stdout)
    assert {(one["key"], one["scope"], one["error"]) for one in found} == {
        ("lost", "ada", "ConnectionError"),
        ("lost", "bob", "ConnectionError"),
    }
    several = here("keys", "show", "charge", "17", *url)
    assert (several.returncode, "--scope (ada, bob)" in several.stderr) == (2, True)
    shown = here("keys", "show", "charge", "17", "--scope", "ada", *url, "--json")
    assert "canary" not in shown.stdout
    assert json.loads(shown.stdout)["response_bytes"] == 40
    shown = here("keys", "show", "charge", "17", "--scope", "ada", "--body", *url)
    assert "canary-body" in shown.stdout

    lost = ("charge", "lost", "--scope", "ada", "--reason", "asked the bank", *url)
    assert here("keys", "resolve", *lost).returncode == 2
    done = here("keys", "resolve", *lost, "--done", "--status", "201", "--body", '"paid"')
    assert (done.returncode, "answered 201" in done.stdout) == (0, True)
    again = here("keys", "resolve", *lost, "--not-done")
    assert (again.returncode, "is completed" in again.stderr) == (1, True)
    lost = ("charge", "lost", "--scope", "bob", "--reason", "asked the bank", *url)
    assert "carried out" in here("keys", "resolve", *lost, "--not-done").stdout
    shown = json.loads(
        here("keys", "show", "charge", "lost", "--scope", "ada", "--body", *url, "--json").stdout
    )
    assert (shown["status"], shown["response_status"]) == ("completed", 201)
    assert (shown["response_body"], shown["epoch"]) == ('"paid"', 2)


@pytest.mark.parametrize("decided", ["--done", "--not-done"])
def test_what_a_person_decides_is_kept_no_shorter_than_its_policy_says(
    house: House, here: Here, decided: str
) -> None:
    keys, days = Keys(house.url, scope=SHARED), 86400

    @idempotent("charge", key="order", keys=keys, policy=Policy(keep_seconds=30 * days))
    def charge(order: str) -> None:
        raise ConnectionError

    for order in ("kept", "over"):
        with pytest.raises(ConnectionError):
            charge(order)
    keys.close()
    house.sql("UPDATE {p}idempotency_key SET expires_at = %s WHERE {key} = 'over'", house.ago(days))
    left = {}
    for order in ("kept", "over"):
        words = ("charge", order, "--database", house.url)
        here("keys", "resolve", *words, decided, "--reason", "asked the bank")
        told = json.loads(here("keys", "show", *words, "--json").stdout)
        assert told["status"] == ("completed" if decided == "--done" else "failed")
        left[order] = round(told["expires_in_seconds"] / days, 2)
    assert left == {"kept": 30, "over": 1}


@pytest.mark.parametrize("who", ["list", "resolve"])
def test_whoever_finds_a_lost_request_tells_of_it(house: House, here: Here, who: str) -> None:
    """Nobody else will: it is in doubt from then on, and no longer looked for."""
    make_some(house.url)
    past = {"sqlite": "0"}.get(house.dialect, "'2020-01-01'")
    house.sql(
        "UPDATE {p}idempotency_key SET status = 'pending', locked_until = " + past + " WHERE "
        "scope = 'ada' AND status = 'indeterminate'"
    )
    resolve = ("resolve", "charge", "lost", "--scope", "ada", "--not-done", "--reason", "asked")
    heard: list[object] = []
    stop = signals.listen(lambda _, fields: heard.append(fields), only=["key.indeterminate"])
    try:
        for _ in range(2):
            here("keys", *(resolve if who == "resolve" else ("list",)), "--database", house.url)
    finally:
        stop()
    why = "the process that had it was lost"
    assert heard == [{"operation": "charge", "idempotency_key": "lost", "error": why}]


def test_one_of_very_many_who_have_the_same_key(house: House, here: Here) -> None:
    """As where each client counts its requests."""
    make_some(house.url)
    what = "'charge', 'lost', 'f', 'external', 'completed', 'o'"
    until = {"sqlite": "4000000000000000"}.get(house.dialect, "'2099-01-01'")
    others = ", ".join(f"('{number:04}', {what}, {until})" for number in range(1001))
    house.sql(
        "INSERT INTO {p}idempotency_key "
        "(scope, operation, {key}, fingerprint, mode, status, owner, expires_at) VALUES " + others
    )
    url = ("--database", house.url)
    lost = ("charge", "lost", "--scope", "bob", *url)
    shown = here("keys", "show", *lost, "--json")
    assert (shown.returncode, '"indeterminate"' in shown.stdout) == (0, True), shown
    done = here("keys", "resolve", *lost, "--not-done", "--reason", "asked")
    assert done.returncode == 0, done
    many = here("keys", "show", "charge", "lost", *url)
    assert (many.returncode, "0018, 0019, …)" in many.stderr) == (2, True), many
    nobody = here("keys", "show", "charge", "lost", "--scope", "eve", *url)
    assert (nobody.returncode, "of eve: it never came" in nobody.stderr) == (1, True), nobody


def test_what_contradicts_itself_decides_nothing(house: House, here: Here) -> None:
    make_some(house.url)
    lost = ("charge", "lost", "--scope", "ada", "--database", house.url)
    for words, says in (
        (("--done", "--not-done"), "say one of --done and --not-done"),
        (("--not-done", "--done"), "say one of --done and --not-done"),
        (("--not-done", "--body", "{}"), "--body is for --done"),
        (("--not-done", "--body", ""), "--body is for --done"),
        (("--not-done", "--status", "201"), "--status is for --done"),
        (("--not-done", "--content-type", "text/plain"), "--content-type is for --done"),
        (("--done", "--body", "text"), "not JSON"),
        (("--done", "--body", "NaN"), "not JSON"),
    ):
        wrong = here("keys", "resolve", *lost, "--reason", "asked", *words)
        assert (wrong.returncode, says in wrong.stderr) == (2, True), wrong
    told = json.loads(here("keys", "show", *lost, "--json").stdout)
    assert told["status"] == "indeterminate"


def test_an_answer_that_cannot_be_sent_is_refused(house: House, here: Here) -> None:
    make_some(house.url)
    lost = ("charge", "lost", "--scope", "ada", "--database", house.url)
    for words, says in (
        (("--status", "204", "--body", "{}"), "204 has no body"),
        (("--status", "304", "--body", "{}"), "304 has no body"),
        (("--body", "a", "--content-type", "text/plain\r\nX-Evil: 1"), "'content-type'"),
        (("--body", "a", "--content-type", "text/plän→"), "'content-type'"),
        (("--body", "a", "--content-type", "text/plain "), "'content-type'"),
    ):
        wrong = here("keys", "resolve", *lost, "--reason", "asked", "--done", *words)
        assert (wrong.returncode, says in wrong.stderr) == (2, True), wrong
        assert wrong.stderr.strip("\n").isprintable(), wrong.stderr
    assert json.loads(here("keys", "show", *lost, "--json").stdout)["status"] == "indeterminate"
    done = here("keys", "resolve", *lost, "--reason", "asked", "--done", "--status", "204")
    assert done.returncode == 0, done


def test_an_answer_may_be_no_json_if_it_says_so(house: House, here: Here) -> None:
    make_some(house.url)
    lost = ("charge", "lost", "--scope", "ada", "--database", house.url)
    as_text = ("--done", "--body", "paid", "--content-type", "text/plain")
    done = here("keys", "resolve", *lost, "--reason", "asked", *as_text)
    assert (done.returncode, "answered 200" in done.stdout) == (0, True), done
    told = json.loads(here("keys", "show", *lost, "--body", "--json").stdout)
    assert told["response_headers"] == [["content-type", "text/plain"]]
    assert told["response_body"] == "paid"


def test_errors_are_sentences(house: House, here: Here) -> None:
    url = ("--database", house.url)
    unknown = here("keys", "show", "charge", "x", *url)
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("postroom: charge knows no key 'x'")
    wrong = here("keys", "list", "--status", "lost", *url)
    assert (wrong.returncode, "choose of pending" in wrong.stderr) == (2, True)


def test_only_what_has_expired_is_pruned(house: House, here: Here) -> None:
    url = ("--database", house.url)
    make_some(house.url)
    assert json.loads(here("keys", "prune", *url, "--json").stdout)["pruned"][0]["count"] == 0
    past = {"sqlite": "0"}.get(house.url.partition(":")[0], "'2020-01-01'")
    house.sql(f"UPDATE {{p}}idempotency_key SET expires_at = {past}")
    assert (
        json.loads(here("keys", "prune", *url, "--dry-run", "--json").stdout)["pruned"][0]["count"]
        == 2
    )
    assert json.loads(here("keys", "prune", *url, "--json").stdout)["pruned"][0]["count"] == 2
    left = json.loads(here("keys", "list", *url, "--json").stdout)
    assert {one["status"] for one in left} == {"indeterminate"}
