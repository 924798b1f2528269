"""Finetune M on the augmented corpus C* with the Trainer of transformers (paper, section 4.1, appendix B)."""
