"""The paper's benchmarks, read from their own files (section 4.2, prompts of appendix C, Dateset of appendix D)."""
