"""What a change of settings, tools, model or text makes stale, and what it then costs; the way back costs nothing.

A row of the table holds the change, the assets that must be stale at once, and those that may be: whatever lies in the
lane that the change is about, and what is made of all lanes. Costs are those of `stale --run`, told by Dagster's events
(costs.json; see conftest.py for writing it anew).
"""

import gzip
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.contract.conftest import BY_HAND, NOTHING, STAGES, Expected, Spent, World, assert_same
from tests.worlds import write_shard

pytestmark = pytest.mark.long

COSTS = Expected("costs")
ALL = {"training/augmented_corpus", "warehouse/toolformer_duckdb", "warehouse/dataset", *BY_HAND}
CALCULATOR = {f"calculator/{stage}" for stage in STAGES}
SUMS = {f"sums/{stage}" for stage in STAGES}
TEXTS = {"ccnet/raw_shards", "ccnet/heldout_texts"}
EVERYTHING = CALCULATOR | SUMS | ALL | TEXTS | {"ccnet/screened_documents", "ccnet/removed_documents"}
Edit = Callable[[World], None]


def changed_prompt(world: World) -> None:
    (world.folder / "sums.txt").write_text("Sums.\nInput: 3 and 2 make 5 .\nOutput: 3 and 2 make [Search(3+2)] 5 .\n")


def changed_version(world: World) -> None:
    world.edit('version = "1"', 'version = "second"', "sums_tool.py")


def added_shard(world: World) -> None:
    write_shard(world.folder / "web", "added")


def removed_shard(world: World) -> None:
    (world.folder / "web" / "two.json.gz").unlink()


def changed_shard(world: World) -> None:
    shard = world.folder / "web" / "two.json.gz"
    lines = gzip.decompress(shard.read_bytes()).splitlines()
    lines[0] = lines[0].replace(b"and", b"and 1 and", 1)
    shard.write_bytes(gzip.compress(b"\n".join(lines[:-1])))


def touched_shard(world: World) -> None:
    then = time.time() + 10_000
    os.utime(world.folder / "web" / "two.json.gz", (then, then))


@dataclass(frozen=True)
class Change:
    """Settings of the command line, or an edit of files; and what it makes stale."""

    settings: tuple[str, ...] = ()
    edit: Edit = lambda world: None
    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)

    def options(self) -> list[str]:
        return [part for pair in self.settings for part in ("--set", pair)]


def of_lane(lane: str, stage: str, *settings: str, edit: Edit = lambda world: None) -> Change:
    """A change that one lane's stage applies."""
    return Change(settings, edit, {f"{lane}/{stage}"}, (CALCULATOR if lane == "calculator" else SUMS) | ALL)


def of_all(stage: str, *settings: str, edit: Edit = lambda world: None) -> Change:
    """A change that a stage of both lanes applies."""
    return Change(settings, edit, {f"calculator/{stage}", f"sums/{stage}"}, CALCULATOR | SUMS | ALL)


