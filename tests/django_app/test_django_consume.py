"""`manage.py postroom consume` works on the project's settings, and applies once with the ORM."""

import json
from typing import Any

from django_site import Site, each_database, one_database

CONSUME = ("postroom", "consume", "basket.consumers:billing", "--once", "--json")
BILLS = (
    "from basket.models import Bill; import json;"
    "print(json.dumps(list(Bill.objects.order_by('id').values_list('number', flat=True))))"
)
MEMORY = {"broker_url": "memory://basket"}


def consumed(site: Site, **environ: str) -> Any:
    return json.loads(site.manage(*CONSUME, **environ).splitlines()[-1])


def bills(site: Site) -> Any:
    return json.loads(site.manage("shell", "-c", BILLS).splitlines()[-1])


@each_database
def test_a_handler_that_fails_twice_leaves_one_row(site: Site) -> None:
    """No URL stands in the code: database and broker are those of DATABASES and POSTROOM."""
    site.postroom = {**MEMORY, "consumer": {"poll_seconds": 0.05}}
    site.manage("migrate", "-v0")
    handled = consumed(site, BASKET_INCOMING="1 2 3", BASKET_FAILURES="2")["handled"]
    for _ in range(4):  # how often one run tries depends on its speed
        if handled < 3:
            handled += consumed(site, BASKET_FAILURES="2")["handled"]
    assert sorted(bills(site)) == [1, 2, 3]
    assert (site.cwd / "tried-1").read_text() == "3"


@one_database
def test_what_is_missing_or_wrong_is_one_sentence(site: Site) -> None:
    site.manage("migrate", "-v0")
    done = site.run(*CONSUME)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "consumer billing has no broker" in done.stderr
    site.postroom = MEMORY
    site.manage("migrate", "-v0", "--database", "other")
    done = site.run(*CONSUME, "--database", "other")
    assert done.returncode == 2
    assert "work on 'default' of DATABASES" in done.stderr
    assert "Consumer(…, using=…)" in done.stderr
