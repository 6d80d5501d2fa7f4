/* The C kernels for CPUs, compiled by native.py: what the files at the end have. No contraction into fused
   multiply-adds (-ffp-contract=off), so that every CPU gives the same bits. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512") /* for which hashes take half the instructions; GCC's choice is 256 */
#endif

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || __FINITE_MATH_ONLY__ + 0
#error "the compiler was told fast math after hmpx's own flags: NaN, infinite and denormal numbers would be lost"
#endif

#include "native.h"

/* The keys of a step: that of each name, in its place among the words of a table. */
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
#include "native_bits.c"
