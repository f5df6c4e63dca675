import { describe, expect, it } from 'vitest';

import { newestOnly, remember } from './api';
import { STEPS, STEP_TEXTS } from './choices';
import { parseDocument } from './document';
import { placeGpus, tensorGroup } from './gpumap';
import type { GpuRow, Layout } from './plan';

describe('answers', () => {
  it('that arrive out of order are dropped', async () => {
    const gates: ((value: string) => void)[] = [];
    const ask = newestOnly((name: string) => new Promise<string>((done) => gates.push((tail) => done(name + tail))));
    const first = ask('first');
    const second = ask('second');
    gates[1]!('!');
    gates[0]!('!');
    expect(await Promise.all([first, second])).toEqual([undefined, 'second!']);
  });

  it('are asked for once while they are remembered, and failures are not', async () => {
    let asked = 0;
    const ask = remember(async (key: string) => {
      asked += 1;
      if (key === 'bad') throw new Error('no');
      return key;
    }, 2);
    await ask('a');
    await ask('a');
    expect(asked).toBe(1);
    await expect(ask('bad')).rejects.toThrow('no');
    await expect(ask('bad')).rejects.toThrow('no');
    expect(asked).toBe(3);
    await ask('c');
    await ask('d');
    await ask('a');
    expect(asked).toBe(6);
  });
});

describe('derivations', () => {
  it('become blocks of plain text', () => {
    const blocks = parseDocument('# Title\n\nText with `code` and [a paper](https://arxiv.org/abs/1)\nin two lines.\n\n```\na = <b>\n```\n\n- one\n  more\n- two');
    expect(blocks).toEqual([
      { kind: 'heading', spans: [{ text: 'Title' }] },
      { kind: 'paragraph', spans: [{ text: 'Text with ' }, { text: 'code', isCode: true }, { text: ' and ' }, { text: 'a paper', href: 'https://arxiv.org/abs/1' }, { text: ' in two lines.' }] },
      { kind: 'formula', text: 'a = <b>' },
      { kind: 'list', items: [[{ text: 'one' }, { text: ' more' }], [{ text: 'two' }]] },
    ]);
  });

  it('make no link of anything but https', () => {
    expect(parseDocument('[x](javascript:alert(1))')).toEqual([{ kind: 'paragraph', spans: [{ text: '[x](javascript:alert(1))' }] }]);
  });
});

describe('choices', () => {
  it('each have words in both languages', () => {
    for (const step of STEPS)
      for (const group of STEP_TEXTS[step].groups) {
        const texts = group.kind === 'radio' ? [group.legend, ...group.options.flatMap((o) => [o.label, o.explain])] : group.kind === 'checks' ? group.items.flatMap((i) => [i.label, i.explain]) : group.items.map((i) => i.label);
        for (const text of texts) expect(text.every((part) => part.length > 0)).toBe(true);
      }
  });
});

describe('the GPU map', () => {
  const gpu = (rank: number): GpuRow => [Math.floor(rank / 8), rank % 8, 'train', rank, rank % 4, Math.floor(rank / 4) % 8, 0, Math.floor(rank / 32), rank % 32, 0, -1];
  const layout = { gpus: Array.from({ length: 256 }, (_, i) => gpu(i)), train_gpus: 256, pp: 8, gpus_per_node: 8, engine_gpus: 64 } as unknown as Layout;

  it('gives 256 GPUs of 8 stages a row each, every GPU its own place', () => {
    const [pool] = placeGpus(layout);
    expect(pool!.rows.map((row) => [row.first, row.last, row.nodes.length])).toEqual(Array.from({ length: 8 }, (_, i) => [i, i, 4]));
    expect(new Set(pool!.cells.map((c) => `${c.x}/${c.y}`)).size).toBe(256);
  });

  it('outlines the TP group of a GPU', () => {
    expect(tensorGroup(layout, 142)).toEqual([140, 141, 142, 143]);
  });
});
