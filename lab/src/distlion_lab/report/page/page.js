// The page around the planner: sliders, curves, table, advice. `state` holds exact values; a slider
// moves along a list that contains its initial value.
"use strict";

(() => {
  const { scenario: given, model, threshold } = JSON.parse(document.getElementById("plan").textContent);
  const SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7f5fc4", "#e69f00", "#5b7083", "#a3443c", "#3c8d2f"];
  const LOWEST_RATE = 1e7, HIGHEST_RATE = 1e12, POINTS = 90;
  const DRAWN = ["MajorityVote()", "QuantizedVote(bits=4)", "fp16 all-reduce", "fp32 all-reduce"];

  const state = {
    rate: given.link.rate_bit_per_s / model.payload_share,
    nodes: given.nodes,
    n_params: given.n_params,
    compute_s: given.compute_s,
  };
  const methods = [...new Set([...model.baselines, ...model.rules].map((entry) => entry.method))];
  const drawn = new Set(DRAWN);
  const style = (method) => {
    const stroke = SERIES[methods.indexOf(method) % SERIES.length];
    return { stroke, dash: model.baselines.some((baseline) => baseline.method === method) ? "7 4" : "" };
  };

  // ---- numbers in readable form

  function three(x) {
    if (x === 0) return "0";
    const decimals = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(Number(x.toPrecision(3))))));
    return x.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }
  const scaled = (x, units) => {
    const [size, name] = units.find(([least]) => x >= 0.9995 * least) ?? units[units.length - 1];
    return `${Number((x / size).toPrecision(3))} ${name}`.trim();
  };
  const formatRate = (x) => scaled(x, [[1e12, "Tbit/s"], [1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]);
  const formatCount = (x) => scaled(x, [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]]);
  const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
  const formatS = (x) => scaled(x, SECONDS);
  // For a column, so that digits align.
  function formatStep(x) {
    const [size, name] = SECONDS.find(([least]) => x >= 0.9995 * least) ?? SECONDS[2];
    return `${three(x / size)} ${name}`;
  }

  // ---- from the state to a scenario

  const scenarioOf = (values) => ({
    ...given,
    nodes: values.nodes,
    n_params: values.n_params,
    compute_s: values.compute_s,
    link: { ...given.link, rate_bit_per_s: values.rate * model.payload_share },
  });
  function bestOf(ranked) {
    const best = new Map();
    for (const forecast of ranked) if (!best.has(forecast.method)) best.set(forecast.method, forecast);
    return best;
  }

  // ---- sliders

  const steps = (lowest, highest, digits) => {
    const values = [];
    for (let power = lowest; power <= highest; power += 1)
      for (const digit of digits) if (power < highest || digit === 1) values.push(Number(`${digit}e${power}`));
    return values;
  };
  const FINE = [1, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2];
  const SLIDERS = [
    { name: "rate", label: "Link rate", values: steps(7, 12, [1, 1.5, 2, 2.5, 4, 5, 7.5]), format: formatRate },
    { name: "nodes", label: "Machines", format: (x) => x.toLocaleString("en-US"),
      values: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096] },
    { name: "n_params", label: "Parameters", values: steps(6, 11, FINE), format: formatCount },
    { name: "compute_s", label: "Compute of a step", values: steps(-3, 2, FINE), format: formatS },
  ];

  function addSlider(slider) {
    const values = [...new Set([...slider.values, state[slider.name]])].sort((a, b) => a - b);
    const box = document.createElement("div");
    box.innerHTML = `<label for="${slider.name}"><span></span><output></output></label><input type="range" min="0" step="1">`;
    box.querySelector("span").textContent = slider.label;
    const input = box.querySelector("input"), output = box.querySelector("output");
    input.id = slider.name;
    input.max = values.length - 1;
    input.value = values.indexOf(state[slider.name]);
    const show = () => {
      output.textContent = slider.format(state[slider.name]);
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.addEventListener("input", () => { state[slider.name] = values[Number(input.value)]; show(); render(); });
    show();
    document.getElementById("sliders").append(box);
  }

  // ---- the chart

  const svg = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  function sampleCurves() {
    const rates = Array.from({ length: POINTS + 1 }, (_, i) => LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (i / POINTS));
    const curves = new Map(methods.filter((method) => drawn.has(method)).map((method) => [method, []]));
    for (const rate of rates) {
      const best = bestOf(planner.compareMethods(model, scenarioOf({ ...state, rate })));
      for (const [method, points] of curves) points.push([rate, best.get(method).step_s]);
    }
    return curves;
  }

  function drawChart() {
    const chart = document.getElementById("chart"), width = chart.clientWidth, height = chart.clientHeight;
    const left = 58, right = width - 12, top = 22, bottom = height - 40;
    const curves = sampleCurves(), times = [...curves.values()].flat().map(([, seconds]) => seconds);
    const lowest = Math.log10(0.8 * state.compute_s), highest = Math.log10(1.3 * Math.max(2 * state.compute_s, ...times));
    const x = (rate) => left + ((right - left) * Math.log10(rate / LOWEST_RATE)) / Math.log10(HIGHEST_RATE / LOWEST_RATE);
    const y = (seconds) => bottom - ((bottom - top) * (Math.log10(seconds) - lowest)) / (highest - lowest);
    chart.replaceChildren();
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const rate of [1e7, 1e8, 1e9, 1e10, 1e11, 1e12]) {
      chart.append(svg("line", { class: "grid", x1: x(rate), x2: x(rate), y1: top, y2: bottom }));
      const anchor = rate === HIGHEST_RATE ? "end" : "middle";
      const narrow = width < 480, text = formatRate(rate).replace("bit/s", narrow ? "" : "bit/s").trim();
      chart.append(svg("text", { x: x(rate), y: bottom + 16, "text-anchor": anchor }, text));
    }
    chart.append(svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, "link rate (bit/s)"));
    for (const seconds of ticks(lowest, highest)) {
      chart.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(seconds), y2: y(seconds) }));
      chart.append(svg("text", { x: left - 6, y: y(seconds) + 4, "text-anchor": "end" }, formatS(seconds)));
    }
    for (const [method, points] of curves) {
      const { stroke, dash } = style(method);
      const path = points.map(([rate, seconds], i) => `${i ? "L" : "M"}${x(rate).toFixed(1)} ${y(seconds).toFixed(1)}`).join("");
      chart.append(svg("path", { class: "curve", d: path, stroke, "stroke-dasharray": dash }));
    }
    const here = Math.min(Math.max(state.rate, LOWEST_RATE), HIGHEST_RATE);
    chart.append(svg("line", { class: "marker", x1: x(here), x2: x(here), y1: top, y2: bottom }));
    const side = x(here) > (left + right) / 2 ? "end" : "start";
    chart.append(svg("text", { x: x(here), y: top - 8, "text-anchor": side }, `your link: ${formatRate(state.rate)}`));
  }

  function ticks(lowest, highest) {
    const digits = highest - lowest > 3.5 ? [1] : highest - lowest > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    const values = [];
    for (let power = Math.floor(lowest); power <= highest; power += 1)
      for (const digit of digits) values.push(Number(`${digit}e${power}`));
    return values.filter((value) => Math.log10(value) >= lowest && Math.log10(value) <= highest);
  }

  // ---- the table, the advice and their assumptions

  function showMethods(ranked) {
    const baseline = ranked.find((forecast) => !forecast.votes), body = document.getElementById("methods");
    body.replaceChildren(...[...bestOf(ranked).values()].map((forecast) => {
      const row = document.createElement("tr"), { stroke, dash } = style(forecast.method);
      if (!forecast.votes) row.className = "baseline";
      row.dataset.method = forecast.method;
      row.dataset.stepS = forecast.step_s;
      row.innerHTML = "<td><label><input type='checkbox'><svg viewBox='0 0 26 12'></svg><span></span></label></td>"
        + "<td class='wide'></td><td class='wide'></td><td class='wide'></td><td></td><td class='wide'></td><td></td>";
      const cells = row.children, box = row.querySelector("input");
      // A narrow page breaks a name before its arguments.
      row.querySelector("span").append(
        ...forecast.method.replace("torch.", "").split(/(?=\()/).flatMap((part) => [part, document.createElement("wbr")]));
      row.querySelector("svg").append(svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke, "stroke-width": 3.5, "stroke-dasharray": dash }));
      box.checked = drawn.has(forecast.method);
      box.addEventListener("change", () => { drawn[box.checked ? "add" : "delete"](forecast.method); drawChart(); });
      cells[1].textContent = forecast.pattern.replace("()", "");
      cells[2].textContent = forecast.overlap ? "yes" : "no";
      cells[3].textContent = three(forecast.sent_bytes / 1e6);
      cells[4].textContent = formatStep(forecast.step_s);
      cells[5].textContent = `${(100 * forecast.efficiency).toFixed(1)}%`;
      cells[6].textContent = (baseline.step_s / forecast.step_s).toFixed(2);
      return row;
    }));
  }

  const cell = (text, isChosen = false) =>
    Object.assign(document.createElement("td"), { textContent: text, className: isChosen ? "chosen" : "" });

  function showSites(scenario) {
    document.getElementById("local-advice").textContent = planner.adviseLocal(model, scenario).text;
    document.getElementById("sites").replaceChildren(...planner.listSites(model, scenario).map((site) => {
      const { advice } = site, row = document.createElement("tr");
      const isEach = advice.every === 1, isVote = advice.each_step_s <= advice.all_reduce_s;
      row.append(cell(formatRate(site.rate_bit_per_s)), cell(formatS(site.latency_s)));
      row.append(cell(formatStep(advice.all_reduce_s), isEach && !isVote), cell(formatStep(advice.each_step_s), isEach && isVote));
      for (const forecast of advice.local) row.append(cell(formatStep(forecast.step_s), forecast.every === advice.every));
      return row;
    }));
  }
  function nameSites() {
    const names = ["link", "latency", "all-reduce", "each step", ...model.periods.map((every) => `every ${every}`)];
    document.getElementById("sites-head").replaceChildren(
      ...names.map((name) => Object.assign(document.createElement("th"), { textContent: name })));
  }

  function showAssumptions() {
    const link = given.link, inside = given.node_link;
    const rows = [
      ["workers a machine", given.gpus_per_node],
      ["latency of a round", formatS(link.latency_s)],
      ["each additional message", formatS(link.message_s)],
      ["link", link.full_duplex ? "full duplex" : "half duplex"],
      ["payload share of its rate", `${(100 * model.payload_share).toFixed(1)}%`],
      ["inside a machine", `${formatRate(inside.rate_bit_per_s)}, ${formatS(inside.latency_s)}`],
      ["encode, commit", `${formatBytes(given.machine.encode_bytes_per_s)}, ${formatBytes(given.machine.commit_bytes_per_s)}`],
      ["sending 1 MB of votes, of gradients", formatWire(given.machine)],
      ["backward, share of compute", `${(100 * given.backward_share).toFixed(0)}%`],
      ["overlap hides, share of backward", `${(100 * given.overlap_share).toFixed(0)}%`],
      ["directions orthogonalized", given.orthogonalized_width ? `width ${given.orthogonalized_width}` : "no"],
      ["momenta averaged", given.momentum_sync_every === null ? "never" : `every ${given.momentum_sync_every} steps, ${given.momentum_sync_bits} bits`],
      ["least gain to compress", `${(100 * threshold).toFixed(0)}%`],
    ];
    document.getElementById("assumptions").replaceChildren(...rows.map(([name, value]) => {
      const row = document.createElement("div");
      row.append(Object.assign(document.createElement("dt"), { textContent: name }));
      row.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return row;
    }));
  }
  function formatWire(machine) {
    const votes = machine.vote_wire_s_per_byte, gradients = machine.gradient_wire_s_per_byte;
    if (votes === 0 && gradients === 0) return "by other cores";
    return `${formatS(1e6 * votes)}, ${formatS(1e6 * gradients)} of a core; ${formatS(machine.bucket_s)} for each additional bucket`;
  }
  const formatBytes = (x) => scaled(x, [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"]]);

  function render() {
    const scenario = scenarioOf(state), ranked = planner.compareMethods(model, scenario);
    const advice = planner.advise(model, scenario, ranked, threshold), box = document.getElementById("advice");
    box.textContent = advice.text;
    box.className = advice.compress ? "compress" : "";
    showMethods(ranked);
    showSites(scenario);
    drawChart();
  }

  SLIDERS.forEach(addSlider);
  showAssumptions();
  nameSites();
  render();
  new ResizeObserver(drawChart).observe(document.getElementById("chart"));
})();
