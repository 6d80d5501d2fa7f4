/* Optimizer steps that end in stochastic rounding, one pass over weights, gradients and state, for a list of
   parameters at once. updates/fused_formulas.py makes the scalars; the order of operations is the one below. */

#include "native.h"

#define STATES 3
#define SCALARS 12

/* A tensor of a step: absent, FP32, or BF16 or 8 bits, which are read through FP32 and written by stochastic rounding.
   `name` is the hash of its name; `scales` are those of codes of 8 bits, whose blocks lie in rows of `row` elements.
   native.py has the same. */
enum { ABSENT, FP32, BF16, CODED };
typedef struct { uint64_t at, kind, name, scales; } Held;
typedef struct { int64_t n, row; Held weight, grad, state[STATES]; } Stepped;

/* Goes through the blocks of codes of `count` elements from `at` on, which begins a block: BODY sees elements j ...
   j + n - 1 and their scale. row: 0 where a block begins every CODES elements, which saves divisions. */
#define FOR_EACH_SCALE(BODY)                                                                             \
  {                                                                                                      \
    int64_t first = row ? at / row * ((row + CODES - 1) / CODES) + at % row / CODES : at / CODES;        \
    int64_t column = row ? at % row : 0;                                                                 \
    uint16_t *scale = (uint16_t *)(uintptr_t)held->scales + first;                                       \
    for (int64_t j = 0, n; j < count; j += n, scale++) {                                                 \
      n = count - j < CODES ? count - j : CODES;                                                         \
      if (row) {                                                                                         \
        n = row - column < n ? row - column : n;                                                         \
        column = column + n < row ? column + n : 0;                                                      \
      }                                                                                                  \
      BODY                                                                                               \
    }                                                                                                    \
  }

/* `count` elements in FP32: in their place, or copied into `room`. */
static inline float *opened(const Held *held, int64_t at, int64_t count, int64_t row, float *restrict room) {
  if (held->kind == FP32) return (float *)(uintptr_t)held->at + at;
  if (held->kind == BF16) {
    const uint16_t *restrict from = (const uint16_t *)(uintptr_t)held->at + at;
    for (int64_t j = 0; j < count; j++) room[j] = from_bf16(from[j]);
  }
  if (held->kind == CODED) {
    const uint8_t *codes = (const uint8_t *)(uintptr_t)held->at + at;
    FOR_EACH_SCALE(decode_block(codes + j, room + j, n, *scale);)
  }
  return room;
}

static inline void closed(const Held *held, int64_t at, int64_t count, int64_t row, const float *restrict room,
                          uint64_t key) {
  if (held->kind == BF16) round_block(room, (uint16_t *)(uintptr_t)held->at + at, count, key, (uint64_t)at);
  if (held->kind == CODED) {
    uint8_t *codes = (uint8_t *)(uintptr_t)held->at + at;
    Numbers numbers;
    const uint16_t *r = draw(&numbers, count, key, (uint64_t)at);
    Largest found[BLOCK], *largest = found; /* of every block before the first is written: nothing waits for anything */
    FOR_EACH_SCALE(*largest++ = largest_of(room + j, n);)
    largest = found;
    FOR_EACH_SCALE({
      *scale = scale_of(room + j, n, *largest);
      encode_block(room + j, codes + j, n, *scale, r + j, largest++->magnitude);
    })
  }
}

/* Asks for `count` elements that will be opened soon: the loops between two blocks load nothing, and hardware that
   looks at what is loaded does not run far enough ahead. */
static inline void fetched(const Held *held, int64_t at, int64_t count) {
  static const int64_t sizes[] = {0, 4, 2, 1}; /* of an element, by kind */
  const char *from = (const char *)(uintptr_t)held->at + at * sizes[held->kind];
  for (int64_t byte = 0; byte < count * sizes[held->kind]; byte += 64) __builtin_prefetch(from + byte);
}

static inline int64_t rows_end(int64_t element, int64_t row, int64_t n) {
  int64_t end = (element + row - 1) / row * row;
  return end < n ? end : n;
}

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

/* scalars: SCALARS of each parameter. step_key: of the seed and the step. No parameter has 2^32 elements or more. */
void step_list(int kernel, const Stepped *list, const float *scalars, int64_t count, uint64_t step_key, int threads) {
  FOR_EACH_SHARE(Stepped, {
    int64_t row = one->row % CODES == 0 || one->row == one->n ? 0 : one->row;
    if (row) share = (Share){rows_end(share.from, row, one->n), rows_end(share.to, row, one->n)};
    if (share.from == share.to) continue;
    uint64_t keys[1 + STATES];
    for (int i = 0; i <= STATES; i++)
      keys[i] = derive_key(step_key, (i ? &one->state[i - 1] : &one->weight)->name, 0);
    for (int64_t at = share.from, n; at < share.to; at += n) {
      float rooms[2 + STATES][BLOCK], *state[STATES];
      n = share.to - at < BLOCK ? share.to - at : BLOCK;
      if (row && row <= n)
        n -= n % row; /* whole rows */
      else if (row && n > row - at % row)
        n = row - at % row;
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
