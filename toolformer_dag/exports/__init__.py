"""Training data out: C* and the warehouse as Hugging Face data sets."""
