"""The calculator."""

from toolformer_dag.tools.calculator.tool import Calculator

__all__ = ["Calculator"]
