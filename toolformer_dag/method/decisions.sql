-- The table of verdicts (verdicts.sql), filled tool by tool: one sort of all calls takes a third more time, and may need more
-- memory than there is.
CREATE TABLE decisions AS FROM verdicts LIMIT 0;
COMMENT ON TABLE decisions IS 'Every scored call with its verdict, sorted by tool and delta.';
COMMENT ON COLUMN decisions.reason IS 'why filtered_calls did not keep the call: the reason in loss_deltas, or a rule of the filter, such as below_tau_f, not_best_at_position or beyond_examples; not_filtered where the filter has not run since it was scored; null where it was kept';
COMMENT ON COLUMN decisions.unfit IS 'why the call may not stay whatever its delta: the reason in loss_deltas; null where the threshold decides';
COMMENT ON COLUMN decisions.eligible IS 'whether the threshold decides: the call is not unfit';
COMMENT ON COLUMN decisions.best IS 'whether it has the largest delta of the eligible calls at its position; of equals, the first sample';
COMMENT ON COLUMN decisions.kept IS 'whether it is in filtered_calls';
COMMENT ON COLUMN decisions.tau_f IS 'the threshold that filtered_calls was made with; null where there was none';
COMMENT ON COLUMN decisions.distance IS 'delta - tau_f: how far the call is above the threshold, nats; null without a delta or a threshold';
COMMENT ON COLUMN decisions.text_offset IS 'character of the text (not of the document) before which the call is written';
COMMENT ON COLUMN decisions.domain IS 'domain of the document';
COMMENT ON COLUMN decisions.document IS 'rowid of the document in documents of this file: a join by it is cheap';
COMMENT ON COLUMN decisions.date IS 'date of the document, of its URL; null without one';
