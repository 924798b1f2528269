"""The tools that come with the package: one file each, its prompt P(x) beside it under the same name."""
