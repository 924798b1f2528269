"""The paper's effect measured on the made world: several seeds, all conditions, held-out questions and text."""
