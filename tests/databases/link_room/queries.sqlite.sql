-- name: insert
INSERT INTO link_test (n, data) VALUES (:n, :data)

-- name: change
UPDATE link_test SET n = n + :by WHERE n = :n

-- name: read
SELECT n, data FROM link_test WHERE n >= :least ORDER BY n

-- name: read_listed
SELECT n FROM link_test WHERE n IN (SELECT value FROM json_each(:ns)) ORDER BY n

-- name: rows_in_the_middle
UPDATE link_test SET n = n + 100 WHERE n = :n;
SELECT n FROM link_test WHERE n > 100;
DELETE FROM link_test WHERE n > 100;

-- name: no_rows_at_the_end
SELECT n FROM link_test WHERE n >= :n;
SELECT n FROM link_test WHERE n < -1000;

-- name: percent
SELECT :word FROM link_test WHERE 'a%b' LIKE 'a%' AND n = :n

-- name: insert_returning
INSERT INTO link_test (n, data) VALUES (:n, :data) RETURNING n
