/** One line about a model, from catalogue facts. */

import type { Text } from './i18n.svelte';
import type { CatalogueModel } from './plan';
import { count } from './scale';

export function modelText(model: CatalogueModel): Text {
  const size = count(model.params_total);
  const en = [model.moe ? `${size} parameters, ${count(model.params_active)} active. Mixture of experts` : `${size} parameters. Dense`];
  const zh = [model.moe ? `${size} 参数，激活 ${count(model.params_active)}。混合专家` : `${size} 参数。稠密`];
  const attention: Record<string, Text> = {
    mla: ['latent attention', '潜变量注意力'],
    gqa: ['grouped-query attention', '分组查询注意力'],
    'hybrid-gdn': ['hybrid attention with a recurrent state pool', '混合注意力，带循环状态池'],
    hybrid_mla_kda: ['hybrid latent attention with a recurrent state pool', '混合潜变量注意力，带循环状态池'],
  };
  const words = attention[model.attention];
  if (words) {
    en.push(model.sparse ? `sparse ${words[0]}` : words[0]);
    zh.push(model.sparse ? `稀疏${words[1]}` : words[1]);
  }
  let more = '';
  let moreZh = '';
  if (model.precision === 'fp8') {
    more = ' Published in FP8.';
    moreZh = '以 FP8 发布。';
  }
  if (!model.moe && !model.has_mtp) {
    more += ' The shortest path to understanding a run.';
    moreZh += '看懂一次训练的最短路径。';
  }
  return [`${en.join(', ')}.${more}`, `${zh.join('，')}。${moreZh}`];
}
