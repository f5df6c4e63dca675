/** Small wordings that several panels share. */

import { fieldLabel, valueLabel } from './choices';
import { say } from './i18n.svelte';
import type { Change, Finding } from './plan';
import { lab } from './store.svelte';

/** A value as a reader knows it; models by their name. */
export function showValue(field: string, value: unknown): string {
  if (field === 'model') return lab.schema?.models.find((model) => model.id === value)?.label ?? String(value);
  if (field === 'gpu') return lab.schema?.gpus.find((gpu) => gpu.id === value)?.label ?? String(value);
  return say(valueLabel(field, value));
}

export function showField(field: string): string {
  return say(fieldLabel(field));
}

export function showChange(change: Change): string {
  return `${showField(change.field)}: ${showValue(change.field, change.before)} → ${showValue(change.field, change.after)}`;
}

/** A finding's message without its code, which is shown apart. */
export function bareMessage(finding: Finding): string {
  return finding.message.replace(` [${finding.code}]`, '');
}
