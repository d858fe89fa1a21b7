-- name: insert
INSERT INTO link_test (n, data) VALUES (CAST(:n AS bigint), CAST(:data AS bytea))

-- name: insert_arrays
-- only: postgresql
INSERT INTO link_test (n, data)
SELECT n, data FROM unnest(CAST(:n AS bigint[]), CAST(:data AS bytea[]))
    WITH ORDINALITY AS m (n, data, place) ORDER BY place

-- name: change
UPDATE link_test SET n = n + CAST(:by AS bigint) WHERE n = CAST(:n AS bigint)

-- name: read
SELECT n, data FROM link_test WHERE n >= CAST(:least AS bigint) ORDER BY n

-- name: read_listed
SELECT n FROM link_test WHERE n = ANY(CAST(CAST(:ns AS text) AS bigint[])) ORDER BY n

-- name: rows_in_the_middle
UPDATE link_test SET n = n + 100 WHERE n = CAST(:n AS bigint);
SELECT n FROM link_test WHERE n > 100;
DELETE FROM link_test WHERE n > 100;

-- name: no_rows_at_the_end
SELECT n FROM link_test WHERE n >= CAST(:n AS bigint);
SELECT n FROM link_test WHERE n < -1000;

-- name: percent
SELECT CAST(:word AS text) FROM link_test WHERE 'a%b' LIKE 'a%' AND n = CAST(:n AS bigint)

-- name: clear
DELETE FROM link_test

-- name: level
-- only: postgresql
SELECT current_setting('transaction_isolation')

-- name: insert_returning
INSERT INTO link_test (n, data) VALUES (CAST(:n AS bigint), CAST(:data AS bytea)) RETURNING n
