/**
 * The fragment of a share link: base64url of UTF-8 JSON without padding. The server writes it and decides what may be in it
 * (experiment/share.py); this file finds it and refuses a broken one. tests/vectors/link.json holds both sides to it.
 */

export const MAX_LINK_LENGTH = 8192;
export type LinkKind = 'experiment' | 'compare';

export interface ReadLink {
  kind: LinkKind;
  payload: string;
}

/** Find a share fragment in `location.hash`; null when it holds something else, such as a section's name. */
export function findFragment(hash: string): ReadLink | null {
  const found = /^#?(experiment|compare)=(.*)$/s.exec(hash);
  return found ? { kind: found[1] as LinkKind, payload: found[2] ?? '' } : null;
}

/** Read a payload back. Throws a message for the reader when it is too long or no JSON object. */
export function decodePayload(payload: string): Record<string, unknown> {
  if (!/^[A-Za-z0-9_-]*={0,2}$/.test(payload) && payload.length <= MAX_LINK_LENGTH) throw new Error('link_not_json');
  if (payload.length > MAX_LINK_LENGTH) throw new Error('link_too_long');
  let value: unknown;
  try {
    const binary = atob(payload.replaceAll('-', '+').replaceAll('_', '/'));
    const bytes = Uint8Array.from(binary, (c) => c.charCodeAt(0));
    value = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes));
  } catch {
    throw new Error('link_not_json');
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new Error('link_not_json');
  return value as Record<string, unknown>;
}
