/* Stochastic rounding FP32 -> BF16 and optimizer steps that end in it, for CPUs. The specification of the numbers
   stands at the head of rounding.py; this file is compiled on first use by native.py. No contraction into
   fused multiply-adds (-ffp-contract=off), so that every CPU gives the same bits. */

#include <math.h>
#include <stdint.h>

#define PARALLEL_FROM 16384 /* pairs of elements: below this, waking other threads costs more than it brings */

static inline uint32_t mix(uint32_t i, uint32_t k1, uint32_t k2) {
  uint32_t h = i * 0x9E3779B9u + k1;
  h ^= h >> 16;
  h *= 0x21F0AAADu;
  h ^= h >> 15;
  h ^= k2;
  h *= 0x735A2D97u;
  return h ^ (h >> 15);
}

static inline uint16_t nearest(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t even = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return (uint16_t)((magnitude <= 0x7F800000u ? even : (bits | 0x400000u)) >> 16); /* a NaN stays one, made quiet */
}

static inline uint16_t rounded(uint32_t bits, uint32_t r) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  return magnitude <= 0x7F7F0000u ? (uint16_t)((bits + r) >> 16) : nearest(bits); /* past BF16's maximum: nearest */
}

static inline float from_bf16(uint16_t x) {
  union { uint32_t bits; float value; } u = {.bits = (uint32_t)x << 16};
  return u.value;
}

static inline uint32_t bits_of(float x) {
  union { float value; uint32_t bits; } u = {.value = x};
  return u.bits;
}

/* Elements `offset` ... `offset + n - 1` of a parameter. An odd first and a lone last element use half of a number. */
#define FOR_EACH_ELEMENT(BODY)                                                                  \
  int64_t head = (offset & 1) && n > 0;                                                         \
  if (head) { int64_t j = 0; uint32_t r = mix((uint32_t)(offset >> 1), k1, k2) >> 16; BODY }    \
  uint32_t base = (uint32_t)((offset + head) >> 1);                                             \
  int64_t pairs = (n - head) / 2;                                                               \
  _Pragma("omp parallel for simd schedule(static) num_threads(threads) if(pairs > PARALLEL_FROM)") \
  for (int64_t i = 0; i < pairs; i++) {                                                         \
    uint32_t h = mix(base + (uint32_t)i, k1, k2);                                               \
    { int64_t j = head + 2 * i; uint32_t r = h & 0xFFFFu; BODY }                                \
    { int64_t j = head + 2 * i + 1; uint32_t r = h >> 16; BODY }                                \
  }                                                                                             \
  if ((n - head) & 1) { int64_t j = n - 1; uint32_t r = mix(base + (uint32_t)pairs, k1, k2) & 0xFFFFu; BODY }

void round_stochastic(const uint32_t *restrict x, uint16_t *restrict out, int64_t n, uint64_t key, uint64_t offset,
                      int threads) {
  uint32_t k1 = (uint32_t)key, k2 = (uint32_t)(key >> 32);
  FOR_EACH_ELEMENT(out[j] = rounded(x[j], r);)
}
