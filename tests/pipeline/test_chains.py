"""A lane with chains: what is paid when, and losses and needs against plain passes through the model."""

from collections.abc import Sequence

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.conftest import Line, NewLine, engine_of, tokens, warehouse
from toolformer_dag.computing.stage import CALL_KEY
from toolformer_dag.lake.warehouse import query
from toolformer_dag.model.requests import WINDOW_WEIGHTS, NeedRequest
from toolformer_dag.settings.setting_types import SettingsError
from toolformer_dag.texts.calls import Call, format_call, remove_calls
from toolformer_dag.texts.chains import build_swap_comparisons, format_chain_text, parse_chain

CHAINED = pl.col("chain").is_not_null()


def scored(line: Line) -> pl.DataFrame:
    """The scored calls of a lane with chains, single ones too."""
    return pl.concat(map(line.read, ("loss_deltas", "chained_deltas"))).sort(CALL_KEY)


def test_depth_pays_for_what_is_new_and_a_threshold_for_nothing(new_line: NewLine) -> None:
    line = new_line("one", "two")
    line.set(tau_s=0.0, k=2, m=2)
    line.update()
    single = line.read("loss_deltas")
    line.set(tools__calculator__depth=2, filtering__keep_idle_first=True)
    assert tokens(line.update()) > 0
    both = scored(line)
    assert both.filter(~CHAINED).equals(single), "single calls stay as they are"
    chains = both.filter(CHAINED)
    assert chains.height and not chains.select(CALL_KEY).is_duplicated().any()
    for before in line.read("chained_candidates").filter(pl.col("input").is_not_null()).iter_rows(named=True):
        assert Call("Calculator", before["input"]) not in [Call(o.tool, o.input) for o in parse_chain(before["before"])]
    line.set(tau_f=-10.0)
    assert tokens(line.update()) == 0
    sources = query(warehouse(line.outputs()), "FROM candidate_sources").row(0, named=True)
    samples = line.read("scored_candidates").height + line.read("chained_candidates").height
    assert sources["candidates"] == samples and sources["scored"] == scored(line)["loss_result"].count()
    kept = line.read("filtered_calls")
    corpus = line.read("augmented_corpus")
    best = scored(line).filter(pl.col("reason").is_null()).group_by("shard", "digest", "segment", "position")
    assert kept["delta"].sort().equals(best.agg(pl.col("delta").max())["delta"].sort())
    assert corpus["calls"].sum() == sum(len(parse_chain(chain)) or 1 for chain in kept["chain"])
    assert all(
        remove_calls(x, ["Calculator"]) == text for x, text in corpus.select("text_with_calls", "text").iter_rows()
    )


@pytest.mark.long
def test_idle_first_calls_the_control_and_depth_three(new_line: NewLine) -> None:
    line = new_line("one", "two")
    line.set(tau_s=0.0, k=2, m=2)
    line.update()
    single = line.read("loss_deltas")
    line.set(tools__calculator__depth=2)
    line.update()
    judged = scored(line).filter(CHAINED)
    assert (judged["reason"] == "idle_first").fill_null(False).to_list() == (judged["need"] <= 0).to_list()
    assert {True, False} <= set(judged["need"] <= 0)
    for row in line.read("chained_swaps").iter_rows(named=True):
        own = judged.row(by_predicate=pl.all_horizontal(pl.col(name) == row[name] for name in CALL_KEY), named=True)
        *before, last = parse_chain(row["chain"])
        assert before == parse_chain(own["chain"])[:-1] and last.result == row["result"] != own["result"]
    funnel = dict(query(warehouse(line.outputs()), "SELECT what, count FROM funnel WHERE step BETWEEN 3 AND 5").rows())
    samples = pl.concat(line.read(stage).select("input") for stage in ("scored_candidates", "chained_candidates"))
    assert (funnel["samples"], funnel["calls"]) == (samples.height, samples["input"].count())
    assert funnel["calls"] >= funnel["calls with a result"] == scored(line).height
    line.set(filtering__keep_idle_first=True)
    assert tokens(line.update("chained_deltas")) == 0
    line.set(tools__calculator__depth=3, tau_f=0.05)
    line.update()
    assert scored(line).filter(pl.col("chain").is_in(judged["chain"].implode())).height == judged.height
    del line.values["tools.calculator.depth"]
    line.set(tau_f=0.05, filtering__keep_idle_first=False)
    assert tokens(line.update()) == 0
    assert line.read("loss_deltas").equals(single)


