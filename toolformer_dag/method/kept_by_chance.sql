-- How many kept calls are kept by chance: target-decoy false discovery rates (Elias & Gygi 2007), with the calls of
-- $control as decoys. Reads decisions, swapped_places, $control, lanes and filter_rules; the filter runs it
-- over the files of one lane, the warehouse over all.
-- A place is a position of a text; its best call counts, as in the filter. T of N places and D of n swapped ones stand at or
-- above a threshold: fdr = (D + 1) (N / n) / T. The 1 keeps the rate at its level (Barber & Candes 2015, Levitsky 2017).
-- The swaps of one place are no independent trials. Hence places weigh alike: a kept swap adds 1 / (swaps of its place) to D,
-- and the 1 is a whole place (Lee, Barber & Willett 2023). More swaps per place steady D; only more places lower 1 / n.

CREATE VIEW places AS SELECT tool, digest, segment, position, delta FROM decisions WHERE best;
COMMENT ON VIEW places IS 'Positions with eligible calls, each with the delta of its best call: what the filter decides on.';
COMMENT ON COLUMN places.delta IS 'delta of the best call, nats';

CREATE VIEW loss_floors AS
SELECT tool, max(delta) AS exact_above
FROM lanes LEFT JOIN (
    SELECT tool, delta FROM decisions WHERE eligible AND delta_is_bound
    UNION ALL
    SELECT tool, delta FROM $control WHERE delta_is_bound AND reason IS NULL
) USING (tool)
GROUP BY tool;
COMMENT ON VIEW loss_floors IS 'Per tool the largest delta that is only an upper bound (filtering.loss_floor): counts are exact at thresholds above it, and left out at others. NULL where every delta is exact.';
COMMENT ON COLUMN loss_floors.exact_above IS 'counts are exact at thresholds above it; null: everywhere';

-- least and greatest ignore NULL in DuckDB, hence CASE.
CREATE MACRO wilson(share, n, z) AS CASE WHEN n > 0 THEN greatest(0.0, least(1.0,
    (share + z * z / (2 * n) + z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))) / (1 + z * z / n)
)) END;
COMMENT ON MACRO wilson IS 'End of Wilson''s interval of a share in n trials: z = 1.96 gives the upper, -1.96 the lower end of the 95 % interval.';

-- Rounded, so that thirds which add up to a level are at that level.
CREATE MACRO false_discovery_rate(decoys, swapped, places, kept) AS
    CASE WHEN swapped > 0 AND kept > 0 THEN least(1.0, round((decoys + 1) * places / swapped / kept, 12)) END;
COMMENT ON MACRO false_discovery_rate IS 'Share of the kept places that are kept by chance; 1 where too few were swapped to say less. decoys: kept swaps, each by its weight.';

-- Wilson's one-sided bound covers a little less than 95 % where the share is near 0: with no decoy of n, 93 % for large n.
CREATE MACRO false_discovery_bound(decoys, swapped, places, kept) AS CASE WHEN swapped > 0 AND kept > 0 THEN
    least(1.0, wilson(decoys / swapped, swapped, 1.6448536269514722) * places / kept)
END;
COMMENT ON MACRO false_discovery_bound IS 'One-sided 95 % bound of the share that is kept by chance. decoys: kept swaps, each by its weight.';

CREATE MACRO chance_estimates(decoys, swapped, places, kept) AS {
    by_chance: round(decoys / nullif(swapped, 0) * places)::BIGINT,
    by_chance_low: floor(places * wilson(decoys / nullif(swapped, 0), swapped, -1.959963984540054))::BIGINT,
    by_chance_high: ceil(places * wilson(decoys / nullif(swapped, 0), swapped, 1.959963984540054))::BIGINT,
    fdr: false_discovery_rate(decoys, swapped, places, kept),
    fdr_high: false_discovery_bound(decoys, swapped, places, kept)
};
COMMENT ON MACRO chance_estimates IS 'How many of `places` would be kept by chance, with the ends of the 95 % interval, the false discovery rate of the `kept` ones and its bound. decoys: kept swaps, each by its weight, of `swapped` places.';

CREATE VIEW control_sizes AS
SELECT tool, coalesce(places, 0) AS places, coalesce(sampled, 0)::BIGINT AS sampled, coalesce(swaps, 0) AS swaps,
       coalesce(swapped, 0) AS swapped
