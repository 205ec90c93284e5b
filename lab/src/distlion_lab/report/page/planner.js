// The closed forms of distlion_lab.planning: the time of a step by every method. A test compares them with
// Python's, number by number; every constant is in `model`, which Python writes.
"use strict";

const planner = (() => {
  const ceilDiv = (a, b) => (a - (a % b)) / b + (a % b > 0 ? 1 : 0);
  const roundHalfEven = (x) => {
    const down = Math.floor(x);
    return x - down === 0.5 ? down + (down % 2) : Math.round(x);
  };
  const bitLength = (n) => { let bits = 0; while (n > 0) { n = Math.floor(n / 2); bits += 1; } return bits; };
  const log2Ceil = (n) => bitLength(n - 1);
  const padTo = (model, bytes) => ceilDiv(bytes, model.align_bytes) * model.align_bytes;

  // ---- layout: sizes of a bucket of one parameter on the wire

  const chunkBytes = (model, payload, hasCounts) =>
    model.header_bytes + padTo(model, 1) + (hasCounts ? padTo(model, 2) : 0) + payload;

  function shapeOf(model, rule, elements, workers) {
    const words = ceilDiv(elements, model.word_elements);
    const blocks = ceilDiv(words, (model.block_elements / model.word_elements) * workers);
    return {
      shards: workers,
      planeBytes: workers * blocks * model.block_bytes,
      votePlanes: rule.vote_planes,
      voteBytes: blocks * rule.vote_planes * model.block_bytes + padTo(model, model.float_bytes * rule.n_scales),
      replyBytes: blocks * replyPlanes(rule, workers) * model.block_bytes
        + padTo(model, model.float_bytes * rule.n_reply_scales),
      hasCounts: rule.has_counts,
    };
  }

  function shapeMomenta(model, elements, workers, bits) {
    const shard = ceilDiv(elements, model.word_elements * workers) * model.word_elements;
    return {
      shards: workers,
      voteBytes: (shard * bits) / 8,
      replyBytes: 4 * shard,
      hasCounts: false,
    };
  }

  const replyPlanes = (rule, workers) => rule.reply_planes ?? bitLength(workers);
  const voteChunk = (model, shape, shards = 1) => chunkBytes(model, shards * shape.voteBytes, false);
  const replyChunk = (model, shape, shards = 1) =>
    chunkBytes(model, shards * shape.replyBytes, shape.hasCounts);

  // ---- exchange: bytes, rounds and work of each pattern

  const gatherRounds = (model, workers, bytes) => (bytes <= model.most_bytes_at_once ? 1 : workers - 1);
  const plan = (sent, received, messages) => ({ sent, received, messages });

  const sumChunk = (model, shape, votes) => chunkBytes(model,
    model.header_bytes * votes + bitLength(votes * (2 ** shape.votePlanes - 1)) * shape.planeBytes, votes > 1);

  // How many votes are in the sums that a rank gives and takes in each round of recursive doubling.
  function listSums(workers, rank) {
    const bits = bitLength(workers) - 1, power = 2 ** bits, extra = workers - power;
    const known = (first, size) => size + Math.max(0, Math.min(first + size, extra) - first);
    if (rank >= power) return [[1, 0]];
    const sums = rank < extra ? [[0, 1]] : [];
    for (let size = 1; size < power; size *= 2) {
      const first = rank - (rank % size), other = first % (2 * size) === 0 ? first + size : first - size;
      sums.push([known(first, size), known(other, size)]);
    }
    return sums;
  }

  const PATTERNS = [
    {
      name: "AllReduce()",
      bothWays: true,
      plan(model, shape) {
        const bytes = (shape.shards - 1) * (voteChunk(model, shape) + replyChunk(model, shape));
        return plan(bytes, bytes, 2 * (shape.shards - 1));
      },
      rounds: (model, shape) => 1 + gatherRounds(model, shape.shards, replyChunk(model, shape)),
      work: (shape) => ({ written: shape.shards + 1, read: 2 * shape.shards, counted: shape.shards * shape.voteBytes }),
    },
    {
      name: "AllGather()",
      bothWays: true,
      plan(model, shape) {
        const bytes = (shape.shards - 1) * voteChunk(model, shape, shape.shards);
        return plan(bytes, bytes, shape.shards - 1);
      },
      rounds: (model, shape) => gatherRounds(model, shape.shards, voteChunk(model, shape, shape.shards)),
      work: (shape) => ({ written: 1, read: shape.shards, counted: shape.shards ** 2 * shape.voteBytes }),
    },
    {
      name: "ParameterServer()",
      bothWays: false,
      plan(model, shape, rank) {
        const vote = voteChunk(model, shape, shape.shards), reply = replyChunk(model, shape, shape.shards);
        const peers = shape.shards - 1;
        return rank === 0 ? plan(peers * reply, peers * vote, peers) : plan(vote, reply, 1);
      },
      rounds: () => 2,
      work: (shape) => ({ written: 2, read: shape.shards, counted: shape.shards ** 2 * shape.voteBytes }),
    },
    {
      name: "RecursiveDoubling()",
      bothWays: true,
      countsInParts: true,
      plan(model, shape, rank) {
        const workers = shape.shards, power = 2 ** (bitLength(workers) - 1);
        const reply = replyChunk(model, shape, workers);
        const total = plan(0, 0, 0);
        for (const [gives, takes] of listSums(workers, rank)) {
          if (gives) { total.sent += sumChunk(model, shape, gives); total.messages += 1; }
          if (takes) total.received += sumChunk(model, shape, takes);
        }
        if (rank >= power) total.received += reply;
        else if (rank < workers - power) { total.sent += reply; total.messages += 1; }
        return total;
      },
      rounds: (model, shape) => listSums(shape.shards, 0).length + hasExtra(shape),
      work(shape) {
        const bytes = (votes) => bitLength(votes * (2 ** shape.votePlanes - 1)) * shape.planeBytes;
        const sums = listSums(shape.shards, 0), swaps = sums.filter(([gives]) => gives).length;
        return {
          written: swaps + hasExtra(shape),
          read: sums.length + swaps,
          counted: sums.reduce((all, [gives, takes]) => all + bytes(gives || 1) + bytes(takes), bytes(1)),
        };
      },
    },
  ];
  const hasExtra = (shape) => (shape.shards > 2 ** (bitLength(shape.shards) - 1) ? 1 : 0);
  const listAble = (scenario, rule) => PATTERNS.filter((pattern) =>
    !pattern.countsInParts || (rule.has_partial_sums && scenario.momentum_sync_every === null));

  // ---- link: seconds

  const transferS = (link, sent, received) =>
    (8 * (link.full_duplex ? Math.max(sent, received) : sent + received)) / link.rate_bit_per_s;

  function exchangeS(model, pattern, shape, link, bothWays = pattern.bothWays) {
    if (shape.shards === 1) return 0;
    return Math.max(...[0, shape.shards - 1].map((rank) => {
      const bytes = pattern.plan(model, shape, rank), rounds = pattern.rounds(model, shape);
      const transfer = bothWays
        ? transferS(link, bytes.sent, bytes.received)
        : transferS(link, bytes.sent, 0) + transferS(link, 0, bytes.received);
      return rounds * link.latency_s + Math.max(0, bytes.messages - rounds) * link.message_s + transfer;
    }));
  }

  function countOverlapBuckets(model, shape, link, needed) {
    const least = exchangeS(model, PATTERNS[0], { ...shape, voteBytes: 0, replyBytes: 0 }, link);
    const transfer = needed * Math.max(0, exchangeS(model, PATTERNS[0], shape, link) - least);
    const best = roundHalfEven(Math.sqrt(transfer / (model.overlap_bucket_s + least)));
    return Math.min(model.most_overlap_buckets, Math.max(model.least_overlap_buckets, best));
  }

  // ---- machine: seconds of arithmetic

  function encodeS(model, machine, elements, planes) {
    const slowdown = [1, 16, 32].includes(planes) ? 1 : Math.min(1.6, 1.34 + 0.035 * planes);
    return (slowdown * elements * (model.read_to_encode_bytes + planes / 8)) / machine.encode_bytes_per_s;
  }

  const commitS = (model, machine, elements, own, planes) =>
    (elements * (model.apply_bytes + planes / 8) + own * model.momentum_bytes) / machine.commit_bytes_per_s;

  // ---- a step

  const ownParams = (scenario) => ceilDiv(scenario.n_params, scenario.gpus_per_node);

  function makeForecast(scenario, load, names) {
    let exposed = load.communication;
    if (names.overlap) {
      const hideable = scenario.overlap_share * scenario.backward_share * scenario.compute_s;
      exposed = Math.max(exposed - hideable, load.lastBucket);
    }
    exposed = Math.max(exposed, load.processor) + load.late;
    const step = scenario.compute_s + load.arithmetic + exposed;
    return {
      ...names,
      bits_per_parameter: (8 * load.sent) / scenario.n_params,
      sent_bytes: load.sent,
      arithmetic_s: load.arithmetic,
      host_s: load.host,
      communication_s: load.communication + load.late,
      processor_s: load.processor,
      exposed_s: exposed,
      step_s: step,
      efficiency: scenario.compute_s / step,
    };
  }

  function forecastVotes(model, scenario, rule, pattern, overlap) {
    const own = ownParams(scenario), workers = scenario.nodes, machine = scenario.machine;
    const link = { ...scenario.link, rate_bit_per_s: scenario.link.rate_bit_per_s / scenario.gpus_per_node };
    let buckets = ceilDiv(own, model.bucket_elements);
    if (overlap) {
      const whole = shapeOf(model, rule, ceilDiv(own, buckets), workers);
      buckets = Math.max(buckets, countOverlapBuckets(model, whole, link, buckets));
    }
    const shape = shapeOf(model, rule, ceilDiv(own, buckets), workers);
    const busiest = Math.max(...[0, workers - 1].map((rank) => pattern.plan(model, shape, rank).sent));
    const planes = replyPlanes(rule, workers);
    let momentaBytes = 0, late = 0;
    if (scenario.momentum_sync_every !== null && workers > 1) {
      const every = scenario.momentum_sync_every, all = shapeMomenta(model, own, workers, scenario.momentum_sync_bits);
      momentaBytes = Math.max(...[0, workers - 1].map((rank) => pattern.plan(model, all, rank).sent)) / every;
      late = Math.max(exchangeS(model, pattern, all, link) / every, momentaBytes * machine.vote_wire_s_per_byte);
    }
    const orthogonalize =
      (model.orthogonalize_operations * scenario.orthogonalized_width * own) / machine.operations_per_s;
    let arithmetic = commitS(model, machine, scenario.n_params, scenario.n_params, 0) + orthogonalize, host = 0;
    if (workers > 1) {
      const work = pattern.work(shape), bytes = pattern.plan(model, shape, 0);
      const counted = rule.keeps_state ? (work.counted * 8) / rule.vote_planes : 0;
      host = buckets * (work.counted / machine.count_bytes_per_s
        + (counted * model.counted_state_bytes) / machine.commit_bytes_per_s
        + (bytes.sent + bytes.received) / machine.frame_bytes_per_s
        + work.written * machine.write_frame_s + work.read * machine.read_frame_s);
      arithmetic = encodeS(model, machine, own, rule.vote_planes)
        + orthogonalize
        + (rule.keeps_state ? (own * model.state_bytes) / machine.commit_bytes_per_s : 0)
        + commitS(model, machine, scenario.n_params, own, planes) + host;
    }
    const peers = scenario.gpus_per_node - 1, inside = own * peers * (4 + planes / 8);
    const insideS = 2 * peers * scenario.node_link.latency_s + transferS(scenario.node_link, inside, inside);
    const oneBucket = exchangeS(model, pattern, shape, link);
    const load = {
      sent: scenario.gpus_per_node * (buckets * busiest + momentaBytes),
      arithmetic,
      host,
      communication: oneBucket + (buckets - 1) * exchangeS(model, pattern, shape, link, true) + insideS,
      lastBucket: oneBucket + insideS / buckets,
      late,
      processor: workers === 1
        ? 0 : buckets * busiest * machine.vote_wire_s_per_byte + (buckets - 1) * machine.bucket_s,
    };
    return makeForecast(scenario, load, { method: rule.method, pattern: pattern.name, votes: true, overlap });
  }

  function forecastAllReduce(model, scenario, baseline) {
    const nodes = scenario.nodes, peers = scenario.gpus_per_node - 1, machine = scenario.machine;
    const sent = (scenario.n_params * ((2 * (nodes - 1)) / nodes) * baseline.bits) / 8;
    const buckets = ceilDiv(scenario.n_params * 4, model.ddp_bucket_bytes);
    const rounds = baseline.algorithm === "ring" ? 2 * (nodes - 1) : 2 * log2Ceil(nodes);
    const inside = (2 * ownParams(scenario) * peers * baseline.bits) / 8;
    let arithmetic = commitS(model, machine, scenario.n_params, scenario.n_params, 0);
    const workers = nodes * scenario.gpus_per_node;
    if (workers > 1) {
      if (baseline.bits === 16) arithmetic += (2 * scenario.n_params * 6) / machine.commit_bytes_per_s;
      arithmetic += ((((workers - 1) / workers) * scenario.n_params * 3 * baseline.bits) / 8) / machine.commit_bytes_per_s;
    }
    const communication = buckets * rounds * scenario.link.latency_s + transferS(scenario.link, sent, sent)
      + 2 * buckets * peers * scenario.node_link.latency_s + transferS(scenario.node_link, inside, inside);
    const load = {
      sent,
      arithmetic,
      host: 0,
      communication,
      lastBucket: communication / buckets,
      late: 0,
      processor: (sent / scenario.gpus_per_node) * machine.gradient_wire_s_per_byte,
    };
    const names = { method: baseline.method, pattern: baseline.algorithm, votes: false, overlap: true };
    return makeForecast(scenario, load, names);
  }

  // All forecasts, the fastest first.
  function compareMethods(model, scenario) {
    const forecasts = model.baselines.map((baseline) => forecastAllReduce(model, scenario, baseline));
    for (const rule of model.rules)
      for (const pattern of listAble(scenario, rule))
        for (const overlap of [true, false])
          forecasts.push(forecastVotes(model, scenario, rule, pattern, overlap));
    return forecasts.sort((a, b) => a.step_s - b.step_s);
  }

  // ---- local steps, as distlion_lab.planning.local_steps

  const baseS = (model, scenario) =>
    scenario.compute_s + commitS(model, scenario.machine, scenario.n_params, scenario.n_params, 0);

  function forecastLocal(model, given, every) {
    const scenario = { ...given, momentum_sync_every: null }, base = baseS(model, scenario);
    const votes = listAble(scenario, model.delta_rule)
      .map((pattern) => forecastVotes(model, scenario, model.delta_rule, pattern, false));
    const vote = votes.reduce((a, b) => (b.step_s < a.step_s ? b : a));
    const voteS = scenario.nodes > 1 ? vote.step_s - scenario.compute_s : 0;
    const step = base + voteS / every;
    return {
      every,
      vote_s: voteS,
      step_s: step,
      sent_bytes: vote.sent_bytes / every,
      bits_per_parameter: vote.bits_per_parameter / every,
      efficiency: scenario.compute_s / step,
    };
  }

  function adviseLocal(model, scenario) {
    const ranked = compareMethods(model, scenario);
    const allReduce = ranked.find((forecast) => !forecast.votes).step_s;
    const each = ranked.find((forecast) => forecast.votes).step_s, least = Math.min(each, allReduce);
    const local = model.periods.map((every) => forecastLocal(model, scenario, every));
    const allowed = (1 + model.local_share) * baseS(model, scenario);
    const advice = (every, text) => ({ every, text, all_reduce_s: allReduce, each_step_s: each, local });
    if (scenario.nodes === 1) return advice(1, "There is nobody to vote with.");
    if (least <= allowed)
      return advice(1, `No local steps here: communication in each step adds at most ${(100 * model.local_share).toFixed(0)}%. `
        + `A step takes ${short(least)} s.`);
    const enough = local.find((forecast) => forecast.step_s <= allowed) ?? local[local.length - 1];
    const text = `Vote every ${enough.every} steps, by distlion.LocalSteps(inner, every=${enough.every}): a step takes `
      + `${short(enough.step_s)} s on average. A vote in each step would take ${short(each)} s, an all-reduce `
      + `${short(allReduce)} s. ${model.price}`;
    if (enough.step_s <= allowed) return advice(enough.every, text);
    return advice(enough.every, `${text} A vote takes ${short(enough.vote_s)} s even so.`);
  }

  function listSites(model, scenario) {
    const place = (rate, latency_s) => ({ ...scenario, link: { ...scenario.link, rate_bit_per_s: rate * model.payload_share, latency_s } });
    return model.site_rates.flatMap((rate) => model.site_latencies_s.map((latency) => (
      { rate_bit_per_s: rate, latency_s: latency, advice: adviseLocal(model, place(rate, latency)) })));
  }

  // ---- advice, in the words of distlion_lab.planning.advice

  // Three significant digits, as in Python's format ".3g".
  function short(x) {
    if (x === 0) return "0";
    const [digits, exponent] = x.toExponential(2).split("e"), power = Number(exponent);
    if (power >= -4 && power < 3) return String(Number(x.toPrecision(3)));
    const sign = power < 0 ? "-" : "+", tail = String(Math.abs(power)).padStart(2, "0");
    return `${Number(digits)}e${sign}${tail}`;
  }

  function advise(model, scenario, ranked, threshold) {
    const best = ranked.find((forecast) => forecast.votes);
    const baseline = ranked.find((forecast) => !forecast.votes);
    const gain = baseline.step_s / best.step_s - 1;
    if (scenario.nodes > 1 && gain >= threshold) {
      const overlap = best.overlap ? "with overlap" : "without overlap";
      return { compress: true, gain, text:
        `Compress: ${best.method} by ${best.pattern} ${overlap} takes ${short(best.step_s)} s a step, `
        + `${baseline.method} (${baseline.pattern}) ${short(baseline.step_s)} s: `
        + `${(1 + gain).toFixed(2)} times as fast. All-reduce leaves ${short(baseline.exposed_s)} s of `
        + `communication that backward does not hide; votes leave ${short(best.exposed_s)} s.`
        + nameHost(best) };
    }
    const refusal = "Do not compress here";
    if (scenario.nodes === 1)
      return { compress: false, gain, text: `${refusal}: with a single node there is no network between nodes.` };
    return { compress: false, gain, text:
      `${refusal}: ${best.method} by ${best.pattern} would take ${short(best.step_s)} s a step, `
      + `${baseline.method} (${baseline.pattern}) takes ${short(baseline.step_s)} s. The gain of `
      + `${gain < 0 ? "" : "+"}${(100 * gain).toFixed(1)}% is below ${(100 * threshold).toFixed(0)}%. `
      + findReason(scenario, best, baseline) + nameHost(best) };
  }

  function nameHost(best) {
    if (best.processor_s > Math.max(best.host_s, best.communication_s))
      return ` The cores that compute also work on packets for ${short(best.processor_s)} s, longer than the link `
        + `takes, ${short(best.communication_s)} s: a faster link would gain little.`;
    if (best.host_s <= best.communication_s) return "";
    return ` The host frames, checks and counts for ${short(best.host_s)} s, longer than the link takes, `
      + `${short(best.communication_s)} s: a faster link would gain little.`;
  }

  function findReason(scenario, best, baseline) {
    const hidden = baseline.communication_s - baseline.exposed_s;
    if (best.arithmetic_s + best.exposed_s >= baseline.arithmetic_s + baseline.exposed_s)
      return `Votes cost ${short(best.arithmetic_s)} s of arithmetic and ${short(best.exposed_s)} s on `
        + `the network, all-reduce ${short(baseline.arithmetic_s)} s and ${short(baseline.exposed_s)} s.`;
    if (hidden >= 0.5 * baseline.communication_s)
      return `Backward hides ${short(hidden)} s of the ${short(baseline.communication_s)} s that the `
        + "all-reduce communicates.";
    return `Communication is a small part of a step: ${short(baseline.exposed_s)} s beside `
      + `${short(scenario.compute_s)} s of compute.`;
  }

  return { compareMethods, advise, forecastLocal, adviseLocal, listSites };
})();
