"""Train the embedded model; toolformer_dag runs without this package, and no wheel has it. README.md says how."""
