-- What became of each scored call. Reads `judged` and `best_calls` of judged.sql, and filtered_calls, lanes, texts and
-- documents.

CREATE TEMP TABLE kept_calls AS
SELECT row FROM best_calls SEMI JOIN filtered_calls USING (tool, shard, digest, segment, position, sample);

CREATE TEMP TABLE placed AS
SELECT texts.tool, shard, digest, segment, texts."offset", domain, date, documents.rowid AS document
FROM texts LEFT JOIN documents USING (shard, digest);

-- The reasons are those of filtered_calls, in the same order.
CREATE TEMP VIEW verdicts AS
SELECT judged.* EXCLUDE (row, repeated, eligible, best) REPLACE (
           CASE WHEN kept_calls.row IS NOT NULL THEN NULL
                WHEN repeated THEN 'duplicate_document'
                WHEN judged.reason IS NOT NULL THEN judged.reason
                WHEN tau_f IS NULL THEN 'no_threshold'
                WHEN NOT delta >= tau_f THEN 'below_tau_f'
                WHEN NOT best THEN 'not_best_at_position'
                ELSE 'beyond_examples'
           END AS reason),
       judged.reason AS unfit, eligible, best, kept_calls.row IS NOT NULL AS kept, tau_f, delta - tau_f AS distance,
       char_offset - "offset" AS text_offset, domain, date, document
FROM judged
LEFT JOIN lanes USING (tool)
LEFT JOIN kept_calls USING (row)
LEFT JOIN placed USING (tool, shard, digest, segment);

-- Filled tool by tool: one sort of all calls takes a third more time, and may need more memory than there is.
CREATE TABLE decisions AS FROM verdicts LIMIT 0;
COMMENT ON TABLE decisions IS 'Every scored call with its verdict, sorted by tool and delta.';
COMMENT ON COLUMN decisions.reason IS 'why the call was not kept: a reason of loss_deltas, duplicate_document, no_threshold, below_tau_f, not_best_at_position or beyond_examples; null where it was kept';
COMMENT ON COLUMN decisions.unfit IS 'why the call may not stay whatever its delta: the reason in loss_deltas; null for most';
COMMENT ON COLUMN decisions.eligible IS 'whether the threshold decides: the call is not unfit, and its document lies in no earlier shard';
COMMENT ON COLUMN decisions.best IS 'whether it has the largest delta of the eligible calls at its position; of equals, the first sample';
COMMENT ON COLUMN decisions.kept IS 'whether it is in filtered_calls';
COMMENT ON COLUMN decisions.tau_f IS 'the threshold that filtered_calls was made with; null where there was none';
COMMENT ON COLUMN decisions.distance IS 'delta - tau_f: how far the call is above the threshold, nats';
COMMENT ON COLUMN decisions.text_offset IS 'character of the text (not of the document) at which x_i begins';
COMMENT ON COLUMN decisions.domain IS 'domain of the document';
COMMENT ON COLUMN decisions.document IS 'rowid of the document in documents of this file: a join by it is cheap';
COMMENT ON COLUMN decisions.date IS 'date of the document, of its URL; null without one';
