"""Readers of shards, a file per container, named by what it reads; `texts.shard_reader` chooses among them."""
