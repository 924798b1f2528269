-- The calls of one lane that stay (paper, section 2, "Filtering API Calls"), from the scored calls of all its shards.
-- Parameters: $files (part files of loss_deltas), $texts (of heuristic_subset), $tau_f (null keeps nothing),
-- $examples.

-- A document that lies in several shards counts once, in the first of them.
CREATE TEMP TABLE home AS
SELECT digest, min(shard) AS home FROM read_parquet($files, hive_partitioning = false) GROUP BY digest;

-- Calls whose result helps by tau_f or more, and that nothing else keeps out.
CREATE TEMP TABLE passed AS
SELECT * EXCLUDE (home)
FROM read_parquet($files, hive_partitioning = false) JOIN home USING (digest)
WHERE shard = home AND reason IS NULL AND delta >= $tau_f;

-- One call per position, the one with the largest delta; of equals, the first sample.
CREATE TEMP TABLE best AS
SELECT * FROM passed
QUALIFY row_number() OVER (PARTITION BY digest, segment, position ORDER BY delta DESC, sample) = 1;

-- At most $examples distinct texts, chosen by a hash of the text, so that equal texts fare equally whatever their ids,
-- and another shard replaces few of them.
CREATE TEMP TABLE examples AS
SELECT DISTINCT digest, segment
FROM best JOIN read_parquet($texts, hive_partitioning = false) USING (shard, digest, segment)
QUALIFY dense_rank() OVER (ORDER BY text_digest) <= $examples;

CREATE TEMP TABLE kept AS
SELECT * FROM best SEMI JOIN examples USING (digest, segment)
ORDER BY digest, segment, position;

-- Every scored call is either kept or counted here, under the first reason that applies.
CREATE TEMP TABLE rejected AS
SELECT shard, why AS reason, count(*) AS count
FROM (
    SELECT shard,
           CASE WHEN shard <> home THEN 'duplicate_document'
                WHEN reason IS NOT NULL THEN reason
                WHEN $tau_f::DOUBLE IS NULL THEN 'no_threshold'
                WHEN NOT delta >= $tau_f THEN 'below_tau_f'
           END AS why
    FROM read_parquet($files, hive_partitioning = false) JOIN home USING (digest)
    UNION ALL
    SELECT shard, 'not_best_at_position' FROM passed ANTI JOIN best USING (digest, segment, position, sample)
    UNION ALL
    SELECT shard, 'beyond_examples' FROM best ANTI JOIN examples USING (digest, segment)
)
WHERE why IS NOT NULL
GROUP BY ALL;
