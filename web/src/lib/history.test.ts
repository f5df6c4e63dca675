import { describe, expect, it } from 'vitest';

import { commit, readStored, saveAsA, startDesign, stepBack, stepForward, writeStored } from './actions';
import { HISTORY_CAP, push, redo, startHistory, undo } from './history';
import type { Experiment } from './plan';

const numbered = (n: number) => ({ n }) as unknown as Experiment;

describe('the history', () => {
  it('goes back and forth one entry at a time', () => {
    const h = push(push(startHistory('a'), 'b', 'first'), 'c', 'second');
    expect(undo(h).present.value).toBe('b');
    expect(undo(undo(h)).present.value).toBe('a');
    expect(redo(undo(h)).present).toEqual({ value: 'c', label: 'second' });
  });

  it('stays where it is at both ends', () => {
    const h = startHistory('a');
    expect(undo(h)).toBe(h);
    expect(redo(h)).toBe(h);
  });

  it('drops what could be redone when something new is done', () => {
    const h = push(undo(push(startHistory('a'), 'b', '')), 'c', '');
    expect(redo(h).present.value).toBe('c');
  });

  it('makes no entry of a value that is the same', () => {
    const h = startHistory({ x: 1 });
    expect(push(h, { x: 1 }, 'again')).toBe(h);
  });

  it('keeps at most a hundred entries and forgets the oldest', () => {
    let h = startHistory(0);
    for (let i = 1; i <= 150; i += 1) h = push(h, i, '');
    expect(h.past).toHaveLength(HISTORY_CAP);
    for (let i = 0; i < 200; i += 1) h = undo(h);
    expect(h.present.value).toBe(50);
  });
});

describe('the design', () => {
  it('keeps A fixed while B is edited, undone and redone', () => {
    const b = numbered(1);
    let d = saveAsA(startDesign(b));
    expect(d.a).not.toBe(b);
    d = commit(d, numbered(2), 'n');
    expect([d.a, stepBack(d).a, stepForward(stepBack(d)).a]).toEqual([{ n: 1 }, { n: 1 }, { n: 1 }]);
  });

  it('comes back from storage with B and A', () => {
    const d = commit(saveAsA(startDesign(numbered(1))), numbered(2), 'n', true);
    expect(readStored(writeStored(d))).toEqual({ experiment: { n: 2 }, a: { n: 1 }, isForeign: true });
  });

  it.each([null, '', '{', '[]', '1', '{"schema":2,"experiment":{}}', '{"schema":1}', '{"schema":1,"experiment":[]}'])('does not come back from %s', (text) => {
    expect(readStored(text)).toBeNull();
  });
});
