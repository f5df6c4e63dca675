/** What each option of the open step would lead to, asked for after the plan is drawn. */

import { call, newestOnly } from './api';
import { STEP_TEXTS, type Figure, type Step, type Value } from './choices';
import { say } from './i18n.svelte';
import type { Effect, PlanAnswer, Schema } from './plan';
import { peakTotal, phaseTotal, readField } from './plan';
import { count, gib, seconds, signed, whole } from './scale';
import { showField } from './words';

type Edit = { field: string; value: Value };

const ask = newestOnly((experiment: unknown, edits: Edit[]) => call<{ effects: Effect[] }>('/api/effects', { experiment, edits }));

class Effects {
  /** By `field=value`, for the experiment whose hash stands beside it. */
  shown = $state.raw<{ hash: string; step: string; by: Map<string, Effect> }>({ hash: '', step: '', by: new Map() });

  async refresh(answer: PlanAnswer, step: Step, schema: Schema): Promise<void> {
    if (this.shown.hash === answer.hash && this.shown.step === step) return;
    const edits: Edit[] = [];
    for (const group of STEP_TEXTS[step].groups) {
      if (group.kind === 'radio') {
        const values = group.field === 'model' ? schema.models.filter((m) => m.in_lab).map((m) => m.id) : group.options.map((o) => o.value);
        for (const value of values) if (value !== readField(answer.resolved, group.field)) edits.push({ field: group.field, value });
      } else if (group.kind === 'checks') {
        for (const item of group.items) edits.push({ field: item.field, value: !readField(answer.resolved, item.field) });
      }
    }
    const got = await ask(answer.experiment, edits);
    if (!got) return;
    this.shown = { hash: answer.hash, step, by: new Map(edits.map((edit, i) => [`${edit.field}=${String(edit.value)}`, got.effects[i]!])) };
  }

  of(field: string, value: Value): Effect | undefined {
    return this.shown.by.get(`${field}=${String(value)}`);
  }
}

export const effects = new Effects();

/** The same figures of the plan that is drawn, for the option that is chosen. */
export function currentEffect(answer: PlanAnswer): Effect {
  const { plan, detail } = answer;
  return {
    gpus: plan.gpus['total'] ?? plan.layout.train_gpus + (plan.layout.kind === 'separate' ? plan.layout.rollout_gpus : 0),
    nodes: plan.layout.nodes,
    peak_bytes: peakTotal(plan)?.bytes ?? 0,
    host_bytes: phaseTotal(plan, 'host')?.bytes ?? 0,
    engine_bytes: plan.memory.filter((row) => row.phase === 'rollout' && row.item.includes('weights')).reduce((sum, row) => sum + row.bytes, 0),
    kv_capacity_tokens: detail.kv_capacity_tokens,
    round_s: plan.staleness.round_s,
    staleness: plan.staleness.predicted,
    followed: [],
    new_errors: [],
  };
}

/** One short line at the right of an option. */
export function describe(figure: Figure, effect: Effect, field: string): string {
  const parts: string[] = [];
  if (figure === 'nodes') parts.push(say([effect.nodes === 1 ? '1 node' : `${effect.nodes} nodes`, `${effect.nodes} 个节点`]));
  if (figure === 'gpus') parts.push(say(['{n} GPUs', '{n} 张 GPU'], { n: whole(effect.gpus) }));
  if (figure === 'round') parts.push(`${seconds(effect.round_s)}, ${say(['staleness {n}', '陈旧度 {n}'], { n: effect.staleness })}`);
  if (figure === 'engine' && effect.engine_bytes) parts.push(say(['{n} GiB engine', '引擎 {n} GiB'], { n: gib(effect.engine_bytes) }));
  if (figure === 'kv') parts.push(say(['{n} tokens an engine', '每引擎 {n} token'], { n: count(effect.kv_capacity_tokens) }));
  if (figure === 'none' && !effect.followed.length && !effect.new_errors.length) return '';
  const followed = effect.followed.map((change) => change.field).filter((name) => name !== field && !name.endsWith('_path'));
  if (followed.length && figure !== 'nodes') parts.push(say(['also sets {what}', '连带改变 {what}'], { what: followed.slice(0, 2).map((f) => showField(f)).join(', ') + (followed.length > 2 ? '…' : '') }));
  return parts.join('; ');
}

/** What switching a box would do to the memory that it is there to save. */
export function describeSwitch(figure: Figure, now: Effect, then: Effect, isOn: boolean): string {
  const sign = isOn ? -1 : 1;
  if (figure === 'peak' || figure === 'host') {
    const key = figure === 'peak' ? 'peak_bytes' : 'host_bytes';
    const change = sign * (then[key] - now[key]);
    if (change === 0) return '';
    return figure === 'peak'
      ? say(['{n} GiB at the peak', '峰值 {n} GiB'], { n: signed(change / 1024 ** 3, 1) })
      : say(['{n} GiB host RAM', '主机内存 {n} GiB'], { n: signed(change / 1024 ** 3, 0) });
  }
  return isOn ? '' : describe('none', then, '');
}
