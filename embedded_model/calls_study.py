"""Ask a finetuned model what takes several calls, and what takes named arguments.

python -m embedded_model.calls_study chains FOLDER    # FOLDER: a project that ran, such as that of `make demo`
python -m embedded_model.calls_study write FOLDER     # writes a project of two tools, to be run
python -m embedded_model.calls_study named FOLDER     # asks it, when it ran
python -m embedded_model.calls_study routing FOLDER   # annotates with 5, 20 and 50 tools, routed and not: an hour

For `routing` every text goes to every lane, and then to the three and five that it fits best. Five lanes are tools of
the world, without the rules that choose their texts; the others count things in towns, as those of a server would.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType

import polars as pl
import typer

from embedded_model.effect_study import percent
from toolformer_dag.computing.plan import Plan, lanes
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.computing.update import update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, in_process
from toolformer_dag.evaluation.asking import TOOLFORMER, benchmark_outcomes, compared
from toolformer_dag.evaluation.catalogue import synthetic_benchmark
from toolformer_dag.evaluation.scores import Condition, outcome_table
from toolformer_dag.markdown import rounded, table
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.synthetic.phenomena import NAMED_TOOLS, TWO_HOP
from toolformer_dag.synthetic.web import write_shards
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

QUESTIONS, SEED = 300, 11
NAMED_LANES = f"""[tools.distance]
use = "embedded_model.named_tools:Distance"
prompt = "{PROMPTS / "distance.txt"}"
[tools.price]
use = "embedded_model.named_tools:Price"
prompt = "{PROMPTS / "price.txt"}"
"""
NAMED = f"""profile = "embedded"
[corpus]
shards = ["web"]
{NAMED_LANES}
[evaluation]
benchmarks = {{ dateset = "made" }}
benchmark_questions = 1
"""
DOCUMENTS = 384


def write_named_project(folder: Path) -> None:
    """Write a web about distances and prices, and the settings of its two lanes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder / "web", 2, DOCUMENTS, 1, NAMED_TOOLS)
    (folder / "toolformer.toml").write_text(NAMED)


def with_depth(settings: Settings, depth: int) -> Settings:
    """Return the settings with another `decoding.depth`."""
    return settings.model_copy(update={"decoding": settings.decoding.model_copy(update={"depth": depth})})


def answers(settings: Settings, asked: Mapping[str, Settings], kinds: tuple[str, ...]) -> pl.DataFrame:
    """Ask base, base + C, and Toolformer without tools and, by name, under each settings of `asked`.

    Returns the columns of `outcome_table`; the `condition` of a model with tools is the name in `asked`.
    """
    questions = [synthetic_benchmark(kind, QUESTIONS, SEED, worded) for kind in kinds for worded in ("seen", "unseen")]

    def ask(model: LanguageModel, conditions: list[Condition]) -> Iterator[pl.DataFrame]:
        plain, *others = conditions
        ways = [(plain, settings)] + [(Condition(name, settings.decoding.k), own) for name, own in asked.items()]
        for condition, own in ways if others else ways[:1]:
            for one in questions:
                yield outcome_table(benchmark_outcomes(own, lanes(own), model, condition, one).outcomes)

    return pl.concat(compared(settings, ask))


