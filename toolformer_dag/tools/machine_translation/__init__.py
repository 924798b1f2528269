"""Machine translation into English."""

from toolformer_dag.tools.machine_translation.tool import MachineTranslation

__all__ = ["MachineTranslation"]
