/** The only functions that make a new state of the page's experiment. Pure; the store calls them. */

import { push, redo, startHistory, undo, type History } from './history';
import type { Experiment } from './plan';

export interface Design {
  /** B: what is edited and exported. */
  readonly history: History<Experiment>;
  /** A: what B is compared with; outside B's history. */
  readonly a: Experiment | null;
  /** Whether B came, wholly or in part, from a file or a link; hooks and paths are then asked about before a run. */
  readonly isForeign: boolean;
}

export const STORAGE_KEY = 'hotloop-experiment-v1';

export function startDesign(experiment: Experiment): Design {
  return { history: startHistory(experiment), a: null, isForeign: false };
}

/** One entry: an edit with all that followed from it, a preset, a repair, a loaded file, A restored. */
export function commit(design: Design, experiment: Experiment, label: string, isForeign = design.isForeign): Design {
  return { ...design, history: push(design.history, structuredClone(experiment), label), isForeign };
}

export function stepBack(design: Design): Design {
  return { ...design, history: undo(design.history) };
}

export function stepForward(design: Design): Design {
  return { ...design, history: redo(design.history) };
}

export function saveAsA(design: Design): Design {
  return { ...design, a: structuredClone(design.history.present.value) };
}

export function clearA(design: Design): Design {
  return { ...design, a: null };
}

/** What is kept in the browser. History is not: a reload starts a new one. */
export function writeStored(design: Design): string {
  return JSON.stringify({ schema: 1, experiment: design.history.present.value, a: design.a, is_foreign: design.isForeign });
}

export interface Stored {
  experiment: Record<string, unknown>;
  a: Record<string, unknown> | null;
  isForeign: boolean;
}

/** Read it back. Anything that is not what writeStored writes gives null; values are cleaned by the server. */
export function readStored(text: string | null): Stored | null {
  if (text === null) return null;
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return null;
  }
  if (!isRecord(value) || value['schema'] !== 1 || !isRecord(value['experiment'])) return null;
  return {
    experiment: value['experiment'],
    a: isRecord(value['a']) ? value['a'] : null,
    isForeign: value['is_foreign'] === true,
  };
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
