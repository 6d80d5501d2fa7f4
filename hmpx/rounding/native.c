/* Stochastic rounding FP32 -> BF16 and optimizer steps that end in it, for CPUs. The specification of the numbers
   stands at the head of stochastic.py; this file is compiled on first use by native.py. No contraction into
   fused multiply-adds (-ffp-contract=off), so that every CPU gives the same bits. */

#include <math.h>
#include <stdint.h>

#define BLOCK 256           /* elements that go through all loops while they are in the first cache; 1024 floats are a
                               page, and four arrays a page apart evict one another */
#define PARALLEL_FROM 32768 /* elements: below this, waking other threads costs more than it brings */

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

/* `out` of n elements, the first being element `offset` of its parameter. One hash serves an even element and the odd
   one after it. */
static inline void round_block(const float *restrict x, uint16_t *restrict out, int64_t n, uint64_t key,
                               uint64_t offset) {
  uint32_t k1 = (uint32_t)key, k2 = (uint32_t)(key >> 32);
  if ((offset & 1) && n > 0) {
    *out++ = rounded(bits_of(*x++), mix((uint32_t)(offset++ >> 1), k1, k2) >> 16);
    n--;
  }
  uint32_t first = (uint32_t)(offset >> 1);
  int64_t pairs = n / 2;
  for (int64_t i = 0; i < pairs; i++) {
    uint32_t h = mix(first + (uint32_t)i, k1, k2);
    out[2 * i] = rounded(bits_of(x[2 * i]), h & 0xFFFFu);
    out[2 * i + 1] = rounded(bits_of(x[2 * i + 1]), h >> 16);
  }
  if (n & 1) out[n - 1] = rounded(bits_of(x[n - 1]), mix(first + (uint32_t)pairs, k1, k2) & 0xFFFFu);
}

#define FOR_EACH_BLOCK(BODY)                                                                             \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (n > PARALLEL_FROM)")               \
  for (int64_t block = 0; block < (n + BLOCK - 1) / BLOCK; block++) {                                    \
    int64_t at = block * BLOCK, count = n - at < BLOCK ? n - at : BLOCK;                                 \
    BODY                                                                                                 \
  }

/* Rows of `width` elements; the first of row r is element `offset + r * stride` of the parameter. */
void round_stochastic(const float *x, uint16_t *out, int64_t n, uint64_t key, uint64_t offset, int64_t width,
                      int64_t stride, int threads) {
  FOR_EACH_BLOCK(for (int64_t end = at + count, row = at / width; at < end; row++) {
    int64_t column = at - row * width;
    int64_t length = width - column < end - at ? width - column : end - at;
    round_block(x + at, out + at, length, key, offset + row * stride + column);
    at += length;
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

/* A master, or the weight where that is not what the master rounds to. */
void read_masters(const float *restrict masters, const uint16_t *restrict weights, float *restrict out, int64_t n,
                  int threads) {
  FOR_EACH_BLOCK(for (int64_t j = at; j < at + count; j++) {
    uint32_t bits = bits_of(masters[j]);
    uint16_t even = nearest(bits);
    uint16_t away = (uint16_t)((kept_bits(bits) + 0x8000u) >> 16);
    out[j] = weights[j] == even || weights[j] == away ? masters[j] : from_bf16(weights[j]);
  })
}

/* An array that an optimizer reads and writes: FP32 as it is, BF16 through FP32 and back by stochastic rounding. */
typedef struct { void *at; int32_t bf16; uint64_t key; } KernelArray; /* native.py has the same */

static inline void read_block(const KernelArray *from, int64_t at, int64_t count, float *restrict x) {
  if (from->bf16) {
    const uint16_t *restrict source = (const uint16_t *)from->at + at;
    for (int64_t j = 0; j < count; j++) x[j] = from_bf16(source[j]);
  } else {
    const float *restrict source = (const float *)from->at + at;
    for (int64_t j = 0; j < count; j++) x[j] = source[j];
  }
}

static inline void write_block(const KernelArray *to, int64_t at, int64_t count, const float *restrict x) {
  if (to->bf16) {
    round_block(x, (uint16_t *)to->at + at, count, to->key, (uint64_t)at);
  } else {
    float *restrict target = (float *)to->at + at;
    for (int64_t j = 0; j < count; j++) target[j] = x[j];
  }
}

/* torch.optim.Adam and AdamW on whole parameters. decay: what a weight is multiplied with first; l2: of it, added to
   the gradient; sign: -1 to maximize; rest: 1 - beta; rate and eps: with the bias corrections multiplied in. */
void adam(KernelArray weight, KernelArray grad, KernelArray mean, KernelArray square, int64_t n, float sign,
          float decay, float l2, float beta1, float rest1, float beta2, float rest2, float rate, float eps,
          int threads) {
  FOR_EACH_BLOCK({
    float p[BLOCK]; float g[BLOCK]; float m[BLOCK]; float v[BLOCK];
    read_block(&weight, at, count, p);
    read_block(&grad, at, count, g);
    read_block(&mean, at, count, m);
    read_block(&square, at, count, v);
    for (int64_t j = 0; j < count; j++) {
      float x = sign * g[j] + l2 * p[j];
      m[j] = beta1 * m[j] + rest1 * x;
      v[j] = beta2 * v[j] + rest2 * x * x;
      p[j] = decay * p[j] - rate * (m[j] / (sqrtf(v[j]) + eps));
    }
    write_block(&weight, at, count, p);
    write_block(&mean, at, count, m);
    write_block(&square, at, count, v);
  })
}

/* torch.optim.SGD. `momentum` < 0 stands for none; `keep` and `add` weigh the old buffer and the gradient in it. */
void sgd(KernelArray weight, KernelArray grad, KernelArray buffer, int64_t n, float sign, float l2,
         float momentum, float keep, float add, int nesterov, float rate, int threads) {
  FOR_EACH_BLOCK({
    float p[BLOCK]; float g[BLOCK]; float b[BLOCK];
    read_block(&weight, at, count, p);
    read_block(&grad, at, count, g);
    for (int64_t j = 0; j < count; j++) g[j] = sign * g[j] + l2 * p[j];
    if (momentum >= 0.0f) {
      read_block(&buffer, at, count, b);
      for (int64_t j = 0; j < count; j++) b[j] = keep * b[j] + add * g[j];
      write_block(&buffer, at, count, b);
      for (int64_t j = 0; j < count; j++) g[j] = nesterov ? g[j] + momentum * b[j] : b[j];
    }
    for (int64_t j = 0; j < count; j++) p[j] -= rate * g[j];
    write_block(&weight, at, count, p);
  })
}
