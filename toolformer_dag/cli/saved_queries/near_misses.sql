-- The best calls of their positions that miss tau_f by at most 0.05 nats, the ten nearest of each tool
WITH near AS (
    SELECT tool, shard, digest, segment, position, sample, char_offset, input, result, chain, delta, tau_f, distance
    FROM decisions
    WHERE distance BETWEEN -0.05 AND 0 AND best AND NOT kept AND NOT delta_is_bound AND delta < tau_f
    QUALIFY row_number() OVER (PARTITION BY tool ORDER BY delta DESC, digest, segment, position, sample) <= 10
)
SELECT tool, round(delta, 3) AS delta, tau_f, right(left(text, char_offset), 60) AS before,
       coalesce(chain_text(chain), input) AS call, result,
       substr(text, char_offset + 1, 60) AS after
FROM near JOIN documents USING (shard, digest)
ORDER BY tool, near.delta DESC
