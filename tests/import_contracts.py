"""Contract of import-linter: outsiders of a package import its faces only."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class FacesContract(Contract):  # type: ignore[misc]
    """Modules outside a package at the top import packages, whose ``__init__`` is a face, not modules.

    Configuration: `visible_modules`, modules that others may import all the same.
    """

    type_name = "faces"
    visible_modules = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return the imports of modules that are neither faces nor visible."""
        visible: set[str] = self.visible_modules
        own = {each for each in graph.modules if each.startswith("capplan.")} - visible
        rooms = {each for each in own if not graph.find_children(each)}
        broken = [
            f"{importer} -> {room}"
            for room in rooms
            for importer in graph.find_modules_that_directly_import(room)
            if importer.split(".")[:2] != room.split(".")[:2]
        ]
        unused = [each for each in visible if not graph.find_modules_that_directly_import(each)]
        return ContractCheck(
            kept=not broken and not unused, metadata={"broken": sorted(broken), "unused": sorted(unused)}
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports, and visible modules that nobody imports."""
        for each in check.metadata["broken"]:
            output.print_error(each)
        for each in check.metadata["unused"]:
            output.print_error(f"{each} is visible, and nobody imports it")
