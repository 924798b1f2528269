"""Settings: the tables of toolformer.toml, and the loading of all sources into them."""
