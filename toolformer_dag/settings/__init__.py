"""What a person may set: toolformer.toml, a profile, environment and command line, validated and frozen."""
