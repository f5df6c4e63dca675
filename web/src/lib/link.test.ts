import { describe, expect, it } from 'vitest';

import vectors from '../../../tests/vectors/link.json';
import { decodePayload, findFragment, MAX_LINK_LENGTH } from './link';

describe('a share link', () => {
  it.each(vectors.good.map((one) => [one.payload, one.choices] as const))('%s holds its choices', (payload, choices) => {
    expect(decodePayload(payload)['choices'] ?? {}).toEqual(choices);
  });

  it.each(vectors.bad)('%s is refused', (payload) => {
    expect(() => decodePayload(payload)).toThrow(payload.length > MAX_LINK_LENGTH ? 'link_too_long' : 'link_not_json');
  });

  it('is found by its name only', () => {
    expect(findFragment('#experiment=abc')).toEqual({ kind: 'experiment', payload: 'abc' });
    expect(findFragment('#compare=abc')).toEqual({ kind: 'compare', payload: 'abc' });
    expect(findFragment('#rehearse')).toBeNull();
    expect(findFragment('')).toBeNull();
  });
});
