"""The project's own tests under Django's test runner: TestCase, TransactionTestCase, callbacks."""

from django_site import FOLDER, Site, each_database

WRITTEN = (FOLDER / "basket" / "tests.py").read_text(encoding="utf-8").count("    def test_")


def test_the_projects_own_tests(site: Site) -> None:
    done = site.run("test", "basket", "--verbosity", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Applying postroom.0001_core" in done.stdout + done.stderr
    assert f"Ran {WRITTEN} tests" in done.stderr
    assert "skipped" not in done.stderr


@each_database
def test_keys_of_tests_are_not_in_the_real_database(site: Site) -> None:
    site.postroom = {"database_url": site.urls["default"]}
    site.manage("migrate", "-v0")
    done = site.run("test", "basket.tests.KeyedOrders")
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.asked("keys", "list") == []
