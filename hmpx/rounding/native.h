/* What the C kernels are made of: rounding of a block, keys, and shares of a list for threads. The
   specification of the numbers stands at the head of stochastic.py.

   The loops are plain, for the compiler to turn into vector instructions, and short enough for AVX2: the hashes of a
   block come first, and a block with numbers that want care, which nearly none has, goes through a second loop. */

#ifndef HMPX_NATIVE_H
#define HMPX_NATIVE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256           /* elements that go through all loops while they are in the first cache; 1024 floats are a
                               page, and four arrays a page apart evict one another */
#define PARALLEL_FROM 32768 /* elements: below this, waking other threads costs more than it brings */
#define GOLDEN 0x9E3779B9u
#define BF16_MAX 0x7F7F0000u /* its bits */

static inline uint64_t splitmix64(uint64_t x) {
  uint64_t z = x + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* The key of the elements whose index has `high` above its low 32 bits. step_key: of the seed and the step. */
static inline uint64_t derive_key(uint64_t step_key, uint64_t name, uint64_t high) {
  return splitmix64(splitmix64(step_key ^ name) ^ high);
}

static inline uint32_t mix(uint32_t h, uint32_t k2) {
  h ^= h >> 16;
  h *= 0x21F0AAADu;
  h ^= h >> 15;
  h ^= k2;
  h *= 0x735A2D97u;
  return h ^ (h >> 15);
}

static inline uint32_t bits_of(float x) {
  union { float value; uint32_t bits; } u = {.value = x};
  return u.bits;
}

static inline float float_of(uint32_t bits) {
  union { uint32_t bits; float value; } u = {.bits = bits};
  return u.value;
}

static inline float from_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }

static inline uint16_t nearest(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t even = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return (uint16_t)((magnitude <= 0x7F800000u ? even : (bits | 0x400000u)) >> 16); /* a NaN stays one, made quiet */
}

static inline uint16_t rounded(uint32_t bits, uint32_t r) {
  return (bits & 0x7FFFFFFFu) <= BF16_MAX ? (uint16_t)((bits + r) >> 16) : nearest(bits);
}

/* The random numbers of `n` elements, at most BLOCK of them, the first being element `offset` of its parameter. One
   hash serves an even element and the odd one after it. */
typedef union { uint32_t pair[BLOCK / 2 + 1]; uint16_t element[BLOCK + 2]; } Numbers;

static inline const uint16_t *draw(Numbers *numbers, int64_t n, uint64_t key, uint64_t offset) {
  uint32_t odd = offset & 1, k2 = (uint32_t)(key >> 32);
  uint32_t counter = (uint32_t)(offset >> 1) * GOLDEN + (uint32_t)key;
  for (int64_t i = 0; i < (n + odd + 1) / 2; i++) {
    uint32_t h = mix(counter, k2);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    h = (h << 16) | (h >> 16); /* the low half belongs to the even element, which comes first in memory */
#endif
    numbers->pair[i] = h;
    counter += GOLDEN;
  }
  return numbers->element + odd;
}

/* `x` to BF16 `out`, at most BLOCK elements. */
static inline void round_block(const float *restrict x, uint16_t *restrict out, int64_t n, uint64_t key,
                               uint64_t offset) {
  Numbers numbers;
  const uint16_t *r = draw(&numbers, n, key, offset);
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
    out[i] = (uint16_t)((bits_of(x[i]) + r[i]) >> 16);
  }
  if (largest > BF16_MAX)
    for (int64_t i = 0; i < n; i++) out[i] = rounded(bits_of(x[i]), r[i]);
}

/* The same, to the nearest, ties to even. */
static inline void nearest_block(const float *restrict x, uint16_t *restrict out, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i]), magnitude = bits & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
    out[i] = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  if (largest > 0x7F800000u) /* a NaN */
    for (int64_t i = 0; i < n; i++) out[i] = nearest(bits_of(x[i]));
}

/* How the elements of a row of a table lie, as `RowLayout` of table.py says it. */
typedef struct { int64_t program, n, blocks, offset, row, width, stride; } RowLayout;

static inline uint64_t element_of(const RowLayout *layout, int64_t at) {
  int64_t width = layout->width, inside = at < width ? at : at / width * layout->stride + at % width;
  return (uint64_t)(layout->offset + inside);
}

/* A list of tensors is divided evenly among threads, each of which walks the list and finds its own elements, a whole
   number of blocks of each tensor. A large tensor is divided by itself, as torch's kernels do it: what a thread has
   written to, it reads again, and cores that share no cache send each other nothing. The small ones, with `total`
   elements, are divided as if they were one. `begin`: elements of those before one of `n`. */
typedef struct { int64_t from, to; } Share;

static inline int64_t share_end(int64_t total, int thread, int threads, int64_t begin, int64_t n) {
  int64_t end = (total * thread / threads - begin + BLOCK - 1) / BLOCK * BLOCK;
  return thread == threads ? n : end < 0 ? 0 : end < n ? end : n;
}

static inline Share share_of(int64_t total, int thread, int threads, int64_t begin, int64_t n) {
  if (n > PARALLEL_FROM) total = n, begin = 0;
  return (Share){share_end(total, thread, threads, begin, n), share_end(total, thread + 1, threads, begin, n)};
}

static inline int64_t of_small(int64_t n) { return n > PARALLEL_FROM ? 0 : n; }

/* A body for each `one` of a `list` of `count` tensors, with this thread's `share` of its elements. */
#define FOR_EACH_SHARE(KIND, ...)                                                                             \
  int64_t all = 0, total = 0;                                                                                 \
  for (int64_t i = 0; i < count; i++) all += list[i].layout.n, total += of_small(list[i].layout.n);               \
  if (all <= PARALLEL_FROM) threads = 1;                                                                      \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")                          \
  for (int thread = 0; thread < threads; thread++) {                                                          \
    int64_t begin = 0;                                                                                        \
    for (const KIND *one = list; one < list + count; begin += of_small(one++->layout.n)) {                      \
      Share share = share_of(total, thread, threads, begin, one->layout.n);                                     \
      __VA_ARGS__                                                                                             \
    }                                                                                                         \
  }

#endif
