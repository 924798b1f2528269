-- What became of each scored call. Reads `judged` and `best_calls` of judged.sql, and filtered_calls, lanes, texts and
-- documents.

CREATE TEMP TABLE kept_calls AS
SELECT row FROM best_calls SEMI JOIN filtered_calls USING (tool, shard, digest, segment, position, sample);

CREATE TEMP TABLE placed AS
SELECT texts.tool, shard, digest, segment, texts."offset", domain, date, documents.rowid AS document
FROM texts SEMI JOIN (SELECT DISTINCT shard FROM scored) AS judged_shards USING (shard)
LEFT JOIN documents USING (shard, digest);

CREATE TEMP VIEW verdicts AS
SELECT judged.* EXCLUDE (row, eligible, best) REPLACE (
           CASE WHEN kept_calls.row IS NULL
                THEN coalesce(why_not(judged.reason, best, delta, tau_f), 'beyond_examples')
           END AS reason),
       judged.reason AS unfit, eligible, best, kept_calls.row IS NOT NULL AS kept, tau_f, delta - tau_f AS distance,
       char_offset - "offset" AS text_offset, domain, date, document
FROM judged
LEFT JOIN lanes USING (tool)
LEFT JOIN kept_calls USING (row)
LEFT JOIN placed USING (tool, shard, digest, segment);
