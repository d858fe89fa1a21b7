"""The loader of SQL files, and what every room's files must keep to."""

import re
from pathlib import Path

import pytest

import postroom.errors
from postroom.databases.sql import DIALECTS, adapt, prepare, query_names, query_text, split

SOURCE = Path(postroom.errors.__file__).parent
ROOMS = sorted(
    ".".join(("postroom", *path.parent.relative_to(SOURCE).parts))
    for path in SOURCE.rglob("queries.sql")
)
STYLES = {"postgresql": ("dollar", "format"), "mysql": ("format",), "sqlite": ("qmark",)}


def _files(room: str) -> dict[str, str]:
    folder = SOURCE.joinpath(*room.split(".")[1:])
    names = {"postgresql": "queries.sql"} | {d: f"queries.{d}.sql" for d in DIALECTS[1:]}
    return {dialect: (folder / name).read_text() for dialect, name in names.items()}


def _only_postgresql(room: str) -> set[str]:
    return set(re.findall(r"-- name: (\w+)\n-- only: postgresql", _files(room)["postgresql"]))


def test_rooms_are_found() -> None:
    assert {"postroom.databases", "postroom.outbox"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_dialect_answers_every_name(room: str) -> None:
    """Save for what says that only PostgreSQL has it, which no other dialect may then answer."""
    special = _only_postgresql(room)
    common = query_names(room, "postgresql") - special
    for dialect in DIALECTS[1:]:
        names = query_names(room, dialect)
        assert common <= names, dialect
        assert not names & special, dialect
    # A name only the two others have is their way round a special one, and both have it.
    assert query_names(room, "mysql") == query_names(room, "sqlite")


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_twice(room: str) -> None:
    for dialect, text in _files(room).items():
        names = re.findall(r"^-- name: *(\w+)", text, re.MULTILINE)
        assert len(names) == len(set(names)), dialect


@pytest.mark.parametrize("room", ROOMS)
def test_every_query_can_be_prepared(room: str) -> None:
    for dialect in DIALECTS:
        for name in query_names(room, dialect):
            for style in STYLES[dialect]:
                statements = prepare(room, dialect, name, style)
                assert statements, f"{dialect} {name} is empty"
                for statement in statements:
                    assert not re.search(r"(?<!:):[a-z]", statement.text), (name, statement.text)


@pytest.mark.parametrize("room", ROOMS)
def test_table_names_are_of_the_dialect(room: str) -> None:
    for dialect in DIALECTS:
        wrong = "postroom_" if dialect == "postgresql" else r"postroom\."
        for name in query_names(room, dialect):
            statements = "\n".join(split(query_text(room, dialect, name)))
            # The name of a lock is text, not a table.
            assert not re.search(rf"(?<!'){wrong}", statements), f"{dialect} {name}"


def test_split_ends_at_semicolons_outside_bodies() -> None:
    script = """
    -- A comment; with a semicolon;
    CREATE TABLE a (
        b int  -- kept
    );

    CREATE FUNCTION f() AS $$
    BEGIN
        -- inside; kept
        SELECT 1;
    END $$;
    INSERT INTO a VALUES ('x;y');
    SELECT 2
    """
    create, function, insert, select = split(script)
    assert create.strip().startswith("CREATE TABLE a")
    assert "-- inside; kept" in function
    assert "SELECT 1;" in function
    assert insert.strip() == "INSERT INTO a VALUES ('x;y')"
    assert select.strip() == "SELECT 2"


def test_lists_in_each_dialect() -> None:
    assert adapt("postgresql", [1, 2]) == "{1,2}"
    assert adapt("sqlite", [1, 2]) == "[1, 2]"
    assert adapt("sqlite", None) is None
    for text in ("1); DROP TABLE x; --", "x"):
        with pytest.raises(ValueError):
            adapt("postgresql", [text])  # type: ignore[list-item]


def test_casts_and_percent_signs_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "postroom_test_room"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "queries.sql").write_text(
        "-- name: one\n-- Why: a colon here is no parameter.\n"
        "SELECT :a::text, :b, :a, '50%' FROM postroom.outbox\n"
        "-- name: two\n-- only: postgresql\nSELECT 1\n"
    )
    (room / "queries.mysql.sql").write_text("-- name: one\nSELECT :b WHERE x IN :ids_list\n")
    (room / "queries.sqlite.sql").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    [dollar] = prepare(room.name, "postgresql", "one", "dollar")
    assert dollar.text == "SELECT $1::text, $2, $1, '50%' FROM postroom.outbox"
    assert dollar.bind("postgresql", {"a": "x", "b": 2})[1] == ("x", 2)
    [formatted] = prepare(room.name, "postgresql", "one", "format")
    assert formatted.text == "SELECT %s::text, %s, %s, '50%%' FROM postroom.outbox"
    assert formatted.names == ("a", "b", "a")
    [qmark] = prepare(room.name, "sqlite", "one", "qmark")
    assert qmark.text.endswith("FROM postroom_outbox")
    [inline] = prepare(room.name, "mysql", "one", "format")
    assert inline.bind("mysql", {"b": 1, "ids_list": [3, 4]}) == (
        "SELECT %s WHERE x IN (3, 4)",
        (1,),
    )
    assert query_names(room.name, "sqlite") == {"one"}
