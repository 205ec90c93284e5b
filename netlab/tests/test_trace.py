import pytest

from distlion_netlab import DeviceWorkload, Lab
from distlion_netlab.fleet import Fleet
from distlion_netlab.trace import OPTIMIZER, PARTS, STEP

SMALL = DeviceWorkload(layers=2, width=32, step_s=0.01)


@pytest.mark.root
@pytest.mark.usefixtures("namespaces_work")
def test_every_part_of_a_vote_is_within_the_step_and_on_its_thread():
    with Lab(2) as lab, Fleet(lab) as fleet:
        for name in ("majority-all-reduce", "majority-all-reduce-overlap"):
            fleet.ask("build", name, SMALL)
            fleet.ask("run_block", name, 1)
            for spans in fleet.ask("trace", name):
                (step,) = (span for span in spans if span.what == STEP)
                (optimizer,) = (span for span in spans if span.what == OPTIMIZER)
                assert {span.what for span in spans} == {STEP, OPTIMIZER, *PARTS}
                assert step.begin_s < optimizer.begin_s < optimizer.end_s < step.end_s
                assert all(step.begin_s <= span.begin_s <= span.end_s for span in spans)
                asked = [span for span in spans if span.what == "encode"]
                assert all(span.is_main is not name.endswith("overlap") for span in asked)
        # Nothing is traced any more, and the optimizers still work.
        fleet.ask("run_block", name, 1)