FROM lanes
LEFT JOIN (SELECT tool, count(*) AS places FROM places GROUP BY tool) USING (tool)
LEFT JOIN (
    SELECT tool, sum(calls) FILTER (swap = 0) AS sampled, count(*) AS swaps,
           count(DISTINCT (digest, segment, position)) AS swapped
    FROM swapped_places GROUP BY tool
) USING (tool);
COMMENT ON VIEW control_sizes IS 'Per tool: places, sampled calls of the control, their places (swapped), and the swaps of these: up to control.swaps at each.';
COMMENT ON COLUMN control_sizes.places IS 'positions with eligible calls';
COMMENT ON COLUMN control_sizes.sampled IS 'calls of the control that were told another document''s result';
COMMENT ON COLUMN control_sizes.swapped IS 'their places';
COMMENT ON COLUMN control_sizes.swaps IS 'swaps of these places';

CREATE VIEW chance_rates AS
WITH steps AS (
    SELECT tool, delta AS tau_f, 1 AS target, 0 AS decoy, 0::DECIMAL(38, 18) AS weight FROM places WHERE delta > 0
    UNION ALL
    SELECT tool, delta_swapped, 0, 1, weight FROM swapped_places WHERE delta_swapped > 0
), sums AS (
    SELECT tool, tau_f, sum(target) AS target, sum(decoy) AS decoy, sum(weight) AS weight FROM steps GROUP BY ALL
), counts AS (
    SELECT tool, tau_f, target, sum(target) OVER at_or_above AS kept, sum(decoy) OVER at_or_above AS kept_swapped,
           (sum(weight) OVER at_or_above)::DOUBLE AS decoys
    FROM sums
    WINDOW at_or_above AS (PARTITION BY tool ORDER BY tau_f DESC ROWS UNBOUNDED PRECEDING)
)
SELECT tool, tau_f, kept::BIGINT AS kept, kept_swapped::BIGINT AS kept_swapped, swaps, swapped, places,
       decoys / swapped AS share_swapped,
       false_discovery_rate(decoys, swapped, places, kept) AS fdr,
       false_discovery_bound(decoys, swapped, places, kept) AS fdr_high
FROM counts JOIN control_sizes USING (tool) JOIN loss_floors USING (tool)
WHERE target > 0 AND swapped > 0 AND (exact_above IS NULL OR tau_f > exact_above);
COMMENT ON VIEW chance_rates IS 'Per tool and threshold at which another call would stay: kept calls, kept swaps, their share with places weighted alike, and the false discovery rate with its bound. Thresholds at which an upper bound would count are left out.';
COMMENT ON COLUMN chance_rates.tau_f IS 'threshold: the delta of a call that stays there and not above';
COMMENT ON COLUMN chance_rates.kept IS 'places kept';
COMMENT ON COLUMN chance_rates.swaps IS 'swaps of the control';
COMMENT ON COLUMN chance_rates.swapped IS 'places of the control';
COMMENT ON COLUMN chance_rates.places IS 'positions with eligible calls';
COMMENT ON COLUMN chance_rates.share_swapped IS 'share of the swaps that are kept, places weighted alike';
COMMENT ON COLUMN chance_rates.kept_swapped IS 'swaps kept at this threshold';
COMMENT ON COLUMN chance_rates.fdr IS 'share of the kept places that are kept by chance';
COMMENT ON COLUMN chance_rates.fdr_high IS 'its one-sided 95 % bound';

CREATE VIEW chance_levels AS
SELECT tool, unnest([0.01, 0.05, 0.1]) AS by_chance FROM lanes
UNION
SELECT tool, by_chance FROM filter_rules WHERE by_chance IS NOT NULL;
COMMENT ON VIEW chance_levels IS 'The false discovery rates of chance_thresholds: 1, 5 and 10 %, and those of the settings.';
COMMENT ON COLUMN chance_levels.by_chance IS 'a false discovery rate';

