"""How built-in tools propose calls without a model: where a text would call, and what it would ask."""
