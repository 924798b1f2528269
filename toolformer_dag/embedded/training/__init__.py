"""Training of the embedded base language model, from nothing, on two CPU cores."""
