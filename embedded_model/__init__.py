"""How the embedded model is trained and studied. It imports toolformer_dag and is not needed to run it."""
