"""Batched language-model work: position probabilities, sampled calls and losses."""

import logging

for _noisy in ("torchao", "torch.utils._pytree"):  # they warn of GPU kernels and of torch's own future, at every start
    logging.getLogger(_noisy).setLevel(logging.ERROR)
