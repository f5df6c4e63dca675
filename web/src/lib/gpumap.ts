/** Where each GPU is drawn. Positions only; every coordinate comes from the plan's layout. */

import type { GpuRow, Layout } from './plan';

export const NODE = 0;
export const INDEX = 1;
export const ROLE = 2;
export const TP = 4;
export const CP = 5;
export const DP = 6;
export const PP = 7;
export const EP = 8;
export const ENGINE = 10;

/** Up to here every GPU is a box with text; above, a node is a box of cells. */
export const MAX_BOXES = 16;
const NODES_PER_ROW = 4;
export const CELL = 13;
const NODE_GAP = 6;
const NODE_WIDTH = 4 * CELL + 4;
const NODE_HEIGHT = 2 * CELL + 4;
const LABEL_WIDTH = 76;
const ROW_GAP = 7;

export interface Cell {
  /** Index into layout.gpus. */
  gpu: number;
  x: number;
  y: number;
}

export interface Row {
  y: number;
  /** Stages or engines in this row, first and last. */
  first: number;
  last: number;
  role: string;
  /** The row goes on with the group of the row above. */
  isContinued: boolean;
  nodes: { x: number; y: number; node: number }[];
}

export interface Pool {
  kind: 'train' | 'serve';
  numGpus: number;
  numNodes: number;
  rows: Row[];
  cells: Cell[];
  width: number;
  height: number;
}

/** Lay one pool out: rows of up to four nodes, a new row at each new stage (trainer) or engine (serving). */
function placePool(layout: Layout, kind: 'train' | 'serve', members: number[]): Pool {
  const byNode = new Map<number, number[]>();
  for (const gpu of members) {
    const node = layout.gpus[gpu]![NODE];
    const list = byNode.get(node);
    if (list) list.push(gpu);
    else byNode.set(node, [gpu]);
  }
  const groupOf = (gpu: GpuRow) => (kind === 'train' ? gpu[PP] : gpu[ENGINE]);
  const rows: Row[] = [];
  const cells: Cell[] = [];
  let y = 0;
  let row: Row | undefined;
  for (const [node, gpus] of byNode) {
    const first = groupOf(layout.gpus[gpus[0]!]!);
    const last = groupOf(layout.gpus[gpus.at(-1)!]!);
    const role = layout.gpus[gpus[0]!]![ROLE];
    const isWholeGroup = (layout.gpus_per_node * 4) / Math.max(1, kind === 'train' ? layout.train_gpus / layout.pp : layout.engine_gpus) <= 1;
    if (!row || row.nodes.length === NODES_PER_ROW || row.role !== role || (isWholeGroup && first !== row.last)) {
      if (row) y += NODE_HEIGHT + ROW_GAP;
      row = { y, first, last, role, isContinued: row !== undefined && row.last === first && row.role === role, nodes: [] };
      rows.push(row);
    }
    row.last = last;
    const x = LABEL_WIDTH + row.nodes.length * (NODE_WIDTH + NODE_GAP);
    row.nodes.push({ x, y, node });
    for (const gpu of gpus) {
      const index = layout.gpus[gpu]![INDEX];
      cells.push({ gpu, x: x + 2.5 + (index % 4) * CELL, y: y + 2.5 + Math.floor(index / 4) * CELL });
    }
  }
  const width = LABEL_WIDTH + Math.min(NODES_PER_ROW, Math.max(1, ...rows.map((r) => r.nodes.length))) * (NODE_WIDTH + NODE_GAP);
  return { kind, numGpus: members.length, numNodes: byNode.size, rows, cells, width, height: y + NODE_HEIGHT };
}

export const NODE_BOX = { width: NODE_WIDTH, height: NODE_HEIGHT };

/** The trainer's pool, and the serving pool when it has GPUs of its own. */
export function placeGpus(layout: Layout): Pool[] {
  const train: number[] = [];
  const serve: number[] = [];
  layout.gpus.forEach((gpu, i) => (gpu[3] >= 0 ? train : serve).push(i));
  const pools = [placePool(layout, 'train', train)];
  if (serve.length) pools.push(placePool(layout, 'serve', serve));
  return pools;
}

/** GPUs that share the weights' columns with this one: same stage, data and context rank. */
export function tensorGroup(layout: Layout, at: number): number[] {
  const one = layout.gpus[at];
  if (!one || one[TP] < 0) return [];
  const found: number[] = [];
  layout.gpus.forEach((gpu, i) => {
    if (gpu[TP] >= 0 && gpu[PP] === one[PP] && gpu[DP] === one[DP] && gpu[CP] === one[CP]) found.push(i);
  });
  return found;
}
