-- The tables of the warehouse that follow from others: what became of each scored call, and counts per hundredth of delta.
-- Reads `judged` and `best_calls` of judged.sql, and filtered_calls, lanes, texts and documents.

CREATE TEMP TABLE kept_calls AS
SELECT row FROM best_calls SEMI JOIN filtered_calls USING (tool, shard, digest, segment, position, sample);

CREATE TEMP TABLE placed AS
SELECT texts.tool, shard, digest, segment, texts."offset", domain, date
FROM texts LEFT JOIN documents USING (shard, digest);

-- The reasons are those of filtered_calls, in the same order.
CREATE TABLE decisions AS
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
       char_offset - "offset" AS text_offset, domain, date
FROM judged
LEFT JOIN lanes USING (tool)
LEFT JOIN kept_calls USING (row)
LEFT JOIN placed USING (tool, shard, digest, segment)
ORDER BY tool, delta;
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
COMMENT ON COLUMN decisions.date IS 'date of the document, of its URL; null without one';

-- The largest n with n / 100 <= delta: floor(0.57 * 100) is 56, so the floor is corrected by comparing.
CREATE TEMP MACRO hundredth(delta) AS greatest(-10000, least(10000,
    floor(delta * 100) + (delta >= (floor(delta * 100) + 1) / 100)::INTEGER - (delta < floor(delta * 100) / 100)::INTEGER
))::INTEGER;

CREATE TABLE curves AS
WITH counted AS (
    SELECT tool, 'scored' AS what, hundredth(delta) AS bin, 0::DECIMAL(38, 18) AS weight FROM decisions WHERE eligible
    UNION ALL
    SELECT tool, 'best', hundredth(delta), 0 FROM decisions WHERE best
    UNION ALL
    SELECT tool, 'texts', hundredth(max(delta)), 0 FROM decisions WHERE best GROUP BY tool, digest, segment
    UNION ALL
    SELECT tool, 'control', hundredth(any_value(delta)), 0 FROM swapped_places GROUP BY tool, digest, segment, position
    UNION ALL
    SELECT tool, 'swapped', hundredth(delta_swapped), weight FROM swapped_places
)
SELECT tool, bin / 100 AS delta,
       count(*) FILTER (what = 'scored') AS scored, count(*) FILTER (what = 'best') AS best,
       count(*) FILTER (what = 'texts') AS texts, count(*) FILTER (what = 'control') AS control,
       count(*) FILTER (what = 'swapped') AS swapped, sum(weight) AS weight
FROM counted
WHERE bin IS NOT NULL
GROUP BY tool, bin
ORDER BY tool, bin;
COMMENT ON TABLE curves IS 'How many deltas lie in each hundredth of a nat, per tool; a row where there are any. Deltas beyond 100 nats are counted at 100.';
COMMENT ON COLUMN curves.delta IS 'lower end of the hundredth, nats: delta <= x < delta + 0.01';
COMMENT ON COLUMN curves.scored IS 'eligible calls';
COMMENT ON COLUMN curves.best IS 'places, by the delta of their best call';
COMMENT ON COLUMN curves.texts IS 'texts, by the delta of their best call';
COMMENT ON COLUMN curves.control IS 'places of the control, by the best delta of the swapped calls with their own results';
COMMENT ON COLUMN curves.swapped IS 'swaps, by their best delta with the results of other documents';
COMMENT ON COLUMN curves.weight IS 'the same swaps, each with its weight in swapped_places';
