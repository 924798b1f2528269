-- What each run changed: settings before and after, and the calls that a lane kept before and after; the last run first
SELECT ended, run, tool, array_to_string(changed, '; ') AS changed, kept_before, kept_after
FROM runs
ORDER BY ended DESC, run, tool
LIMIT 100
