"""An estimate of one GPU in closed form: capacity, slots and step time tell where the edges lie."""

from capplan.models.fluid.estimate import Fluid, batch_limit, fluid, fluid_in
from capplan.models.fluid.inputs import Gpu, Load

__all__ = ["Fluid", "Gpu", "Load", "batch_limit", "fluid", "fluid_in"]
