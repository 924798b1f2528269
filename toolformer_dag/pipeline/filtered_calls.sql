-- The calls of one lane and shard that stay (paper, section 2, "Filtering API Calls"), from its scored calls.
-- Parameters: $files (part files of loss_deltas), $texts (of heuristic_subset), $tau_f (null keeps nothing), and what
-- filter_rule.sql found: $repeated (documents of the shard that an earlier one has), $last_text (null where no text passes).

CREATE TEMP TABLE repeated AS SELECT unnest($repeated::VARCHAR[]) AS digest;

-- Calls whose result helps by tau_f or more, and that nothing else keeps out.
CREATE TEMP TABLE passed AS
SELECT *
FROM read_parquet($files, hive_partitioning = false) ANTI JOIN repeated USING (digest)
WHERE reason IS NULL AND delta >= $tau_f;

-- One call per position, the one with the largest delta; of equals, the first sample.
CREATE TEMP TABLE best AS
SELECT * FROM passed
QUALIFY row_number() OVER (PARTITION BY digest, segment, position ORDER BY delta DESC, sample) = 1;

CREATE TEMP TABLE kept AS
SELECT * FROM best SEMI JOIN (
    SELECT shard, digest, segment FROM read_parquet($texts, hive_partitioning = false) WHERE text_digest <= $last_text
) USING (shard, digest, segment)
ORDER BY digest, segment, position;

-- Every scored call is either kept or counted here, under the first reason that applies.
CREATE TEMP TABLE rejected AS
SELECT shard, why AS reason, count(*) AS count
FROM (
    SELECT shard,
           CASE WHEN repeated.digest IS NOT NULL THEN 'duplicate_document'
                WHEN reason IS NOT NULL THEN reason
                WHEN $tau_f::DOUBLE IS NULL THEN 'no_threshold'
                WHEN NOT delta >= $tau_f THEN 'below_tau_f'
           END AS why
    FROM read_parquet($files, hive_partitioning = false) AS scored LEFT JOIN repeated USING (digest)
    UNION ALL
    SELECT shard, 'not_best_at_position' FROM passed ANTI JOIN best USING (digest, segment, position, sample)
    UNION ALL
    SELECT shard, 'beyond_examples' FROM best ANTI JOIN kept USING (digest, segment, position, sample)
)
WHERE why IS NOT NULL
GROUP BY ALL;
