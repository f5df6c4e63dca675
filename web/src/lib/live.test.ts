import { describe, expect, it } from 'vitest';

import { layLanes, LiveRun, MAX_POINTS, splitTime } from './live';

const record = (round: number, more: Record<string, number> = {}) => ({ round, 'rollout/raw_reward': round / 10000, ...more });

describe('a live run', () => {
  it('draws every round of a short run', () => {
    const run = new LiveRun();
    for (let i = 0; i < 30; i += 1) run.takeMetrics(record(i));
    expect(run.series.points.map((p) => p.round)).toEqual(Array.from({ length: 30 }, (_, i) => i));
    expect(run.series.stride).toBe(1);
  });

  it('keeps at most a thousand points of 9,000 records, the first and the newest among them', () => {
    const run = new LiveRun();
    for (let i = 0; i < 9000; i += 1) run.takeMetrics(record(i, i % 300 === 299 ? { 'eval/sampled': 0.5 } : {}));
    const rounds = run.series.points.map((p) => p.round);
    expect(rounds.length).toBeLessThanOrEqual(MAX_POINTS);
    expect(rounds[0]).toBe(0);
    expect(rounds.at(-1)).toBe(8999);
    expect([...rounds].sort((a, b) => a - b)).toEqual(rounds);
    expect(run.numRecords).toBe(9000);
    expect(run.recent.length).toBeLessThanOrEqual(24);
    expect(run.series.points.filter((p) => p.values['eval/sampled'] !== undefined).length).toBe(30);
  });

  it('keeps only the numbers that are drawn', () => {
    const run = new LiveRun();
    run.takeMetrics(record(0, { 'train/lr-pg_0': 1, 'train/pg_clipfrac': 0.25 }));
    expect(run.series.points[0]!.values).toEqual({ 'rollout/raw_reward': 0, 'train/pg_clipfrac': 0.25 });
  });

  it('starts over when the run was cut back', () => {
    const run = new LiveRun();
    run.takeMetrics(record(0));
    run.reset();
    run.takeMetrics(record(0));
    expect([run.series.points.length, run.numRecords]).toEqual([1, 1]);
  });
});

const TIMES = { 'perf/rollout_time': 2, 'perf/reward_time': 0.5, 'perf/data_time': 0.25, 'perf/train_time': 1, 'perf/record_time': 0.25, 'perf/update_weights_time': 0.5, 'perf/step_time': 4 };

describe('time', () => {
  it('is split into named parts that add up to the round', () => {
    const parts = splitTime(record(0, TIMES));
    expect(parts.reduce((sum, part) => sum + part.seconds, 0)).toBeCloseTo(4);
    expect(parts.find((part) => part.id === 'sample')!.seconds).toBe(1.5);
  });

  it('names what is left over', () => {
    const parts = splitTime(record(0, { ...TIMES, 'perf/step_time': 5 }));
    expect(parts.at(-1)).toEqual({ id: 'other', seconds: 1 });
  });

  it('is laid out so that nobody works twice at once in a sync round', () => {
    const { spans, span } = layLanes([record(0, TIMES), record(1, TIMES)]);
    expect(span).toBe(8);
    expect(spans.map((s) => [s.lane, s.start, s.end])).toEqual([
      ['sampler', 0, 2], ['trainer', 2.25, 3.25], ['weights', 3.5, 4],
      ['sampler', 4, 6], ['trainer', 6.25, 7.25], ['weights', 7.5, 8],
    ]);
  });
});
