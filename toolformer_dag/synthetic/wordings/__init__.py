"""How the made world's web words its phenomena: data only, one file per family of phenomena."""
