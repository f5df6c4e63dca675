/**
 * The page's one state: the design with its history, the plan that the server gave for it, and what is being waited for.
 *
 *   control --edit--> queue --POST /api/plan--> answer --> design (one entry) + plan --> everything drawn
 *
 * Edits wait for each other, so that two quick clicks are two entries and each sees what followed from the one before.
 */

import { commit, clearA, readStored, saveAsA, startDesign, stepBack, stepForward, STORAGE_KEY, writeStored, type Design } from './actions';
import { ApiError, call, newestOnly, remember } from './api';
import { decodePayload, findFragment, MAX_LINK_LENGTH } from './link';
import type { Experiment, PlanAnswer, Schema } from './plan';

export interface Message {
  kind: 'note' | 'error';
  code: string;
  text: string;
}

const CACHED_PLANS = 120;
/** The reader looks away from a change that takes longer than this. */
const DIM_AFTER_MS = 150;
const SAY_AFTER_MS = 1000;

class Lab {
  schema = $state.raw<Schema | null>(null);
  design = $state.raw<Design | null>(null);
  answer = $state.raw<PlanAnswer | null>(null);
  planA = $state.raw<PlanAnswer | null>(null);
  message = $state.raw<Message | null>(null);
  /** 0: nothing awaited; 1: dim captions; 2: say "Updating". */
  waiting = $state(0);
  isServerLost = $state(false);
  /** Counts drawn answers; tests wait for it. */
  revision = $state(0);

  #queue: Promise<void> = Promise.resolve();
  #plans = remember((key: string) => call<PlanAnswer>('/api/plan', { experiment: JSON.parse(key) }), CACHED_PLANS);
  #askA = newestOnly((experiment: Experiment) => this.#plans(JSON.stringify(experiment)));

  get experiment(): Experiment {
    return this.design!.history.present.value;
  }

  get canUndo(): boolean {
    return (this.design?.history.past.length ?? 0) > 0;
  }

  get canRedo(): boolean {
    return (this.design?.history.future.length ?? 0) > 0;
  }

