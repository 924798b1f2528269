"""The made world, its small web and the small model: everything runs from here with no download."""
