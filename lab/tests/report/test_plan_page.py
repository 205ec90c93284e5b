"""The planner's page computes what Python computes, in an engine that has no browser around it."""

import itertools
import json
import math
from pathlib import Path

import pytest
from py_mini_racer import MiniRacer

import distlion_lab.report
from distlion.wire import LinkModel
from distlion_lab.planning.advice import advise
from distlion_lab.planning.line import model_line
from distlion_lab.planning.local_steps import forecast_local, list_sites
from distlion_lab.planning.machine import CPU, GPU
from distlion_lab.planning.page_model import build_page_model
from distlion_lab.planning.planner import compare_methods
from distlion_lab.planning.scenario import NVLINK, PCIE, Scenario

SCRIPT = Path(distlion_lab.report.__file__).parent / "page" / "planner.js"
NUMBERS = (
    "bits_per_parameter",
    "sent_bytes",
    "arithmetic_s",
    "communication_s",
    "exposed_s",
    "step_s",
    "efficiency",
)
# Both add and multiply doubles, in another order here and there: some roundings of 2^-53 each.
TOLERANCE = 1e-12


def grid():
    """Every slider at small, middle and large values, then every assumption in turn."""
    sliders = itertools.product(
        (1e7, 1e9, 1e11), (1, 2, 3, 16, 1000), (1, 1_000_003, 3 * 10**9), (1e-4, 0.8, 60.0)
    )
    for rate, nodes, n_params, compute_s in sliders:
        yield Scenario(
            n_params=n_params,
            nodes=nodes,
            link=model_line(rate, latency_s=1e-4, message_s=1e-5),
            compute_s=compute_s,
        )
    usual = {"n_params": 350_000_000, "nodes": 12, "compute_s": 0.5}
    usual |= {"link": LinkModel(1e-4, 1e9, True, 1e-5)}
    for changed in (
        {"gpus_per_node": 8},
        {"gpus_per_node": 8, "node_link": PCIE},
        {"gpus_per_node": 3, "node_link": NVLINK, "nodes": 1},
        {"machine": CPU},
        {"machine": CPU, "momentum_sync_every": 7},
        {"machine": CPU, "gpus_per_node": 8},
        {"machine": CPU, "nodes": 1},
        {"machine": GPU.slowed(3)},
        {"link": LinkModel(1e-4, 1e9, full_duplex=False)},
        {"link": LinkModel(0.0, 1e9)},
        {"link": LinkModel(3.0, 1e12)},
        {"overlap_share": 0.0},
        {"overlap_share": 1.0, "backward_share": 0.5},
        {"momentum_sync_every": 100},
        {"orthogonalized_width": 768},
        {"momentum_sync_every": 7, "momentum_sync_bits": 16},
        {"momentum_sync_every": 1, "momentum_sync_bits": 16},
    ):
        yield Scenario(**usual | changed)


@pytest.fixture(scope="module")
def engine():
    context = MiniRacer()
    context.eval(SCRIPT.read_text())
    context.eval(f"const model = {json.dumps(build_page_model())};")
    return context


def run_page(engine, scenario, threshold=0.05):
    """Return the forecasts and the advice of the page."""
    given = json.dumps(scenario.to_json())
    shown = engine.eval(
        f"""(() => {{
            const scenario = {given}, ranked = planner.compareMethods(model, scenario);
            const advice = planner.advise(model, scenario, ranked, {threshold});
            return JSON.stringify([ranked, advice]);
        }})()"""
    )
    return json.loads(shown)


def test_every_number_of_every_forecast_is_that_of_the_planner(engine):
    compared = 0
    for scenario in grid():
        page = {(f["method"], f["pattern"], f["overlap"]): f for f in run_page(engine, scenario)[0]}
        forecasts = compare_methods(scenario).ranked
        assert len(page) == len(forecasts)
        for forecast in forecasts:
            shown = page[forecast.method, forecast.pattern, forecast.overlap]
            for name in NUMBERS:
                expected = getattr(forecast, name)
                assert math.isclose(shown[name], expected, rel_tol=TOLERANCE), (scenario, name)
                compared += 1
    assert compared > 60_000


def test_advice_is_that_of_the_planner_word_for_word(engine):
    advised = set()
    # Advice holds where speed-ups end too, which Python searches for: seconds for large models.
    for scenario in [each for each in grid() if each.n_params < 10**9][::4]:
        expected = advise(compare_methods(scenario))
        shown = run_page(engine, scenario)[1]
        assert shown["text"] == expected.text
        assert shown["compress"] == expected.compress
        advised.add(expected.text.split(":")[0])
    assert advised == {"Compress", "Do not compress here"}


LOCAL_NUMBERS = ("vote_s", "step_s", "sent_bytes", "bits_per_parameter", "efficiency")


def test_local_steps_on_the_page_are_those_of_the_planner(engine):
    chosen = set()
    for scenario in [each for each in grid() if each.n_params < 10**9][::5]:
        given = json.dumps(scenario.to_json())
        found = json.loads(
            engine.eval(f"JSON.stringify(planner.forecastLocal(model, {given}, 16))")
        )
        expected = forecast_local(scenario, 16)
        sites = json.loads(engine.eval(f"JSON.stringify(planner.listSites(model, {given}))"))
        for name in LOCAL_NUMBERS:
            assert math.isclose(found[name], getattr(expected, name), rel_tol=TOLERANCE)
        for shown, site in zip(sites, list_sites(scenario), strict=True):
            assert shown["advice"]["text"] == site.advice.text
            assert shown["advice"]["every"] == site.advice.every
            for name in ("all_reduce_s", "each_step_s"):
                assert math.isclose(
                    shown["advice"][name], getattr(site.advice, name), rel_tol=TOLERANCE
                )
            for one, other in zip(shown["advice"]["local"], site.advice.local, strict=True):
                for name in LOCAL_NUMBERS:
                    assert math.isclose(one[name], getattr(other, name), rel_tol=TOLERANCE)
            chosen.add(site.advice.every)
    assert chosen == {1, 4, 8, 16, 32}
