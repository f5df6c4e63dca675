/**
 * How each choice is put before a reader: its step, its kind of control, its words. No rule lives here: whether a
 * choice is allowed, what follows from it and what it costs comes from the server.
 */

import type { Text } from './i18n.svelte';

export const STEPS = ['model', 'placement', 'precision', 'consistency', 'serving', 'launch'] as const;
export type Step = (typeof STEPS)[number];

export type Value = string | number | boolean | null;

/** Which figure of the plan stands at the right of an option, for this experiment with that option chosen. */
export type Figure = 'nodes' | 'gpus' | 'round' | 'engine' | 'kv' | 'peak' | 'host' | 'none';

export interface Option {
  value: Value;
  label: Text;
  explain: Text;
}

export interface Radio {
  kind: 'radio';
  field: string;
  legend: Text;
  options: Option[];
  figure: Figure;
  why?: string;
}

export interface Check {
  field: string;
  label: Text;
  explain: Text;
  figure: Figure;
  why?: string;
}

export interface Checks {
  kind: 'checks';
  legend: Text;
  items: Check[];
}

export interface Field {
  field: string;
  label: Text;
  hint?: Text;
  input: 'number' | 'text' | 'path' | 'select';
  min?: number;
  max?: number;
  step?: number;
  options?: { value: Value; label: string }[];
  /** Shown only while this other choice has one of these values; a hidden field keeps its value. */
  when?: { field: string; in: Value[] };
  placeholder?: string;
  wide?: boolean;
}

export interface Fields {
  kind: 'fields';
  legend?: Text;
  items: Field[];
}

export type Group = Radio | Checks | Fields;

export interface StepText {
  title: Text;
  intro: Text;
  groups: Group[];
}

const HOOK: Text = ['module.function, importable on every worker', '模块.函数，每个 worker 都能导入'];

