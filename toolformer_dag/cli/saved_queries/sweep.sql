-- What each tool keeps, and would keep by chance, as tau_f rises from 0 to 3 nats in steps of 0.1; no count by chance where too few swaps tell
SELECT tool, tau_f, calls, examples, CASE WHEN swaps > 0 AND NOT too_few_swaps THEN round(by_chance, 1) END AS by_chance,
       CASE WHEN NOT too_few_swaps THEN round(fdr, 3) END AS fdr, too_few_swaps
FROM curve_statistics JOIN control_sizes USING (tool)
WHERE tau_f BETWEEN 0 AND 3 AND round(tau_f * 100)::INTEGER % 10 = 0
ORDER BY tool, tau_f
