/** Undo and redo over immutable values. One user action is one entry, whatever followed from it. */

export const HISTORY_CAP = 100;

export interface Entry<T> {
  readonly value: T;
  /** What the user did to get here, such as "layout"; shown by the undo button. */
  readonly label: string;
}

export interface History<T> {
  readonly past: readonly Entry<T>[];
  readonly present: Entry<T>;
  readonly future: readonly Entry<T>[];
}

export function startHistory<T>(value: T): History<T> {
  return { past: [], present: { value, label: '' }, future: [] };
}

/** Add an entry; a value equal to the present one changes nothing. A new entry clears what could be redone. */
export function push<T>(history: History<T>, value: T, label: string): History<T> {
  if (JSON.stringify(value) === JSON.stringify(history.present.value)) return history;
  const past = [...history.past, history.present].slice(-HISTORY_CAP);
  return { past, present: { value, label }, future: [] };
}

export function undo<T>(history: History<T>): History<T> {
  const before = history.past.at(-1);
  if (before === undefined) return history;
  return { past: history.past.slice(0, -1), present: before, future: [history.present, ...history.future] };
}

export function redo<T>(history: History<T>): History<T> {
  const [after, ...rest] = history.future;
  if (after === undefined) return history;
  return { past: [...history.past, history.present], present: after, future: rest };
}
