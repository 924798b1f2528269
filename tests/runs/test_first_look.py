"""What a first run tells: the data, too few texts to train on, and a corpus of which nothing can be read."""

import polars as pl

from tests.command_line import cli
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.training.training_report import read_training_report


def test_a_first_look_ends_with_the_data_and_too_few_texts_train_nothing(world):
    config = ("--config", str(world.folder / "toolformer.toml"))
    few = ("--set", "training.max_steps=3", "--set", "training.min_texts=1000")
    look = cli("run", *config, "--first", "1", *few)
    [(texts,)] = world.sql("select count(*) from augmented_corpus where split = 'train'")
    sentence = f"{texts} texts in C*: too few to train on (minimum 1000: training.min_texts)"
    assert look.returncode == 0, look.stderr
    assert "\nThe first look: 2 of 2 shards, 12 documents\n| tool " in look.stdout and sentence in look.stdout
    [(kept,)] = world.sql("select count(*) from filtered_calls where tool = 'calculator'")
    [line] = [line for line in look.stdout.splitlines() if line.startswith("| calculator")]
    assert line.split(" | ")[6].strip() == str(kept)
    assert f"toolformer-dag run --first 1 --train {' '.join(config)}" in look.stdout
    for asked in (("--first", "1", "--train"), ()):
        done = cli("run", *config, *asked, *few)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"error: nothing was finetuned: {sentence}")
        assert last.endswith(f"these keep about {1000 * texts / 12:,.0f} per 1,000 documents")
    report = read_training_report(get_checkpoint_folder(world.settings()))
    assert report is not None and report.steps == 1
    assert cli("run", *config, "--set", "training.min_texts=1000").returncode == 0  # what is trained already stays


def test_a_first_look_says_where_chance_keeps_as_many_calls(world):
    config = ("--config", str(world.folder / "toolformer.toml"))
    look = cli(
        "run", *config, "--first", "1", "--set", "tools.calculator.tau_f=-100", "--set", "training.min_texts=1000"
    )
    [(calls, low, high)] = world.sql(
        "select calls, by_chance_low, by_chance_high from lanes join swapped_statistics using (tool, tau_f) "
        "where tool = 'calculator'"
    )
    assert low <= calls <= high, look.stdout
    assert f"calculator: {calls} calls are kept, and chance keeps as many (" in look.stdout


def test_a_corpus_of_which_nothing_can_be_read_stops_the_run_there(fresh):
    for shard in (fresh.folder / "web").iterdir():
        shard.unlink()
    pl.DataFrame({"body": ["Two and two make four ."], "n": [1]}).write_parquet(fresh.folder / "web" / "one.parquet")
    fresh.edit("web/*.json.gz", "web")
    config = ("--config", str(fresh.folder / "toolformer.toml"))
    why = "unknown_format: "
    for _ in range(2):
        done = cli("run", *config)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        told = done.stderr.partition("some assets failed:\n")[2]
        assert told.startswith(
            f"ccnet/raw_shards: no document could be read from {fresh.folder / 'web/one.parquet'}: {why}"
        )
        assert "body" in told and "heuristic_subset" not in done.stderr and "nothing to finetune on" not in done.stderr
    listed = cli("stale", "--why", *config)
    assert listed.stdout.startswith("ccnet/raw_shards\n    no document could be read from ")
