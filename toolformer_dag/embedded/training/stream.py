"""The rows of every micro-batch, a pure function of seed, step and lane: a run can be resumed anywhere, by anybody."""

from collections.abc import Iterator
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from toolformer_dag.embedded.training.boot_camp import LATER_SEGMENT, boot_camp_row, copy_document
from toolformer_dag.embedded.training.document import encode
from toolformer_dag.embedded.training.mixture import Mixture
from toolformer_dag.embedded.training.packing import pack
from toolformer_dag.embedded.training.settings import EmbeddedTraining

BOOT_LENGTH = 64
SHORT, LONG = 512, 1024
LONG_EVERY = 4  # every fourth step has the long rows
COPY_SHARE = 0.05
ENCODED_AT_ONCE = 8


class Stream:
    """Makes micro-batches of a run."""

    def __init__(self, settings: EmbeddedTraining, mixture: Mixture, tokenizer: Tokenizer) -> None:
        self.settings, self.mixture, self.tokenizer = settings, mixture, tokenizer

    def batch(self, step: int, lane: int) -> Tensor:
        """Rows of token ids (rows, length + 1): inputs and targets overlap."""
        settings = self.settings
        random = Random(f"stream {settings.seed} {step} {lane}")
        if step < settings.boot_steps:
            rows = range(settings.lane_tokens // BOOT_LENGTH)
            vocabulary = settings.shape.vocabulary
            progress = step / settings.boot_steps
            return torch.tensor([boot_camp_row(random, vocabulary, BOOT_LENGTH + 1, progress) for _ in rows])
        length = LONG if step % LONG_EVERY == 0 else SHORT
        rows_of = settings.lane_tokens // length
        return torch.from_numpy(pack(self._documents(random, step), rows_of, length + 1, SHORT + 1))

    def _documents(self, random: Random, step: int) -> Iterator[list[int]]:
        late = step >= self.settings.early * self.settings.steps
        made = self.mixture.documents(random, step, self.settings.real_share, late=late)
        while True:
            for document in encode(self.tokenizer, [next(made) for _ in range(ENCODED_AT_ONCE)]):
                if random.random() < COPY_SHARE:
                    yield [0, *copy_document(random, self.settings.shape.vocabulary, LATER_SEGMENT)]
                yield document