-- With the share p of kept swaps as it is, n places do where (p n + 1) (N / n) <= by_chance T, that is where
-- n >= N / (by_chance T - N p); there is no such number where chance keeps that share by itself.
CREATE VIEW chance_thresholds AS
WITH certified AS (
    SELECT tool, by_chance, count(chance_rates.tau_f) AS steps,
           min(tau_f) FILTER (fdr <= by_chance) AS tau_f,
           arg_min(kept, tau_f) FILTER (fdr <= by_chance) AS kept,
           arg_min(fdr, tau_f) FILTER (fdr <= by_chance) AS fdr,
           arg_min(fdr_high, tau_f) FILTER (fdr <= by_chance) AS fdr_high,
           min(tau_f) FILTER (fdr_high <= by_chance) AS tau_f_high,
           arg_min(kept, tau_f) FILTER (fdr_high <= by_chance) AS kept_high,
           min(ceil(round(places / (by_chance * kept - places * share_swapped), 6)))
               FILTER (by_chance * kept > places * share_swapped) AS swaps_needed
    FROM chance_levels LEFT JOIN chance_rates USING (tool)
    GROUP BY tool, by_chance
), below_floor AS (
    SELECT tool, count(*) AS bounded FROM places JOIN loss_floors USING (tool)
    WHERE delta > 0 AND delta <= exact_above GROUP BY tool
)
SELECT tool, by_chance, tau_f, coalesce(kept, 0) AS kept, fdr, fdr_high, tau_f_high, coalesce(kept_high, 0) AS kept_high,
       places, swaps, swapped,
       CASE WHEN tau_f IS NULL THEN swaps_needed::BIGINT END AS swaps_needed,
       CASE WHEN tau_f IS NOT NULL THEN 'certified'
            WHEN places = 0 THEN 'no calls'
            WHEN swaps = 0 THEN 'not measured'
            WHEN bounded > 0 THEN 'not computed below the floor'
            WHEN steps = 0 THEN 'no call helps'
            WHEN swaps_needed IS NOT NULL THEN 'too few swaps'
            ELSE 'chance keeps more at every threshold'
       END AS verdict
FROM certified JOIN control_sizes USING (tool) LEFT JOIN below_floor USING (tool)
ORDER BY tool, by_chance;
COMMENT ON VIEW chance_thresholds IS 'Per tool and false discovery rate: the smallest threshold that has it (tau_f) and that has it with 95 % confidence (tau_f_high), and where there is none, why, and how many swapped places would do (swaps_needed).';
COMMENT ON COLUMN chance_thresholds.by_chance IS 'the false discovery rate asked for';
COMMENT ON COLUMN chance_thresholds.tau_f IS 'the smallest threshold that has it; null where none has';
COMMENT ON COLUMN chance_thresholds.kept IS 'places kept there';
COMMENT ON COLUMN chance_thresholds.fdr IS 'false discovery rate there';
COMMENT ON COLUMN chance_thresholds.fdr_high IS 'its one-sided 95 % bound';
COMMENT ON COLUMN chance_thresholds.tau_f_high IS 'the smallest threshold that has the rate with 95 % confidence';
COMMENT ON COLUMN chance_thresholds.kept_high IS 'places kept there';
COMMENT ON COLUMN chance_thresholds.places IS 'positions with eligible calls';
COMMENT ON COLUMN chance_thresholds.swaps IS 'swaps of the control';
COMMENT ON COLUMN chance_thresholds.swapped IS 'places of the control';
COMMENT ON COLUMN chance_thresholds.swaps_needed IS 'how many swapped places would certify a threshold; null where one is certified, or where no number would do';
COMMENT ON COLUMN chance_thresholds.verdict IS 'certified, or why no threshold is';

CREATE VIEW thresholds AS
SELECT tool, tau_f
FROM (
    SELECT tool, unnest([0.5, 1.0, 2.0]) AS tau_f FROM lanes
    UNION
    SELECT tool, tau_f FROM lanes WHERE tau_f IS NOT NULL
) JOIN loss_floors USING (tool)
WHERE exact_above IS NULL OR tau_f > exact_above;
COMMENT ON VIEW thresholds IS 'Those of Table 2 and each tool''s own, but for those at which an upper bound would count (loss_floors).';
COMMENT ON COLUMN thresholds.tau_f IS 'threshold, nats';

