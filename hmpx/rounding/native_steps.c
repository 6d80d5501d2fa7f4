/* Optimizer steps that end in stochastic rounding, one pass over weights, gradients and state, for a list of
   parameters at once. updates/fused_formulas.py makes the scalars; the order of operations is the one below. */

#include "native.h"

#define STATES 3
#define SCALARS 12

typedef struct { int64_t n, row; Held weight, grad, state[STATES]; } Stepped; /* native.py has the same */

#define KERNEL(NAME, A, B, C)                                                                            \
  static void NAME(float *restrict p, const float *restrict grad, float *restrict A, float *restrict B,  \
                   float *restrict C, const float *restrict s, int64_t n)
typedef void Kernel(float *restrict, const float *restrict, float *restrict, float *restrict, float *restrict,
                    const float *restrict, int64_t);

/* A parameter's gradient with its sign (-1 to maximize) and L2 penalty; the first two scalars of every kernel. */
#define GRADIENT (sign * grad[j] + l2 * p[j])

/* torch.optim.Adam and AdamW. decay: what a weight is multiplied with first; rest: 1 - beta; rate and eps: with the
   bias corrections multiplied in. */
KERNEL(adam, m, v, none) {
  float sign = s[0], l2 = s[1], decay = s[2], beta1 = s[3], rest1 = s[4], beta2 = s[5], rest2 = s[6], rate = s[7];
  float eps = s[8];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    m[j] = beta1 * m[j] + rest1 * x;
    v[j] = beta2 * v[j] + rest2 * x * x;
    p[j] = decay * p[j] - rate * (m[j] / (sqrtf(v[j]) + eps));
  }
}

/* torch.optim.SGD. `momentum` < 0 stands for none; `keep` and `add` weigh the old buffer and the gradient in it. */
KERNEL(sgd, b, none, none2) {
  float sign = s[0], l2 = s[1], rate = s[2], momentum = s[3], keep = s[4], add = s[5];
  int nesterov = s[6] != 0.0f;
  if (momentum < 0.0f)
    for (int64_t j = 0; j < n; j++) p[j] -= rate * GRADIENT;
  else
    for (int64_t j = 0; j < n; j++) {
      float x = GRADIENT;
      b[j] = keep * b[j] + add * x;
      p[j] -= rate * (nesterov ? x + momentum * b[j] : b[j]);
    }
}

/* Lion of Chen et al., "Symbolic discovery of optimization algorithms" (2023). */
KERNEL(lion, m, none, none2) {
  float sign = s[0], l2 = s[1], decay = s[2], beta1 = s[3], rest1 = s[4], beta2 = s[5], rest2 = s[6], rate = s[7];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT, u = beta1 * m[j] + rest1 * x;
    float direction = (float)((u > 0.0f) - (u < 0.0f));
    p[j] = decay * p[j] - rate * direction;
    m[j] = beta2 * m[j] + rest2 * x;
  }
}

/* torch.optim.Adagrad. rate: with its decay. */
KERNEL(adagrad, sum, none, none2) {
  float sign = s[0], l2 = s[1], rate = s[2], eps = s[3];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    sum[j] += x * x;
    p[j] -= rate * (x / (sqrtf(sum[j]) + eps));
  }
}

/* torch.optim.RMSprop. `momentum` < 0 stands for none. */
KERNEL(rmsprop, square, b, mean) {
  float sign = s[0], l2 = s[1], rate = s[2], alpha = s[3], rest = s[4], eps = s[5], momentum = s[6];
  int centered = s[7] != 0.0f;
  float moved[BLOCK];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    square[j] = alpha * square[j] + rest * x * x;
    moved[j] = x;
  }
  if (centered)
    for (int64_t j = 0; j < n; j++) {
      mean[j] += rest * (moved[j] - mean[j]);
      moved[j] /= sqrtf(square[j] - mean[j] * mean[j]) + eps;
    }
  else
    for (int64_t j = 0; j < n; j++) moved[j] /= sqrtf(square[j]) + eps;
  if (momentum >= 0.0f)
    for (int64_t j = 0; j < n; j++) moved[j] = b[j] = momentum * b[j] + moved[j];
  for (int64_t j = 0; j < n; j++) p[j] -= rate * moved[j];
}

/* torch.optim.NAdam. rate and rate_mean: what weighs the gradient and its mean; correction: of the second moment. */
KERNEL(nadam, m, v, none) {
  float sign = s[0], l2 = s[1], decay = s[2], rest1 = s[3], beta2 = s[4], rest2 = s[5], rate = s[6], rate_mean = s[7];
  float eps = s[8], correction = s[9];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    m[j] += rest1 * (x - m[j]);
    v[j] = beta2 * v[j] + rest2 * x * x;
    float root = sqrtf(v[j] / correction) + eps;
    p[j] = decay * p[j] - rate * (x / root) - rate_mean * (m[j] / root);
  }
}

static Kernel *const KERNELS[] = {adam, sgd, lion, adagrad, rmsprop, nadam}; /* native.py has the names */

/* Asks for `count` elements that will be opened soon: the loops between two blocks load nothing, and hardware that
   looks at what is loaded does not run far enough ahead. */
static inline void fetched(const Held *held, int64_t at, int64_t count) {
  static const int64_t sizes[] = {0, 4, 2, 1, 2, 2, 2, 2}; /* of an element, by kind */
  const char *from = AS(const char, held->at) + at * sizes[held->kind];
  for (int64_t byte = 0; byte < count * sizes[held->kind]; byte += 64) __builtin_prefetch(from + byte);
}

/* scalars: SCALARS of each parameter. step_key: of the seed and the step. No parameter has 2^32 elements or more. */
void step_list(int kernel, const Stepped *list, const float *scalars, int64_t count, uint64_t step_key, int threads) {
  FOR_EACH_SHARE(Stepped, {
    int64_t row = uneven_rows(one->row, one->n);
    share = (Share){row_start(share.from, row, one->n), row_start(share.to, row, one->n)};
    if (share.from == share.to) continue;
    uint64_t keys[1 + STATES];
    for (int i = 0; i <= STATES; i++)
      keys[i] = derive_key(step_key, (i ? &one->state[i - 1] : &one->weight)->name, 0);
    for (int64_t at = share.from, n; at < share.to; at += n) {
      float rooms[2 + STATES][BLOCK], *state[STATES];
      n = opened_at_once(at, share.to, row);
      int64_t next = at + n, ahead = share.to - next < BLOCK ? share.to - next : BLOCK;
      fetched(&one->weight, next, ahead);
      fetched(&one->grad, next, ahead);
      for (int i = 0; i < STATES; i++) fetched(&one->state[i], next, ahead);
      float *weight = opened(&one->weight, at, n, row, rooms[0]), *grad = opened(&one->grad, at, n, row, rooms[1]);
      for (int i = 0; i < STATES; i++) state[i] = opened(&one->state[i], at, n, row, rooms[2 + i]);
      KERNELS[kernel](weight, grad, state[0], state[1], state[2], scalars + (one - list) * SCALARS, n);
      closed(&one->weight, at, n, row, weight, keys[0]);
      for (int i = 0; i < STATES; i++) closed(&one->state[i], at, n, row, state[i], keys[1 + i]);
    }
  })
}
