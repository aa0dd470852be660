// A run's curves as they come: whole at first, then from where they have changed.

export class Curves {
  constructor() {
    this.byName = new Map();
  }

  take(sent) {
    for (const [name, curve] of Object.entries(sent)) {
      const known = this.byName.get(name);
      if (!known || curve.from === null || known.width !== curve.width) {
        this.byName.set(name, curve);
        continue;
      }
      let keep = known.x.length;
      while (keep > 0 && known.x[keep - 1] >= curve.from) keep -= 1;
      for (const key of ["x", "mean", "low", "high"]) {
        if (!known[key]) continue;
        known[key].length = keep;
        known[key].push(...curve[key]);
      }
    }
  }

  get(name) {
    return this.byName.get(name) ?? { x: [], mean: [], low: [], high: [], width: 1 };
  }

  names(start) {
    return [...this.byName.keys()].filter((name) => name.startsWith(start));
  }

  // Places on an axis of steps as places on one of samples or of time; see `axisOf`.
  along(axis, xs, workers, firstT) {
    if (axis === "step") return xs;
    if (axis === "time") {
      const { x, mean } = this.get("step:t");
      return xs.map((step) => between(x, mean, step) - firstT);
    }
    const { x, mean, width } = this.get("step:samples");
    const total = [];
    let sum = 0;
    for (const one of mean) { sum += one * width * Math.max(workers, 1); total.push(sum); }
    return xs.map((step) => between(x, total, step));
  }

  // Back: the step at a place on such an axis.
  stepAt(axis, place, workers, firstT) {
    if (axis === "step") return place;
    const { x } = this.get(axis === "time" ? "step:t" : "step:samples");
    return between(this.along(axis, x, workers, firstT), x, place);
  }
}

export function between(xs, ys, x) {
  if (!xs.length) return 0;
  let [low, high] = [0, xs.length - 1];
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

// A time axis that does not go back, which a plot needs: records of several workers may be a moment apart.
export function rising(xs) {
  let last = -Infinity;
  return xs.map((x) => (last = Math.max(last + 1e-9, x)));
}

// A hole in the line where nothing was recorded for so long.
export function withGaps(xs, ys, longest) {
  const [outX, outY] = [[], []];
  xs.forEach((x, at) => {
    if (at && x - xs[at - 1] > longest) { outX.push((x + xs[at - 1]) / 2); outY.push(null); }
    outX.push(x);
    outY.push(ys[at]);
  });
  return [outX, outY];
}

// The mean of the neighbours, a twenty-fifth of the curve on each side.
export function smooth(ys) {
  const reach = Math.max(1, Math.round(ys.length / 25));
  return ys.map((y, at) => {
    if (y === null) return null;
    let [sum, known] = [0, 0];
    for (const step of [1, -1]) {
      for (let away = step === 1 ? 0 : 1; away <= reach; away += 1) {
        const value = ys[at + step * away];
        if (value === null || value === undefined) break;
        sum += value;
        known += 1;
      }
    }
    return sum / known;
  });
}