CREATE VIEW filter_statistics AS
WITH texts_with_calls AS (
    SELECT thresholds.tool, thresholds.tau_f, digest, segment, count(*) AS calls
    FROM thresholds JOIN places ON thresholds.tool = places.tool AND places.delta >= thresholds.tau_f
    GROUP BY ALL
)
SELECT tool, tau_f, coalesce(sum(calls), 0)::BIGINT AS calls, count(digest) AS examples
FROM thresholds LEFT JOIN texts_with_calls USING (tool, tau_f)
GROUP BY tool, tau_f
ORDER BY tool, tau_f;
COMMENT ON VIEW filter_statistics IS 'Table 2 of the paper: calls and examples (texts with at least one call) at 0.5, 1.0, 2.0 and the tool''s own tau_f.';
COMMENT ON COLUMN filter_statistics.tau_f IS 'threshold, nats';
COMMENT ON COLUMN filter_statistics.calls IS 'calls kept: one per position';
COMMENT ON COLUMN filter_statistics.examples IS 'texts with at least one kept call';

-- The control beside Table 2. Of all places, `calls` are kept. Of the `swapped` ones, `kept` are kept with their own results
-- and `kept_swapped` of the `swaps` with others: `share_swapped`, with places weighted alike. `ratio` compares these two
-- shares. `by_chance` is share_swapped of all places.
CREATE VIEW swapped_statistics AS
WITH kept_swaps AS (
    SELECT thresholds.tool, thresholds.tau_f,
           count(DISTINCT (digest, segment, position)) FILTER (delta >= thresholds.tau_f) AS kept,
           count(*) FILTER (delta_swapped >= thresholds.tau_f) AS kept_swapped,
           coalesce(sum(weight) FILTER (delta_swapped >= thresholds.tau_f), 0)::DOUBLE AS decoys
    FROM thresholds LEFT JOIN swapped_places USING (tool)
    GROUP BY ALL
), shares AS (
    SELECT tool, tau_f, calls, places, sampled, swapped, swaps, kept, kept_swapped,
           kept / nullif(swapped, 0) AS share, decoys / nullif(swapped, 0) AS share_swapped,
           chance_estimates(decoys, swapped, places, calls) AS estimated
    FROM filter_statistics JOIN kept_swaps USING (tool, tau_f) JOIN control_sizes USING (tool)
)
SELECT * EXCLUDE (estimated), share_swapped / nullif(share, 0) AS ratio, estimated.by_chance AS by_chance,
       estimated.by_chance_low AS by_chance_low, estimated.by_chance_high AS by_chance_high, estimated.fdr AS fdr,
       estimated.fdr_high AS fdr_high, kept_swapped = 0 AND coalesce(estimated.fdr > 0.05, false) AS too_few_swaps
FROM shares
ORDER BY tool, tau_f;
COMMENT ON VIEW swapped_statistics IS 'Beside each count of Table 2: how many places would be kept by chance, told results of other documents, with the 95 % interval, and the false discovery rate with its bound. too_few_swaps: none was kept, and too few were swapped to tell 5 % from more.';
COMMENT ON COLUMN swapped_statistics.tau_f IS 'threshold, nats';
COMMENT ON COLUMN swapped_statistics.calls IS 'calls kept: one per position';
COMMENT ON COLUMN swapped_statistics.places IS 'positions with eligible calls';
COMMENT ON COLUMN swapped_statistics.sampled IS 'calls of the control that were told another document''s result';
COMMENT ON COLUMN swapped_statistics.swapped IS 'their places';
COMMENT ON COLUMN swapped_statistics.swaps IS 'swaps of these places';
COMMENT ON COLUMN swapped_statistics.kept IS 'of the swapped places, those kept with their own results';
COMMENT ON COLUMN swapped_statistics.kept_swapped IS 'swaps kept with the results of other documents';
COMMENT ON COLUMN swapped_statistics.share IS 'kept / swapped';
COMMENT ON COLUMN swapped_statistics.share_swapped IS 'share of the swaps that are kept, places weighted alike';
COMMENT ON COLUMN swapped_statistics.ratio IS 'share_swapped / share';
COMMENT ON COLUMN swapped_statistics.by_chance IS 'places that would be kept by chance: share_swapped of all places';
COMMENT ON COLUMN swapped_statistics.by_chance_low IS 'lower end of its 95 % interval';
COMMENT ON COLUMN swapped_statistics.by_chance_high IS 'upper end of its 95 % interval';
COMMENT ON COLUMN swapped_statistics.fdr IS 'share of the kept places that are kept by chance';
COMMENT ON COLUMN swapped_statistics.fdr_high IS 'its one-sided 95 % bound';
COMMENT ON COLUMN swapped_statistics.too_few_swaps IS 'whether no swap was kept and too few were made to tell 5 % from more';