def test_losses_and_needs_are_those_of_plain_passes(new_line: NewLine) -> None:
    line = new_line("one")
    line.set(tau_s=0.0, k=1, m=2, tools__calculator__depth=3, filtering__keep_idle_first=True)
    line.update()
    model_name = line.plan().settings.model.name
    model = AutoModelForCausalLM.from_pretrained(model_name)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    texts = dict(line.read("heuristic_subset").select(pl.struct("digest", "segment").hash(), "text").iter_rows())

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def log_p(prefix: Sequence[int], continuation: Sequence[int]) -> list[float]:
        whole = torch.tensor([[*prefix, *continuation]])
        with torch.no_grad():
            scores = model(whole).logits[0].float().log_softmax(-1)
        return [float(scores[len(prefix) + at - 1, token]) for at, token in enumerate(continuation)]

    start = [tokenizer.bos_token_id] if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else []

    def loss(z: str, text: str, position: int) -> float:
        window = ids(text)[position : position + len(WINDOW_WEIGHTS)]
        found = log_p([*start, *ids(z), *ids(text)[:position]], window)
        return -sum(weight * value for weight, value in zip(WINDOW_WEIGHTS, found, strict=False))

    rows = scored(line).with_columns(key=pl.struct("digest", "segment").hash())
    chains = rows.filter(CHAINED & pl.col("loss_result").is_not_null() & (pl.col("position") > 0))
    assert {len(parse_chain(chain)) for chain in chains["chain"]} == {2, 3}
    length = pl.col("chain").str.count_matches('"tool"')
    for row in pl.concat([chains.filter(length == n).head(3) for n in (2, 3)]).iter_rows(named=True):
        links = parse_chain(row["chain"])
        text = texts[row["key"]]
        i = row["position"]
        shorter = [loss(format_chain_text(links[:n]), text, i) for n in range(1, len(links))]
        unanswered = format_chain_text(links[:-1]) + format_call(Call(links[-1].tool, links[-1].input))
        expected = (loss("", text, i), min(shorter), loss(unanswered, text, i), loss(format_chain_text(links), text, i))
        assert [row[name] for name in ("loss_empty", "loss_before", "loss_call", "loss_result")] == pytest.approx(
            expected, abs=2e-3
        )
        assert row["delta"] == pytest.approx(min(expected[:3]) - expected[3], abs=2e-3)
        asked = build_swap_comparisons(links, ["1"] * (len(links) - 1))
        for (before, other, call), found in zip(
            asked,
            engine_of(line.plan().settings.model).compute_needs([NeedRequest(text, i, *one) for one in asked]),
            strict=True,
        ):
            behind = [[*start, *ids(text)[:i], *ids(one)] for one in (before, other)]
            first = len(ids(" ["))
            own, exchanged = (sum(log_p([*one, *ids(call)[:first]], ids(call)[first:])) for one in behind)
            assert found == pytest.approx(own - exchanged, abs=2e-3)


def test_an_unknown_tool_behind_a_call_is_named(new_line: NewLine) -> None:
    line = new_line("one")
    line.set(tools__calculator__depth=2, tools__calculator__then='["maps"]')
    with pytest.raises(SettingsError, match="there is no other tool 'maps'"):
        line.plan()
    line.set(tools__calculator__depth=1)
    with pytest.raises(SettingsError, match="then and chain_prompt are for chains; set depth = 2"):
        line.plan()
