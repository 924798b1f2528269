"""`traces/judged`: an asset where the settings name conversations, up to date until these or the judge change."""

from benchmarks.made_traces import records
from tests.traces.conftest import write_lines
from toolformer_dag.assets import JOB, outputs
from toolformer_dag.assets.declaration import asset_key
from toolformer_dag.assets.metadata import TOKENS
from toolformer_dag.definitions import definitions_of
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces.judgement import traces_database

NAME = "traces/judged"
SOURCE = "traces.source=['talks.jsonl']"


def test_recorded_conversations_are_judged_as_an_asset(fresh):
    assert NAME not in [one.name for one in outputs(fresh.project().plan)]
    write_lines(fresh.folder / "talks.jsonl", records(4))

    def made(*overrides):
        project = fresh.project(SOURCE, *overrides)
        assert NAME in project.stale()
        job = definitions_of(project.plan).resolve_job_def(JOB)
        assert job.execute_in_process(instance=project.instance, asset_selection=[asset_key(NAME)]).success
        assert NAME not in project.stale()
        return fresh.figures(NAME)[TOKENS].value

    assert made() > 0
    assert query(traces_database(fresh.settings()), "SELECT count(*) FROM trace_calls").item() == 4
    assert made("traces.share=0.5") == 0
    write_lines(fresh.folder / "talks.jsonl", records(8))
    assert NAME in fresh.stale(SOURCE, "traces.share=0.5")