export const STEP_TEXTS: Record<Step, StepText> = {
  model: {
    title: ['Model', '模型'],
    intro: [
      'What is trained, and on what task. The model sets the parallel sizes and the engine size together.',
      '训练什么模型，做什么任务。模型一并决定并行规模和引擎大小。',
    ],
    groups: [
      { kind: 'radio', field: 'model', legend: ['Which model', '选择模型'], options: [], figure: 'nodes' },
      {
        kind: 'radio',
        field: 'task',
        legend: ['Task', '任务'],
        figure: 'none',
        options: [
          {
            value: 'math',
            label: ['Verifiable math', '可验证的数学题'],
            explain: ['Prompts with a checkable answer; reward is 1 or 0.', '答案可以核对的题目，奖励为 1 或 0。'],
          },
          {
            value: 'custom',
            label: ['My agent or reward', '我的智能体或奖励'],
            explain: [
              'You bring a generate function and a reward function, importable on every worker.',
              '自带生成函数和奖励函数，每个 worker 都要能导入。',
            ],
          },
        ],
      },
      {
        kind: 'fields',
        items: [
          { field: 'generate_hook', label: ['Generate function', '生成函数'], hint: HOOK, input: 'text', when: { field: 'task', in: ['custom'] }, placeholder: 'my_agent.generate', wide: true },
          { field: 'reward_hook', label: ['Reward function', '奖励函数'], hint: HOOK, input: 'text', when: { field: 'task', in: ['custom'] }, placeholder: 'my_agent.reward', wide: true },
          { field: 'sampling.num_groups', label: ['Prompts a round', '每轮题数'], input: 'number', min: 1, max: 65536 },
          { field: 'sampling.group_size', label: ['Rollouts per prompt', '每题采样数'], input: 'number', min: 1, max: 4096 },
          { field: 'response_tokens', label: ['Response tokens', '回答长度上限'], hint: ['at most, per rollout', '每条采样的 token 上限'], input: 'number', min: 128, max: 131072 },
          { field: 'rounds', label: ['Rounds', '轮数'], input: 'number', min: 1, max: 100000 },
        ],
      },
    ],
  },
  placement: {
    title: ['Placement', '资源'],
    intro: ['Who owns which GPUs, and whether sampling waits for training.', '哪些 GPU 归谁用，采样要不要等训练。'],
    groups: [
      {
        kind: 'radio',
        field: 'layout',
        legend: ['Who owns the GPUs', 'GPU 归谁'],
        figure: 'gpus',
        options: [
          { value: 'colocate', label: ['Colocated', '共用'], explain: ['Sampling and training take turns on one pool. Fewest GPUs.', '采样和训练轮流使用同一批 GPU，用卡最少。'] },
          { value: 'separate', label: ['Separate', '分开'], explain: ['Two pools. Each can be sized for its own work.', '两批 GPU，各按自己的工作定大小。'] },
          { value: 'external', label: ['External', '外部'], explain: ['Engines belong to another deployment; weights travel by disk.', '引擎属于另一个部署，权重经磁盘传过去。'] },
        ],
      },
      {
        kind: 'radio',
        field: 'schedule',
        legend: ['Schedule', '调度'],
        figure: 'round',
        options: [
          { value: 'sync', label: ['Sync', '同步'], explain: ['Sample, train, push weights, repeat. The baseline to compare with.', '采样、训练、推送权重，再来一轮。比较的基准。'] },
          { value: 'async', label: ['Fully async', '全异步'], explain: ['Sampling never stops for training. Faster rounds, older samples.', '采样不因训练停下。轮次更快，样本更旧。'] },
        ],
      },
      {
        kind: 'checks',
        legend: ['Save GPU memory', '节省显存'],
        items: [
          { field: 'cpu_adam', label: ['CPU Adam', 'CPU Adam'], explain: ['Master weights and moments live in host RAM.', '主权重和动量放在主机内存。'], figure: 'peak' },
          { field: 'recompute', label: ['Recompute activations', '重算激活'], explain: ['Run each layer again in the backward pass instead of storing it.', '反向时重新计算各层，不保存激活。'], figure: 'peak' },
        ],
      },
      {
        kind: 'fields',
        items: [
          { field: 'nodes', label: ['Trainer nodes', '训练节点数'], hint: ['of 8 GPUs each', '每个 8 张 GPU'], input: 'number', min: 1, max: 512 },
          { field: 'rollout_gpus', label: ['Rollout GPUs', '采样 GPU 数'], input: 'number', min: 1, max: 8192 },
          { field: 'gpu', label: ['GPU type', 'GPU 型号'], hint: ['planner only', '仅用于估算'], input: 'select' },
          { field: 'external_addrs', label: ['Engine addresses', '引擎地址'], hint: ['host:port, separated by spaces', 'host:port，用空格分开'], input: 'text', when: { field: 'layout', in: ['external'] }, placeholder: '10.0.0.7:30000', wide: true },
        ],
      },
    ],
  },
  precision: {
    title: ['Precision', '精度'],
    intro: [
      'What the numbers are stored in. Training master weights stay FP32 in every case.',
      '数值用什么格式存。训练的主权重始终是 FP32。',
    ],
    groups: [
      {
        kind: 'radio',
        field: 'precision',
        legend: ['Rollout and training', '采样与训练'],
        figure: 'engine',
        options: [
          { value: 'bf16', label: ['BF16 both', '两边 BF16'], explain: ['Same format on both sides. The baseline.', '两边格式相同，作为基准。'] },
          { value: 'fp8', label: ['FP8 rollouts, BF16 training', '采样 FP8，训练 BF16'], explain: ['Half the engine bytes; adds a mismatch that a correction should answer.', '引擎权重减半，会带来需要校正的偏差。'] },
          { value: 'fp8train', label: ['FP8 both', '两边 FP8'], explain: ['Experimental. Blockwise E4M3 in training too.', '实验性。训练也用分块 E4M3。'] },
          { value: 'int4', label: ['INT4 rollouts', '采样 INT4'], explain: ['Beta. Smallest engine, largest mismatch.', '测试阶段。引擎最小，偏差最大。'] },
        ],
      },
      {
        kind: 'radio',
        field: 'kv_dtype',
        legend: ['Attention KV', '注意力 KV'],
        figure: 'kv',
        options: [
          { value: 'auto', label: ['Automatic', '自动'], explain: ['Follows the model.', '跟随模型。'] },
          { value: 'fp8', label: ['FP8', 'FP8'], explain: ['Half the bytes a token.', '每个 token 的字节减半。'] },
        ],
      },
      {
        kind: 'fields',
        legend: ['Recurrent state (hybrid models)', '循环状态（混合模型）'],
        items: [
          { field: 'ssm_dtype', label: ['State format', '状态格式'], input: 'select', options: ['auto', 'float32', 'bfloat16'].map((v) => ({ value: v, label: v })) },
          { field: 'ssm_ratio', label: ['State pool : KV pool', '状态池 : KV 池'], hint: ['empty: the engine decides', '留空由引擎决定'], input: 'number', min: 0, step: 0.1 },
        ],
      },
    ],
  },
  consistency: {
    title: ['Consistency', '一致性'],
    intro: [
      'Engine and trainer never agree exactly. Decide what happens to tokens they disagree on, and how old a sample may be.',
      '引擎和训练器不会完全一致。决定怎样处理不一致的 token，以及样本最多可以多旧。',
    ],
    groups: [
      {
        kind: 'radio',
        field: 'algorithm.kind',
        legend: ['Objective', '目标'],
        figure: 'none',
        why: 'objective',
        options: [
          { value: 'grpo', label: ['GRPO', 'GRPO'], explain: ["Reward against the group's mean and spread; ratios clipped token by token.", '奖励与组内均值和离散度比较，逐 token 截断比值。'] },
          { value: 'gspo', label: ['GSPO', 'GSPO'], explain: ['One ratio for a whole response.', '整个回答一个比值。'] },
          { value: 'cispo', label: ['CISPO', 'CISPO'], explain: ['Clips the weight and keeps the gradient of every token.', '截断权重，保留每个 token 的梯度。'] },
          { value: 'reinforce_plus_plus', label: ['REINFORCE++', 'REINFORCE++'], explain: ['Raw rewards, KL in the reward, discounted returns.', '原始奖励，奖励中含 KL，折扣回报。'] },
          { value: 'reinforce_plus_plus_baseline', label: ['REINFORCE++ with baseline', 'REINFORCE++ 带基线'], explain: ["The group's mean as baseline, KL in the reward.", '以组内均值为基线，奖励中含 KL。'] },
        ],
      },
      {
        kind: 'radio',
        field: 'correction',
        legend: ['Correction', '校正'],
        figure: 'none',
        why: 'correction',
        options: [
          { value: 'tis', label: ['TIS', 'TIS'], explain: ['Weigh each token by trainer / engine probability, clipped at 2.', '按训练器与引擎的概率比给每个 token 加权，上限 2。'] },
          { value: 'icepop', label: ['IcePop', 'IcePop'], explain: ['Drop tokens whose ratio leaves 0.5 to 2.', '比值超出 0.5 到 2 的 token 不参与训练。'] },
          { value: 'none', label: ['None', '不校正'], explain: ['Trust that both sides agree.', '相信两边一致。'] },
        ],
      },
      {
        kind: 'checks',
        legend: ['Also', '另外'],
        items: [
          { field: 'r3', label: ['R3', 'R3'], explain: ["Replay the engine's expert routing in training.", '训练时重放引擎的专家路由。'], figure: 'none', why: 'r3' },
          { field: 'sc', label: ['Score centering', '得分中心化'], explain: ['Changes the objective to REINFORCE with centred scores.', '把目标换成得分中心化的 REINFORCE。'], figure: 'none', why: 'score_centering' },
          { field: 'partial', label: ['Partial rollouts', '部分采样'], explain: ['Keep unfinished answers and continue them next round.', '保留未完成的回答，下一轮继续。'], figure: 'none', why: 'partial' },
          { field: 'mask_prefix', label: ['Mask the old prefix', '屏蔽旧前缀'], explain: ['Tokens from before the push give no loss. Only with partial rollouts.', '推送之前的 token 不计损失。仅用于部分采样。'], figure: 'none', why: 'partial' },
          { field: 'deterministic', label: ['Deterministic', '确定性'], explain: ['Same run twice gives the same tokens. Not the same as engine = trainer.', '跑两次得到相同 token。不等于引擎与训练器一致。'], figure: 'none', why: 'deterministic' },
          { field: 'straw', label: ['Persistent queue (straw)', '持久队列（straw）'], explain: ['Rollouts survive a crash; one producer per rollout worker when async.', '采样结果在崩溃后仍在；异步时每个采样 worker 一个生产者。'], figure: 'none' },
        ],
      },
      {
        kind: 'fields',
        items: [
          { field: 'max_staleness', label: ['Staleness bound', '陈旧度上限'], hint: ['versions; empty: no bound', '版本数，留空表示不限'], input: 'number', min: 0 },
          { field: 'straw_dir', label: ['Queue directory', '队列目录'], hint: ['absolute, shared storage', '绝对路径，共享存储'], input: 'path', when: { field: 'straw', in: [true] } },
          { field: 'straw_run_id', label: ['Queue run id', '队列运行 id'], input: 'text', when: { field: 'straw', in: [true] } },
          { field: 'straw_declaration', label: ['Storage declaration', '存储声明'], input: 'path', when: { field: 'straw', in: [true] } },
        ],
      },
      {
        kind: 'radio',
        field: 'eval_mode',
        legend: ['Held-out evaluation', '留出评测'],
        figure: 'none',
        options: [
          { value: 'off', label: ['Off', '关'], explain: ['Reward on training prompts is all you see.', '只看训练题上的奖励。'] },
          { value: 'inline', label: ['Inline', '轮内'], explain: ['Between rounds; sampling waits. Not with async.', '在轮次之间进行，采样会等待。不能与异步同用。'] },
          { value: 'side', label: ['On the side', '旁路'], explain: ['A replica held at one version is asked while training goes on.', '训练照常，向固定版本的副本提问。'] },
        ],
      },
      {
        kind: 'fields',
        items: [
          { field: 'eval_data', label: ['Held-out file', '留出数据'], input: 'path', when: { field: 'eval_mode', in: ['inline', 'side'] }, wide: true },
          { field: 'eval_interval', label: ['Every how many rounds', '间隔轮数'], input: 'number', min: 1, when: { field: 'eval_mode', in: ['inline', 'side'] } },
          { field: 'eval_samples', label: ['Samples per prompt', '每题采样数'], input: 'number', min: 1, when: { field: 'eval_mode', in: ['inline', 'side'] } },
        ],
      },
    ],
  },
  serving: {
    title: ['Serving', '推理'],
    intro: [
      'How the engines are arranged. Leave all of this off until a measurement asks for it.',
      '引擎怎样安排。没有测量结果要求之前，全部关着。',
    ],
    groups: [
      {
        kind: 'checks',
        legend: ['Serving', '推理'],
        items: [
          { field: 'pd', label: ['Prefill and decode apart (PD)', '预填充与解码分离（PD）'], explain: ['Two engine groups; the KV cache moves between them over RDMA.', '两组引擎，KV 缓存经 RDMA 在两组之间移动。'], figure: 'gpus' },
          { field: 'hicache', label: ['HiCache', 'HiCache'], explain: ['Keep reused prefixes in host RAM.', '把会复用的前缀放在主机内存。'], figure: 'host' },
        ],
      },
      {
        kind: 'radio',
        field: 'eagle',
        legend: ['Draft tokens (EAGLE)', '草稿 token（EAGLE）'],
        figure: 'none',
        options: [
          { value: 'off', label: ['Off', '关'], explain: ['One token a step.', '每步一个 token。'] },
          { value: 'builtin', label: ['Built-in head', '内置头'], explain: ["Draft with the model's own MTP head, verify once.", '用模型自带的 MTP 头起草，一次验证。'] },
          { value: 'external', label: ['External draft', '外部草稿'], explain: ['A separate draft model that you name.', '使用你指定的草稿模型。'] },
        ],
      },
      {
        kind: 'radio',
        field: 'transport',
        legend: ['Weights travel by', '权重传输'],
        figure: 'none',
        options: [
          { value: 'nccl', label: ['NCCL', 'NCCL'], explain: ['GPU to GPU, or in memory when colocated.', 'GPU 直传；共用时在内存里。'] },
          { value: 'disk', label: ['Disk', '磁盘'], explain: ['Whole weights in a shared directory.', '完整权重写入共享目录。'] },
          { value: 'delta', label: ['Delta', '增量'], explain: ['Only what changed, from a shared directory to a local copy.', '只写变化的部分，从共享目录到本地副本。'] },
        ],
      },
      {
        kind: 'fields',
        items: [
          { field: 'concurrency', label: ['Concurrency', '并发'], hint: ['per engine', '每个引擎'], input: 'number', min: 1, max: 8192 },
          { field: 'prefill_gpus', label: ['Prefill GPUs', '预填充 GPU'], input: 'number', min: 1, max: 8192, when: { field: 'pd', in: [true] } },
          { field: 'rdma_device', label: ['RDMA device', 'RDMA 设备'], hint: ['needed while PD is on', 'PD 开启时必填'], input: 'text', when: { field: 'pd', in: [true] }, placeholder: 'mlx5_0' },
          { field: 'eagle_steps', label: ['Draft depth', '草稿深度'], input: 'number', min: 1, max: 8, when: { field: 'eagle', in: ['builtin', 'external'] } },
          { field: 'draft_path', label: ['Draft model', '草稿模型'], input: 'path', when: { field: 'eagle', in: ['external'] }, wide: true },
          { field: 'weight_dir', label: ['Shared weight directory', '共享权重目录'], input: 'path', when: { field: 'transport', in: ['disk', 'delta'] }, wide: true },
          { field: 'local_weight_dir', label: ['Local weight directory', '本地权重目录'], input: 'path', when: { field: 'transport', in: ['delta'] }, wide: true },
        ],
      },
    ],
  },
  launch: {
    title: ['Launch', '启动'],
    intro: [
      'Files for a real cluster. Nothing here starts or stops a process by itself.',
      '给真实集群用的文件。这里的任何东西都不会自己启动或停止进程。',
    ],
    groups: [
      {
        kind: 'radio',
        field: 'slime_target',
        legend: ['Which slime', 'slime 版本'],
        figure: 'none',
        options: [
          { value: 'v0.4.0', label: ['v0.4.0', 'v0.4.0'], explain: ['The published release; flags that were not verified are named in the file.', '已发布的版本，未核实的参数会写在文件里。'] },
          { value: '624b824a', label: ['commit 624b824a', '提交 624b824a'], explain: ['Every flag was checked against its argument parser.', '每个参数都对照它的解析器核实过。'] },
        ],
      },
      {
        kind: 'fields',
        legend: ['Paths on the cluster', '集群上的路径'],
        items: [
          { field: 'hf_path', label: ['Model directory', '模型目录'], input: 'path', wide: true },
          { field: 'train_path', label: ['Training weights', '训练权重'], input: 'path', wide: true },
          { field: 'data_path', label: ['Prompts', '题目数据'], input: 'path', wide: true },
          { field: 'save_path', label: ['Saves', '保存目录'], input: 'path', wide: true },
          { field: 'megatron_path', label: ['Megatron-LM', 'Megatron-LM'], input: 'path', wide: true },
          { field: 'resume_from', label: ['Resume from', '从此恢复'], hint: ['a directory of saves; empty: start anew', '保存目录，留空表示重新开始'], input: 'path', wide: true },
          { field: 'rounds_more', label: ['Rounds to add', '再跑几轮'], input: 'number', min: 1 },
          { field: 'image', label: ['Installation image', '安装镜像'], hint: ['a hint about hardware, no claim of fit', '仅提示硬件，不保证适配'], input: 'select', options: [{ value: 'cuda', label: 'CUDA (NVIDIA)' }, { value: 'rocm', label: 'ROCm (AMD)' }, { value: 'gb10', label: 'GB10 (NVIDIA, Arm)' }] },
        ],
      },
    ],
  },
};