  async start(): Promise<void> {
    this.schema = await call<Schema>('/api/schema');
    const defaults = this.schema.defaults;
    const stored = readStored(this.#readStorage());
    let design = startDesign(defaults);
    if (stored) {
      const experiment = await this.#clean(stored.experiment);
      if (experiment) {
        const a = stored.a ? await this.#clean(stored.a) : null;
        design = { ...startDesign(experiment), a, isForeign: stored.isForeign };
      }
    }
    this.design = design;
    await this.#draw(design);
    await this.openFragment(location.hash);
  }

  /** Change choices; everything that follows is part of the same entry. */
  edit(edit: Record<string, unknown>, label: string): Promise<void> {
    return this.#enqueue(async () => {
      const answer = await call<PlanAnswer>('/api/plan', { experiment: this.experiment, edit });
      this.#take(answer, label);
    });
  }

  /** Replace the whole experiment as one undoable entry. */
  replace(experiment: Experiment, label: string, isForeign?: boolean): Promise<void> {
    return this.#enqueue(async () => {
      const answer = await this.#plans(JSON.stringify(experiment));
      this.#take(answer, label, isForeign);
    });
  }

  undo(): Promise<void> {
    return this.#enqueue(() => this.#move(stepBack(this.design!)));
  }

  redo(): Promise<void> {
    return this.#enqueue(() => this.#move(stepForward(this.design!)));
  }

  reset(): Promise<void> {
    return this.replace(this.schema!.defaults, 'reset', false);
  }

  saveA(): void {
    this.#setDesign(saveAsA(this.design!));
  }

  clearA(): void {
    this.#setDesign(clearA(this.design!));
  }

  restoreA(): Promise<void> {
    const a = this.design!.a;
    return a ? this.replace(structuredClone(a), 'restore A') : Promise.resolve();
  }

  /** Read an experiment.json, TOML or bare choices; a bad file leaves everything as it was. */
  async load(name: string, text: string): Promise<void> {
    try {
      const read = await call<{ experiment: Experiment; dropped: string[] }>('/api/load', { name, text });
      await this.replace(read.experiment, 'load', true);
      this.#tellDropped(read.dropped);
    } catch (error) {
      this.#tell(error);
    }
  }

  /** Open a share link; the reader's own private values stay. */
  async openFragment(hash: string): Promise<void> {
    const found = findFragment(hash);
    if (!found) return;
    history.replaceState(null, '', location.pathname + location.search);
    try {
      if (found.payload.length > MAX_LINK_LENGTH) throw new Error('link_too_long');
      decodePayload(found.payload); // a broken link is refused here, before anything is asked
      const read = await call<{ experiment: Experiment; a: Experiment | null; dropped: string[] }>('/api/open-link', {
        kind: found.kind,
        payload: found.payload,
        current: this.experiment,
        a: this.design!.a,
      });
      await this.replace(read.experiment, 'link', true);
      if (found.kind === 'compare' && read.a) this.#setDesign({ ...this.design!, a: read.a });
      this.#tellDropped(read.dropped);
    } catch (error) {
      this.#tell(error);
    }
  }

  dismiss(): void {
    this.message = null;
  }

  tell(message: Message): void {
    this.message = message;
  }

  async #move(design: Design): Promise<void> {
    const answer = await this.#plans(JSON.stringify(design.history.present.value));
    this.#setDesign(design);
    this.#show(answer);
  }

  #take(answer: PlanAnswer, label: string, isForeign?: boolean): void {
    this.#setDesign(commit(this.design!, answer.experiment, label, isForeign));
    this.#show(answer);
  }

  #show(answer: PlanAnswer): void {
    this.answer = answer;
    this.isServerLost = false;
    this.revision += 1;
  }

  #setDesign(design: Design): void {
    this.design = design;
    try {
      localStorage.setItem(STORAGE_KEY, writeStored(design));
    } catch {
      this.message = { kind: 'note', code: 'storage_off', text: '' };
    }
    void this.#drawA(design);
  }

  async #draw(design: Design): Promise<void> {
    this.#show(await this.#plans(JSON.stringify(design.history.present.value)));
    void this.#drawA(design);
  }

  async #drawA(design: Design): Promise<void> {
    if (!design.a) {
      this.planA = null;
      return;
    }
    try {
      const answer = await this.#askA(design.a);
      if (answer) this.planA = answer;
    } catch (error) {
      this.#tell(error);
    }
  }

  #enqueue(work: () => Promise<void>): Promise<void> {
    const mine = this.#queue.then(async () => {
      const dim = setTimeout(() => (this.waiting = 1), DIM_AFTER_MS);
      const say = setTimeout(() => (this.waiting = 2), SAY_AFTER_MS);
      try {
        await work();
      } catch (error) {
        this.#tell(error);
        this.revision += 1; // controls are drawn again from the unchanged experiment
      } finally {
        clearTimeout(dim);
        clearTimeout(say);
        this.waiting = 0;
      }
    });
    this.#queue = mine;
    return mine;
  }

  async #clean(values: Record<string, unknown>): Promise<Experiment | null> {
    try {
      return (await call<{ experiment: Experiment }>('/api/clean', { values })).experiment;
    } catch (error) {
      this.#tell(error);
      return null;
    }
  }

  #readStorage(): string | null {
    try {
      return localStorage.getItem(STORAGE_KEY);
    } catch {
      return null; // storage switched off: the page starts with the defaults
    }
  }

  #tellDropped(dropped: string[]): void {
    if (dropped.length) this.message = { kind: 'note', code: 'dropped', text: dropped.join(', ') };
  }

  #tell(error: unknown): void {
    if (error instanceof ApiError) {
      this.isServerLost = error.code === 'server_lost';
      this.message = { kind: 'error', code: error.code, text: [error.message, error.doThis].filter(Boolean).join(' ') };
    } else if (error instanceof Error) {
      this.message = { kind: 'error', code: error.message, text: '' };
    } else {
      throw error;
    }
  }
}

export const lab = new Lab();
