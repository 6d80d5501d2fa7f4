"""How far the log-probs of a trainer and of its sampler are apart in BF16, and with the head in FP32.

Both policies have the same weights. The sampler writes token by token, from a prefix that grows, with attention of
its own; the trainer scores whole batches of what it wrote. The third head multiplies BF16 and keeps the result in
FP32, which costs a GPU no more than BF16. `hmpx.compare` then says what each does to the gradient of the policy's own
objective: log-probs weighted by advantages. Run it with ``python examples/logprob_mismatch.py``.
"""

import torch
from torch import nn

import hmpx

WORDS, WIDTH, LENGTH, SEQUENCES, TEMPERATURE = 1000, 64, 24, 16, 8


class Policy(nn.Module):
    """One layer of attention, and a head that is tied to the embedding; log-probs of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.tokens.weight

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        logits = self.lm_head(self.norm(x + self.attend(*self.qkv(x).chunk(3, -1))))
        return (logits / TEMPERATURE).log_softmax(-1)


class Sampler(Policy):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT / WIDTH**0.5
        return scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf).softmax(-1) @ v


HEADS = {
    "neuron-bf16-sr": "neuron-bf16-sr",
    "fp32-head": "fp32-head",
    "bf16-to-fp32": {"extends": "neuron-bf16-sr", "modules": {"<head>": "bf16-to-fp32"}},
}


def mismatch(recipe: str | dict) -> torch.Tensor:
    """|log-prob of the trainer - of the sampler| of each token that the sampler wrote, (SEQUENCES, LENGTH) in FP32."""
    torch.manual_seed(0)
    with hmpx.activate(recipe), torch.no_grad():
        trainer, sampler, said = Policy(), Sampler(), []
        sampler.load_state_dict(trainer.state_dict())
        for policy in (trainer, sampler):
            torch.optim.AdamW(policy.parameters())  # as it is made, the recipe takes the policy
        ids = torch.randint(WORDS, (SEQUENCES, 1))
        for _ in range(LENGTH):
            found = sampler(ids)[:, -1]
            ids = torch.cat([ids, found.exp().multinomial(1)], 1)
            said.append(found.gather(1, ids[:, -1:]))
        scored = trainer(ids[:, :-1]).gather(2, ids[:, 1:, None]).squeeze(2)
    return (scored - torch.cat(said, 1)).abs()


def objective(policy: nn.Module, ids: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """What a policy gradient descends: log-probs of the tokens, each sequence weighted by its advantage."""
    said = policy(ids[:, :-1]).gather(2, ids[:, 1:, None]).squeeze(2)
    return -(advantages[:, None] * said).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (SEQUENCES, LENGTH)), torch.randn(SEQUENCES)


torch.manual_seed(1)
model, batches = Policy(), [batch() for _ in range(4)]
print(f"{'the head':16} {'|trainer - sampler|':>20} {'largest':>8} {'gradient error':>15}")
for name, recipe in HEADS.items():
    apart = mismatch(recipe)
    error = hmpx.compare(model, batches, objective, lists=recipe).gradient_error
    print(f"{name:16} {apart.mean():20.5f} {apart.max():8.5f} {error:15.5f}")
