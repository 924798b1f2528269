"""Train the embedded model; toolformer_dag runs without this package. README.md says how."""
