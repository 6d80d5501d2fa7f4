/* Optimizer steps that end in stochastic rounding, one pass over weights, gradients and state, for a list of
   parameters at once. updates/stepping/optimizer_classes.py makes the scalars; the order of operations is the one below. */

#include "native.h"

#define STATES 3

enum { WEIGHT, GRAD, STATE, TENSORS = STATE + STATES };
typedef struct { RowLayout layout; Stored stored[TENSORS]; } Stepped;

/* A kernel leaves a weight and its state in FP32 in `p`, `A`, `B` and `C`. Its inputs are there too, or still in BF16:
   `halves` is the number of tensors in BF16, counted in the order gradient, weight, states. A kernel reads BF16 at no
   cost while it waits for a root or a quotient; separate loops that only widened BF16 took a tenth of the step. */
#define KERNEL(NAME, A, B, C)                                                                            \
  LOOP void NAME(float *restrict p, const uint16_t *restrict half_p, const float *restrict grad,         \
            const uint16_t *restrict half_grad, float *restrict A, const uint16_t *restrict half_##A,    \
            float *restrict B, const uint16_t *restrict half_##B, float *restrict C,                     \
            const uint16_t *restrict half_##C, const float *restrict s, int64_t n, const int halves)

/* A parameter's gradient with its sign (-1 to maximize) and L2 penalty; the first two scalars of every kernel. Without a
   penalty the weight has no part in it: 0 times an infinite weight, of a choice that is closed, would be NaN. */
#define SIGNED (sign * (halves > 0 ? from_bf16(half_grad[j]) : grad[j]))
#define GRADIENT (l2 != 0.0f ? SIGNED + l2 * OLD_WEIGHT : SIGNED)
#define OLD_WEIGHT (halves > 1 ? from_bf16(half_p[j]) : p[j])
#define OLD(X) (halves > 2 ? from_bf16(half_##X[j]) : X[j])

/* torch.optim.Adam and AdamW. decay: what a weight is multiplied with first; rest: 1 - beta; rate and eps: with the
   bias corrections multiplied in. */
KERNEL(adam, m, v, none) {
  float sign = s[0], l2 = s[1], decay = s[2], beta1 = s[3], rest1 = s[4], beta2 = s[5], rest2 = s[6], rate = s[7];
  float eps = s[8];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    m[j] = beta1 * OLD(m) + rest1 * x;
    v[j] = beta2 * OLD(v) + rest2 * x * x;
    p[j] = decay * OLD_WEIGHT - rate * (m[j] / (sqrtf(v[j]) + eps));
  }
}

/* torch.optim.SGD. `momentum` < 0 stands for none; `keep` and `add` weigh the old buffer and the gradient in it. */
KERNEL(sgd, b, none, none2) {
  float sign = s[0], l2 = s[1], rate = s[2], momentum = s[3], keep = s[4], add = s[5];
  int nesterov = s[6] != 0.0f;
  if (momentum < 0.0f)
    for (int64_t j = 0; j < n; j++) p[j] = OLD_WEIGHT - rate * GRADIENT;
  else
    for (int64_t j = 0; j < n; j++) {
      float x = GRADIENT;
      b[j] = keep * OLD(b) + add * x;
      p[j] = OLD_WEIGHT - rate * (nesterov ? x + momentum * b[j] : b[j]);
    }
}

/* Lion of Chen et al., "Symbolic discovery of optimization algorithms" (2023). */
KERNEL(lion, m, none, none2) {
  float sign = s[0], l2 = s[1], decay = s[2], beta1 = s[3], rest1 = s[4], beta2 = s[5], rest2 = s[6], rate = s[7];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT, u = beta1 * OLD(m) + rest1 * x;
    float direction = (float)((u > 0.0f) - (u < 0.0f));
    p[j] = decay * OLD_WEIGHT - rate * direction;
    m[j] = beta2 * OLD(m) + rest2 * x;
  }
}

/* torch.optim.Adagrad. rate: with its decay. */
KERNEL(adagrad, sum, none, none2) {
  float sign = s[0], l2 = s[1], rate = s[2], eps = s[3];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    sum[j] = OLD(sum) + x * x;
    p[j] = OLD_WEIGHT - rate * (x / (sqrtf(sum[j]) + eps));
  }
}

/* torch.optim.RMSprop. `momentum` < 0 stands for none. */
KERNEL(rmsprop, square, b, mean) {
  float sign = s[0], l2 = s[1], rate = s[2], alpha = s[3], rest = s[4], eps = s[5], momentum = s[6];
  int centered = s[7] != 0.0f;
  float moved[BLOCK];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    square[j] = alpha * OLD(square) + rest * x * x;
    moved[j] = x;
  }
  if (centered)
    for (int64_t j = 0; j < n; j++) {
      float before = OLD(mean);
      mean[j] = before + rest * (moved[j] - before);
      moved[j] /= sqrtf(square[j] - mean[j] * mean[j]) + eps;
    }
  else
    for (int64_t j = 0; j < n; j++) moved[j] /= sqrtf(square[j]) + eps;
  if (momentum >= 0.0f)
    for (int64_t j = 0; j < n; j++) moved[j] = b[j] = momentum * OLD(b) + moved[j];
  for (int64_t j = 0; j < n; j++) p[j] = OLD_WEIGHT - rate * moved[j];
}

