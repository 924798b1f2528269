-- What runs changed. Reads changes.

CREATE VIEW runs AS
WITH ends AS (
    SELECT run, max(ended) AS ended FROM changes GROUP BY run
), changed AS (
    SELECT run, tool,
           list(DISTINCT setting || ' ' || value_before || ' -> ' || value_after) FILTER (setting IS NOT NULL) AS settings,
           max(kept_before) AS kept_before, max(kept_after) AS kept_after
    FROM changes GROUP BY run, tool
)
SELECT run, ended, tool, coalesce(list_sort(settings), []) AS changed, kept_before, kept_after
FROM changed JOIN ends USING (run)
ORDER BY ended, run, tool NULLS FIRST;
COMMENT ON VIEW runs IS 'A row per run that changed something and lane in which it did: settings before and after, and kept calls before and after. A log: it is no part of what equal lakes agree in.';
COMMENT ON COLUMN runs.ended IS 'when the last of its steps ended that changed something';
COMMENT ON COLUMN runs.tool IS 'key of the lane; null for settings of all lanes';
COMMENT ON COLUMN runs.changed IS 'the settings with their values before and after, such as `tau_f 0.5 -> 0.9`; empty where the rows before the filter changed alone';
COMMENT ON COLUMN runs.kept_before IS 'calls that the lane kept before the run; null where the filter made no other rows';
COMMENT ON COLUMN runs.kept_after IS 'calls that the lane kept after the run; null where the filter made no other rows';
