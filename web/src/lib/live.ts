/**
 * A run as it is seen live: events in, bounded series out. Nothing here grows with the length of a run.
 *
 *   EventSource --event--> LiveRun.take --> series (at most MAX_POINTS points each) + newest record + state
 *                 |
 *                 +-- id of the last event; after a lost connection the stream goes on after it
 */

export const MAX_POINTS = 1000;

/** The numbers that are drawn, by name of docs/reference/metrics.md; what the server adds begins with `lab/`. */
export const DRAWN = [
  'rollout/raw_reward',
  'lab/reward_se',
  'eval/sampled',
  'eval/greedy',
  'lab/held_out_low',
  'lab/held_out_high',
  'train/ppo_kl',
  'train/kl_loss',
  'train/pg_clipfrac',
  'train/tis_clipfrac',
  'train/train_rollout_logprob_abs_diff',
  'train/entropy_loss',
  'train/grad_norm',
  'staleness/mean',
  'staleness/max',
  'staleness/dropped',
  'rollout/response_len/mean',
  'rollout/truncated_ratio',
  'rollout/zero_std/count',
  'perf/step_time',
  'perf/tokens_per_gpu_per_sec',
] as const;
export type Drawn = (typeof DRAWN)[number];

export interface Point {
  round: number;
  values: Partial<Record<Drawn, number>>;
}

export type Metrics = Record<string, number>;

export interface RunInfo {
  run_id: string;
  created: number;
  experiment_hash: string;
  title: string;
  state: 'running' | 'finished' | 'stopped' | 'failed';
  was_stopped: boolean;
  return_code: number | null;
  resumes: number;
  folder: string;
  tail: string[];
  resume_command: string;
}

/** Points thinned to every `stride`-th round, evaluations always kept until there are too many of them too. */
export class Thinned {
  points: Point[] = [];
  stride = 1;

  add(point: Point): void {
    const last = this.points.at(-1);
    if (last && last.round === point.round) {
      this.points[this.points.length - 1] = point;
      return;
    }
    const beforeLast = this.points.at(-2);
    // The newest point is always there; it is replaced by the next one unless it stands on the stride.
    if (last && beforeLast && last.round % this.stride !== 0 && last.values['eval/sampled'] === undefined) this.points.pop();
    this.points.push(point);
    if (this.points.length > MAX_POINTS) {
      this.stride *= 2;
      const kept = this.points.filter((p, i) => i === this.points.length - 1 || p.round % this.stride === 0);
      const held = this.points.filter((p) => p.values['eval/sampled'] !== undefined && p.round % this.stride !== 0);
      this.points = kept.length + held.length <= MAX_POINTS ? [...kept, ...held].sort((a, b) => a.round - b.round) : kept;
    }
  }
}

const RECENT = 24;

export class LiveRun {
  readonly series = new Thinned();
  /** The last few records whole, for the time split and the lanes. */
  recent: Metrics[] = [];
  newest: Metrics | null = null;
  numRounds = 0;
  numRecords = 0;
  ages = new Map<number, number>();
  evaluationBefore: Metrics | null = null;

  takeMetrics(record: Metrics): void {
    const round = record['round'];
    if (typeof round !== 'number') return;
    const values: Point['values'] = {};
    for (const name of DRAWN) {
      const value = record[name];
      if (typeof value === 'number' && Number.isFinite(value)) values[name] = value;
    }
    this.series.add({ round, values });
    this.recent = [...this.recent.slice(-(RECENT - 1)), record];
    this.newest = record;
    this.numRecords += 1;
  }

  takeSpan(record: Record<string, unknown>): void {
    if (typeof record['num_rounds'] === 'number') this.numRounds = record['num_rounds'];
    if (record['event'] === 'evaluated' && record['round'] === -1) this.evaluationBefore = record as Metrics;
  }

  reset(): void {
    this.series.points = [];
    this.series.stride = 1;
    this.recent = [];
    this.newest = null;
    this.numRecords = 0;
  }
}

export interface Handlers {
  change: () => void;
  state: (info: RunInfo) => void;
  connection: (isOpen: boolean) => void;
}

/** Follow a run until it ends. Draws are asked for at most every `everyMs`. Returns what stops it. */
export function followRun(runId: string, run: LiveRun, on: Handlers, everyMs = 200): () => void {
  const source = new EventSource(`/api/runs/${runId}/events`);
  let timer: ReturnType<typeof setTimeout> | undefined;
  const changed = (): void => {
    timer ??= setTimeout(() => {
      timer = undefined;
      on.change();
    }, everyMs);
  };
  const read = <T>(event: MessageEvent<string>): T => JSON.parse(event.data) as T;
  source.addEventListener('metrics', (event) => {
    run.takeMetrics(read<Metrics>(event));
    changed();
  });
  source.addEventListener('span', (event) => {
    run.takeSpan(read<Record<string, unknown>>(event));
    changed();
  });
  source.addEventListener('reset', () => {
    run.reset();
    changed();
  });
  source.addEventListener('state', (event) => on.state(read<RunInfo>(event)));
  source.addEventListener('end', (event) => {
    on.state(read<RunInfo>(event));
    source.close();
    on.change();
  });
  source.onopen = () => on.connection(true);
  source.onerror = () => on.connection(false);
  return () => {
    clearTimeout(timer);
    source.close();
  };
}

export interface Lane {
  lane: 'sampler' | 'trainer' | 'weights' | 'evaluator';
  start: number;
  end: number;
}

export interface Lanes {
  spans: Lane[];
  rounds: { round: number; at: number }[];
  span: number;
}

/** What each part did in the last rounds, laid end to end from the records' durations. */
export function layLanes(records: Metrics[], count = 3): Lanes {
  const spans: Lane[] = [];
  const rounds: Lanes['rounds'] = [];
  let now = 0;
  for (const record of records.slice(-count)) {
    const time = (name: string): number => record[`perf/${name}`] ?? 0;
    rounds.push({ round: record['round'] ?? 0, at: now });
    const sampled = now + time('rollout_time');
    const laidOut = sampled + time('data_time');
    const trained = laidOut + time('train_time');
    const written = trained + time('record_time') + time('save_time');
    const pushed = written + time('update_weights_time');
    spans.push({ lane: 'sampler', start: now, end: sampled });
    spans.push({ lane: 'trainer', start: laidOut, end: trained });
    spans.push({ lane: 'weights', start: written, end: pushed });
    if (time('eval_time') > 0) spans.push({ lane: 'evaluator', start: pushed, end: pushed + time('eval_time') });
    now += Math.max(time('step_time'), pushed - now);
  }
  return { spans, rounds, span: now || 1 };
}

/** Parts of the last round's time that are named; what is left over is "other". */
export function splitTime(record: Metrics): { id: string; seconds: number }[] {
  const time = (name: string): number => record[`perf/${name}`] ?? 0;
  const reward = time('reward_time');
  const parts = [
    { id: 'sample', seconds: Math.max(0, time('rollout_time') - reward) },
    { id: 'reward', seconds: reward },
    { id: 'update', seconds: time('train_time') },
    { id: 'record', seconds: time('data_time') + time('record_time') + time('save_time') },
    { id: 'weights', seconds: time('update_weights_time') },
    { id: 'evaluate', seconds: time('eval_time') },
  ];
  const named = parts.reduce((sum, part) => sum + part.seconds, 0);
  const rest = time('step_time') - named;
  return rest > 0.02 * time('step_time') ? [...parts, { id: 'other', seconds: rest }] : parts;
}
