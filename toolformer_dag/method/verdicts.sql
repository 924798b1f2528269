-- What became of each scored call. Reads `scored` and `judged` of judged.sql, decided_calls, lanes, texts and documents.

-- The reasons that the filter has stored.
CREATE TEMP TABLE decided AS
SELECT scored.row AS row, decided_calls.reason AS reason
FROM scored JOIN decided_calls USING (tool, shard, digest, segment, position, sample);

CREATE TEMP TABLE placed AS
SELECT texts.tool, shard, digest, segment, texts."offset", domain, date, documents.rowid AS document
FROM texts SEMI JOIN (SELECT DISTINCT shard FROM scored) AS judged_shards USING (shard)
LEFT JOIN documents USING (shard, digest);

-- A call that the filter has not seen yet has the reason that its threshold gives.
CREATE TEMP VIEW verdicts AS
SELECT judged.* EXCLUDE (row, eligible, best) REPLACE (
           CASE WHEN decided.row IS NOT NULL THEN decided.reason
                ELSE coalesce(why_not(judged.reason, best, delta, tau_f), 'not_filtered')
           END AS reason),
       judged.reason AS unfit, eligible, best, decided.row IS NOT NULL AND decided.reason IS NULL AS kept, tau_f,
       delta - tau_f AS distance, char_offset - "offset" AS text_offset, domain, date, document
FROM judged
LEFT JOIN lanes USING (tool)
LEFT JOIN decided USING (row)
LEFT JOIN placed USING (tool, shard, digest, segment);