/** Settings of the sections that have no control of their own, and names that a rehearsal's account uses. */
const MORE_LABELS: Record<string, Text> = {
  attention: ['Attention', '注意力'],
  data_path: ['Prompts', '题目数据'],
  'algorithm.eps_clip': ['Clip, low', '截断下限'],
  'algorithm.eps_clip_high': ['Clip, high', '截断上限'],
  'algorithm.kl_loss_type': ['KL estimator', 'KL 估计'],
  'algorithm.normalize_std': ['Divide by the std', '除以标准差'],
  'algorithm.aggregation': ['Loss is a mean over', '损失求平均的方式'],
  'optimizer.lr': ['Learning rate', '学习率'],
  'optimizer.lr_decay_style': ['Learning rate decay', '学习率衰减'],
  'optimizer.lr_min_frac': ['Learning rate at the end', '结束时学习率占比'],
  'optimizer.lr_warmup_steps': ['Warm-up steps', '预热步数'],
  'optimizer.steps_per_round': ['Updates a round', '每轮更新次数'],
  'optimizer.weight_decay': ['Weight decay', '权重衰减'],
  'optimizer.beta1': ['Adam beta 1', 'Adam beta 1'],
  'optimizer.beta2': ['Adam beta 2', 'Adam beta 2'],
  'optimizer.eps': ['Adam epsilon', 'Adam epsilon'],
  'optimizer.clip_grad': ['Gradient clip', '梯度裁剪'],
  'sampling.temperature': ['Temperature', '温度'],
  'sampling.top_p': ['Top-p', 'Top-p'],
  'sampling.top_k': ['Top-k', 'Top-k'],
  'data.apply_chat_template': ['Chat template', '对话模板'],
  'data.prompt_key': ['Prompt key', '题目字段'],
  'data.label_key': ['Label key', '答案字段'],
  'data.shuffle': ['Shuffle', '打乱'],
  'reward.kind': ['Reward', '奖励'],
  'laptop.policy': ['Toy policy', '小策略'],
  'laptop.task': ['Built-in task', '内置任务'],
};

