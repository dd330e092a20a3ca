// The rules of the gate and of truncated importance weights on the sums of report_whatif.tables.
// Pure functions: no document, no state.
"use strict";

// One segment: min(tier of its mean gap, tail rule); 1 where its mean advantage is not negative.
function segmentWeight(data, s, settings) {
  if (!data.eligible[s]) return 1;
  const mean = data.mean[s];
  let tier = 1;
  if (mean < settings.mildMean) tier = settings.mildWeight;
  if (mean < settings.deepMean) tier = settings.deepWeight;
  let deep = 0;
  for (let i = data.deep_offsets[s]; i < data.deep_offsets[s + 1]; i++) {
    if (data.deep[i] < settings.tailGap) deep++;
  }
  const tail = 1 - settings.tailStrength * Math.min(deep / settings.tailCount, 1);
  return Math.min(tier, tail);
}

function segmentWeights(data, settings) {
  const weights = new Float64Array(data.mean.length);
  for (let s = 0; s < weights.length; s++) weights[s] = segmentWeight(data, s, settings);
  return weights;
}

function divide(top, bottom) {
  return bottom === 0 ? (top > 0 ? Infinity : NaN) : top / bottom;
}

// The numbers of report_whatif.what_if. capIndex: place of the cap C in data.caps.
function whatIf(data, settings, weights) {
  const w = weights || segmentWeights(data, settings);
  const cap = data.caps[settings.capIndex];
  const bins = data.caps.length + 1;
  const sum = { gated: 0, eligible: 0, gatedTokens: 0, weight: 0, tokens: 0, largest: 0 };
  const low = { raw: 0, gate: 0, tis: 0, both: 0 };
  const high = { raw: 0, gate: 0, tis: 0, both: 0 };
  for (let r = 0; r + 1 < data.segment_offsets.length; r++) {
    const begin = data.segment_offsets[r], end = data.segment_offsets[r + 1];
    let tokens = 0, weight = 0;
    for (let s = begin; s < end; s++) {
      tokens += data.num_valid[s];
      weight += data.num_valid[s] - data.num_negative[s] + w[s] * data.num_negative[s];
    }
    const factor = tokens > 0 ? tokens / weight : 1;
    for (let s = begin; s < end; s++) {
      const gated = data.eligible[s] && w[s] !== 1;
      sum.eligible += data.eligible[s];
      if (gated) {
        sum.gated++;
        sum.gatedTokens += data.num_negative[s];
      }
      if (data.num_valid[s] > 0) {
        const untouched = data.num_valid[s] > data.num_negative[s];
        sum.largest = Math.max(sum.largest, (untouched ? 1 : w[s]) * factor);
      }
      low.raw += data.low_mass[s];
      low.gate += w[s] * factor * data.low_mass[s];
      low.tis += data.low_weighted[s];
      low.both += w[s] * factor * data.low_weighted[s];
    }
    let mass = 0, truncated = 0;
    for (let b = 0; b < bins; b++) {
      const i = r * bins + b;
      mass += data.high_mass[i];
      truncated += b <= settings.capIndex ? data.high_weighted[i] : cap * data.high_mass[i];
    }
    high.raw += mass;
    high.gate += factor * mass;
    high.tis += truncated;
    high.both += factor * truncated;
    sum.tokens += tokens;
    sum.weight += weight;
  }
  let above = 0, total = 0;
  for (let b = 0; b < bins; b++) {
    if (b > settings.capIndex) above += data.ratio_count[b];
    total += b <= settings.capIndex ? data.ratio_sum[b] : cap * data.ratio_count[b];
  }
  return {
    gated: sum.gated,
    gated_share: divide(sum.gated, sum.eligible),
    gated_tokens: sum.gatedTokens,
    mean_weight: divide(sum.weight, sum.tokens),
    max_coefficient: sum.largest,
    rho: divide(low.raw, high.raw),
    rho_gate: divide(low.gate, high.gate),
    rho_tis: divide(low.tis, high.tis),
    rho_both: divide(low.both, high.both),
    tis_above: divide(above, sum.tokens),
    tis_weight: divide(total, sum.tokens),
  };
}
