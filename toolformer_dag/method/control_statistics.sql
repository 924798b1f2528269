-- What all controls keep: swapped_statistics for each of them. Reads decisions, thresholds, filter_statistics, control_sizes
-- and the tables of the controls, whose names and rows (with the name as `control`) are put in.

CREATE VIEW control_statistics AS
WITH controls AS (
    SELECT unnest([$names]) AS control
), swaps AS (
    $swaps
), control_places AS (
    SELECT control, tool, digest, segment, position, swap, max(own.delta) AS delta, max(other.delta) AS delta_swapped,
           (1 / count(*) OVER (PARTITION BY control, tool, digest, segment, position))::DECIMAL(38, 18) AS weight
    FROM swaps AS other JOIN decisions AS own USING (tool, shard, digest, segment, position, sample)
    WHERE own.eligible AND other.reason IS NULL
    GROUP BY control, tool, digest, segment, position, swap
), bounds AS (
    SELECT control, tool, max(delta) AS exact_above FROM swaps WHERE delta_is_bound AND reason IS NULL GROUP BY ALL
), counted AS (
    SELECT controls.control, thresholds.tool, thresholds.tau_f,
           count(DISTINCT (digest, segment, position)) FILTER (swap IS NOT NULL) AS swapped, count(swap) AS swaps,
           count(DISTINCT (digest, segment, position)) FILTER (delta >= thresholds.tau_f) AS kept,
           count(*) FILTER (delta_swapped >= thresholds.tau_f) AS kept_swapped,
           coalesce(sum(weight) FILTER (delta_swapped >= thresholds.tau_f), 0)::DOUBLE AS decoys
    FROM controls CROSS JOIN thresholds LEFT JOIN control_places USING (control, tool)
    GROUP BY ALL
), estimated AS (
    SELECT control, tool, tau_f, swapped, swaps, kept, kept_swapped, kept / nullif(swapped, 0) AS share,
           decoys / nullif(swapped, 0) AS share_swapped,
           unnest(chance_estimates(decoys, swapped, places, calls))
    FROM counted
    JOIN filter_statistics USING (tool, tau_f)
    JOIN (SELECT tool, places FROM control_sizes) USING (tool)
)
SELECT estimated.*, kept_swapped = 0 AND coalesce(fdr > 0.05, false) AS too_few_swaps
FROM estimated LEFT JOIN bounds USING (control, tool)
WHERE exact_above IS NULL OR tau_f > exact_above
ORDER BY control, tool, tau_f;
COMMENT ON VIEW control_statistics IS 'Every control by tool and threshold: how many of its places are kept with their own and with other results, and how many of all places would be kept by chance. One control, $control, estimates what is kept by chance elsewhere (swapped_statistics); thresholds at which an upper bound would count are left out.';
COMMENT ON COLUMN control_statistics.control IS 'the table with the calls of the control';
COMMENT ON COLUMN control_statistics.tau_f IS 'threshold, nats';
COMMENT ON COLUMN control_statistics.swapped IS 'places of the control';
COMMENT ON COLUMN control_statistics.swaps IS 'swaps of these places';
COMMENT ON COLUMN control_statistics.kept IS 'of the swapped places, those kept with their own results';
COMMENT ON COLUMN control_statistics.kept_swapped IS 'swaps kept with other results';
COMMENT ON COLUMN control_statistics.share IS 'kept / swapped; null where none was swapped';
COMMENT ON COLUMN control_statistics.share_swapped IS 'share of the swaps that are kept, places weighted alike; null where none was swapped';
COMMENT ON COLUMN control_statistics.by_chance IS 'places that would be kept by chance: share_swapped of all places; null where none was swapped';
COMMENT ON COLUMN control_statistics.by_chance_low IS 'lower end of its 95 % interval; null where none was swapped';
COMMENT ON COLUMN control_statistics.by_chance_high IS 'upper end of its 95 % interval; null where none was swapped';
COMMENT ON COLUMN control_statistics.fdr IS 'share of the kept places that are kept by chance; null where none is kept, or none was swapped';
COMMENT ON COLUMN control_statistics.fdr_high IS 'its one-sided 95 % bound; null where none is kept, or none was swapped';
COMMENT ON COLUMN control_statistics.too_few_swaps IS 'whether no swap was kept and too few were made to tell 5 % from more';
