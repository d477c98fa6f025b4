"""Queues by request size with token quotas, as in Chameleon (section 4.3)."""

from capplan.planner.queues.group import group_queues
from capplan.planner.queues.planning import plan_queues
from capplan.planner.queues.sizes import RequestSample

__all__ = ["RequestSample", "group_queues", "plan_queues"]
