/** The export of the experiment that is drawn: fetched when it changes, while something shows it. */

import { ApiError, call, newestOnly } from './api';
import type { Experiment } from './plan';

export interface Exported {
  /** File name -> text; the shell files are there too when blocked, to be read but not copied. */
  files: Record<string, string>;
  blocked: boolean;
  /** Files that an error blocks. */
  blocked_files: string[];
}

const ask = newestOnly((experiment: Experiment) => call<Exported>('/api/export', { experiment }));

class Exporting {
  current = $state.raw<Exported | null>(null);
  failure = $state('');
  #hash = '';

  async refresh(hash: string, experiment: Experiment): Promise<void> {
    if (hash === this.#hash) return;
    this.#hash = hash;
    try {
      const got = await ask(experiment);
      if (got) {
        this.current = got;
        this.failure = '';
      }
    } catch (error) {
      this.failure = error instanceof ApiError ? error.message : String(error);
      this.#hash = '';
    }
  }
}

export const exporting = new Exporting();
