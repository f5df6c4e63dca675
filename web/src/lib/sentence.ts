/** The experiment as one sentence. Each choice in it is a link to its step. */

import type { Step } from './choices';
import type { Language } from './i18n.svelte';
import type { PlanAnswer } from './plan';

export interface Part {
  text: string;
  step?: Step;
}

const PRECISION = { bf16: 'BF16', fp8: 'FP8', fp8train: 'FP8', int4: 'INT4' } as const;
const CORRECTION = { tis: 'TIS', icepop: 'IcePop', none: '' } as const;

const link = (text: string, step: Step): Part => ({ text, step });
const plain = (text: string): Part => ({ text });

/** Cluster sizes in words of the reader's language. */
export function sentence(answer: PlanAnswer, gpuLabel: string, language: Language): Part[] {
  return language === 'zh' ? chinese(answer, gpuLabel) : english(answer, gpuLabel);
}

function english({ resolved: e, plan, model }: PlanAnswer, gpu: string): Part[] {
  const total = plan.gpus['train']! + (e.layout === 'separate' ? plan.gpus['rollout']! : 0);
  const parts = [
    link(model.label, 'model'),
    plain(' learns '),
    link(e.task === 'math' ? 'verifiable math' : 'your own task', 'model'),
    plain(' on '),
    link(`${total} ${gpu}`, 'placement'),
  ];
  if (e.layout === 'colocate') parts.push(plain(', sampling and training '), link('in turns on the same GPUs', 'placement'), plain('. '));
  else if (e.layout === 'external') parts.push(plain(', while '), link('engines of another deployment', 'placement'), plain(' sample. '));
  else if (e.schedule === 'async')
    parts.push(plain(`: ${plan.gpus['train']} train while ${plan.gpus['rollout']} `), link('keep sampling', 'placement'), plain('. '));
  else parts.push(plain(`: ${plan.gpus['train']} train and ${plan.gpus['rollout']} sample, `), link('one after the other', 'placement'), plain('. '));
  if (e.pd) parts.push(plain('Prefill and decode '), link('run apart', 'serving'), plain('. '));
  const sides = e.precision === 'bf16' || e.precision === 'fp8train';
  parts.push(plain(sides ? 'Both sides run ' : 'Training is BF16, rollouts are '), link(PRECISION[e.precision ?? 'bf16'], 'precision'));
  if (e.sc) parts.push(plain(', and '), link('score centering', 'consistency'), plain(' replaces the objective. '));
  else if (e.correction === 'none') parts.push(plain(', and '), link('nothing corrects', 'consistency'), plain(' what mismatch is left. '));
  else if (e.correction === 'tis') parts.push(plain(', and '), link(CORRECTION.tis, 'consistency'), plain(' weighs what mismatch is left. '));
  else parts.push(plain(', and '), link(CORRECTION.icepop, 'consistency'), plain(' drops tokens the two disagree on. '));
  if (e.max_staleness !== null) parts.push(plain('No sample older than '), link(`${e.max_staleness} ${e.max_staleness === 1 ? 'version' : 'versions'}`, 'consistency'), plain('. '));
  parts.push(
    link(`${e.sampling.num_groups * e.sampling.group_size} rollouts`, 'model'),
    plain(' a round, for '),
    link(`${e.rounds} ${e.rounds === 1 ? 'round' : 'rounds'}`, 'model'),
    plain('.'),
  );
  return parts;
}

function chinese({ resolved: e, plan, model }: PlanAnswer, gpu: string): Part[] {
  const total = plan.gpus['train']! + (e.layout === 'separate' ? plan.gpus['rollout']! : 0);
  const parts = [
    link(model.label, 'model'),
    plain(' 在 '),
    link(`${total} 张 ${gpu}`, 'placement'),
    plain(' 上学习'),
    link(e.task === 'math' ? '可验证的数学题' : '自定义任务', 'model'),
  ];
  if (e.layout === 'colocate') parts.push(plain('，采样和训练'), link('轮流使用同一批 GPU', 'placement'), plain('。'));
  else if (e.layout === 'external') parts.push(plain('，由'), link('另一个部署的引擎', 'placement'), plain('采样。'));
  else parts.push(plain(`：${plan.gpus['train']} 张训练，${plan.gpus['rollout']} 张`), link(e.schedule === 'async' ? '不停采样' : '轮到时采样', 'placement'), plain('。'));
  if (e.pd) parts.push(link('预填充与解码分离', 'serving'), plain('。'));
  const sides = e.precision === 'bf16' || e.precision === 'fp8train';
  parts.push(plain(sides ? '两边都用 ' : '训练用 BF16，采样用 '), link(PRECISION[e.precision ?? 'bf16'], 'precision'));
  if (e.sc) parts.push(plain('，目标换成'), link('得分中心化', 'consistency'), plain('。'));
  else if (e.correction === 'none') parts.push(plain('，剩下的偏差'), link('不校正', 'consistency'), plain('。'));
  else parts.push(plain('，剩下的偏差由 '), link(CORRECTION[e.correction], 'consistency'), plain(e.correction === 'tis' ? ' 加权。' : ' 剔除。'));
  if (e.max_staleness !== null) parts.push(plain('样本最多旧 '), link(`${e.max_staleness} 个版本`, 'consistency'), plain('。'));
  parts.push(plain('每轮 '), link(`${e.sampling.num_groups * e.sampling.group_size} 条采样`, 'model'), plain('，共 '), link(`${e.rounds} 轮`, 'model'), plain('。'));
  return parts;
}
