-- The documents that are left out before texts are chosen, each with its reason.
-- Parameters: $files (part files of screened_documents), $deduplicate.

-- A document that lies in several shards counts once, in the first of them, whatever the order in which they were read.
CREATE TEMP TABLE repeated AS
SELECT shard, digest, home
FROM read_parquet($files, hive_partitioning = false)
JOIN (SELECT digest, min(shard) AS home FROM read_parquet($files, hive_partitioning = false) GROUP BY digest HAVING count(*) > 1)
USING (digest)
WHERE shard > home;

-- Of equal texts the copy in the first shard stays.
CREATE TEMP TABLE copies AS
SELECT text_digest, min({shard: shard, digest: digest}) AS kept
FROM read_parquet($files, hive_partitioning = false) ANTI JOIN repeated USING (shard, digest)
WHERE $deduplicate
GROUP BY text_digest
HAVING count(*) > 1;

CREATE TEMP TABLE removed AS
SELECT shard, digest, reason, benchmark,
       CASE reason WHEN 'duplicate_document' THEN home WHEN 'duplicate_text' THEN kept.shard END AS kept_shard,
       CASE reason WHEN 'duplicate_document' THEN digest WHEN 'duplicate_text' THEN kept.digest END AS kept_digest
FROM (
    SELECT *, CASE WHEN benchmark IS NOT NULL THEN 'in_benchmark' WHEN home IS NOT NULL THEN 'duplicate_document'
                   WHEN kept <> {shard: shard, digest: digest} THEN 'duplicate_text' END AS reason
    FROM read_parquet($files, hive_partitioning = false)
    LEFT JOIN repeated USING (shard, digest)
    LEFT JOIN copies USING (text_digest)
)
WHERE reason IS NOT NULL;
