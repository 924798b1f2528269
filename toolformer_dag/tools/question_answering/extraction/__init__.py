"""A reader without weights: the kind of the question, candidate spans, overlap and nearness."""
