-- What was left out on the way to C*, by stage, tool and reason
SELECT stage, tool, reason, sum(count)::BIGINT AS count
FROM rejections
GROUP BY ALL
ORDER BY count DESC, stage, tool, reason
