-- What the readers of benchmark files left out of the questions, by benchmark and reason
SELECT shard AS benchmark, reason, count
FROM rejections
WHERE stage = 'outcomes'
ORDER BY benchmark, reason