/** Label of any field, nested ones included; the field's own name when it has none here. */
export function fieldLabel(field: string): Text {
  for (const step of STEPS) {
    for (const group of STEP_TEXTS[step].groups) {
      if (group.kind === 'radio' && group.field === field) return group.legend;
      if (group.kind !== 'radio') {
        const item = (group.items as { field: string; label: Text }[]).find((i) => i.field === field);
        if (item) return item.label;
      }
    }
  }
  return MORE_LABELS[field] ?? [field, field];
}

/** The step that holds a field; findings about fields of no step belong to Launch. */
export function stepOf(field: string): Step {
  for (const step of STEPS) {
    for (const group of STEP_TEXTS[step].groups) {
      if (group.kind === 'radio' ? group.field === field : group.items.some((i) => i.field === field || i.field.startsWith(`${field}.`))) return step;
    }
  }
  return 'launch';
}

/** The label of a value of a radio, or the value as it is written in the file. */
export function valueLabel(field: string, value: unknown): Text {
  for (const step of STEPS) {
    for (const group of STEP_TEXTS[step].groups) {
      if (group.kind !== 'radio' || group.field !== field) continue;
      const option = group.options.find((o) => o.value === value);
      if (option) return option.label;
    }
  }
  if (value === true) return ['on', '开'];
  if (value === false) return ['off', '关'];
  if (value === null || value === '' || value === undefined) return ['empty', '空'];
  const text = typeof value === 'object' ? JSON.stringify(value) : String(value);
  return [text, text];
}

/** The text field of this name, if a reader types it: what a finding can ask for on the spot. */
export function textField(name: string): Field | undefined {
  for (const step of STEPS) {
    for (const group of STEP_TEXTS[step].groups) {
      if (group.kind !== 'fields') continue;
      const found = group.items.find((item) => item.field === name && (item.input === 'text' || item.input === 'path'));
      if (found) return found;
    }
  }
  return undefined;
}
