-- What a shard of filtered_calls has to know of the others, from the scored texts of all shards of a lane. Runs with the
-- macro why_not of rule.sql. Parameters: $files (part files of scored_texts), $tau_f (null keeps nothing), $examples.

CREATE TEMP TABLE passing AS
SELECT shard, text_digest
FROM read_parquet($files, hive_partitioning = false)
WHERE why_not(NULL, true, delta, $tau_f) IS NULL AND text_digest IS NOT NULL;

-- At most $examples distinct texts, chosen by a hash of the text, so that equal texts are treated alike whatever their
-- ids, and another shard replaces few of them.
CREATE TEMP TABLE last_text AS
SELECT max(text_digest) AS text_digest
FROM (SELECT DISTINCT text_digest FROM passing ORDER BY text_digest LIMIT $examples);

-- How many of a shard's texts are among them tells which they are.
CREATE TEMP TABLE examples AS
SELECT shard, count(*) AS texts
FROM passing JOIN last_text ON passing.text_digest <= last_text.text_digest
GROUP BY shard;
