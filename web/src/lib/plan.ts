/** The server's answers, as hotloop.experiment.plan and hotloop.lab write them. */

import type { Experiment } from './types.gen';

export type { Experiment };
export type Verdict = 'fits' | 'tight' | 'over';
export type Phase = 'train' | 'rollout' | 'host';

export interface Finding {
  code: string;
  message: string;
  fields: string[];
}

export interface Change {
  field: string;
  before: unknown;
  after: unknown;
  rule: string;
}

export interface Repair {
  code: string;
  title: string;
  edit: Record<string, unknown>;
  changes: Change[];
  clears: string[];
  gpus_after: Record<string, number>;
  remaining: string[];
}

export interface MemoryRow {
  phase: Phase;
  where: string;
  item: string;
  bytes: number;
  formula: string;
}

export interface MemoryTotal {
  phase: Phase;
  bytes: number;
  capacity_bytes: number;
  verdict: Verdict;
}

export interface Estimate {
  name: string;
  value: number;
  unit: string;
  formula: string;
  assumptions: string[];
}

export interface Staleness {
  bound: number | null;
  predicted: number;
  latency_s: number;
  round_s: number;
  queued_rounds: number;
  mixed_version_frac: number;
}

export interface LaunchStep {
  where: string;
  what: string;
  command: string;
}

export interface Stage {
  index: number;
  first_layer: number;
  num_layers: number;
  num_dense: number;
  num_moe: number;
  num_attention: number;
  has_embedding: boolean;
  has_head: boolean;
}

export interface EngineGroup {
  role: 'regular' | 'prefill' | 'decode';
  num_engines: number;
  gpus: number;
  hicache: boolean;
  eagle: boolean;
}

/** node, index, role, rank, tp, cp, dp, pp, ep, edp, engine: `gpu_fields` names them. */
export type GpuRow = readonly [number, number, string, number, number, number, number, number, number, number, number];

export interface Layout {
  kind: string;
  nodes: number;
  gpus_per_node: number;
  train_gpus: number;
  rollout_gpus: number;
  ray_gpus: number;
  external_gpus: number;
  tp: number;
  pp: number;
  cp: number;
  dp: number;
  ep: number;
  etp: number;
  edp: number;
  max_tokens_per_gpu: number;
  stages: Stage[];
  engine_gpus: number;
  engine_dp: number;
  engine_ep: number;
  num_engines: number;
  groups: EngineGroup[];
  producers: string;
  gpu_fields: string[];
  gpus: GpuRow[];
  is_whole: boolean;
}

export interface Plan {
  gpus: Record<string, number>;
  layout: Layout;
  memory: MemoryRow[];
  verdict: Verdict;
  memory_totals: MemoryTotal[];
  largest_lever: { edit: Record<string, unknown>; phase: Phase; saves_bytes: number; title: string } | null;
  assumptions: string[];
  errors: Finding[];
  notes: Finding[];
  repairs: Repair[];
  estimates: Estimate[];
  staleness: Staleness;
  resume: Record<string, unknown> | null;
  launch: LaunchStep[];
}

/** What the catalogue knows of the chosen model; drawn, never computed with. */
export interface ModelFacts {
  id: string;
  label: string;
  hf_repo: string;
  model_script: string;
  published_precision: string;
  has_mtp: boolean;
  notes: string[];
  arch: Record<string, number | string | boolean | number[] | string[]>;
}

export interface Detail {
  stage_bytes: number[];
  kv_capacity_tokens: number;
  requests_capacity: number;
  prompt_tokens: number;
  response_tokens: number;
}

export interface PlanAnswer {
  experiment: Experiment;
  resolved: Experiment;
  hash: string;
  edited: Change[];
  followed: Change[];
  plan: Plan;
  model: ModelFacts;
  detail: Detail;
}

/** What a choice would lead to, before it is picked. */
export interface Effect {
  error?: string;
  gpus: number;
  nodes: number;
  peak_bytes: number;
  host_bytes: number;
  engine_bytes: number;
  kv_capacity_tokens: number;
  round_s: number;
  staleness: number;
  followed: Change[];
  new_errors: string[];
}

export interface CatalogueModel {
  id: string;
  label: string;
  in_lab: boolean;
  rollout_only: boolean;
  nodes: number;
  params_total: number;
  params_active: number;
  moe: boolean;
  attention: string;
  sparse: boolean;
  precision: string;
  has_mtp: boolean;
}

export interface Preset {
  name: string;
  title: string;
  experiment: Experiment;
}

export interface Schema {
  version: string;
  defaults: Experiment;
  models: CatalogueModel[];
  gpus: { id: string; label: string }[];
  presets: Preset[];
  can_run: boolean;
  missing: string;
}

/** Sum of the rows of a phase. */
export function phaseTotal(plan: Plan, phase: Phase): MemoryTotal | undefined {
  return plan.memory_totals.find((total) => total.phase === phase);
}

/** The fuller of the two GPU phases. */
export function peakTotal(plan: Plan): MemoryTotal | undefined {
  const totals = plan.memory_totals.filter((total) => total.phase !== 'host');
  return totals.reduce<MemoryTotal | undefined>((most, total) => (most && most.bytes >= total.bytes ? most : total), undefined);
}

export function estimate(plan: Plan, name: string): Estimate | undefined {
  return plan.estimates.find((item) => item.name === name);
}

/** Read a field by dotted path, such as `sampling.group_size`. */
export function readField(experiment: Experiment, field: string): unknown {
  return field.split('.').reduce<unknown>((value, key) => (value as Record<string, unknown> | undefined)?.[key], experiment);
}

/** The total that decides the plan's verdict: the worst one, host RAM included. */
export function decidingTotal(plan: Plan): MemoryTotal | undefined {
  const matching = plan.memory_totals.filter((total) => total.verdict === plan.verdict && total.bytes > 0);
  const share = (total: MemoryTotal) => total.bytes / total.capacity_bytes;
  return matching.reduce<MemoryTotal | undefined>((most, total) => (most && share(most) >= share(total) ? most : total), undefined);
}
