COMMENT ON VIEW call_costs IS 'What each scored call cost, a chain all its calls: SELECT call, delta, cost FROM calls JOIN call_costs USING (tool, shard, digest, segment, position, sample).';
COMMENT ON COLUMN call_costs.cost IS 'what the backend says it cost; 0 where it says nothing';
COMMENT ON COLUMN call_costs.seconds IS 'time the tool took';
