/** The rehearsals of this lab, and the one that is shown. */

import { ApiError, call } from './api';
import type { Experiment } from './plan';
import { followRun, LiveRun, type RunInfo } from './live';

export interface Listed {
  name: string;
  value?: unknown;
  /** Of a replaced choice: what it is in the experiment, and what runs in its place. */
  before?: unknown;
  after?: unknown;
  why?: string;
}

export interface Rehearsal {
  kept: Listed[];
  replaced: Listed[];
  not_rehearsed: Listed[];
  rounds: number;
  foreign: string[];
  errors: string[];
}

class Runs {
  list = $state.raw<RunInfo[]>([]);
  shown = $state.raw<RunInfo | null>(null);
  /** Counts redraws; the live object itself is plain, so that 5 records a second cost one redraw. */
  tick = $state(0);
  live = new LiveRun();
  isConnected = $state(true);
  failure = $state('');
  #stop: (() => void) | null = null;

  async refresh(): Promise<void> {
    this.list = (await call<{ runs: RunInfo[] }>('/api/runs')).runs;
  }

  /** After a reload: show what runs, or else the newest run. */
  async start(): Promise<void> {
    await this.refresh();
    const first = this.list.find((run) => run.state === 'running') ?? this.list[0];
    if (first) this.show(first);
  }

  async begin(experiment: Experiment, agreed: string[]): Promise<void> {
    await this.#try(async () => {
      const info = await call<RunInfo>('/api/runs', { experiment, agreed });
      this.show(info);
      await this.refresh();
    });
  }

  async stop(): Promise<void> {
    await this.#act('stop');
  }

  async resume(): Promise<void> {
    await this.#act('resume');
  }

  async remove(runId: string): Promise<void> {
    await this.#try(async () => {
      await call(`/api/runs/${runId}`, undefined, 'DELETE');
      if (this.shown?.run_id === runId) this.hide();
      await this.refresh();
    });
  }

  show(info: RunInfo): void {
    this.hide();
    const live = new LiveRun();
    this.live = live;
    this.shown = info;
    this.#stop = followRun(info.run_id, live, {
      change: () => {
        this.tick += 1;
      },
      state: (next) => {
        this.shown = next;
        if (next.state !== 'running') void this.refresh();
      },
      connection: (isOpen) => {
        this.isConnected = isOpen;
      },
    });
  }

  hide(): void {
    this.#stop?.();
    this.#stop = null;
    this.shown = null;
    this.live = new LiveRun();
    this.tick += 1;
  }

  async #act(what: 'stop' | 'resume'): Promise<void> {
    const run = this.shown;
    if (!run) return;
    await this.#try(async () => {
      const info = await call<RunInfo>(`/api/runs/${run.run_id}/${what}`, {});
      if (what === 'resume') this.show(info);
      else this.shown = info;
      await this.refresh();
    });
  }

  async #try(work: () => Promise<void>): Promise<void> {
    this.failure = '';
    try {
      await work();
    } catch (error) {
      this.failure = error instanceof ApiError ? error.message : String(error);
    }
  }
}

export const runs = new Runs();
