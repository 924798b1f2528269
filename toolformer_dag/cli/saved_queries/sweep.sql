-- What each tool keeps, and would keep by chance, as tau_f rises from 0 to 3 nats in steps of 0.1
SELECT tool, tau_f, calls, examples, CASE WHEN swaps > 0 THEN round(by_chance, 1) END AS by_chance, round(fdr, 3) AS fdr
FROM curve_statistics JOIN control_sizes USING (tool)
WHERE tau_f BETWEEN 0 AND 3 AND round(tau_f * 100)::INTEGER % 10 = 0
ORDER BY tool, tau_f
