-- Counts per hundredth of delta, which a sweep over thresholds adds up. Reads decisions and swapped_places.

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