/* torch.optim.NAdam. rate and rate_mean: what weighs the gradient and its mean; correction: of the second moment. */
KERNEL(nadam, m, v, none) {
  float sign = s[0], l2 = s[1], decay = s[2], rest1 = s[3], beta2 = s[4], rest2 = s[5], rate = s[6], rate_mean = s[7];
  float eps = s[8], correction = s[9];
  for (int64_t j = 0; j < n; j++) {
    float x = GRADIENT;
    float before = OLD(m);
    m[j] = before + rest1 * (x - before);
    v[j] = beta2 * OLD(v) + rest2 * x * x;
    float root = sqrtf(v[j] / correction) + eps;
    p[j] = decay * OLD_WEIGHT - rate * (x / root) - rate_mean * (m[j] / root);
  }
}

#define FORM(NAME, HALVES)                                                                               \
  static void NAME##HALVES(float *const *x, const uint16_t *const *half, const float *s, int64_t n) {    \
    NAME(x[0], half[0], x[1], half[1], x[2], half[2], x[3], half[3], x[4], half[4], s, n, HALVES);       \
  }
#define FORMS(NAME) FORM(NAME, 0) FORM(NAME, 1) FORM(NAME, 2) FORM(NAME, 3)
#define THEIR_NAMES(NAME) {NAME##0, NAME##1, NAME##2, NAME##3},
/* FOR_EACH_KERNEL is defined by shared.py, as are the kinds and their sizes. */

FOR_EACH_KERNEL(FORMS)
typedef void Kernel(float *const *, const uint16_t *const *, const float *, int64_t);
static Kernel *const KERNELS[][4] = {FOR_EACH_KERNEL(THEIR_NAMES)};

static int halves_of(const Stepped *one) {
  const Stored *stored = one->stored;
  if (stored[GRAD].kind != BF16) return 0;
  if (stored[WEIGHT].kind != BF16 && stored[WEIGHT].kind != NEAREST) return 1;
  for (int i = STATE; i < TENSORS; i++)
    if (stored[i].kind != BF16 && stored[i].kind != ABSENT) return 2;
  return 3;
}

/* Asks for `count` elements that will be read soon: the loops that write a block load nothing new, and hardware that
   looks at what is loaded does not run far enough ahead. */
static inline void fetched(const Stored *stored, int64_t at, int64_t count) {
  static const int64_t halves[] = {HALF_BYTES}; /* of a byte, of an element, by kind */
  const char *from = AS(const char, stored->at) + at * halves[stored->kind] / 2;
  for (int64_t byte = 0; byte < count * halves[stored->kind] / 2; byte += 64) __builtin_prefetch(from + byte);
}

/* scalars: SCALARS of each parameter. */
void step_list(const Stepped *list, int64_t count, int threads, int kernel, const float *scalars) {
  FOR_EACH_SHARE(Stepped, {
    const RowLayout *layout = &one->layout;
    const Stored *stored = one->stored;
    if (share.from == share.to) continue;
    int halves = halves_of(one), tensors = TENSORS, has_codes = 0; /* up to the last one that is there */
    while (stored[tensors - 1].kind == ABSENT) tensors--;
    for (int i = 0; i < tensors; i++) has_codes |= is_coded(stored[i].kind);
    Blocks blocks = blocks_of(layout, has_codes);
    share = in_blocks(share, &blocks, layout->n);
    const int is_half[TENSORS] = {halves > 1, halves > 0, halves > 2, halves > 2, halves > 2};
    for (int64_t at = share.from, n; at < share.to; at += n) {
      float rooms[TENSORS][BLOCK], *x[TENSORS] = {0};
      const uint16_t *half[TENSORS] = {0};
      n = opened_at_once(layout, &blocks, at, share.to);
      int64_t next = at + n, ahead = share.to - next < BLOCK ? share.to - next : BLOCK;
      for (int i = 0; i < tensors; i++) fetched(&stored[i], next, ahead);
      for (int i = 0; i < tensors; i++) {
        x[i] = is_half[i] ? rooms[i] : opened(&stored[i], at, n, &blocks, rooms[i]);
        half[i] = AS(uint16_t, stored[i].at) + at;
      }
      KERNELS[kernel][halves](x, half, scalars + (one - list) * SCALARS, n);
      for (int i = 0; i < tensors; i++)
        if (i != GRAD) closed(&stored[i], at, n, &blocks, x[i], (uint64_t)(layout->offset + at));
    }
  })
}
