"""BM25 over passages on disk: what Wikipedia search answers from and what question answering reads."""
