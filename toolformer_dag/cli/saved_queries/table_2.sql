-- Table 2 of the paper: kept calls and examples at each threshold, and how many calls chance would keep
SELECT tool, tau_f, examples, statistics.calls,
       CASE WHEN swaps > 0 THEN by_chance END AS by_chance,
       CASE WHEN swaps > 0 THEN by_chance_low END AS by_chance_low,
       CASE WHEN swaps > 0 THEN by_chance_high END AS by_chance_high,
       round(fdr, 3) AS fdr, too_few_swaps
FROM swapped_statistics AS statistics JOIN filter_statistics USING (tool, tau_f)
ORDER BY tool, tau_f
