"""`postroom audit list`, and the entries that a relay leaves."""

from pathlib import Path

from commands import Here
from counter import audited, draft, publish, said


def test_a_rebind_leaves_an_entry(here: Here, database_url: str) -> None:
    said(here, "db", "install", "--database", database_url)
    relay = ("relay", "--once", "--database", database_url, "--broker")
    said(here, *relay, "call:receivers:take")
    said(here, *relay, "call:receivers:take", "--rebind")
    assert audited(database_url) == []  # the routes did not change

    assert here(*relay, "call:receivers:refuse_poison").returncode == 2
    assert audited(database_url) == []
    said(here, *relay, "call:receivers:refuse_poison", "--rebind")
    ((who, what, subject, why),) = audited(database_url)
    assert "@" in who
    assert (what, subject) == ("relay.rebind", "routes")
    assert why.index("call:receivers:take") < why.index("call:receivers:refuse_poison")


def test_entries_are_listed_newest_first_and_filtered(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    poison, _ = publish(database_url, draft("poison"), draft("behind"))
    said(here, "relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    said(here, "lanes", "pause", "3", "--reason", "deploy", *url)
    said(here, "lanes", "resume", "3", *url)
    said(here, "dead", "discard", poison, "--reason", "customer has left", *url)

    def listed(*options: str) -> list[tuple[str, str, str | None]]:
        found = said(here, "audit", "list", *options, *url)
        return [(one["what"], one["subject"], one["why"]) for one in found]

    discarded = ("dead.discard", poison, "customer has left")
    paused, resumed = ("lanes.pause", "lane 3", "deploy"), ("lanes.resume", "lane 3", None)
    assert listed() == [discarded, resumed, paused]
    assert listed("--what", "lanes") == [resumed, paused]
    assert listed("--what", "lanes.pause") == [paused]
    assert listed("--what", "lan") == []
    assert listed("--subject", poison) == [discarded]
    assert listed("--since", "1h") == [discarded, resumed, paused]
    assert listed("--until", "1h") == []
    assert listed("--limit", "1") == [discarded]
    newest = said(here, "audit", "list", "--limit", "1", *url)[0]
    assert listed("--before", str(newest["entry"])) == [resumed, paused]
    assert listed("--who", newest["who"]) == [discarded, resumed, paused]
    assert listed("--who", "nobody@nowhere") == []
    assert "customer has left" in here("audit", "list", *url).stdout
    none = here("audit", "list", "--what", "prune", *url)
    assert (none.returncode, none.stdout) == (0, "The audit has no such entries.\n")


def test_a_wrong_time_is_refused(here: Here, tmp_path: Path) -> None:
    url = ("--database", f"sqlite:///{tmp_path}/a.db")
    said(here, "db", "install", *url)
    wrong = here("audit", "list", "--since", "yesterday", *url)
    assert wrong.returncode == 2
    assert "--since must be a time" in wrong.stderr
