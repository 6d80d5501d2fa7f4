/* The C kernels for CPUs, compiled by native_library.py: stochastic rounding FP32 -> BF16, and what the
   files at the end have. No contraction into fused multiply-adds (-ffp-contract=off), so that every CPU gives the same
   bits. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512") /* for which hashes take half the instructions; GCC's choice is 256 */
#endif

#include "native.h"

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

/* Keys of the launches of a step on a GPU: that of each name, in its place among the words. */
void put_keys(uint64_t *words, const uint64_t *places, const uint64_t *names, int64_t count, uint64_t step_key) {
  for (int64_t i = 0; i < count; i++) words[places[i]] = derive_key(step_key, names[i], 0);
}

/* Counts of steps, each in a tensor of its own. */
void read_floats(const uint64_t *list, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i++) out[i] = *(const float *)(uintptr_t)list[i];
}

void add_one(const uint64_t *list, int64_t count) {
  for (int64_t i = 0; i < count; i++) *(float *)(uintptr_t)list[i] += 1.0f;
}

#include "native_masters.c" /* one library */
#include "native_codes.c"
#include "native_stored.c"
#include "native_steps.c"
