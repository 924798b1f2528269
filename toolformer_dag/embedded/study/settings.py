"""What a study measures, and the settings of each of its lines. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from toolformer_dag.settings.load import load_settings
from toolformer_dag.settings.settings import Settings

DECODING = (1, 3)  # k beside 0 (disabled) and the settings' own
PLAIN_TEXTS = 150  # of each kind, for perplexity
PAGE_CHARACTERS = 2000  # read of each
LINE = """profile = "embedded"
[model]
name = {model}
[corpus]
small_web = {{ shards = 2, documents = {documents}, seed = {web} }}
texts_per_shard = {documents}
[sampling]
seed = {seed}
[training]
seed = {seed}
[evaluation]
questions = {questions}
seed = {ask}
"""


@dataclass(frozen=True, slots=True)
class Study:
    """`seeds` whole lines over `documents` made pages each, and `questions` per tool and set of wordings.

    Base and finetuned models are asked the same questions; each seed has pages, samples, batches and questions of its
    own. `real_text` is for perplexity on pages that are not made.
    """

    model: str = "embedded"
    seeds: int = 3
    documents: int = 3600
    questions: int = 100
    real_text: tuple[Path, ...] = ()

    def line(self, folder: Path, seed: int) -> Settings:
        """The settings of one line, written into a folder of its own: the UI and `sql` can look at it there.

        Raises SettingsError.
        """
        file = folder / f"seed{seed}" / "toolformer.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            LINE.format(
                model=json.dumps(self.model),
                documents=self.documents,
                questions=self.questions,
                web=seed + 1,
                seed=seed,
                ask=seed + 7,
            )
        )
        return load_settings(file, environment={})
