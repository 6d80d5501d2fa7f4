/* Masters beside BF16 weights: halves.py's numbers in two halves, FP32 copies, and checksums of the weights. */

#include "native.h"

/* An FP32 number as the BF16 nearest to it, ties away from zero, and an int16: its bits, those of a NaN made quiet
   where rounding would make another number of it. */
static inline uint32_t kept_bits(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  int lost = (magnitude > 0x7F800000u && magnitude < 0x7F808000u) || magnitude >= 0x7FFF8000u;
  return lost ? (bits & 0x80000000u) | 0x7FC00000u : bits;
}

static inline void split_block(const float *restrict x, uint16_t *restrict upper, uint16_t *restrict lower, int64_t n) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t bits = bits_of(x[j]), magnitude = bits & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
    lower[j] = (uint16_t)bits;
    upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
  }
  if (largest > 0x7F800000u) /* a NaN, which nearly no block has */
    for (int64_t j = 0; j < n; j++) {
      uint32_t bits = kept_bits(bits_of(x[j]));
      lower[j] = (uint16_t)bits;
      upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
    }
}

static inline void join_block(const uint16_t *restrict upper, const int16_t *restrict lower, float *restrict out,
                              int64_t n) {
  for (int64_t j = 0; j < n; j++) out[j] = float_of(((uint32_t)upper[j] << 16) + (uint32_t)(int32_t)lower[j]);
}

#define LARGEST_24 0x7F7FFF00u /* the bits of the largest number of 24 bits */

/* A number of 24 bits as a BF16 one and an int8. */
static inline void split_block_24(const float *restrict x, uint16_t *restrict upper, uint8_t *restrict lower, int64_t n,
                                  uint64_t key, uint64_t offset) {
  Numbers numbers;
  const uint16_t *restrict r = draw(&numbers, n, key, offset);
  uint32_t largest = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t bits = bits_of(x[j]), magnitude = bits & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
    bits += r[j] >> 8;
    lower[j] = (uint8_t)(bits >> 8);
    upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
  }
  if (largest > LARGEST_24) /* it stays itself, or what is kept in its stead */
    for (int64_t j = 0; j < n; j++) {
      uint32_t bits = kept_bits(bits_of(x[j]));
      bits += (bits & 0x7FFFFFFFu) <= LARGEST_24 ? r[j] >> 8 : 0;
      lower[j] = (uint8_t)(bits >> 8);
      upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
    }
}

static inline void join_block_24(const uint16_t *restrict upper, const int8_t *restrict lower, float *restrict out,
                                 int64_t n) {
  for (int64_t j = 0; j < n; j++) out[j] = float_of(((uint32_t)upper[j] << 16) + (uint32_t)((int32_t)lower[j] * 256));
}

/* Whether two BF16 numbers are one: 0 and -0 are. */
static inline int are_one(uint16_t a, uint16_t b) { return a == b || !((a | b) & 0x7FFFu); }

/* Masters, or the weight where that is not what the master rounds to; `out` may be `masters`. A pass that rounds ties
   away from zero alone does for nearly every block. */
static inline void read_block(const float *masters, const uint16_t *restrict weights, float *out, int64_t n) {
  uint32_t other = 0, largest = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t magnitude = bits_of(masters[j]) & 0x7FFFFFFFu;
    other |= (bits_of(masters[j]) + 0x8000u) >> 16 ^ weights[j];
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!other && largest <= 0x7F800000u) {
    if (out != masters) memcpy(out, masters, (size_t)n * sizeof *out);
    return;
  }
  for (int64_t j = 0; j < n; j++) {
    uint32_t bits = bits_of(masters[j]);
    uint16_t even = nearest(bits);
    uint16_t away = (uint16_t)((kept_bits(bits) + 0x8000u) >> 16);
    out[j] = are_one(weights[j], even) || are_one(weights[j], away) ? masters[j] : from_bf16(weights[j]);
  }
}

/* updates/checksums.py: 16 bits for each `every` weights, which are SUMMED or one. */
#define SUMMED 32

static uint32_t multipliers[SUMMED];

static __attribute__((constructor)) void make_multipliers(void) {
  for (uint32_t i = 0; i < SUMMED; i++) multipliers[i] = mix((i + 1) * GOLDEN, 0) | 1;
}

static inline void sum_block(const uint16_t *restrict weights, uint16_t *restrict sums, int64_t n, int64_t every) {
  if (every == 1) {
    memcpy(sums, weights, (size_t)n * sizeof *sums);
    return;
  }
  for (int64_t at = 0; at < n; at += SUMMED, sums++) {
    uint32_t sum = 0;
    if (n - at >= SUMMED) /* a number that the compiler can unroll */
      for (int64_t j = 0; j < SUMMED; j++) sum += weights[at + j] * multipliers[j];
    else
      for (int64_t j = 0; j < n - at; j++) sum += weights[at + j] * multipliers[j];
    *sums = (uint16_t)(sum >> 16);
  }
}

void block_checksums(const uint16_t *weights, uint16_t *sums, int64_t n, int64_t every, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n > PARALLEL_FROM)
  for (int64_t at = 0; at < n; at += BLOCK)
    sum_block(weights + at, sums + at / every, n - at < BLOCK ? n - at : BLOCK, every);
}
