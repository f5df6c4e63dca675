// Made by web/gen_types.py from the JSON schema of hotloop.experiment.choices; never edited.

export interface Cispo {
  eps_clip: number;
  eps_clip_high: number;
  dual_clip: number | null;
  kl_coef: number;
  kl_loss_coef: number;
  kl_loss_type: 'k1' | 'k2' | 'k3' | 'low_var_kl';
  entropy_coef: number;
  normalize_std: boolean;
  aggregation: 'per_sample' | 'per_token';
  kind: 'cispo';
}

export interface Data {
  prompt_key: string;
  label_key: string;
  apply_chat_template: boolean;
  shuffle: boolean;
  slice: string;
  held_out_path: string;
  held_out_rows: number;
}

export interface DeepscalerReward {
  kind: 'deepscaler';
}

export interface ExactReward {
  kind: 'exact';
}

export interface Export {
  slime_args: readonly string[];
  publish: string;
}

export interface FormatReward {
  kind: 'format';
  pattern: string;
}

export interface Grpo {
  eps_clip: number;
  eps_clip_high: number;
  dual_clip: number | null;
  kl_coef: number;
  kl_loss_coef: number;
  kl_loss_type: 'k1' | 'k2' | 'k3' | 'low_var_kl';
  entropy_coef: number;
  normalize_std: boolean;
  aggregation: 'per_sample' | 'per_token';
  kind: 'grpo';
}

export interface Gspo {
  eps_clip: number;
  eps_clip_high: number;
  dual_clip: number | null;
  kl_coef: number;
  kl_loss_coef: number;
  kl_loss_type: 'k1' | 'k2' | 'k3' | 'low_var_kl';
  entropy_coef: number;
  normalize_std: boolean;
  aggregation: 'per_sample' | 'per_token';
  kind: 'gspo';
}

export interface Laptop {
  policy: string;
  task: string;
  seed: number;
  threads: number;
  device: 'cpu' | 'cuda';
  dtype: 'fp32' | 'bf16';
  warmup_accuracy: number;
  warmup_max_steps: number;
  max_slots: number;
  exact_savings: boolean;
  checkpoint_interval: number;
  keep_checkpoints: number;
  eval_rows: number;
  publish: string;
  publish_full_every: number;
  service_url: string;
  replicas: number;
  hooks: Record<string, string>;
}

export interface MathReward {
  kind: 'math';
}

export interface Optimizer {
  lr: number;
  lr_decay_style: 'constant' | 'linear' | 'cosine';
  lr_min_frac: number;
  lr_warmup_steps: number;
  weight_decay: number;
  beta1: number;
  beta2: number;
  eps: number;
  clip_grad: number;
  steps_per_round: number;
  max_tokens_per_microbatch: number | null;
}

export interface ProgramReward {
  kind: 'program';
}

export interface PythonReward {
  kind: 'python';
  function: string;
}

export interface ReinforcePlusPlus {
  eps_clip: number;
  eps_clip_high: number;
  dual_clip: number | null;
  kl_coef: number;
  kl_loss_coef: number;
  kl_loss_type: 'k1' | 'k2' | 'k3' | 'low_var_kl';
  entropy_coef: number;
  normalize_std: boolean;
  aggregation: 'per_sample' | 'per_token';
  kind: 'reinforce_plus_plus';
  normalize_advantages: boolean;
  gamma: number;
}

export interface ReinforcePlusPlusBaseline {
  eps_clip: number;
  eps_clip_high: number;
  dual_clip: number | null;
  kl_coef: number;
  kl_loss_coef: number;
  kl_loss_type: 'k1' | 'k2' | 'k3' | 'low_var_kl';
  entropy_coef: number;
  normalize_std: boolean;
  aggregation: 'per_sample' | 'per_token';
  kind: 'reinforce_plus_plus_baseline';
  normalize_advantages: boolean;
}

export interface RemoteReward {
  kind: 'remote';
  url: string;
}

export interface Sampling {
  num_groups: number;
  group_size: number;
  over_sampling: number | null;
  temperature: number;
  top_p: number;
  top_k: number;
  stop: readonly string[];
  drop_zero_std: boolean;
}

export interface Experiment {
  slime_target: 'v0.4.0' | '624b824a';
  model: string;
  task: 'math' | 'custom';
  generate_hook: string;
  reward_hook: string;
  layout: 'colocate' | 'separate' | 'external';
  external_addrs: string;
  schedule: 'sync' | 'async';
  nodes: number | null;
  rollout_gpus: number | null;
  precision: 'bf16' | 'fp8' | 'fp8train' | 'int4' | null;
  kv_dtype: 'auto' | 'fp8' | null;
  ssm_dtype: 'auto' | 'float32' | 'bfloat16';
  ssm_ratio: number | null;
  correction: 'tis' | 'none' | 'icepop';
  r3: boolean;
  sc: boolean;
  deterministic: boolean;
  pd: boolean;
  prefill_gpus: number | null;
  rdma_device: string;
  hicache: boolean;
  eagle: 'off' | 'builtin' | 'external';
  eagle_steps: number | null;
  draft_path: string;
  transport: 'nccl' | 'disk' | 'delta';
  weight_dir: string;
  local_weight_dir: string;
  straw: boolean;
  straw_dir: string;
  straw_run_id: string;
  straw_declaration: string;
  partial: boolean;
  mask_prefix: boolean;
  cpu_adam: boolean | null;
  recompute: boolean;
  concurrency: number;
  response_tokens: number;
  rounds: number;
  hf_path: string | null;
  train_path: string | null;
  data_path: string | null;
  save_path: string | null;
  megatron_path: string | null;
  image: 'cuda' | 'rocm' | 'gb10';
  gpu: string;
  max_staleness: number | null;
  eval_mode: 'off' | 'inline' | 'side';
  eval_data: string;
  eval_interval: number;
  eval_samples: number;
  resume_from: string;
  rounds_more: number | null;
  sampling: Sampling;
  algorithm: Grpo | Gspo | Cispo | ReinforcePlusPlus | ReinforcePlusPlusBaseline;
  optimizer: Optimizer;
  data: Data;
  reward: DeepscalerReward | ExactReward | MathReward | FormatReward | ProgramReward | PythonReward | RemoteReward;
  export: Export;
  laptop: Laptop;
}
