/** Typed calls to the lab's server, and the dropping of answers that arrive out of order. */

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly doThis: string,
    readonly details: Record<string, unknown> = {},
  ) {
    super(message);
  }
}

export async function call<T>(path: string, body?: unknown, method?: string): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? 'GET' : 'POST'),
      headers: body === undefined ? {} : { 'content-type': 'application/json' },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
  } catch {
    throw new ApiError(0, 'server_lost', 'The lab server does not answer.', 'Start "hotloop lab" again; nothing on this page is lost.');
  }
  const answer: unknown = await response.json().catch(() => null);
  if (!response.ok) {
    const error = (answer as { error?: Record<string, unknown> } | null)?.error ?? {};
    throw new ApiError(
      response.status,
      String(error['code'] ?? 'http_error'),
      String(error['message'] ?? response.statusText),
      String(error['do'] ?? ''),
      (error['details'] as Record<string, unknown> | undefined) ?? {},
    );
  }
  return answer as T;
}

/** Wrap an asynchronous function so that only the answer to the newest call is given; older ones give undefined. */
export function newestOnly<A extends unknown[], R>(ask: (...args: A) => Promise<R>): (...args: A) => Promise<R | undefined> {
  let newest = 0;
  return async (...args: A) => {
    const mine = ++newest;
    const answer = await ask(...args);
    return mine === newest ? answer : undefined;
  };
}

/** A small cache of promised answers by key; the least recently used goes first, and a failed answer is not kept. */
export function remember<R>(ask: (key: string) => Promise<R>, size: number): (key: string) => Promise<R> {
  const kept = new Map<string, Promise<R>>();
  return (key) => {
    const found = kept.get(key) ?? ask(key);
    kept.delete(key);
    kept.set(key, found);
    found.catch(() => kept.delete(key));
    if (kept.size > size) kept.delete(kept.keys().next().value as string);
    return found;
  };
}
