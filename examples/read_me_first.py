"""The whole of GRPO in one flat file: a language model learns to sort five digits, on a laptop CPU, in about a minute.

    python examples/read_me_first.py [--rounds 500] [--seed 0]

Read it from top to bottom. `hotloop run` does the same with the parts that a real run needs: an engine with continuous
batching, records of every token, checkpoints, resume, verifiers, exact savings. Needs torch only.

    prompts -> sample 16 answers each -> reward each -> advantage inside the group -> one optimizer step -> repeat

Shapes: B rows, T tokens, V vocabulary, P prompts, G rollouts of a group.
"""

import argparse
import random
import time

import torch
import torch.nn.functional as F

PAD, BOS, EOS, SORT, EQUALS, VOCAB = 0, 1, 2, 13, 14, 32  # digit d is token 3 + d
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 192
PROMPT_LEN, ANSWER_LEN = 8, 6  # "<bos>s52813=" and "12358<eos>"
GROUPS, GROUP_SIZE = 32, 16


# ---- the task: every item is five digits; the answer is the same digits in order --------------------------------
def make_items() -> tuple[list, list, list]:
    """Return disjoint held-out, warm-up gate and training items."""
    rng = random.Random(7)
    items = sorted({tuple(rng.randint(0, 9) for _ in range(5)) for _ in range(20000)})
    random.Random(1234).shuffle(items)
    return items[:512], items[512:1024], items[1024:]


