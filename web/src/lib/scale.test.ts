import { describe, expect, it } from 'vitest';

import vectors from '../../../tests/vectors/numbers.json';
import { count, fixed, gib, metric, percent, seconds, signed, ticks, whole, wholeTicks } from './scale';

describe('numbers', () => {
  it.each(vectors.seconds as [number, string][])('%d seconds are written %s', (value, text) => {
    expect(seconds(value)).toBe(text);
  });

  it('have a true minus sign and no negative zero', () => {
    expect(fixed(-1.25, 1)).toBe('−1.3');
    expect(fixed(-0.001, 1)).toBe('0.0');
    expect(signed(0.93541, 4)).toBe('+0.9354');
    expect(signed(-0.93541, 4)).toBe('−0.9354');
    expect(signed(0.00001, 4)).toBe('0.0000');
  });

  it('are grouped, shortened and shared in the same way everywhere', () => {
    expect(whole(1397)).toBe('1,397');
    expect(whole(1234567)).toBe('1,234,567');
    expect([count(743e9), count(3.9e9), count(54144), count(128)]).toEqual(['743B', '3.9B', '54k', '128']);
    expect(gib(64 * 1024 ** 3)).toBe('64.0');
    expect(percent(0.0204, 1)).toBe('2.0 %');
    expect([metric(0), metric(0.0006), metric(0.61), metric(312)]).toEqual(['0', '0.0006', '0.61', '312']);
  });
});

describe('ticks', () => {
  it('are round and cover the range', () => {
    expect(ticks(0, 79.6, 4)).toEqual([0, 20, 40, 60, 80]);
    expect(ticks(0, 0.65)).toEqual([0, 0.2, 0.4, 0.6, 0.8]);
    expect(ticks(3, 3)).toEqual([3]);
  });

  it('of rounds are whole numbers inside the range', () => {
    expect(wholeTicks(0, 29)).toEqual([0, 5, 10, 15, 20, 25]);
    expect(wholeTicks(0, 2)).toEqual([0, 1, 2]);
  });
});
