"""How the threads of torch wait for each other."""

from swarm.runtime.threads import yield_cores


def test_waiting_threads_fall_asleep_soon_unless_a_person_wants_something_else():
    nothing, own, policy = {}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}
    for environment in (nothing, own, policy):
        yield_cores(environment)
    assert nothing == {"GOMP_SPINCOUNT": "2000"}
    assert own == {"GOMP_SPINCOUNT": "7"}
    assert policy == {"OMP_WAIT_POLICY": "ACTIVE"}
