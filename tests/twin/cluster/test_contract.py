"""Our routers keep the contract that users' routers are held to."""

import pytest

from capplan import InputError
from capplan.serving.routers import ROUTERS
from capplan.testing import RouterContract
from capplan.twin.cluster import simulate_cluster
from tests.oracle.routers import Rotating, load
from tests.twin.cluster.workloads import even, same


class TestOurRouters(RouterContract):
    @pytest.fixture(params=list(ROUTERS))
    def make_router(self, request):
        return lambda: request.param


class TestRoutersInPython(RouterContract):
    @pytest.fixture
    def make_router(self):
        return lambda: Rotating(3, lambda _, candidate: (load(candidate),))


@pytest.mark.parametrize("answer", [-1, 2, None, 0.5])
def test_a_router_that_does_not_return_a_position_is_refused(answer) -> None:
    with pytest.raises(InputError, match="router: must return a position from 0 to 1"):
        simulate_cluster(even(2, 4.0), same(2), router=lambda *_: answer, duration_s=5.0)