CHANGES = {
    "k up": of_lane("calculator", "scored_candidates", "tools.calculator.k=3"),
    "m up": of_lane("calculator", "scored_candidates", "tools.calculator.m=4"),
    "k down": of_lane("calculator", "scored_candidates", "tools.calculator.k=1"),
    "tau_s up": of_lane("calculator", "scored_candidates", "tools.calculator.tau_s=0.4"),
    "tau_f up": of_lane("calculator", "filtered_calls", "tools.calculator.tau_f=0.3"),
    "tau_f that keeps the same calls": of_lane("calculator", "filtered_calls", "tools.calculator.tau_f=1e-7"),
    "prompt": of_lane("sums", "scored_candidates", edit=changed_prompt),
    "option of a tool": of_lane("sums", "tool_results", "tools.sums.edition=2"),
    "version of a tool": of_lane("sums", "tool_results", edit=changed_version),
    "dtype": Change(
        ("model.dtype=bfloat16", "tools.sums.enabled=false"),
        must={"calculator/scored_candidates", "calculator/loss_deltas"},
        may=CALCULATOR | ALL | TEXTS,
    ),
    "seed of sampling": of_all("scored_candidates", "sampling.seed=5"),
    "length of a call": of_all("scored_candidates", "sampling.max_call_tokens=9"),
    "length of a text": Change(("corpus.segment_tokens=30",), must={"sums/heuristic_subset"}, may=EVERYTHING),
    "texts per shard": of_all("heuristic_subset", "corpus.texts_per_shard=3"),
    "shard added": Change(edit=added_shard, must=TEXTS, may=EVERYTHING),
    "shard removed": Change(edit=removed_shard, may=EVERYTHING),
    "shard changed": Change(edit=changed_shard, must={"ccnet/raw_shards"}, may=EVERYTHING),
    "shard touched": Change(edit=touched_shard, may=TEXTS),
    "lane disabled": Change(("tools.sums.enabled=false",), must={"training/augmented_corpus"}, may=ALL),
    "examples per tool": of_all("filtered_calls", "training.examples_per_tool=1"),
    "texts of the control": of_all("swapped_results", "evaluation.swapped_texts=1"),
    "length of a result": of_lane("sums", "tool_results", "tools.sums.limits.max_result_characters=1"),
    "execution": Change(
        (
            "execution.chunk_texts=3",
            "execution.chunk_calls=2",
            "execution.workers=2",
            "model.device='auto'",
            "model.token_budget=4096",
            "tools.sums.limits.concurrency=2",
        )
    ),
}


def check_cost(name: str, spent: Spent) -> None:
    """Compares with what was measured: nothing is nothing, anything else costs at most two in a hundred more."""
    tokens, calls = COSTS.of(name, [spent.tokens, spent.calls])
    for found, expected in ((spent.tokens, tokens), (spent.calls, calls)):
        assert (found == 0) == (expected == 0), (name, spent)
        assert 0.9 * expected <= found <= 1.02 * expected, (name, spent)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_makes_its_stage_stale_and_costs_what_it_asks_for_and_the_way_back_is_free(
    world, made, tmp_path, name
):
    change = CHANGES[name]
    shutil.copytree(world.folder / "web", tmp_path / "web")
    change.edit(world)
    stale = world.stale(*change.options())
    assert change.must <= stale, name
    assert stale <= change.may, name
    check_cost(name, world.mend(*change.options()))
    assert world.stale(*change.options()) <= BY_HAND
    for file in ("sums.txt", "sums_tool.py"):
        shutil.copy2(made.folder / file, world.folder / file)
    shutil.rmtree(world.folder / "web")
    shutil.copytree(tmp_path / "web", world.folder / "web")
    assert world.mend() == NOTHING, name
    assert_same(world.tables(), made.tables())


def test_another_model_pays_for_everything_anew(world, other_model):
    shutil.rmtree(world.folder / "model")
    shutil.copytree(other_model, world.folder / "model")
    stale = world.stale()
    assert {f"{lane}/scored_candidates" for lane in ("calculator", "sums")} <= stale
    assert {"training/finetuned_checkpoint", "training/baseline_checkpoint"} <= stale <= EVERYTHING
    check_cost("another model", world.mend())
    assert world.stale() <= BY_HAND


def test_a_second_run_does_nothing_and_a_new_threshold_runs_the_checkpoints(world):
    assert world.run() == NOTHING
    below = "select quantile_cont(delta, 0.1) from filtered_calls where tool = 'calculator'"  # enough stay to train on
    [(tenth,)] = world.sql(below)
    change = ("--set", f"tools.calculator.tau_f={tenth}")
    world.mend(*change)
    assert "training/finetuned_checkpoint" in world.stale(*change)
    of_lanes = "select sum(tokens)::bigint, sum(calls)::bigint from costs where tool is not null"
    before = world.sql(of_lanes)
    spent = world.run(*change)
    assert spent.calls == 0 and spent.tokens > 0  # of finetuning and evaluation
    assert world.sql(of_lanes) == before
    assert world.stale(*change) == set()
    assert world.sql(f"select count(*) from filtered_calls where tool = 'calculator' and delta < {tenth}") == [(0,)]
