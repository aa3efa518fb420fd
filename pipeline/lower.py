"""Stage: to the edge dialect and to the backend, in one step (executorch offers XNNPACK no other sound way)."""

from __future__ import annotations

from executorch.devtools.backend_debug import get_delegation_info

from pipeline.artifacts import Exported, Lowered
from pipeline.backends import xnnpack
from pipeline.config import LowerSettings
from pipeline.passes.attend_by_length import attend_by_length

_BACKENDS = {"xnnpack": xnnpack}


def lower(exported: Exported, settings: LowerSettings, constant_methods: dict[str, int | bool | list[int]]) -> Lowered:
    """Return the programs with the backend's parts as delegates."""
    backend = _BACKENDS[settings.backend]
    manager = backend.lower(exported.programs, constant_methods)
    for name in exported.programs:
        attend_by_length(manager.exported_program(name), backend.lower_part)
    delegated = {
        name: get_delegation_info(manager.exported_program(name).graph_module).num_delegated_nodes
        for name in exported.programs
    }
    return Lowered(manager, delegated, exported.facts)
