"""The stages of the line, one declaration each, in the order of the data. Knows no Dagster.

A file of a stage, such as loss_deltas.py, is read from its end: STAGE declares the table, and the functions above it
fill it. They have the same names in every file (`Stage` in computing/stage.py says more):

- `settings(plan, lane)`: the settings and versions that the rows depend on, apart from the tables that are read; a
  change makes the rows out of date. The lane is None for a stage of all lanes
- `inputs(output)`: which versions of the tables that are read count; only where these are not all
- `rows(worker, output, part)`: the rows of a part, and what is left out of it
- `chunks(worker, output, part, claimed_keys)` and `compute(worker, output, chunk)`, where a model or a tool computes:
  the first plans what no run has computed yet, the second computes a chunk of that and stores it. `rows` then reads

The words for what is passed: a `Plan` is a run with its settings and its lake, a `Lane` a tool with its settings, a
`TableOutput` the stage's table for a plan and a lane, and a `Worker` a process that computes, with model and row
stores. A row store keeps what was computed, whatever table it is read into.
"""