def encode(items: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn items into prompt ids [B, 8] and answer ids [B, 6]."""
    prompts = [[BOS, SORT, *(3 + d for d in item), EQUALS] for item in items]
    answers = [[*(3 + d for d in sorted(item)), EOS] for item in items]
    return torch.tensor(prompts), torch.tensor(answers)


# ---- the policy: a two-layer decoder, written out ---------------------------------------------------------------
def make_policy(seed: int) -> dict[str, torch.Tensor]:
    """Draw the weights: matrices from normal(0, 0.02), norms 1. About 0.1 M parameters."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"{i}.norm1": (HIDDEN,), f"{i}.norm2": (HIDDEN,), f"{i}.qn": (HEAD_DIM,), f"{i}.kn": (HEAD_DIM,)}
        shapes |= {f"{i}.q": (HEADS * HEAD_DIM, HIDDEN), f"{i}.k": (KV_HEADS * HEAD_DIM, HIDDEN)}
        shapes |= {f"{i}.v": (KV_HEADS * HEAD_DIM, HIDDEN), f"{i}.o": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{i}.gate": (MLP, HIDDEN), f"{i}.up": (MLP, HIDDEN), f"{i}.down": (HIDDEN, MLP)}
    policy = {}
    for name, shape in shapes.items():
        weight = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=rng)
        policy[name] = weight.requires_grad_()
    return policy


def rotate(x: torch.Tensor, start: int) -> torch.Tensor:
    """Apply rotary positions start, start + 1, ... to x [B, heads, T, head_dim]."""
    half = HEAD_DIM // 2
    positions = torch.arange(start, start + x.shape[2])[:, None]
    angles = positions / 10000 ** (torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def forward(policy: dict, ids_BT: torch.Tensor, cache: list | None = None) -> torch.Tensor:
    """Return logits [B, T, V]. With a cache (one (k, v) pair a layer) only the new tokens are computed."""
    x = F.embedding(ids_BT, policy["embed"])
    rows, length = ids_BT.shape
    start = cache[0][0].shape[2] if cache and cache[0] else 0
    for i in range(LAYERS):
        h = F.rms_norm(x, (HIDDEN,), policy[f"{i}.norm1"], 1e-6)
        q = F.linear(h, policy[f"{i}.q"]).view(rows, length, HEADS, HEAD_DIM)
        k = F.linear(h, policy[f"{i}.k"]).view(rows, length, KV_HEADS, HEAD_DIM)
        v = F.linear(h, policy[f"{i}.v"]).view(rows, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = rotate(F.rms_norm(q, (HEAD_DIM,), policy[f"{i}.qn"], 1e-6).transpose(1, 2), start)
        k = rotate(F.rms_norm(k, (HEAD_DIM,), policy[f"{i}.kn"], 1e-6).transpose(1, 2), start)
        if cache is not None:
            if cache[i]:
                k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
            cache[i] = (k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0 and length > 1, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(rows, length, -1), policy[f"{i}.o"])
        h = F.rms_norm(x, (HIDDEN,), policy[f"{i}.norm2"], 1e-6)
        gated = F.silu(F.linear(h, policy[f"{i}.gate"])) * F.linear(h, policy[f"{i}.up"])
        x = x + F.linear(gated, policy[f"{i}.down"])
    return F.linear(F.rms_norm(x, (HIDDEN,), policy["norm"], 1e-6), policy["embed"])


# ---- the sampler: prefill each prompt once, then one token a step for all its answers ---------------------------
@torch.no_grad()
def sample(policy: dict, prompts_PT: torch.Tensor, answers_per_prompt: int, greedy: bool = False):
    """Return answer ids [B, 6] and the log-probability of each when it was drawn, B = P x answers_per_prompt."""
    cache: list = [None] * LAYERS
    logits_BV = forward(policy, prompts_PT, cache)[:, -1].repeat_interleave(answers_per_prompt, 0)
    cache = [(k.repeat_interleave(answers_per_prompt, 0), v.repeat_interleave(answers_per_prompt, 0)) for k, v in cache]
    ids, logprobs = [], []
    for step in range(ANSWER_LEN):
        logprobs_BV = logits_BV.log_softmax(-1)
        token_B1 = logits_BV.argmax(-1, True) if greedy else torch.multinomial(logprobs_BV.exp(), 1)
        ids.append(token_B1)
        logprobs.append(logprobs_BV.gather(1, token_B1))
        if step + 1 < ANSWER_LEN:
            logits_BV = forward(policy, token_B1, cache)[:, -1]
    return torch.cat(ids, 1), torch.cat(logprobs, 1)


def mask_after_eos(ids_BT: torch.Tensor) -> torch.Tensor:
    """1.0 up to and including the first end token, 0.0 after it: later tokens are not part of the answer."""
    ended = (ids_BT == EOS).long().cumsum(1) - (ids_BT == EOS).long()
    return (ended == 0).float()


def compute_rewards(ids_BT: torch.Tensor, answers_BT: torch.Tensor) -> torch.Tensor:
    """1 if every token is right, else 0: no partial credit."""
    return (ids_BT == answers_BT).all(1).float()


@torch.no_grad()
def evaluate(policy: dict, items: list) -> tuple[float, float]:
    """Exact-match accuracy on unseen items: greedy, and sampled at temperature 1."""
    prompts, answers = encode(items)
    greedy = compute_rewards(sample(policy, prompts, 1, greedy=True)[0], answers).mean().item()
    return greedy, compute_rewards(sample(policy, prompts, 1)[0], answers).mean().item()


# ---- learning ---------------------------------------------------------------------------------------------------
def warm_up(policy: dict, train: list, gate: list, rng: random.Random) -> int:
    """Supervised steps until the policy is right about 40 % of the time: RL needs some rewards to start from."""
    optimizer = torch.optim.AdamW(policy.values(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, 401):
        prompts, answers = encode(rng.choices(train, k=128))
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 50)
        logits = forward(policy, torch.cat([prompts, answers], 1))[:, PROMPT_LEN - 1 : -1]
        F.cross_entropy(logits.reshape(-1, VOCAB), answers.reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(policy.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 30 and step % 5 == 0 and evaluate(policy, gate)[1] >= 0.40:
            break
    return step


def compute_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(reward - group mean) / (group's sample standard deviation + 1e-6). Zero where a whole group agrees."""
    centred = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return centred / (rewards_PG.std(1, keepdim=True) + 1e-6)


def compute_loss(policy, prompts_BT, ids_BT, old_logprobs_BT, advantages_B, num_tokens: float) -> torch.Tensor:
    """Clipped policy gradient, summed over answer tokens and divided by the tokens of the whole batch.

    ratio = exp(logprob - old_logprob); loss = max(-ratio A, -clip(ratio, 0.8, 1.2) A).
    """
    logits = forward(policy, torch.cat([prompts_BT, ids_BT], 1))[:, PROMPT_LEN - 1 : -1]
    logprobs_BT = logits.log_softmax(-1).gather(2, ids_BT[:, :, None])[:, :, 0]
    ratio = (logprobs_BT - old_logprobs_BT).exp()
    advantages_B1 = advantages_B[:, None]
    per_token = torch.maximum(-ratio * advantages_B1, -ratio.clamp(0.8, 1.2) * advantages_B1)
    return (per_token * mask_after_eos(ids_BT)).sum() / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on a laptop, in one file.")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    held_out, gate, train = make_items()

    policy = make_policy(args.seed)
    steps = warm_up(policy, train, gate, rng)
    greedy, sampled = evaluate(policy, held_out)
    print(f"warm-up: {steps} supervised steps; held out: greedy {greedy:.3f}, sampled {sampled:.3f}", flush=True)

    optimizer = torch.optim.AdamW(policy.values(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.0)
    began = time.perf_counter()
    for round_number in range(args.rounds):
        prompts_PT, answers_PT = encode(rng.choices(train, k=GROUPS))
        ids_BT, old_logprobs_BT = sample(policy, prompts_PT, GROUP_SIZE)
        rewards_B = compute_rewards(ids_BT, answers_PT.repeat_interleave(GROUP_SIZE, 0))
        advantages_B = compute_advantages(rewards_B.view(GROUPS, GROUP_SIZE)).view(-1)

        live_B = advantages_B != 0  # a group whose answers are all right or all wrong teaches nothing
        if live_B.any():
            step = round_number + 1
            decay = 0.05 + 0.95 * (1 - round_number / args.rounds)
            optimizer.param_groups[0]["lr"] = 5e-4 * min(1.0, step / 5) * decay
            prompts_BT = prompts_PT.repeat_interleave(GROUP_SIZE, 0)[live_B]
            num_tokens = mask_after_eos(ids_BT).sum().item()
            compute_loss(
                policy, prompts_BT, ids_BT[live_B], old_logprobs_BT[live_B], advantages_B[live_B], num_tokens
            ).backward()
            torch.nn.utils.clip_grad_norm_(policy.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if (round_number + 1) % 50 == 0 or round_number + 1 == args.rounds:
            greedy, sampled = evaluate(policy, held_out)
            seconds = time.perf_counter() - began
            print(
                f"round {round_number + 1:4d}  reward {rewards_B.mean():.3f}  held out: greedy {greedy:.3f}, "
                f"sampled {sampled:.3f}  {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
