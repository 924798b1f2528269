-- The share of each tool's positions that the filter keeps, by the domain of the document: the hundred largest
SELECT tool, domain, count(*) AS positions, count(*) FILTER (kept) AS kept, round(count(*) FILTER (kept) / count(*), 3) AS share
FROM decisions
WHERE best
GROUP BY tool, domain
ORDER BY positions DESC, tool, domain
LIMIT 100
