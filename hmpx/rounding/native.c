/* The C kernels for CPUs, compiled on first use by native.py: stochastic rounding FP32 -> BF16, masters in halves,
   checksums, and in native_steps.c optimizer steps. No contraction into fused multiply-adds (-ffp-contract=off), so
   that every CPU gives the same bits. */

#include "native.h"

#define FOR_EACH_BLOCK(BODY)                                                                             \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (n > PARALLEL_FROM)")               \
  for (int64_t block = 0; block < (n + BLOCK - 1) / BLOCK; block++) {                                    \
    int64_t at = block * BLOCK, count = n - at < BLOCK ? n - at : BLOCK;                                 \
    BODY                                                                                                 \
  }

/* Elements `at` to `end` of rows of `width`, at most a block of them. The first element of row r is element
   `offset + r * stride` of the parameter. */
static inline void round_rows(const float *x, uint16_t *out, int64_t at, int64_t end, uint64_t key, uint64_t offset,
                              int64_t width, int64_t stride) {
  for (int64_t row = at / width; at < end; row++) {
    int64_t column = at - row * width;
    int64_t length = width - column < end - at ? width - column : end - at;
    round_block(x + at, out + at, length, key, offset + row * stride + column);
    at += length;
  }
}

void round_stochastic(const float *x, uint16_t *out, int64_t n, uint64_t key, uint64_t offset, int64_t width,
                      int64_t stride, int threads) {
  FOR_EACH_BLOCK(round_rows(x, out, at, at + count, key, offset, width, stride);)
}

/* One of a list; native.py has the same. `name` is the parameter's hash; all indices have the same upper 32 bits. */
typedef struct { uint64_t x, out; int64_t n; uint64_t name, offset; int64_t width, stride; } Rounding;

void round_list(const Rounding *list, int64_t count, uint64_t step_key, int threads) {
  FOR_EACH_SHARE(Rounding, {
    if (share.from == share.to) continue;
    uint64_t key = derive_key(step_key, one->name, one->offset >> 32);
    for (int64_t at = share.from; at < share.to; at += BLOCK)
      round_rows((const float *)(uintptr_t)one->x, (uint16_t *)(uintptr_t)one->out, at,
                 at + BLOCK < share.to ? at + BLOCK : share.to, key, one->offset & 0xFFFFFFFFu, one->width, one->stride);
  })
}

/* BF16 numbers of a list of tensors to FP32; native.py has the same. */
typedef struct { uint64_t from, to; int64_t n; } Widening;

void widen_list(const Widening *list, int64_t count, int threads) {
  FOR_EACH_SHARE(Widening, {
    const uint16_t *restrict from = (const uint16_t *)(uintptr_t)one->from;
    float *restrict to = (float *)(uintptr_t)one->to;
    for (int64_t j = share.from; j < share.to; j++) to[j] = from_bf16(from[j]);
  })
}

/* halves.py: an FP32 number as the BF16 nearest to it, ties away from zero, and an int16. */
static inline uint32_t kept_bits(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  int lost = (magnitude > 0x7F800000u && magnitude < 0x7F808000u) || magnitude >= 0x7FFF8000u;
  return lost ? (bits & 0x80000000u) | 0x7FC00000u : bits;
}

void split_halves(const float *restrict x, uint16_t *restrict upper, uint16_t *restrict lower, int64_t n, int threads) {
  FOR_EACH_BLOCK(for (int64_t j = at; j < at + count; j++) {
    uint32_t bits = kept_bits(bits_of(x[j]));
    lower[j] = (uint16_t)bits;
    upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
  })
}

void join_halves(const uint16_t *restrict upper, const int16_t *restrict lower, uint32_t *restrict out, int64_t n,
                 int threads) {
  FOR_EACH_BLOCK(for (int64_t j = at; j < at + count; j++)
      out[j] = ((uint32_t)upper[j] << 16) + (uint32_t)(int32_t)lower[j];)
}

/* updates/checksums.py: 16 bits for each `block` of weights. */
void block_checksums(const uint16_t *restrict weights, uint16_t *restrict sums, const uint32_t *restrict multipliers,
                     int64_t n, int64_t block, int threads) {
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (n > PARALLEL_FROM)")
  for (int64_t b = 0; b < (n + block - 1) / block; b++) {
    const uint16_t *restrict of = weights + b * block;
    int64_t count = n - b * block < block ? n - b * block : block;
    uint32_t sum = 0;
    if (count == 32) /* a number that the compiler can unroll */
      for (int64_t j = 0; j < 32; j++) sum += of[j] * multipliers[j];
    else
      for (int64_t j = 0; j < count; j++) sum += of[j] * multipliers[j];
    sums[b] = (uint16_t)(sum >> 16);
  }
}

/* Whether two BF16 numbers are one: 0 and -0 are. */
static inline int are_one(uint16_t a, uint16_t b) { return a == b || !((a | b) & 0x7FFFu); }

/* A master, or the weight where that is not what the master rounds to; `out` may be `masters`. A pass that rounds ties
   away from zero alone does for nearly every block. */
void read_masters(const float *masters, const uint16_t *restrict weights, float *out, int64_t n, int threads) {
  FOR_EACH_BLOCK({
    uint32_t other = 0;
    uint32_t largest = 0;
    for (int64_t j = at; j < at + count; j++) {
      uint32_t magnitude = bits_of(masters[j]) & 0x7FFFFFFFu;
      other |= (bits_of(masters[j]) + 0x8000u) >> 16 ^ weights[j];
      largest = magnitude > largest ? magnitude : largest;
    }
    if (!other && largest <= 0x7F800000u) {
      if (out != masters) memcpy(out + at, masters + at, (size_t)count * sizeof *out);
      continue;
    }
    for (int64_t j = at; j < at + count; j++) {
      uint32_t bits = bits_of(masters[j]);
      uint16_t even = nearest(bits);
      uint16_t away = (uint16_t)((kept_bits(bits) + 0x8000u) >> 16);
      out[j] = are_one(weights[j], even) || are_one(weights[j], away) ? masters[j] : from_bf16(weights[j]);
    }
  })
}

#include "native_codes.c" /* one library */
#include "native_steps.c"