def shares(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return per benchmark and condition: questions, the per cent that are right with a 95 % interval, and calls each.

    `unfit`: the per cent of the calls that were written and have no result.
    """
    groups = outcomes.group_by("benchmark", "condition", maintain_order=True).agg(
        n=pl.len(),
        hits=pl.col("correct").sum(),
        calls=pl.col("calls").list.len().mean(),
        unfit=100
        * pl.col("calls").list.explode(keep_nulls=False, empty_as_null=False).struct.field("result").is_null().mean(),
    )
    return groups.with_columns(right=pl.struct("hits", "n").map_elements(percent, return_dtype=pl.String)).drop("hits")


OF_WORLD = ("calculator", "question_answering", "machine_translation", "distance", "price")
THINGS = """bridge tower school garden church museum library theatre bakery market station harbour fountain statue farm
hospital factory cinema stadium castle palace chapel temple mosque monastery windmill brewery vineyard orchard stable
barn tavern hotel hostel shop bank office court prison barracks lighthouse observatory aquarium zoo playground"""
TOWNS = ("Oslo", "Rome", "Lima", "Bergen", "Turin")
ANNOTATION = ("heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "filtered_calls")
MOST = (3, 5)
"""Tools that a text goes to, where it is routed."""
ROUTED_DOCUMENTS = 64
MANY = f"""profile = "plain"
[profiles.plain]
[model]
name = "embedded"
dtype = "float32"
[corpus]
shards = ["web"]
segment_tokens = 160
[sampling]
max_call_tokens = 32
[tools.calculator]
prompt = "embedded"
tau_s = 0.02
k = 3
m = 5
[tools.question_answering]
prompt = "embedded"
passages = "embedded"
reader = "embedded"
tau_f = 0.5
k = 3
m = 3
[tools.machine_translation]
prompt = "embedded"
backend = "embedded"
tau_s = 0.02
k = 3
m = 5
{NAMED_LANES}"""
Kept = set[tuple[object, ...]]
"""Calls by tool and place."""


class Count(Tool):
    """Counts each of one thing in a town."""

    version = "1"
    defaults = ToolDefaults(tau_s=0.05, k=3, m=3, tau_f=0.5)

    def __init__(self, key: str, options: ToolOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self.name = "".join(map(str.capitalize, key.split("_")))

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer by the length of the town's name."""
        return [ToolResult(str(len(call.input))) for call in calls]


def write_many(folder: Path, tools: int, documents: int) -> Path:
    """Write pages and the settings of so many tools; return the settings file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder / "web", 1, documents, 1, OF_WORLD)
    lanes = ""
    for at, thing in enumerate(THINGS.split()[: tools - len(OF_WORLD)]):
        one, other = (TOWNS[(at + step) % len(TOWNS)] for step in (0, 1))
        call = f"[Count{thing.capitalize()}({{}})]"
        examples = [
            f"In {1990 + at} each {thing} of {one} was counted: {call.format(one)} {at + 2}.",
            f"The town of {other} has {call.format(other)} {at + 5} of them, each a {thing}.",
        ]
        told = f'description = "Counts each {thing} of a town."\nexamples = {examples}'
        lanes += f'[tools.count_{thing}]\nuse = "embedded_model.calls_study:Count"\n{told}\n'
    file = folder / "toolformer.toml"
    file.write_text(MANY + lanes)
    return file


def annotated(file: Path, most: int) -> tuple[Kept, int, float]:
    """Annotate with every tool; return the kept calls, the texts that went to a lane, and the tokens per text."""
    lake = f"paths.lake={file.parent / f'lake_{most}'}"
    plan = Plan.of(load_settings(file, environment={}, overrides=[lake, f"corpus.tools_per_text={most}"]))
    for lane in plan.lanes:
        lane.tool.routed = True
        for rule in (Tool.wants_document, Tool.wants):  # as of an MCP tool
            setattr(lane.tool, rule.__name__, MethodType(rule, lane.tool))
    worker, tokens = Worker(plan), 0
    outputs = {output.name: output for output in table_outputs(plan)}
    lanes = [f"{lane.key}/{stage}" for lane in plan.lanes for stage in ANNOTATION]
    for name in ("ccnet/raw_shards", *lanes):
        work = update(worker, Workers(worker, outputs, in_process), outputs[name], lambda done, total: None).work
        tokens += sum(work.tokens.values())
    found = {stage: _rows(outputs, stage) for stage in (ANNOTATION[0], ANNOTATION[-1])}
    texts = found[ANNOTATION[0]].select("digest", "segment").n_unique()
    kept = set(found[ANNOTATION[-1]].select("tool", "digest", "segment", "position").iter_rows())
    return kept, texts, tokens / texts


def _rows(outputs: Mapping[str, TableOutput], stage: str) -> pl.DataFrame:
    """Return the rows of a stage in all lanes."""
    tables = [output.table for output in outputs.values() if output.stage.name == stage]
    return pl.concat([table.read(part) for table in tables for part in table.parts()])


def routed_costs(folder: Path, tools: int, documents: int) -> Iterator[dict[str, object]]:
    """Yield a row for every text to every lane, and one for texts that are routed."""
    file = write_many(folder / str(tools), tools, documents)
    every: Kept = set()
    for most in (0, *(one for one in MOST if one < tools)):
        kept, texts, tokens = annotated(file, most)
        every = every or kept
        row: dict[str, object] = {
            "tools": tools,
            "lanes per text": str(most) if most else "all",
            "texts": texts,
            "tokens per text": tokens,
        }
        for told, names in (("kept", OF_WORLD), ("kept, named arguments", NAMED_TOOLS)):
            before, after = ({call for call in calls if call[0] in names} for calls in (every, kept))
            row |= {told: len(after), f"{told}: lost %": 100 * len(before - after) / max(1, len(before))}
        yield row


def main(what: str, folder: Path) -> None:
    """Write the project, or ask one and print the table."""
    if what == "write":
        write_named_project(folder)
        return
    if what == "routing":
        rows = [row for tools in (5, 20, 50) for row in routed_costs(folder, tools, ROUTED_DOCUMENTS)]
        typer.echo(table(tuple(rows[0]), (tuple(row.values()) for row in rows), rounded))
        return
    settings = load_settings(folder / "toolformer.toml", environment={})
    if what == "named":
        found = answers(settings, {TOOLFORMER: settings}, NAMED_TOOLS)
    else:
        ways = {f"depth {depth}": with_depth(settings, depth) for depth in (1, 2, 3)}
        found = answers(settings, ways, (TWO_HOP,))
    told = shares(found)
    typer.echo(table(told.columns, told.iter_rows(), rounded))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
