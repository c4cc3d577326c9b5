/* One pass of a decoder over a few nodes, as a list of operations run in one parallel region.
 *
 * Activations are fp32 rows, one per node, rounded to bf16 where a bf16 model would round them. Each number is
 * computed by one thread, in an order that depends on its node's own path alone: not on how many nodes the pass has,
 * which rows they belong to, or how many threads there are.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

typedef uint16_t bf16;

#define UNROLL _Pragma("GCC unroll 16")
#define IN static inline __attribute__((always_inline))
#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define BF16 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define PAUSE _mm_pause
#else
#include "neon.inc"
#endif
#include "team.inc"

enum { L = 8, BLOCK = 24, PANEL = 16, BROAD = 3 * PANEL, WIDE = 32, DEEP = 128, SOON = 16, CHUNK = 128, AHEAD = 2048, LONG = 8192, SOONER_STEPS = 16, EARLY = 4096 };
enum { KEYS = 64, MANY = 16, ROUNDED = 128, TOGETHER = 8, MOST_ROUNDED = 512, SPINS = 2000, RUNNING = 12, CHANNELS = 256, STREAMS = 8 };

/* ---------------------------------------------------------------- vectors of eight floats */

AVX2 IN __m256 widen8(const bf16 *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

AVX2 IN __m256 widen_int8_8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

AVX2 IN float sum8(__m256 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

AVX2 IN __m128 half8(__m256 a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }

/* The sums of four vectors, each as sum8 has it. */
AVX2 IN __m128 sums4_8(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m128 p = half8(a), q = half8(b), r = half8(c), s = half8(d);
  _MM_TRANSPOSE4_PS(p, q, r, s);
  return _mm_add_ps(_mm_add_ps(p, r), _mm_add_ps(q, s));
}

/* The sums of a tile of accumulators (rows, nodes) to y (nodes, rows). */
AVX2 IN void sums8(int rows, int nodes, int step, const __m256 *acc, float *y, int64_t ldy) {
  if (rows == 4) {
    UNROLL for (int m = 0; m < nodes; m++)
      _mm_storeu_ps(y + m * ldy, sums4_8(acc[m], acc[step + m], acc[2 * step + m], acc[3 * step + m]));
  } else if (nodes == 4) {
    UNROLL for (int r = 0; r < rows; r++, acc += step) {
      float four[4];
      _mm_storeu_ps(four, sums4_8(acc[0], acc[1], acc[2], acc[3]));
      UNROLL for (int m = 0; m < 4; m++) y[m * ldy + r] = four[m];
    }
  } else {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int m = 0; m < nodes; m++) y[m * ldy + r] = sum8(acc[r * step + m]);
  }
}

/* Rounded to the nearest bf16, ties to even; NaN stays NaN. */
AVX2 IN __m256 round8(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  u = _mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000));
  return _mm256_blendv_ps(_mm256_castsi256_ps(u), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

AVX2 IN __m256 rounded8(__m256 a, int narrow) { return narrow ? round8(a) : a; }

/* A mask of the first `left` lanes. */
AVX2 IN __m256i first8(int64_t left) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first `left` lanes of a, zero in the others. */
AVX2 IN __m256 keep8(__m256 a, int64_t left) { return _mm256_and_ps(a, _mm256_castsi256_ps(first8(left))); }

enum { SILU, GELU_TANH, GELU, RELU, SIGMOID, RELU_SQUARED, SOFTPLUS, TABLED };

AVX2 IN float nearest(float a, int narrow) { return _mm256_cvtss_f32(rounded8(_mm256_set1_ps(a), narrow)); }

AVX2 IN float softplus(float a, int narrow) { return nearest(a > 20.0f ? a : log1pf(expf(a)), narrow); }

/* What is done to a product: `activation` is that of a gate, `added` is 1 where it is added to what is there. */
typedef struct {
  const float *bias, *other_bias; /* or NULL */
  float scale;
  int narrow, activation, added;
  const bf16 *table; /* TABLED: the result for each number in bf16 */
} After;

/* ---------------------------------------------------------------- linear layers, per instruction set */

/* What integers of weights are multiplied by and what is added, in groups of columns. In rows: scales (out, groups) of 2^shift
 * columns. In panels: scales and offsets (panels, groups, 16), and the sums of x (nodes, groups). */
typedef struct {
  const void *scale, *offset; /* fp32, or fp16 where `half` */
  const float *sums;
  int64_t groups; /* 0 for weights without scales */
  int shift, half;
  const int32_t *chosen; /* in panels: the steps that are read, in order, and SOONER_STEPS to be fetched; or NULL for all */
  int64_t count;         /* of steps that are read */
  const char *next;      /* in rows: what is fetched meanwhile, or NULL for the rows that follow */
} Factors;

/* Panels of weights that have their scales within them. Rows come in blocks of columns: a scale, an offset perhaps, and the
 * integers of the block. These two are fp16 numbers; or, where they are `fine`, bytes times numbers in fp16, which SUPER
 * columns share and which come before them. (Bytes have signs, or where there are offsets, six bits.) Each is there for the
 * sixteen rows of the panel. */
typedef struct {
  int bits, offset, fine; /* bits of an integer, TABLE for four that choose one of sixteen numbers */
} Blocks;

enum { SUPER = 256, TABLE = 3 };
/* Nodes that are multiplied by tiles of bytes, at least: by blocks of 32 columns, and by super-blocks. */
enum { FEWEST_FOR_TILES = 7, FEWEST_OF_SUPERS = 4 };
#define CODE_OF_BLOCKS(BITS, OFFSET, FINE) ((BITS) | (OFFSET) << 4 | (FINE) << 5)
#define EVERY_COARSE_BLOCKS(DO) DO(4, 0, 0) DO(4, 1, 0) DO(5, 0, 0) DO(5, 1, 0) DO(8, 0, 0) DO(TABLE, 0, 0)
#define EVERY_FINE_BLOCKS(DO) DO(4, 1, 1) DO(5, 1, 1) DO(6, 0, 1) DO(TABLE, 0, 1)
#define EVERY_BLOCKS(DO) EVERY_COARSE_BLOCKS(DO) EVERY_FINE_BLOCKS(DO)

#define ONE_BY_ONE EVERY_BLOCKS /* the blocks that are multiplied one by one, not by super-blocks */

IN Blocks blocks_of(int code) { return (Blocks){code & 15, code >> 4 & 1, code >> 5 & 1}; }
IN int columns_of_blocks(Blocks form) { return form.bits == 6 ? 16 : 32; }

/* Bytes of a block of a row: of its integers, and in all, but for what SUPER columns share. */
IN int bytes_of_integers(Blocks form) { return columns_of_blocks(form) * (form.bits == TABLE ? 4 : form.bits) / 8; }
IN int bytes_of_row(Blocks form) { return bytes_of_integers(form) + (1 + form.offset) * (form.fine ? 1 : 2); }

/* What is to be taken from their integers. */
IN int half_of_blocks(Blocks form) { return form.offset ? 0 : form.bits == TABLE ? 128 : 1 << (form.bits - 1); }

/* Whether there are such panels, of so many columns. */
IN int blocks_fit(int code, int64_t columns) {
  const Blocks form = blocks_of(code);
#define SAME(BITS, OFFSET, FINE) code == CODE_OF_BLOCKS(BITS, OFFSET, FINE) ||
  return (EVERY_BLOCKS(SAME) 0) && columns % (form.fine ? SUPER : columns_of_blocks(form)) == 0;
#undef SAME
}

/* Bytes of a row in such panels, as sixteen rows share them. */
IN int64_t bytes_of_blocks(int code, int64_t columns) {
  const Blocks form = blocks_of(code);
  return columns / columns_of_blocks(form) * bytes_of_row(form) + (form.fine ? columns / SUPER * 2 * (1 + form.offset) : 0);
}

/* How nodes are written in fixed point: bytes of a number, columns of a block, what is added to the weights; and where `mixed`
 * with the columns in the order in which PANEL_INT4 has them. */
typedef struct {
  int digits, columns, half, mixed;
  int group; /* of super-blocks: the columns that share a scale, or else 0. `half` is -1 there where tiles multiply weights with
                their signs, which need no sums of x. */
} Fixed;

/* What follows the bytes of a block of a node. */
typedef struct {
  int32_t high, low; /* minus `half` times the sums of the first sixteen bits, and of the last byte of three */
  float scale, sum;  /* its power of two; the sum of its numbers */
} Behind;

/* What follows a super-block of a node: its power of two, and for each group of columns the sum of its numbers, where weights
 * have offsets, or else, for each plane, minus `half` times the sum there. With it a super-block has an odd number of lines of
 * the cache, so that nodes do not share the lines of one set. */
typedef struct {
  float scale;
  union {
    float sums[SUPER / 32];
    int32_t halves[SUPER / 16][3];
  };
  char pad[124];
} BehindSuper;

IN int64_t bytes_of_super(int digits) { return digits * SUPER + (int64_t)sizeof(BehindSuper); }

IN BehindSuper *behind_super(const char *x, int digits) { return (BehindSuper *)(x + digits * SUPER); }

IN float power_of_two(int exponent) {
  const uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

/* The power of two above the greatest number of a block, of which these are the bits, by a margin of 2^15 / 32639; at least
 * -100, for which numbers are zeros. */
IN int exponent_of(uint32_t greatest) {
  float most;
  memcpy(&most, &greatest, sizeof most);
  most *= 1.00396f;
  memcpy(&greatest, &most, sizeof most);
  const int exponent = (int)(greatest >> 23) - 126;
  return exponent < -100 ? -100 : exponent;
}

/* Those of panels from row r on, and of nodes from m on. */
IN Factors part_of(const Factors *f, int64_t r, int64_t m) {
  const int64_t bytes = r * f->groups * (f->half ? 2 : 4);
  Factors part = *f;
  if (f->scale) part.scale = (const char *)f->scale + bytes;
  if (f->offset) part.offset = (const char *)f->offset + bytes, part.sums += m * f->groups;
  return part;
}

typedef void (*Linear)(const void *, int64_t, int64_t, const void *, int64_t, int64_t, float *, int64_t, const Factors *);

/* What the kernels name:
 *   SET(name)       name with the set's suffix        OF_LANES(name)  with the number of its lanes
 *   TARGET          the attribute that allows its instructions
 *   VEC, FLOATS     a vector of fp32, its lanes       ZERO, STORE     of it
 *   OPERAND, LANES  a factor, its numbers             LOAD            reads one; SPREAD, SPREAD_X repeat one of weights, of x
 *   X               the numbers of x                  DOT(v, u, acc)  acc plus the products of the lanes; FMA of fp32
 *   WIDEN...        weights of other formats to OPERAND
 *   TALL            rows of w in a tile               SUMS            the sums over the lanes of a tile's accumulators
 *   FEW             nodes up to which rows of w are streamed: as many accumulators as there are registers for
 *   ACROSS_VALUES   vectors of values at a time
 *   ADD ... MIN     of fp32                           WHERE_...       lanes of v where x is so, of `other` elsewhere
 *   HALF_OF_POWER   2^(n - 1) for the integers n in the lower bits of floats
 *   ADD_BY_EIGHT    adds a vector to a sum of eight lanes, in the order of its lanes; MOST_BY_EIGHT the highest of each
 */

/* The j-th numbers of eight pairs of bf16. */
AVX2 IN __m256 half_of_pairs8(const bf16 *p, int j) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
  return _mm256_castsi256_ps(j ? _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(pairs, 16));
}

/* The j-th integers of four bits, of eight numbers that hold eight each: the even ones in the lower half. */
AVX2 IN __m256 nibbles8(const uint32_t *p, int j) {
  const __m256i bits = _mm256_set1_epi32(28 - 16 * (j % 2) - 4 * (j / 2));
  const __m256i moved = _mm256_sllv_epi32(_mm256_loadu_si256((const __m256i *)p), bits);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(moved, 28));
}

/* 2^(n - 1) for the integers n in the lower bits of floats. */
AVX2 IN __m256 half_of_power8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(n), _mm256_set1_epi32(126)), 23));
}

#define SET(name) name##_avx2
#define OF_LANES(name) name##8
#define TARGET AVX2
#define VEC __m256
#define FLOATS 8
#define ZERO _mm256_setzero_ps
#define STORE _mm256_storeu_ps
#define OPERAND __m256
#define LANES 8
#define LOAD(p) _mm256_loadu_ps(p)
#define LOAD_FLOATS(p) _mm256_loadu_ps(p)
#define SPREAD _mm256_set1_ps
#define SPREAD_X(p) _mm256_broadcast_ss(p)
#define X float
#define DOT _mm256_fmadd_ps
#define FMA _mm256_fmadd_ps
#define MUL _mm256_mul_ps
#define ADD _mm256_add_ps
#define SUB _mm256_sub_ps
#define DIV _mm256_div_ps
#define MAX _mm256_max_ps
#define MIN _mm256_min_ps
#define HALF_OF_POWER half_of_power8
#define WHERE_NAN(x, v, other) _mm256_blendv_ps(other, v, _mm256_cmp_ps(x, x, _CMP_UNORD_Q))
#define WHERE_LESS(x, y, v, other) _mm256_blendv_ps(other, v, _mm256_cmp_ps(x, y, _CMP_LT_OQ))
#define ZERO_WHERE_LESS(x, y, v) _mm256_andnot_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ), v)
#define WHERE_FIRST(n, v, other) _mm256_blendv_ps(other, v, _mm256_castsi256_ps(first8(n)))
#define ADD_BY_EIGHT _mm256_add_ps
#define MOST_BY_EIGHT(v) (v)
#define SUMS sums8
#define TALL 3
#define FEW 3
#define ACROSS 4
#define WIDEN widen8
#define WIDEN_HALF(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define WIDEN_INT8 widen_int8_8
#define HALF_OF_PAIRS half_of_pairs8
#define NIBBLES nibbles8
#define ACROSS_VALUES 2
#include "lanes.inc"
#include "linear.inc"
#include "panels.inc"
#undef SET
#undef TARGET
#undef OPERAND
#undef LANES
#undef LOAD
#undef SPREAD_X
#undef DOT
#undef WIDEN
#undef ADD

#ifdef __x86_64__
#undef VEC
#undef FLOATS
#undef ZERO
#undef STORE
#undef LOAD_FLOATS
#undef SPREAD
#undef FMA
#undef MUL
#undef SUB
#undef DIV
#undef MAX
#undef MIN
#undef HALF_OF_POWER
#undef WHERE_NAN
#undef WHERE_LESS
#undef ZERO_WHERE_LESS
#undef WHERE_FIRST
#undef ADD_BY_EIGHT
#undef MOST_BY_EIGHT
#undef OF_LANES
#undef SUMS
#undef TALL
#undef FEW
#undef ACROSS
#undef WIDEN_HALF
#undef WIDEN_INT8
#undef HALF_OF_PAIRS
#undef NIBBLES
#undef ACROSS_VALUES

AVX512 IN __m512 widen16(const bf16 *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

AVX512 IN __m512 widen_int8_16(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

AVX512 IN __m512 half_of_pairs16(const bf16 *p, int j) {
  const __m512i pairs = _mm512_loadu_si512(p);
  return _mm512_castsi512_ps(j ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(pairs, 16));
}

/* A permutation reads four bits of a lane's index: as many as an integer has. */
AVX512 IN __m512 nibbles16(const uint32_t *p, int j) {
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), (unsigned)(16 * (j % 2) + 4 * (j / 2))), values);
}

/* The quarters of four vectors, added in the order of _mm512_reduce_add_ps: the halves, then theirs. */
AVX512 IN __m512 quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* The next step of the same sum, for two such vectors. */
AVX512 IN __m512 pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

/* The sums of a tile of accumulators (rows, nodes) to y (nodes, rows), each as _mm512_reduce_add_ps has it. */
AVX512 IN void sums16(int rows, int nodes, int step, const __m512 *acc, float *y, int64_t ldy) {
  __m512 q[4];
  UNROLL for (int r = 0; r < 4; r++) {
    const __m512 *a = acc + (r < rows ? r : 0) * step;
    q[r] = quarters(a[0], a[nodes > 1], a[nodes > 2 ? 2 : 0], a[nodes > 3 ? 3 : 0]);
  }
  const __m512 p = pairs(q[0], q[1]), s = pairs(q[2], q[3]);
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(p, s, 0x88), _mm512_shuffle_ps(p, s, 0xdd));
  const __mmask8 kept = (__mmask8)((1 << rows) - 1);
  _mm_mask_storeu_ps(y, kept, _mm512_castps512_ps128(all));
  if (nodes > 1) _mm_mask_storeu_ps(y + ldy, kept, _mm512_extractf32x4_ps(all, 1));
  if (nodes > 2) _mm_mask_storeu_ps(y + 2 * ldy, kept, _mm512_extractf32x4_ps(all, 2));
  if (nodes > 3) _mm_mask_storeu_ps(y + 3 * ldy, kept, _mm512_extractf32x4_ps(all, 3));
}

AVX512 IN __m512 half_of_power16(__m512 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(n), _mm512_set1_epi32(126)), 23));
}

AVX512 IN __m512 rounded16(__m512 a, int narrow) {
  if (!narrow) return a;
  __m512i u = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  u = _mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000));
  return _mm512_mask_mov_ps(_mm512_castsi512_ps(u), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}

/* The first eight lanes, then the others. */
AVX512 IN __m256 add_by_eight16(__m256 sum, __m512 a) {
  return _mm256_add_ps(_mm256_add_ps(sum, _mm512_castps512_ps256(a)), _mm512_extractf32x8_ps(a, 1));
}

#define SET(name) name##_avx512
#define OF_LANES(name) name##16
#define TARGET AVX512
#define VEC __m512
#define FLOATS 16
#define ZERO _mm512_setzero_ps
#define STORE _mm512_storeu_ps
#define OPERAND __m512
#define LANES 16
#define LOAD(p) _mm512_loadu_ps(p)
#define LOAD_FLOATS(p) _mm512_loadu_ps(p)
#define SPREAD _mm512_set1_ps
#define SPREAD_X(p) _mm512_set1_ps(*(p))
#define DOT _mm512_fmadd_ps
#define FMA _mm512_fmadd_ps
#define MUL _mm512_mul_ps
#define ADD _mm512_add_ps
#define SUB _mm512_sub_ps
#define DIV _mm512_div_ps
#define MAX _mm512_max_ps
#define MIN _mm512_min_ps
#define HALF_OF_POWER half_of_power16
#define WHERE_NAN(x, v, other) _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), v)
#define WHERE_LESS(x, y, v, other) _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), v)
#define ZERO_WHERE_LESS(x, y, v) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ), v)
#define WHERE_FIRST(n, v, other) _mm512_mask_mov_ps(other, (__mmask16)((1 << (n)) - 1), v)
#define ADD_BY_EIGHT add_by_eight16
#define MOST_BY_EIGHT(v) _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))
#define SUMS sums16
#define TALL 4
#define FEW 6
#define ACROSS 6
#define WIDEN widen16
#define WIDEN_HALF(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define WIDEN_INT8 widen_int8_16
#define HALF_OF_PAIRS half_of_pairs16
#define NIBBLES nibbles16
#define ACROSS_VALUES 4
#include "lanes.inc"
#include "linear.inc"
#include "panels.inc"
#undef SET
#undef TARGET
#undef OPERAND
#undef LANES
#undef LOAD
#undef SPREAD_X
#undef X
#undef DOT
#undef WIDEN
#undef ADD
#undef WIDEN_INT8
#undef NIBBLES

/* Products of bf16 by the instruction for them: it adds a pair of products to a lane, odd columns after even ones, each
 * sum rounded to nearest, with denormal numbers as zeros. */
BF16 IN __m512bh load_bf16(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

BF16 IN __m512bh spread_pair(const bf16 *p) {
  int pair;
  memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

/* Two columns of sixteen integers as pairs: a float that holds one has zeros where a bf16 has none. */
BF16 IN __m512bh widen_int8_pairs(const int8_t *p) {
  const __m512i odd = _mm512_castps_si512(widen_int8_16(p + 16)), even = _mm512_castps_si512(widen_int8_16(p));
  return (__m512bh)_mm512_or_si512(odd, _mm512_srli_epi32(even, 16));
}

/* The j-th pairs of integers of four bits. A permutation of 32 numbers reads five bits of an index, one more than there
 * are, so that each number is there twice. */
BF16 IN __m512bh nibble_pairs(const uint32_t *p, int j) {
  const __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
  const __m512i moved = _mm512_srli_epi32(_mm512_loadu_si512(p), (unsigned)(4 * j));
  return (__m512bh)_mm512_permutexvar_epi16(moved, _mm512_broadcast_i64x4(values));
}

#define SET(name) name##_units
#define TARGET BF16
#define OPERAND __m512bh
#define LANES 32
#define LOAD load_bf16
#define SPREAD_X spread_pair
#define X bf16
#define DOT(v, u, acc) _mm512_dpbf16_ps(acc, v, u)
#define WIDEN_INT8 widen_int8_pairs
#define NIBBLES nibble_pairs
#include "linear.inc"
#include "panels.inc"

/* A row of x in bf16, zeros up to a multiple of 32. */
BF16 static void narrow_row(const float *x, int64_t width, bf16 *to) {
  for (int64_t k = 0; k < width; k += 16) {
    const int64_t left = width - k;
    const __m512 v = _mm512_maskz_loadu_ps(left < 16 ? (__mmask16)((1 << left) - 1) : (__mmask16)0xffff, x + k);
    _mm256_storeu_si256((__m256i *)(to + k), (__m256i)_mm512_cvtneps_pbh(v));
  }
  if ((width + 15) / 16 % 2) _mm256_storeu_si256((__m256i *)(to + (width + 15) / 16 * 16), _mm256_setzero_si256());
}

#include "tiles.inc"
#undef SET
#undef TARGET
#undef OPERAND
#include "vnni.inc"
#include "tile_integers.inc"
#undef LOAD_BYTES
#undef EVERY_BYTE
#undef SPREAD_FOUR
#undef BOTH
#undef OTHER_SIGNS
#undef WHERE_ALSO
#undef ADD_INTEGERS
#undef TO_FLOATS
#undef AS_STEPS
#undef OF_EIGHT_BITS
#undef TO_LEFT
#undef TO_RIGHT
#undef BY_ROW
#undef FROM_TABLE
#undef DOT_OF_INTEGERS
#undef SET
#undef TARGET
#undef EACH
#undef TOPS
#undef STEPS_TOGETHER
#include "twice.inc"
#include "madd.inc"
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define KNOWS_AVX_VNNI
#define SET(name) name##_vex
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define DPBUSD _mm256_dpbusd_avx_epi32
#include "half_vnni.inc"
#endif

/* The same instruction as AVX512-VNNI encodes it, with registers and all else of AVX2: for processors without AVX512-VBMI. */
AVX2 IN __m256i dpbusd_evex(__m256i acc, __m256i w, __m256i x) {
  __asm__("vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}

#define SET(name) name##_evex
#define TARGET AVX2
#define DPBUSD dpbusd_evex
#include "half_vnni.inc"
#else
#include "neon_bf16.inc"
#include "twice.inc"
#include "sdot.inc"
#endif

/* Of weights: GROUPED has a scale for every few of a row; from PANELS on they lie in panels. */
enum Form { FLOAT, BFLOAT, INT8, GROUPED, PANELS, PANEL_FLOAT = PANELS, PANEL_BFLOAT, PANEL_INT8, PANEL_INT4, PANEL_BLOCKS, FORMS };

static Linear linears[FORMS] = {linear_float_avx2, linear_bf16_avx2, linear_int8_avx2, linear_grouped_avx2,
                                panels_float_avx2, panels_bf16_avx2, panels_int8_avx2, panels_int4_avx2};
static Linear by_units[FORMS] = {[BFLOAT] = linear_bf16_units, [PANEL_BFLOAT] = panels_bf16_units,
                                 [PANEL_INT8] = panels_int8_units, [PANEL_INT4] = panels_int4_units};
static Linear by_integers[FORMS]; /* with x in fixed point, see integers.inc; or NULL */
static void (*fix)(const float *, int64_t, const Fixed *, char *, int64_t); /* a row of x for it ... */
static void (*fix_supers)(const float *, int64_t, const Fixed *, char *, int64_t); /* ... in super-blocks, or NULL */
static int by_pairs;   /* numbers of x lie there in two bytes each, not in one */
static int for_plain[2]; /* whether it takes plain integers where the model computes in fp32, for which 24 bits may cost more than
                            floats, and in bf16, for which tiles of bf16 cost less */
typedef void (*Values)(const float *, int64_t, int64_t, int64_t, const void *, int64_t, int64_t, float *, int64_t);
static Values values_of[2] = {values_float_avx2, values_bf16_avx2}; /* by whether they are bf16 */
static void (*softmax)(float *, int64_t, float, float, const float *) = softmax8;
static int64_t (*finish)(const After *, int64_t, int64_t, const float *, const float *, float *, int64_t) = finish8;
static int64_t (*multiply_of[2])(float *, int64_t) = {multiply_avx2, multiply_avx2}; /* likewise */
static const int64_t bits_of[FORMS] = {32, 16, 8, 8, 32, 16, 8, 4}; /* but of PANEL_BLOCKS */
static const int64_t columns_of[FORMS] = {1, 1, 1, 1, 1, 2, 4, 8, 16}; /* a row has a multiple of so many */
static int units;     /* where the model computes in bf16, products by the instruction for it, with x in bf16 */

/* ---------------------------------------------------------------- the list of operations */

enum Kind {
  EMBED, RMS_NORM, LAYER_NORM, LINEAR, GATED, ACTIVATE, PREPARE, ATTEND, ADD, SCALE, CAP, GATHER,
  ROUTE, PLAN, DEAL, COMBINE, CROSS, CLAMP, COLUMNS, GLU, XIELU, MULTIPLY, GATE, CONVOLVE, RATES, RECUR, GATED_NORM,
  PICK, HEADS, LATENT, SCAN, UNIT, MIX, MATCH, EXCEED, SPARE, CHOOSE
};

enum { ALONE = 4, BY_PAIRS = 8 }; /* bits of a mode: see there */

typedef struct {
  int32_t kind;
  int32_t wait;   /* the next operation reads this one's result */
  int32_t src, other, dst;
  int32_t narrow; /* the model computes in bf16: results are rounded so */
  int32_t tail;   /* runs over the gathered nodes only */
  int32_t mode;   /* activation; RMS_NORM, PREPARE: 1 = one rounding; LINEAR, COLUMNS: 1 = added to dst; EMBED: 1 = scales all;
                     HEADS: 1 = factors are (in, out); LATENT: 1 = one rounding;
                     ROUTE: 1 = the weights of a node are divided by their sum, 2 = weights are sigmoids, 3 = both,
                     4 = one after the other, by a softmax over scores that are no more than `eps` less, relatively,
                     6, 7 = 2, 3 with experts chosen by their scores, not the sigmoids; DEAL: 1 = times the experts' weights;
                     COMBINE: 1 = products are not rounded, 2 = without weights; SCAN: which recurrence;
                     ATTEND: 1 = a node sees its own part of the positions, of `window` each, 2 = biases are by the
                     positions of keys, and are added to scaled scores, the sums rounded;
                     MIX: 1 = added to dst; RMS_NORM, PREPARE, ATTEND: and 4 = as torch computes a single token, which
                     ATTEND does in bf16 only, of all positions, without biases, sinks or caps, and with 8 in the order
                     of MKL with instructions for bf16 */
  int64_t out, in;
  int64_t heads, kv_heads, head, rotary, window; /* RECUR: heads of values, and of queries and keys, and size of these;
                                                    CONVOLVE: head inputs of a channel; SCAN: heads parts of the
                                                    channels, each with its own keys, and head numbers of a state; GATE, GATED_NORM: of the row;
                                                    LATENT, ATTEND: head latents and, where `in` is not 0, `in`
                                                    rotated numbers of a key, one for all heads; HEADS: of the row;
                                                    PREPARE: kv_heads 0 where there are queries only; RMS_NORM: heads
                                                    parts of a row, each by itself, or 0 for one; MIX: parts of src
                                                    and of dst, and size of these; EMBED: heads tokens of the table, or
                                                    0 where it has all: the others are in `offsets`, not to be scaled,
                                                    or where that is NULL the first stands for them;
                                                    ROUTE: groups of experts, those kept, experts that a group is
                                                    judged by; CHOOSE: heads scores, and kv_heads of them are chosen;
                                                    LINEAR, GATED: nodes choose among `heads` groups of inputs, or
                                                    kv_heads of outputs, of `step` each, by the marks in `other`; 0
                                                    where all run */
  int64_t step;                         /* PREPARE, ATTEND: from head to head in the rows of q ...; RECUR: size of values;
                                           GATE: from head to head in the row of the gates, the first at k_at; 1 where
                                           each has one; PICK: from part to part of src, from k_at on, to v_at of dst */
  int64_t kv_step;                      /* ... and in those of k and v; LATENT, HEADS: in those of the result ... */
  int64_t k_at, v_at, q_at;             /* ... which begin here in theirs; RECUR: and queries, all in one row; SCAN: keys and
                                           queries, in the rows of `other`; LATENT, HEADS:
                                           k_at is of the numbers that they read of a head, v_at of the rows of its
                                           factor, `apart` from head to head */
  int64_t experts, top;                 /* number of experts, 0 for none, and of experts per node */
  int64_t apart;                        /* LINEAR, GATED: from expert to expert, in rows of the weights;
                                           COLUMNS: from row to row of the weights, (in, apart) per expert */
  int64_t blank;                        /* EMBED: the token that has no position, or -1 */
  int64_t groups;                       /* LINEAR, GATED: of columns that share a scale; of plain weights, of `shift`
                                           columns that are added up first; EMBED: of a table in PANEL_BLOCKS, what blocks it has */
  const void *weight, *second;          /* LINEAR, GATED: as the model keeps them; EMBED: tokens, in rows or panels, and positions or NULL;
                                           SCAN: logarithms of rates (head, in); UNIT: of channels (in,);
                                           ATTEND: keys and values in fewer bits, in panels of `form`, `apart` places of
                                           each slot and head, or NULL */
  const void *scales, *second_scales;   /* of quantised weights; INT8: (out,), padded to 16; others: see Factors;
                                           ATTEND: by chunk of places and number of a key; by place */
  const void *offsets, *second_offsets; /* of quantised weights in panels, or NULL */
  const float *bias, *other_bias;       /* small vectors, fp32, padded to 16; ATTEND: (heads, out) by distance, or by position;
                                           ROUTE: added to the weights where experts are chosen, or NULL, and factors
                                           of an expert's weight, or NULL; SCALE: (1,), in the place of `scale`, or NULL, and
                                           likewise (in,); MIX: (kv_heads, heads), in the place of `other`, or NULL;
                                           RECUR: (heads,), of the values that are added to the result, or NULL, and rates
                                           of all tokens, as in rows of `other`, or NULL;
                                           SCAN: of time steps, and of the inputs that are added to the result, or bonus and
                                           logarithm of a decay; UNIT: of the gates of inputs and of what is kept */
  const float *q_norm, *k_norm;         /* PREPARE: per head, or NULL */
  const float *sinks;                   /* ATTEND: (heads,), scores of nothing in the softmax, or NULL */
  void *keys, *values;                  /* GATED: values is what the activation TABLED makes of each number in bf16;
                                           (slots, kv_heads, capacity, head); latents and the rotated parts of keys; CONVOLVE, RECUR, SCAN: states, and what drafts
                                           bring to them (slots, drafted, ...) */
  const float *cosine, *sine;           /* (positions, rotary) */
  const float *factor;                  /* PREPARE: (positions,), of the queries after the rotation, or NULL */
  float eps, scale, cap;                /* ROUTE: added to the sum, factor of the weights, least sum; MIX: eps is added to
                                           the coefficients; MATCH: eps is the least mean; SPARE: scale is the
                                           cosine above which a node skips what follows */
  int32_t norm_once;                    /* PREPARE: the norms round once; ROUTE: the router computes in fp32 */
  int32_t form;                         /* LINEAR, GATED: of the weights; ROUTE: of the bias */
  int32_t shift;                        /* GROUPED: a group is 2^shift columns; EMBED: of the positions;
                                           ATTEND: index of distance 0 in the biases */
  int32_t interleaved;                  /* PREPARE, LATENT: 1 = neighbours are rotated together, not halves;
                                           LATENT: 2 = likewise, and the result is laid out in halves */
  int32_t norm_last;                    /* PREPARE: the norms follow the rotation; GATED_NORM: the gate */
  int32_t bias_last;                    /* COLUMNS: the bias is added to the rounded product */
  int32_t half;                         /* LINEAR, GATED: scales and offsets are fp16 */
  int32_t spared;                       /* 1 = left out once all nodes skip feed-forwards */
} Op;

/* The routing of nodes to experts. Rows are permuted so that those of one expert are contiguous. */
typedef struct {
  int64_t expert, first, rows;          /* at most CHUNK rows */
} Part;

typedef struct {
  int64_t parts;
  Part *part;
  int64_t *row;                         /* (nodes, top): by rank, the expert, and once that is planned the row there */
  int64_t *next;                        /* (experts,) */
} Plan;

typedef struct {
  int64_t nodes, tail, vocabulary, capacity;
  int64_t positions;                    /* that tables have */
  int64_t sources, source_slots;        /* CROSS: keys and values of a source, at most, and number of sources */
  const int64_t *token;                 /* ids, or NULL where `embeds` is given */
  const float *embeds;                  /* (nodes, hidden) */
  const int64_t *slot, *position;       /* of each node; nodes of a slot are contiguous */
  const int64_t *place;                 /* where a node's keys and values are written */
  const int64_t *base;                  /* a node sees the places [0, base) ... */
  const int64_t *extra_from;            /* ... and the places extra[extra_from[i] .. extra_from[i + 1]) */
  const int64_t *extra, *extra_position;
  const int64_t *source_lengths;        /* CROSS: source positions that a node sees; of none the result is zero ... */
  const int64_t *source_slot;           /* ... and which source that is; the same for all nodes of a group */
  const int64_t *gather;                /* the nodes of the tail */
  const int64_t *rounded;               /* by slot: so many first places are read in fewer bits, where there are such keys */
  int64_t groups;                       /* attention: groups of nodes of one slot */
  const int64_t *group_from;            /* (groups + 1,) */
  int64_t longest;                      /* most positions that a node sees */
  int64_t slots;                        /* of the cache */
  int64_t extras;                       /* entries of `extra` */
  int64_t rows;                         /* of layers with states: the rows of the pass, or 0 */
  const int64_t *row_from;              /* (rows + 1,): their nodes */
  const int64_t *parent;                /* (nodes,): the node before it, or -1 */
  const int64_t *settled;               /* (rows,): so many first nodes, a chain, are committed by the pass */
  const int64_t *path_from, *path;      /* what was committed of the last pass's drafts: their places in `drafted` */
  int64_t drafted;                      /* nodes of a row that are not settled, at most */
  int64_t buffers;
  const int64_t *room;                  /* (buffers,): floats in each */
  float **buffer;
  const int64_t *stride;                /* floats from row to row; multiples of 16 */
  int64_t *sparing;                     /* (nodes + 1,), or NULL: 1 where a node skips feed-forwards, -1 where it never does;
                                           at the end how many skip them */
  Plan *plan;                           /* the pass's own */
  int64_t reach;                        /* the places that any node sees are before it; set by run() */
} Pass;

typedef struct {
  int64_t next;
  char pad[56];
} Counter;

/* A barrier between operations. Threads spin at first, because the wait is mostly a few microseconds, then sleep,
 * because on a busy machine the thread that they wait for needs a core. */
typedef struct {
  int32_t arrived, round, asleep;
  char pad[52];
} Barrier;

static void meet(Barrier *barrier, int threads) {
  const int32_t round = __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&barrier->round, round + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&barrier->asleep, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &barrier->round, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
#endif
    return;
  }
  for (int i = 0; i < SPINS; i++) {
    if (__atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE) != round) return;
    PAUSE();
  }
  __atomic_add_fetch(&barrier->asleep, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&barrier->round, __ATOMIC_SEQ_CST) == round)
#ifdef __linux__
    syscall(SYS_futex, &barrier->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
#else
    sched_yield();
#endif
  __atomic_sub_fetch(&barrier->asleep, 1, __ATOMIC_SEQ_CST);
}

/* The next task: a thread's own share first, in order, then what others have left. */
static inline int64_t claim(Counter *counters, int64_t total, int threads, int self, int *turn) {
  for (; *turn < threads; ++*turn) {
    const int of = (self + *turn) % threads;
    const int64_t from = total * of / threads, to = total * (of + 1) / threads;
    if (__atomic_load_n(&counters[of].next, __ATOMIC_RELAXED) >= to - from) continue;
    const int64_t task = from + __atomic_fetch_add(&counters[of].next, 1, __ATOMIC_RELAXED);
    if (task < to) return task;
  }
  return -1;
}

#define ROW(i, node) (pass->buffer[i] + (node) * pass->stride[i])

/* Eight numbers of a row of `width`, zeros beyond its end. */
AVX2 IN __m256 row8(const void *row, int64_t k, int64_t width, int narrow) {
  const size_t n = (size_t)(width - k < L ? width - k : L);
  if (narrow) {
    bf16 part[L] = {0};
    memcpy(part, (const bf16 *)row + k, sizeof(bf16) * n);
    return widen8(part);
  }
  float part[L] = {0};
  memcpy(part, (const float *)row + k, sizeof(float) * n);
  return _mm256_loadu_ps(part);
}

/* As row8, of a row of a table in panels whose first word of 32 bits is given: a number, or two of bf16. */
AVX2 IN __m256 panel8(const uint32_t *words, int64_t k, int64_t width, int narrow) {
  uint32_t part[L] = {0};
  const int64_t each = narrow ? 2 : 1, first = k / each, end = (width + each - 1) / each;
  for (int64_t i = 0; i < L / each && first + i < end; i++) part[i] = words[(first + i) * PANEL];
  return row8(part, 0, L, narrow);
}

/* The row-th of sixteen numbers in fp16. */
AVX2 IN float half_at(const char *halves, int64_t row) {
  float found[L];
  _mm256_storeu_ps(found, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + row / L * L * 2))));
  return found[row % L];
}

/* As row8, of a row of a panel that has its scales within it: (integer - half) * scale + offset, as `Blocks.matrix`. */
AVX2 static __m256 block8(const char *panel, int code, int64_t row, int64_t k, int narrow) {
  static const int8_t table[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  const Blocks form = blocks_of(code);
  const int columns = columns_of_blocks(form), factors = 1 + form.offset, size = form.fine ? PANEL : 2 * PANEL;
  const int half = form.offset || form.bits == TABLE ? 0 : 1 << (form.bits - 1);
  const int each = form.bits == TABLE ? 0 : form.bits - 4, per = each ? 8 / each : 1; /* bits above four */
  const int64_t block = PANEL * bytes_of_row(form), units = 2 * PANEL * factors, super = units + SUPER / columns * block;
  const char *shared = panel + (form.fine ? k / SUPER * super : 0);
  const char *at = form.fine ? shared + units + k % SUPER / columns * block : panel + k / columns * block;
  const char *integers = at + factors * size;
  float factor[2] = {0}, numbers[L];
  for (int i = 0; i < factors; i++) {
    const char *own = at + i * size;
    factor[i] = form.fine ? half_at(shared + i * 2 * PANEL, row) * (float)(int8_t)own[row] : half_at(own, row);
  }
  for (int i = 0; i < L; i++) {
    const int64_t c = k % columns + i, four = c / 4, place = row * 4 + c % 4;
    int q = (uint8_t)integers[(form.bits == 8 ? four : four / 2) * 4 * PANEL + place];
    if (form.bits != 8) q = q >> 4 * (four % 2) & 15;
    if (form.bits == 5 || form.bits == 6) {
      const int high = (uint8_t)integers[columns / 8 * 4 * PANEL + four / per * 4 * PANEL + place];
      q |= (high >> each * (four % per) & ((1 << each) - 1)) << 4;
    }
    numbers[i] = (float)(form.bits == TABLE ? table[q] : q - half) * factor[0];
    if (form.offset) numbers[i] += factor[1];
  }
  return rounded8(_mm256_loadu_ps(numbers), narrow);
}

AVX2 static void embed(const Op *op, const Pass *pass, int64_t node) {
  const int64_t width = op->in, bytes = width * (op->narrow ? 2 : 4), token = pass->embeds ? 0 : pass->token[node];
  const int further = !pass->embeds && op->heads && token >= op->heads;
  const int blocks = op->form == PANEL_BLOCKS && !pass->embeds, panels = op->form >= PANELS && !blocks && !pass->embeds && !further;
  const char *panel = (const char *)op->weight + (blocks ? token / PANEL * PANEL * bytes_of_blocks((int)op->groups, width) : 0);
  const uint32_t *words = (const uint32_t *)op->weight +
                          (panels ? token / PANEL * PANEL * (op->narrow ? (width + 1) / 2 : width) + token % PANEL : 0);
  const char *row = further && op->offsets ? (const char *)op->offsets + (token - op->heads) * bytes
                                           : (const char *)op->weight + (further ? 0 : token) * bytes;
  const void *given = pass->embeds ? (const void *)(pass->embeds + node * width) : row;
  const int scaled = op->scale != 1.0f && (op->mode || !pass->embeds) && !(further && op->offsets);
  const int narrow = op->narrow && !pass->embeds;
  const char *placed = NULL;
  if (op->second && (pass->embeds || token != op->blank)) {
    const int64_t at = pass->position[node] + op->shift;
    placed = (const char *)op->second + (at < op->out ? at : op->out - 1) * bytes;
  }
  float *y = ROW(op->dst, node);
  for (int64_t k = 0; k < width; k += L) {
    __m256 v = blocks   ? block8(panel, (int)op->groups, token % PANEL, k, narrow)
               : panels ? panel8(words, k, width, narrow)
                        : row8(given, k, width, narrow);
    if (scaled) v = rounded8(_mm256_mul_ps(v, _mm256_set1_ps(op->scale)), op->narrow);
    if (placed) v = rounded8(_mm256_add_ps(v, row8(placed, k, width, op->narrow)), op->narrow);
    _mm256_storeu_ps(y + k, v);
  }
}

#include "means.inc"

AVX2 IN void rms_row(const float *x, float *y, int64_t width, const float *weight, float eps, int narrow, int once,
                     float mean) {
  const __m256 r = _mm256_set1_ps(1.0f / sqrtf(mean + eps));
  for (int64_t k = 0; k < width; k += L) {
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + k), r);
    v = _mm256_mul_ps(rounded8(v, narrow && !once), _mm256_loadu_ps(weight + k));
    v = rounded8(v, narrow);
    if (width - k >= L) {
      _mm256_storeu_ps(y + k, v);
    } else {
      float part[L];
      _mm256_storeu_ps(part, v);
      memcpy(y + k, part, sizeof(float) * (size_t)(width - k));
    }
  }
}

AVX2 static void layer_norm(const Op *op, const float *x, float *y) {
  const int64_t width = op->in;
  __m256 total = _mm256_setzero_ps(), squares = _mm256_setzero_ps();
  for (int64_t k = 0; k < width; k += L) total = _mm256_add_ps(total, keep8(_mm256_loadu_ps(x + k), width - k));
  const __m256 mean = _mm256_set1_ps(sum8(total) / (float)width);
  for (int64_t k = 0; k < width; k += L) {
    __m256 v = keep8(_mm256_sub_ps(_mm256_loadu_ps(x + k), mean), width - k);
    squares = _mm256_fmadd_ps(v, v, squares);
  }
  const __m256 r = _mm256_set1_ps(1.0f / sqrtf(sum8(squares) / (float)width + op->eps));
  for (int64_t k = 0; k < width; k += L) {
    __m256 v = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + k), mean), r);
    v = _mm256_mul_ps(v, _mm256_loadu_ps((const float *)op->weight + k));
    if (op->bias) v = _mm256_add_ps(v, _mm256_loadu_ps(op->bias + k));
    _mm256_storeu_ps(y + k, keep8(rounded8(v, op->narrow), width - k));
  }
}

/* What a thread has for itself: room for attention; and for nodes in bf16, and the sums of their groups, which are those of
 * `op` from `first` on. */
typedef struct {
  float *scores, *queries, *extras;
  float *vectors, *states;              /* RECUR: directions of queries and keys, SCAN: rates; states of a slice of a head */
  int64_t *holders;
  uint32_t *keys;
  bf16 *x;
  float *sums;
  int32_t *chosen;                      /* see Factors */
  int64_t count;
  const Op *op;
  int64_t first;
} Worker;

static void (*attend_as_alone)(const Op *, const Pass *, int64_t, int64_t, Worker *); /* see alone.inc; or NULL */
static int of_alone; /* the bits of modes that it takes */

IN int64_t padded_to_32(int64_t width) { return (width + 31) / 32 * 32; }

/* From one node to the next in bf16: an odd number of cache lines, so that nodes do not share the lines of one set. */
IN int64_t apart_in_bf16(int64_t width) { return (width + 31) / 32 / 2 * 64 + 32; }

/* Whether a product takes its nodes in fixed point: that of integers in panels, in groups of whole blocks, where nodes do not
 * choose columns. */
IN int in_fixed_point(const Op *op) {
  return op->form == PANEL_BLOCKS ||
         (by_integers[op->form] && for_plain[!!op->narrow] && op->in / op->groups % 16 == 0 &&
          !(op->kind == LINEAR && op->heads));
}

IN Fixed fixed_of(const Op *op) {
  const int digits = op->narrow ? 2 : 3;
  if (op->form != PANEL_BLOCKS)
    return (Fixed){digits, op->in / op->groups % 32 ? 16 : 32, op->form == PANEL_INT4 ? 8 : 128, op->form == PANEL_INT4, 0};
  const Blocks form = blocks_of(op->shift);
  const int columns = columns_of_blocks(form), super = fix_supers && form.fine;
  return (Fixed){digits, super ? SUPER : columns, half_of_blocks(form), 0, super ? columns : 0};
}

IN int64_t bytes_of_block(Fixed fixed) {
  if (fixed.group) return bytes_of_super(fixed.digits);
  return (by_pairs ? 2 * fixed.digits - 2 : fixed.digits) * fixed.columns + (int64_t)sizeof(Behind);
}

/* Bytes of a row of weights. */
IN int64_t bytes_of_weights(const Op *op) {
  if (op->form != PANEL_BLOCKS) {
    const int64_t columns = columns_of[op->form];
    return (op->in + columns - 1) / columns * columns * bits_of[op->form] / 8;
  }
  return bytes_of_blocks(op->shift, op->in);
}

/* Whether a product takes its nodes in bf16. */
IN int in_bf16(const Op *op) {
  return units && by_units[op->form] && !in_fixed_point(op) &&
         (op->narrow || op->form == BFLOAT || op->form == PANEL_BFLOAT);
}

/* Whether a product of plain weights in panels is the sum of those of groups of columns. */
IN int in_parts(const Op *op) { return op->groups && !op->scales; }

/* Rows of the weights in a task. */
IN int64_t block_of(const Op *op) { return op->form < PANELS ? BLOCK : BROAD; }

/* One product: rows [first, first + rows) of the weights over the nodes at x; (nodes, BROAD) in y.
 *
 * next: rows that follow, as far from the first, where nodes choose them; or 0. */
AVX2 IN void product(const Op *op, const void *weight, const void *scales, const void *offsets, const Worker *worker,
                     const void *x, int64_t ldx, int64_t nodes, int64_t first, int64_t rows, int64_t next, float *y) {
  const int64_t row = bytes_of_weights(op);
  const char *w = (const char *)weight + first * row;
  const int chosen = op->kind == LINEAR && op->heads && op->form >= PANELS;
  const Factors whole = {scales, offsets, worker->sums, op->groups, op->shift, op->half,
                         chosen ? worker->chosen : NULL, worker->count, next ? w + next * row : NULL};
  const Factors part = part_of(&whole, first, 0);
  const Linear multiply = in_fixed_point(op) ? by_integers[op->form]
                          : !in_bf16(op)     ? linears[op->form]
                                             : by_units[op->form];
  multiply(x, ldx, nodes, w, rows, op->in, y, BROAD, &part);
  if (op->form == INT8)
    for (int64_t m = 0; m < nodes; m++)
      for (int64_t r = 0; r < rows; r += L)
        _mm256_storeu_ps(y + m * BROAD + r,
                         _mm256_mul_ps(_mm256_loadu_ps(y + m * BROAD + r), _mm256_loadu_ps((const float *)scales + first + r)));
}

/* The sums of the groups of a row of x. */
AVX2 static void group_sums(const float *x, int64_t width, int64_t groups, float *to) {
  const int64_t size = width / groups;
  for (int64_t g = 0; g < groups; g++, x += size) {
    __m256 sum = _mm256_setzero_ps();
    for (int64_t k = 0; k < size; k += L) sum = _mm256_add_ps(sum, _mm256_loadu_ps(x + k));
    to[g] = sum8(sum);
  }
}

/* Whether one of the nodes from m0 on chooses one of the inputs or outputs [first, last) of an operation. */
IN int any_chooses(const Op *op, const Pass *pass, int64_t m0, int64_t nodes, int64_t first, int64_t last) {
  for (int64_t m = 0; m < nodes; m++)
    for (int64_t group = first / op->step; group * op->step < last; group++)
      if (ROW(op->other, m0 + m)[group]) return 1;
  return 0;
}

/* Brings the nodes of an operation from m0 on to where its products read them: in bf16, with the sums of groups; and notes
 * the inputs that they choose. */
static void prepare_nodes(const Op *op, const Pass *pass, int64_t m0, int64_t nodes, Worker *worker) {
  if (worker->op == op && worker->first == m0) return;
  for (int64_t m = 0; m < nodes; m++) {
    const float *x = ROW(op->src, m0 + m);
    if (in_fixed_point(op)) {
      Fixed fixed = fixed_of(op);
      const int64_t bytes = bytes_of_block(fixed);
      if (fixed.group && fixed.half && nodes >= FEWEST_OF_SUPERS) fixed.half = -1;
      (fixed.group ? fix_supers : fix)(x, op->in, &fixed, (char *)worker->x + m * bytes, nodes * bytes);
      continue;
    }
    if (in_bf16(op)) narrow_row(x, op->in, worker->x + m * apart_in_bf16(op->in));
    if (op->offsets) group_sums(x, op->in, op->groups, worker->sums + m * op->groups);
  }
  if (op->kind == LINEAR && op->heads && op->form >= PANELS) {
    const int64_t columns = columns_of[op->form], steps = op->in / columns;
    worker->count = 0;
    for (int64_t step = 0; step < steps; step++)
      if (any_chooses(op, pass, m0, nodes, step * columns, (step + 1) * columns)) worker->chosen[worker->count++] = (int32_t)step;
    for (int64_t i = 0; i < SOONER_STEPS; i++) /* in the next panels */
      worker->chosen[worker->count + i] = worker->count ? worker->chosen[i % worker->count] + (int32_t)(BROAD / PANEL * steps) : 0;
  }
  worker->op = op;
  worker->first = m0;
}

/* The products of rows [first, first + rows) that one of the nodes chooses, as far as these lie apart in memory; others are
 * zero. */
AVX2 static void chosen_rows(const Op *op, const Pass *pass, const Worker *worker, const void *x, int64_t ldx, int64_t m0,
                             int64_t nodes, int64_t first, int64_t rows, float *one, float *two) {
  const int64_t unit = op->form >= PANELS ? PANEL : op->form == INT8 ? L : op->step, last = first + rows;
  memset(one, 0, sizeof(float) * (size_t)(nodes * BROAD));
  if (op->kind == GATED) memset(two, 0, sizeof(float) * (size_t)(nodes * BROAD));
#define CHOSEN(r) any_chooses(op, pass, m0, nodes, r, (r) + unit < last ? (r) + unit : last)
  int64_t r = first;
  while (r < last && !CHOSEN(r)) r += unit - r % unit;
  while (r < last) {
    int64_t end = r, next;
    do end += unit - end % unit;
    while (end < last && CHOSEN(end));
    if (end > last) end = last;
    for (next = end; next < last && !CHOSEN(next);) next += unit - next % unit;
    product(op, op->weight, op->scales, op->offsets, worker, x, ldx, nodes, r, end - r, next - r, one + r - first);
    if (op->kind == GATED)
      product(op, op->second, op->second_scales, op->second_offsets, worker, x, ldx, nodes, r, end - r, next - r,
              two + r - first);
    r = next;
  }
#undef CHOSEN
}

/* Rows [first, first + rows) of an expert's weights over the nodes [m0, m0 + nodes), with what follows the product; zeros
 * where a node does not choose them. */
AVX2 static void linear(const Op *op, const Pass *pass, int64_t expert, int64_t first, int64_t rows, int64_t m0,
                        int64_t nodes, Worker *worker) {
  const void *x = ROW(op->src, m0);
  const int64_t at = expert * op->apart + first;
  int64_t ldx = pass->stride[op->src];
  const int64_t ldy = pass->stride[op->dst];
  _Alignas(64) float one[CHUNK * BROAD], two[CHUNK * BROAD];
  float *dst = ROW(op->dst, m0) + first;
  prepare_nodes(op, pass, m0, nodes, worker);
  if (in_bf16(op)) {
    ldx = apart_in_bf16(op->in);
    x = worker->x;
  }
  if (in_fixed_point(op)) {
    ldx = fixed_of(op).digits;
    x = worker->x;
  }
  if (op->kv_heads) {
    chosen_rows(op, pass, worker, x, ldx, m0, nodes, first, rows, one, two);
  } else {
    product(op, op->weight, op->scales, op->offsets, worker, x, ldx, nodes, at, rows, 0, one);
    if (op->kind == GATED)
      product(op, op->second, op->second_scales, op->second_offsets, worker, x, ldx, nodes, at, rows, 0, two);
  }
  const int gated = op->kind == GATED;
  const After after = {op->bias ? op->bias + first : NULL, op->other_bias ? op->other_bias + first : NULL,
                       gated ? 1.0f : op->scale, op->narrow, op->mode, !gated && op->mode, op->values};
  const int64_t whole = finish(&after, nodes, rows, one, gated ? two : NULL, dst, ldy);
  for (int64_t m = 0; m < nodes; m++)
    for (int64_t r = whole; r < rows; r += L) {
      __m256 v = finished8(&after, r, one + m * BROAD, gated ? two + m * BROAD : NULL);
      const __m256i kept = first8(rows - r);
      float *y = dst + m * ldy + r;
      if (after.added) v = rounded8(_mm256_add_ps(_mm256_maskload_ps(y, kept), v), op->narrow);
      _mm256_maskstore_ps(y, kept, v);
    }
  for (int64_t m = m0; op->kv_heads && m < m0 + nodes; m++)
    for (int64_t i = first; i < first + rows; i++)
      if (!ROW(op->other, m)[i / op->step]) ROW(op->dst, m)[i] = 0.0f;
}

/* y (nodes, WIDE) += x (nodes, in) times `deep` rows of weights (in, apart), `vectors` vectors of outputs. */
AVX2 IN void columns_tile(const Op *op, const void *weight, int64_t deep, int vectors, int nodes, const float *x,
                          int64_t ldx, float *y) {
  __m256 acc[2][WIDE / L];
  UNROLL for (int m = 0; m < nodes; m++)
    UNROLL for (int v = 0; v < vectors; v++) acc[m][v] = _mm256_loadu_ps(y + m * WIDE + v * L);
  for (int64_t k = 0; k < deep; k++) {
    const int64_t at = k * op->apart, size = bits_of[op->form] / 8;
    const char *later = (const char *)weight + (at + SOON * op->apart) * size; /* rows are far apart in memory */
    for (int64_t byte = 0; byte < vectors * L * size; byte += 64) __builtin_prefetch(later + byte, 0, 3);
    UNROLL for (int v = 0; v < vectors; v++) {
      const __m256 w = op->form == BFLOAT ? widen8((const bf16 *)weight + at + v * L)
                                        : _mm256_loadu_ps((const float *)weight + at + v * L);
      UNROLL for (int m = 0; m < nodes; m++) acc[m][v] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + m * ldx + k), w, acc[m][v]);
    }
  }
  UNROLL for (int m = 0; m < nodes; m++)
    UNROLL for (int v = 0; v < vectors; v++) _mm256_storeu_ps(y + m * WIDE + v * L, acc[m][v]);
}

/* Outputs [first, first + rows) of a linear layer with weights (in, out): each is a sum over its inputs in order. */
AVX2 static void columns(const Op *op, const Pass *pass, int64_t expert, int64_t first, int64_t rows, int64_t m0,
                         int64_t nodes) {
  const int64_t ldx = pass->stride[op->src], ldy = pass->stride[op->dst], size = bits_of[op->form] / 8;
  const char *weight = (const char *)op->weight + (expert * op->in * op->apart + first) * size;
  const float *x = ROW(op->src, m0), *bias = op->bias ? op->bias + expert * op->out + first : NULL;
  float all[CHUNK * WIDE], *dst = ROW(op->dst, m0) + first;
  memset(all, 0, sizeof(float) * (size_t)(nodes * WIDE));
  for (int64_t k = 0; k < op->in; k += DEEP) {
    const int64_t deep = op->in - k < DEEP ? op->in - k : DEEP;
    const char *w = weight + k * op->apart * size;
    for (int64_t m = 0; m < nodes; m += 2) {
      const float *from = x + m * ldx + k;
      float *to = all + m * WIDE;
      if (rows == WIDE) {
        if (m + 1 < nodes) columns_tile(op, w, deep, WIDE / L, 2, from, ldx, to);
        else columns_tile(op, w, deep, WIDE / L, 1, from, ldx, to);
      } else {
        for (int64_t r = 0; r < rows; r += L) {
          if (m + 1 < nodes) columns_tile(op, w + r * size, deep, 1, 2, from, ldx, to + r);
          else columns_tile(op, w + r * size, deep, 1, 1, from, ldx, to + r);
        }
      }
    }
  }
  for (int64_t m = 0; m < nodes; m++)
    for (int64_t r = 0; r < rows; r += L) {
      float *y = dst + m * ldy + r;
      __m256 v = _mm256_loadu_ps(all + m * WIDE + r);
      if (bias) v = _mm256_add_ps(rounded8(v, op->narrow && op->bias_last), _mm256_loadu_ps(bias + r));
      v = rounded8(v, op->narrow);
      _mm256_storeu_ps(y, op->mode ? rounded8(_mm256_add_ps(_mm256_loadu_ps(y), v), op->narrow) : v);
    }
}

/* ---------------------------------------------------------------- attention */

IN bf16 narrowed(float a) {
  uint32_t u;
  memcpy(&u, &a, 4);
  return (bf16)(u >> 16); /* already rounded */
}

AVX2 IN void put(void *to, int64_t at, const float *from, int64_t n, int narrow) {
  if (narrow)
    for (int64_t i = 0; i < n; i++) ((bf16 *)to)[at + i] = narrowed(from[i]);
  else
    memcpy((float *)to + at, from, sizeof(float) * (size_t)n);
}

/* x c + y s, each product rounded too unless `once`. */
AVX2 IN __m256 turned(__m256 x, __m256 y, const float *c, const float *s, int narrow, int once) {
  const __m256 p = _mm256_mul_ps(x, _mm256_loadu_ps(c)), q = _mm256_mul_ps(y, _mm256_loadu_ps(s));
  return rounded8(_mm256_add_ps(rounded8(p, narrow && !once), rounded8(q, narrow && !once)), narrow);
}

AVX2 static void rotate(float *x, const Op *op, int64_t position) {
  const float *c = op->cosine + position * op->rotary, *s = op->sine + position * op->rotary;
  const int64_t half = op->rotary / 2;
  int64_t i = 0;
  const int neighbours = op->interleaved == 1;
  if (!neighbours)
    for (; i + L <= half; i += L) {
      const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + half);
      const __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), b);
      _mm256_storeu_ps(x + i, turned(a, minus, c + i, s + i, op->narrow, op->mode & 1));
      _mm256_storeu_ps(x + i + half, turned(b, a, c + i + half, s + i + half, op->narrow, op->mode & 1));
    }
  for (; i < half; i++) {
    const int64_t a = neighbours ? 2 * i : i, b = neighbours ? 2 * i + 1 : i + half;
    const float xa = x[a], xb = x[b];
    float pa = xa * c[a], qa = -xb * s[a], pb = xb * c[b], qb = xa * s[b];
    if (op->narrow) {
      float four[L] = {pa, qa, pb, qb};
      if (!(op->mode & 1)) _mm256_storeu_ps(four, round8(_mm256_loadu_ps(four)));
      float two[L] = {four[0] + four[1], four[2] + four[3]};
      _mm256_storeu_ps(two, round8(_mm256_loadu_ps(two)));
      x[a] = two[0];
      x[b] = two[1];
    } else {
      x[a] = pa + qa;
      x[b] = pb + qb;
    }
  }
}

/* The mean that a norm divides by, in the order that the operation asks for. */
AVX2 IN float mean_of(const Op *op, const float *x, int64_t width) {
  return op->mode & ALONE ? mean_alone(x, width) : mean_square(x, width);
}

/* Norm and rotation of one head, in their order. */
AVX2 IN void prepare_head(const Op *op, float *x, const float *norm, int64_t position) {
  if (norm && !op->norm_last) rms_row(x, x, op->head, norm, op->eps, op->narrow, op->norm_once, mean_of(op, x, op->head));
  if (op->rotary) rotate(x, op, position);
  if (norm && op->norm_last) rms_row(x, x, op->head, norm, op->eps, op->narrow, op->norm_once, mean_of(op, x, op->head));
}

AVX2 IN void scaled_row(float *x, int64_t width, float factor, int narrow) {
  for (int64_t k = 0; k < width; k += L)
    _mm256_storeu_ps(x + k, rounded8(_mm256_mul_ps(_mm256_loadu_ps(x + k), _mm256_set1_ps(factor)), narrow));
}

/* Head by head: norm, rotation, and the keys and values of the node into the cache. */
AVX2 static void prepare(const Op *op, const Pass *pass, int64_t node) {
  float *q = ROW(op->src, node), *k = ROW(op->other, node) + op->k_at, *v = ROW(op->dst, node) + op->v_at;
  const int64_t position = pass->position[node], head = op->head, step = op->step, kv_step = op->kv_step;
  for (int64_t h = 0; h < op->heads; h++) {
    prepare_head(op, q + h * step, op->q_norm, position);
    if (op->factor) scaled_row(q + h * step, head, op->factor[position], op->narrow);
  }
  for (int64_t h = 0; h < op->kv_heads; h++) {
    prepare_head(op, k + h * kv_step, op->k_norm, position);
    const int64_t at = ((pass->slot[node] * op->kv_heads + h) * pass->capacity + pass->place[node]) * head;
    put(op->keys, at, k + h * kv_step, head, op->narrow);
    put(op->values, at, v + h * kv_step, head, op->narrow);
  }
}

/* The rotated part of a head, from x to y. */
AVX2 static void turn(const Op *op, const float *x, float *y, int64_t position) {
  const int64_t half = op->in / 2;
  for (int64_t i = 0; i < op->in; i++) y[i] = x[op->interleaved == 2 ? i % half * 2 + i / half : i];
  if (op->rotary) rotate(y, op, position);
}

/* Latent attention: the rotated part of each head's query to its place in dst, and the node's latents and the rotated
 * part of its key, which all heads share, to the cache. */
AVX2 static void latent(const Op *op, const Pass *pass, int64_t node) {
  float *q = ROW(op->src, node) + op->k_at, *k = ROW(op->other, node), *to = ROW(op->dst, node) + op->head;
  const int64_t position = pass->position[node], at = pass->slot[node] * pass->capacity + pass->place[node];
  float *turned = k + op->head + op->in;
  for (int64_t h = 0; h < op->heads; h++) turn(op, q + h * op->step, to + h * op->kv_step, position);
  turn(op, k + op->head, turned, position);
  put(op->keys, at * op->head, k, op->head, op->narrow);
  put(op->values, at * op->in, turned, op->in, op->narrow);
}

/* Each head of a chunk of nodes by its own part of a matrix. */
AVX2 static void by_head(const Op *op, const Pass *pass, int64_t head, Part nodes, Worker *worker) {
  const int64_t width = op->mode ? op->out : op->in;
  float *rows[2] = {ROW(op->src, nodes.first) + head * op->step + op->k_at, ROW(op->dst, nodes.first) + head * op->kv_step};
  const int64_t strides[2] = {pass->stride[op->src], pass->stride[op->dst]}, block = op->mode ? WIDE : block_of(op);
  Pass part = *pass;
  Op one = *op;
  part.buffer = rows;
  part.stride = strides;
  one.kind = op->mode ? COLUMNS : LINEAR;
  one.weight = (const char *)op->weight + (head * op->apart + op->v_at) * width * bits_of[op->form] / 8;
  one.src = one.mode = 0;
  one.heads = one.kv_heads = 0;
  one.dst = 1;
  one.apart = width;
  worker->op = NULL; /* another head's */
  for (int64_t first = 0; first < op->out; first += block) {
    const int64_t some = op->out - first < block ? op->out - first : block;
    if (op->mode) columns(&one, &part, 0, first, some, 0, nodes.rows);
    else linear(&one, &part, 0, first, some, 0, nodes.rows, worker);
  }
  worker->op = NULL;
}

/* Transposes eight rows, `from` apart, of eight numbers of 32 bits; the rows of the result are `apart` apart. */
AVX2 IN void transpose8(const uint32_t *rows, int64_t from, uint32_t *to, int64_t apart) {
  __m256 r[8], t[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float *)(rows + i * from));
  UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
    r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps((float *)(to + i * apart), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps((float *)(to + (i + 4) * apart), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

/* n rows of `width` numbers of 32 bits to panels of `whole` columns, as product() reads them; the last one is filled up
 * with zeros. */
AVX2 static void to_panels(const uint32_t *rows, int64_t n, int64_t width, int64_t whole, uint32_t *to) {
  for (int64_t first = 0; first < n; first += L, to += first % PANEL ? L : PANEL * whole - L) {
    const uint32_t *from = rows + first * width;
    const int64_t left = n - first;
    int64_t k = 0;
    if (left >= L)
      for (; k + L <= width; k += L) transpose8(from + k, width, to + k * PANEL, PANEL);
    for (; k < width; k++)
      for (int64_t i = 0; i < L; i++) to[k * PANEL + i] = i < left ? from[i * width + k] : 0;
    if (first % PANEL == 0 && left <= L)
      for (k = 0; k < width; k++) memset(to + k * PANEL + L, 0, sizeof(uint32_t) * L);
  }
}

/* Numbers of a key: of latent attention, those of the latents and the rotated ones, which lie with the values. */
IN int64_t key_size(const Op *op) { return op->head + (op->kind == ATTEND ? op->in : 0); }

/* The scores of `queries`, (count, key size), with n keys, of which `rotated` are a part in latent attention; (count, ld)
 * at y, of which it writes n, rounded up to PANEL. */
AVX2 static void score(const Op *op, const Worker *worker, int64_t count, const void *keys, const void *rotated, int64_t n,
                       float *y, int64_t ld) {
  const int64_t size = op->narrow ? 2 : 4, width = op->head * size / 4, all = key_size(op), more = all * size / 4 - width;
  const Linear multiply = op->narrow && units ? by_units[PANEL_BFLOAT] : linears[op->narrow ? PANEL_BFLOAT : PANEL_FLOAT];
  const Factors none = {0};
  const void *x = op->narrow && units ? (const void *)worker->x : (const void *)worker->queries;
  const int64_t ldx = op->narrow && units ? padded_to_32(all) : all;
  for (int64_t block = 0; block < n; block += KEYS) {
    const int64_t some = n - block < KEYS ? n - block : KEYS;
    to_panels((const uint32_t *)keys + block * width, some, width, width + more, worker->keys);
    if (more) to_panels((const uint32_t *)rotated + block * more, some, more, width + more, worker->keys + width * PANEL);
    multiply(x, ldx, count, worker->keys, (some + PANEL - 1) / PANEL * PANEL, all, y + block, ld, &none);
  }
}

/* y += sum of p[j] v[j] for n values, j in order, for `count` queries; (count, ld) at p, (count, head) at y. */
static void blend(const Op *op, const float *p, int64_t ld, int64_t count, const void *values, int64_t n, float *y) {
  const int64_t head = op->head, whole = head / PANEL * PANEL;
  values_of[op->narrow](p, ld, count, n, values, head, whole, y, head);
  if (whole < head && op->narrow) values_bf16_avx2(p, ld, count, n, (const bf16 *)values + whole, head, L, y + whole, head);
  if (whole < head && !op->narrow) values_float_avx2(p, ld, count, n, (const float *)values + whole, head, L, y + whole, head);
}

/* Keys and values in fewer bits lie in chunks of ROUNDED places, those of a slot and head one after another: keys in panels
 * of places, with a scale for each number of a key in a chunk; values in panels of numbers, with a scale for each place. */
static const float ones[MOST_ROUNDED] = {[0 ... MOST_ROUNDED - 1] = 1.0f};
static const Factors unscaled = {.scale = ones, .groups = 1};

/* As score(), of the first n places of a slot and head, the `of`-th. */
AVX2 static void score_rounded(const Op *op, const Worker *worker, int64_t count, int64_t of, int64_t n, float *y, int64_t ld) {
  const int64_t head = op->head, chunk = ROUNDED * head * bits_of[op->form] / 8;
  const char *keys = (const char *)op->weight + of * (op->apart / ROUNDED) * chunk;
  const float *scales = (const float *)op->scales + of * (op->apart / ROUNDED) * head;
  float *x = (float *)worker->keys;
  for (int64_t j = 0; j < n; j += ROUNDED, keys += chunk, scales += head)
    for (int64_t m = 0; m < count; m += TOGETHER) {
      const int64_t some = count - m < TOGETHER ? count - m : TOGETHER;
      for (int64_t i = 0; i < some * head; i += L)
        _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(worker->queries + m * head + i), _mm256_loadu_ps(scales + i % head)));
      linears[op->form](x, head, some, keys, ROUNDED, head, y + m * ld + j, ld, &unscaled);
    }
}

/* As blend(), of the first n places of a slot and head; multiplies p by the scales of the values. */
AVX2 static void blend_rounded(const Op *op, const Worker *worker, float *p, int64_t ld, int64_t count, int64_t of, int64_t n, float *y) {
  const int64_t head = op->head, wide = (head + PANEL - 1) / PANEL * PANEL, chunk = ROUNDED * wide * bits_of[op->form] / 8;
  const char *values = (const char *)op->second + of * (op->apart / ROUNDED) * chunk;
  const float *scales = (const float *)op->second_scales + of * op->apart;
  float *sums = (float *)worker->keys;
  for (int64_t m = 0; m < count; m++)
    for (int64_t j = 0; j < n; j += L)
      _mm256_storeu_ps(p + m * ld + j, _mm256_mul_ps(_mm256_loadu_ps(p + m * ld + j), _mm256_loadu_ps(scales + j)));
  for (int64_t j = 0; j < n; j += ROUNDED, values += chunk)
    for (int64_t m = 0; m < count; m += TOGETHER) {
      const int64_t some = count - m < TOGETHER ? count - m : TOGETHER;
      linears[op->form](p + m * ld + j, ld, some, values, wide, ROUNDED, sums, wide, &unscaled);
      for (int64_t i = 0; i < some; i++)
        for (int64_t d = 0; d < head; d += L)
          _mm256_storeu_ps(y + (m + i) * head + d,
                           _mm256_add_ps(_mm256_loadu_ps(y + (m + i) * head + d), _mm256_loadu_ps(sums + i * wide + d)));
    }
}

/* Adds the position biases of a head to its scores, for n positions from `low` on. */
AVX2 static void lean(const Op *op, int64_t head, int64_t position, int64_t low, int64_t n, float *s) {
  const float *bias = op->bias + head * op->out;
  if (op->mode & 2)
    for (int64_t j = 0; j < n; j++) s[j] = nearest(s[j] * op->scale + bias[low + j], op->narrow);
  else
    for (int64_t j = 0; j < n; j++) s[j] += bias[position - low - j + op->shift];
}

/* The first position that a node may see. */
IN int64_t first_seen(const Op *op, int64_t position) {
  if (!op->window) return 0;
  const int64_t first = op->mode & 1 ? position / op->window * op->window : position - op->window + 1;
  return first < 0 ? 0 : first;
}

/* Whether two nodes of a slot read the same keys and values. */
IN int read_alike(const Op *op, const Pass *pass, const int64_t *base, int64_t i, int64_t j) {
  if (base[i] != base[j] || first_seen(op, pass->position[i]) != first_seen(op, pass->position[j])) return 0;
  if (op->kind == CROSS) return 1;
  const int64_t of_i = pass->extra_from[i], of_j = pass->extra_from[j], n = pass->extra_from[i + 1] - of_i;
  const size_t size = sizeof(int64_t) * (size_t)n;
  return pass->extra_from[j + 1] - of_j == n && !memcmp(pass->extra + of_i, pass->extra + of_j, size) &&
         (!op->window || !memcmp(pass->extra_position + of_i, pass->extra_position + of_j, size));
}

/* One head of keys and values, for the nodes of one group and the query heads that share it. A row of scores holds those
 * of the places from `start` on; then only those that the node sees, in the order of its path. */
AVX2 static void attend(const Op *op, const Pass *pass, int64_t group, int64_t kv, Worker *worker) {
  const int64_t from = pass->group_from[group], to = pass->group_from[group + 1];
  const int64_t head = op->head, share = op->heads / op->kv_heads, count = (to - from) * share;
  const int64_t size = op->narrow ? 2 : 4, bytes = head * size, wide = key_size(op), ld = pass->reach + 2 * PANEL;
  const int cross = op->kind == CROSS, latents = wide > head;
  const int64_t slot = (cross ? pass->source_slot : pass->slot)[from], of = slot * op->kv_heads + kv;
  const int64_t rounds = op->weight ? pass->rounded[slot] : 0, *base = cross ? pass->source_lengths : pass->base;
  const int64_t origin = (latents ? slot : of) * (cross ? pass->sources : pass->capacity);
  const char *keys = (const char *)op->keys + origin * bytes;
  const char *rotated = latents ? (const char *)op->values + origin * (wide - head) * size : NULL;
  const char *values = latents ? keys : (const char *)op->values + origin * bytes;
  int64_t low[MANY], start = INT64_MAX, shared = INT64_MAX, end = 0;
#define EXTRAS(i, e)                                                             \
  for (int64_t e = pass->extra_from[i]; e < pass->extra_from[(i) + !cross]; e++) \
    if (!op->window || pass->extra_position[e] >= first_seen(op, pass->position[i]))
#define LEAST(a, b) a = (b) < a ? (b) : a
#define MOST_OF(a, b) a = (b) > a ? (b) : a
  for (int64_t i = from; i < to; i++) {
    const int64_t first = first_seen(op, pass->position[i]);
    low[i - from] = first > base[i] ? base[i] : first;
    LEAST(start, low[i - from]);
    LEAST(shared, base[i]);
    MOST_OF(end, base[i]);
    EXTRAS(i, e) {
      LEAST(start, pass->extra[e]);
      MOST_OF(end, pass->extra[e] + 1);
    }
  }
  for (int64_t i = from, at = 0; i < to; i++)
    for (int64_t h = 0; h < share; h++, at++) {
      const float *q = ROW(op->src, i) + (kv * share + h) * op->step;
      if (op->narrow && units) narrow_row(q, wide, worker->x + at * padded_to_32(wide));
      if (!(op->narrow && units) || rounds) memcpy(worker->queries + at * wide, q, sizeof(float) * (size_t)wide);
    }
  worker->op = NULL; /* its nodes are overwritten */
  score_rounded(op, worker, count, of, rounds, worker->scores, ld);
  score(op, worker, count, keys + (start + rounds) * bytes, latents ? rotated + start * (wide - head) * size : NULL,
        end - start - rounds, worker->scores + rounds, ld);
  for (int64_t i = from, at = 0; i < to; i++)
    for (int64_t h = 0; h < share; h++, at++) {
      float *row = worker->scores + at * ld, *s = row + low[i - from] - start;
      const int64_t plain = base[i] - low[i - from];
      int64_t n = 0;
      EXTRAS(i, e) {
        worker->extras[n] = row[pass->extra[e] - start];
        if (op->bias) lean(op, kv * share + h, pass->position[i], pass->extra_position[e], 1, worker->extras + n);
        n++;
      }
      memcpy(s + plain, worker->extras, sizeof(float) * (size_t)n);
      if (op->bias) lean(op, kv * share + h, pass->position[i], low[i - from], plain, s);
      softmax(s, plain + n, op->kind == ATTEND && op->mode & 2 ? 1.0f : op->scale, op->cap, op->sinks ? op->sinks + kv * share + h : NULL);
      memset(row, 0, sizeof(float) * (size_t)(low[i - from] - start));
    }
  float *y = worker->queries;
  memset(y, 0, sizeof(float) * (size_t)(count * head));
  blend_rounded(op, worker, worker->scores, ld, count, of, rounds, y);
  start += rounds; /* nodes see all places before it */
  const float *scores = worker->scores + rounds;
  if (shared > start) blend(op, scores, ld, count, values + start * bytes, shared - start, y);
  else shared = start;
  for (int64_t i = from, next; i < to; i = next) {
    for (next = i + 1; next < to && read_alike(op, pass, base, i, next); next++);
    const int64_t at = (i - from) * share, queries = (next - i) * share;
    const int64_t first = low[i - from] > shared ? low[i - from] : shared;
    const float *row = scores + at * ld, *p = row + base[i] - start;
    float *sums = y + at * head;
    if (base[i] > first) blend(op, row + first - start, ld, queries, values + first * bytes, base[i] - first, sums);
    int64_t place = 0, run = 0;
    EXTRAS(i, e) {
      if (run && pass->extra[e] != place + run) {
        blend(op, p, ld, queries, values + place * bytes, run, sums);
        p += run;
        run = 0;
      }
      if (!run++) place = pass->extra[e];
    }
    if (run) blend(op, p, ld, queries, values + place * bytes, run, sums);
  }
  for (int64_t i = from, at = 0; i < to; i++)
    for (int64_t h = 0; h < share; h++, at++) {
      float *result = ROW(op->dst, i) + (kv * share + h) * head;
      for (int64_t d = 0; d < head; d += L)
        _mm256_storeu_ps(result + d, rounded8(_mm256_loadu_ps(y + at * head + d), op->narrow));
    }
}

#ifdef __x86_64__
#include "alone.inc"
#endif

/* ---------------------------------------------------------------- layers with states */

#include "recurrent.inc"
#include "scans.inc"

#include "streams.inc"
#include "sparing.inc"

/* ---------------------------------------------------------------- mixtures of experts */

/* What an expert is chosen by: its score and a correction, which its weight is without. */
AVX2 IN float merit(const Op *op, const float *p, int64_t expert) {
  return op->bias ? nearest(p[expert] + op->bias[expert], op->form == BFLOAT) : p[expert];
}

/* Drops the experts of all groups but the best; a group is as good as its best `window` experts, one or two, together. */
AVX2 static void drop_groups(const Op *op, float *p, float *groups) {
  const int64_t size = op->experts / op->heads;
  for (int64_t g = 0; g < op->heads; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
      const float m = merit(op, p, e);
      if (m > second) second = m > first ? first : m;
      if (m > first) first = m;
    }
    groups[g] = op->window > 1 ? first + second : first;
  }
  for (int64_t g = 0; g < op->heads; g++) {
    int64_t better = 0;
    for (int64_t h = 0; h < op->heads; h++) better += groups[h] > groups[g] || (groups[h] == groups[g] && h < g);
    for (int64_t e = g * size; better >= op->kv_heads && e < (g + 1) * size; e++) p[e] = -INFINITY;
  }
}

/* The weight of an expert by a softmax over those whose scores are close to its own, the best, as torch rounds it. */
AVX2 static float weight_among_close(const Op *op, const float *p, int64_t best) {
  const __m256 top = _mm256_set1_ps(p[best]), sign = _mm256_set1_ps(-0.0f);
  const __m256 most = rounded8(_mm256_set1_ps(op->eps), op->narrow);
  __m256 total = _mm256_setzero_ps();
  for (int64_t e = 0; e < op->experts; e += L) {
    const __m256 s = _mm256_loadu_ps(p + e), size = _mm256_max_ps(_mm256_andnot_ps(sign, s), top);
    const __m256 less = rounded8(_mm256_div_ps(rounded8(_mm256_sub_ps(top, s), op->narrow), size), op->narrow);
    const __m256 far = _mm256_cmp_ps(less, most, _CMP_GT_OQ);
    total = _mm256_add_ps(total, keep8(_mm256_andnot_ps(far, exp8(_mm256_sub_ps(s, top))), op->experts - e));
  }
  return nearest(1.0f / sum8(total), op->narrow);
}

/* The experts of a node and their weights, the best first; of equals, the first one. */
AVX2 static void route(const Op *op, const Pass *pass, int64_t node) {
  float *p = ROW(op->src, node), *w = ROW(op->dst, node), part[L] = {0};
  int64_t *row = pass->plan->row + node * op->top;
  if (op->mode == 4) {
    for (int64_t k = 0; k < op->top; k++) {
      row[k] = 0;
      for (int64_t e = 1; e < op->experts; e++)
        if (p[e] > p[row[k]]) row[k] = e;
      w[k] = weight_among_close(op, p, row[k]);
      p[row[k]] = -INFINITY;
    }
    return;
  }
  const int sigmoids = op->mode & 2, last = op->mode & 4, stepwise = op->narrow && !op->norm_once;
  if (!sigmoids) softmax8(p, op->experts, 1.0f, 0.0f, NULL);
  for (int64_t e = 0; sigmoids && !last && e < op->experts; e += L)
    _mm256_storeu_ps(p + e, keep8(rounded8(activated8(_mm256_loadu_ps(p + e), SIGMOID), stepwise), op->experts - e));
  if (op->heads) drop_groups(op, p, w);
  for (int64_t k = 0; k < op->top; k++) {
    int64_t best = 0;
    for (int64_t e = 1; e < op->experts; e++)
      if (merit(op, p, e) > merit(op, p, best)) best = e;
    row[k] = best;
    w[k] = last ? nearest(_mm256_cvtss_f32(activated8(_mm256_set1_ps(p[best]), SIGMOID)), stepwise) : p[best];
    part[0] += w[k];
    p[best] = -INFINITY;
  }
  if (sigmoids) { /* the sum is rounded, and what it is divided by */
    const __m256 sum = rounded8(_mm256_loadu_ps(part), stepwise);
    _mm256_storeu_ps(part, rounded8(_mm256_add_ps(sum, _mm256_set1_ps(op->eps)), stepwise));
  }
  if (part[0] < op->cap) part[0] = op->cap;
  for (int64_t k = 0; k < op->top; k += L) {
    __m256 v = _mm256_loadu_ps(w + k);
    if (op->mode & 1) v = _mm256_div_ps(v, _mm256_set1_ps(part[0]));
    v = rounded8(v, op->scale == 1.0f ? op->narrow : stepwise);
    if (op->scale != 1.0f) v = rounded8(_mm256_mul_ps(v, _mm256_set1_ps(op->scale)), op->narrow);
    _mm256_storeu_ps(w + k, v);
  }
  for (int64_t k = 0; op->other_bias && k < op->top; k++) w[k] = nearest(w[k] * op->other_bias[row[k]], op->narrow);
}

static void planned(const Op *op, int64_t nodes, Plan *plan) {
  int64_t at = 0, *next = plan->next, *row = plan->row;
  memset(next, 0, sizeof(int64_t) * (size_t)op->experts);
  for (int64_t i = 0; i < nodes * op->top; i++) next[row[i]]++;
  plan->parts = 0;
  for (int64_t e = 0; e < op->experts; e++) {
    const int64_t end = at + next[e];
    next[e] = at;
    for (; at < end; at += plan->part[plan->parts++].rows)
      plan->part[plan->parts] = (Part){e, at, end - at < CHUNK ? end - at : CHUNK};
  }
  for (int64_t i = 0; i < nodes * op->top; i++) row[i] = next[row[i]]++;
}

/* The row of a node to its experts. */
AVX2 static void deal(const Op *op, const Pass *pass, int64_t node) {
  const float *x = ROW(op->src, node), *w = ROW(op->other, node);
  for (int64_t i = 0; i < op->top; i++) {
    float *y = ROW(op->dst, pass->plan->row[node * op->top + i]);
    for (int64_t k = 0; k < op->in; k += L) {
      const __m256 v = _mm256_loadu_ps(x + k);
      _mm256_storeu_ps(y + k, op->mode ? rounded8(_mm256_mul_ps(v, _mm256_set1_ps(w[i])), op->narrow) : v);
    }
  }
}

/* The sum of the experts' outputs at a node, each times its weight, by rank; without experts, the node's own row. */
AVX2 static void combine(const Op *op, const Pass *pass, int64_t node) {
  const int64_t *row = op->experts ? pass->plan->row + node * op->top : &node;
  const float *w = ROW(op->other, node);
  float *y = ROW(op->dst, node);
  for (int64_t k = 0; k < op->in; k += L) {
    __m256 total = _mm256_setzero_ps();
    for (int64_t i = 0; i < op->top; i++) {
      const __m256 x = _mm256_loadu_ps(ROW(op->src, row[i]) + k), v = _mm256_mul_ps(x, _mm256_set1_ps(w[i]));
      total = _mm256_add_ps(total, op->mode == 2 ? x : rounded8(v, op->narrow && !op->mode));
    }
    _mm256_storeu_ps(y + k, rounded8(total, op->narrow));
  }
}

/* (u + 1) g sigmoid(scale g) of clamped neighbours (g, u) of a row. */
AVX2 static void clamped_glu(const Op *op, const Pass *pass, int64_t row) {
  const float *x = ROW(op->src, row);
  const __m256 cap = _mm256_set1_ps(op->cap), low = _mm256_set1_ps(-op->cap);
  float *y = ROW(op->dst, row);
  for (int64_t k = 0; k < op->in; k += L) {
    const __m256 a = _mm256_loadu_ps(x + 2 * k), b = _mm256_loadu_ps(x + 2 * k + L);
    __m256 g = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xd8));
    __m256 u = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8));
    g = rounded8(_mm256_min_ps(cap, g), op->narrow);
    u = rounded8(_mm256_max_ps(low, _mm256_min_ps(cap, u)), op->narrow);
    const __m256 s = rounded8(_mm256_mul_ps(g, _mm256_set1_ps(op->scale)), op->narrow);
    g = rounded8(_mm256_mul_ps(g, rounded8(activated8(s, SIGMOID), op->narrow)), op->narrow);
    u = rounded8(_mm256_add_ps(u, _mm256_set1_ps(1.0f)), op->narrow);
    _mm256_storeu_ps(y + k, rounded8(_mm256_mul_ps(u, g), op->narrow));
  }
}

/* Allocates the plan of a pass. */
static int room(const Op *ops, int64_t count, int64_t nodes, Plan *plan) {
  int64_t pairs = 0, experts = 0;
  for (int64_t i = 0; i < count; i++) {
    if (nodes * ops[i].top > pairs) pairs = nodes * ops[i].top;
    if (ops[i].experts > experts) experts = ops[i].experts;
  }
  if (!experts) return 1;
  plan->part = malloc(sizeof(Part) * (size_t)(experts + pairs / CHUNK));
  plan->row = malloc(sizeof(int64_t) * (size_t)pairs);
  plan->next = malloc(sizeof(int64_t) * (size_t)experts);
  return plan->part && plan->row && plan->next;
}

/* ---------------------------------------------------------------- running it */

/* xIELU, each step rounded as torch does: `bias` and `other_bias` hold its two parameters, `scale` is its beta. */
AVX2 static void xielu(const Op *op, const float *x, float *y) {
  float rise[L] = {op->scale + softplus(*op->other_bias, op->narrow)};
  const __m256 beta = _mm256_set1_ps(op->scale), above = _mm256_set1_ps(softplus(*op->bias, op->narrow));
  _mm256_storeu_ps(rise, rounded8(_mm256_loadu_ps(rise), op->narrow));
  const __m256 below = _mm256_set1_ps(rise[0]), one = _mm256_set1_ps(1.0f), half = _mm256_set1_ps(0.5f);
  for (int64_t k = 0; k < op->in; k += L) {
    const __m256 v = _mm256_loadu_ps(x + k), line = rounded8(_mm256_mul_ps(beta, v), op->narrow);
    const __m256 t = tanh8(_mm256_mul_ps(_mm256_min_ps(_mm256_set1_ps(op->eps), v), half));
    const __m256 less = _mm256_div_ps(_mm256_add_ps(t, t), _mm256_sub_ps(one, t)); /* exp(v) - 1 */
    __m256 left = rounded8(_mm256_sub_ps(rounded8(less, op->narrow), v), op->narrow);
    left = rounded8(_mm256_mul_ps(left, below), op->narrow);
    const __m256 right = rounded8(_mm256_mul_ps(rounded8(_mm256_mul_ps(above, v), op->narrow), v), op->narrow);
    const __m256 curve = _mm256_blendv_ps(left, right, _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ));
    _mm256_storeu_ps(y + k, rounded8(_mm256_add_ps(curve, line), op->narrow));
  }
}

AVX2 static void elementwise(const Op *op, const Pass *pass, int64_t node) {
  const float *x = ROW(op->src, node), *z = ROW(op->other, node);
  float *y = ROW(op->dst, node);
  for (int64_t k = 0; k < op->in; k += L) {
    __m256 v = _mm256_loadu_ps(x + k);
    switch (op->kind) {
      case ACTIVATE: v = activated8(v, op->mode); break;
      case ADD: v = _mm256_add_ps(v, _mm256_loadu_ps(z + k)); break;
      case MULTIPLY: v = _mm256_mul_ps(v, _mm256_loadu_ps(z + k)); break;
      case SCALE: {
        const __m256 one = _mm256_set1_ps(op->bias ? *op->bias : op->scale);
        v = _mm256_mul_ps(v, op->other_bias ? _mm256_loadu_ps(op->other_bias + k) : one);
        break;
      }
      case CLAMP: /* NaN stays NaN */
        v = _mm256_max_ps(_mm256_set1_ps(-op->cap), _mm256_min_ps(_mm256_set1_ps(op->cap), v));
        break;
      default: { /* CAP, each step rounded as torch does */
        const __m256 cap = _mm256_set1_ps(op->cap);
        v = rounded8(tanh8(rounded8(_mm256_div_ps(v, cap), op->narrow)), op->narrow);
        v = _mm256_mul_ps(v, cap);
      }
    }
    _mm256_storeu_ps(y + k, rounded8(v, op->narrow));
  }
}

/* Each head of a row times its activated gates, or its only one. */
AVX2 static void gate(const Op *op, const Pass *pass, int64_t node) {
  for (int64_t h = 0; h < op->heads; h++) {
    const float *x = ROW(op->src, node) + h * op->step + op->k_at;
    float *y = ROW(op->dst, node) + h * op->head;
    for (int64_t k = 0; k < op->head; k += L) {
      const __m256 own = op->step == 1 ? _mm256_set1_ps(*x) : _mm256_loadu_ps(x + k);
      const __m256 g = rounded8(activated8(own, op->mode), op->narrow);
      _mm256_storeu_ps(y + k, rounded8(_mm256_mul_ps(_mm256_loadu_ps(y + k), g), op->narrow));
    }
  }
}

/* A part of each head of a row, side by side. */
static void pick(const Op *op, const Pass *pass, int64_t node) {
  const float *x = ROW(op->src, node) + op->k_at;
  float *y = ROW(op->dst, node) + op->v_at;
  for (int64_t h = 0; h < op->heads; h++) memcpy(y + h * op->head, x + h * op->step, sizeof(float) * (size_t)op->head);
}

/* Marks the highest of a row of scores with 1, and the others with 0; of equal ones the first are. */
static void choose(const Op *op, const float *scores, float *marks) {
  const int64_t all = op->heads, wanted = op->kv_heads;
  uint32_t least = 0; /* the highest number that so many scores reach, as integers in their order */
  uint32_t *keys = (uint32_t *)marks;
  for (int64_t i = 0; i < all; i++) {
    const float score = scores[i] + 0.0f; /* -0 is 0 */
    uint32_t u;
    memcpy(&u, &score, 4);
    u = u >> 31 ? ~u : u | 0x80000000u;
    memcpy(keys + i, &u, 4);
  }
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t tried = least | 1u << bit;
    int64_t reach = 0;
    for (int64_t i = 0; i < all; i++) reach += keys[i] >= tried;
    if (reach >= wanted) least = tried;
  }
  int64_t equal = wanted;
  for (int64_t i = 0; i < all; i++) equal -= keys[i] > least;
  for (int64_t i = 0; i < all; i++) {
    const uint32_t key = keys[i];
    marks[i] = key > least || (key == least && equal-- > 0) ? 1.0f : 0.0f;
  }
}

/* The nodes of an operation are computed in equal parts. */
IN int64_t chunks_of(int64_t nodes) { return (nodes + CHUNK - 1) / CHUNK; }

IN Part part_at(const Op *op, const Pass *pass, int64_t i) {
  if (op->experts) return pass->plan->part[i];
  const int64_t nodes = op->tail ? pass->tail : pass->nodes, parts = chunks_of(nodes), first = nodes * i / parts;
  return (Part){0, first, nodes * (i + 1) / parts - first};
}

static int64_t tasks_of(const Op *op, const Pass *pass) {
  const int64_t nodes = op->tail ? pass->tail : pass->nodes;
  if (op->spared && all_spared(pass)) return 0;
  switch (op->kind) {
    case LINEAR:
    case GATED: {
      const int64_t parts = op->experts ? pass->plan->parts : chunks_of(nodes);
      return parts * ((op->out + block_of(op) - 1) / block_of(op));
    }
    case COLUMNS: {
      const int64_t parts = op->experts ? pass->plan->parts : chunks_of(nodes);
      return parts * ((op->out + WIDE - 1) / WIDE);
    }
    case HEADS: return chunks_of(nodes) * op->heads;
    case PLAN: return 1;
    case CONVOLVE: return pass->rows * ((op->in + CHANNELS - 1) / CHANNELS);
    case RECUR: return pass->rows * op->kv_heads;
    case SCAN: return pass->rows * op->heads * slices_of_head(op);
    case ACTIVATE:
    case MULTIPLY:
    case GLU: return op->experts ? nodes * op->top : nodes;
    case ATTEND:
    case CROSS: return pass->groups * op->kv_heads;
    default: return nodes;
  }
}

AVX2 static void run_task(const Op *op, const Pass *pass, int64_t task, Worker *worker) {
  switch (op->kind) {
    case EMBED: embed(op, pass, task); return;
    case RMS_NORM:
      for (int64_t at = 0; at < op->in * (op->heads ? op->heads : 1); at += op->in)
        rms_row(ROW(op->src, task) + at, ROW(op->dst, task) + at, op->in, op->weight, op->eps, op->narrow, op->mode & 1,
                mean_of(op, ROW(op->src, task) + at, op->in));
      return;
    case LAYER_NORM: layer_norm(op, ROW(op->src, task), ROW(op->dst, task)); return;
    case LINEAR:
    case GATED: {
      const int64_t block = block_of(op), blocks = (op->out + block - 1) / block;
      const int64_t first = task % blocks * block, rows = op->out - first;
      const Part part = part_at(op, pass, task / blocks);
      linear(op, pass, part.expert, first, rows < block ? rows : block, part.first, part.rows, worker);
      return;
    }
    case COLUMNS: {
      const int64_t blocks = (op->out + WIDE - 1) / WIDE, first = task % blocks * WIDE, rows = op->out - first;
      const Part part = part_at(op, pass, task / blocks);
      columns(op, pass, part.expert, first, rows < WIDE ? rows : WIDE, part.first, part.rows);
      return;
    }
    case PREPARE: prepare(op, pass, task); return;
    case LATENT: latent(op, pass, task); return;
    case HEADS: by_head(op, pass, task % op->heads, part_at(op, pass, task / op->heads), worker); return;
    case ATTEND:
      if (op->mode & ALONE) {
        attend_as_alone(op, pass, task / op->kv_heads, task % op->kv_heads, worker);
        return;
      } /* fall through */
    case CROSS: attend(op, pass, task / op->kv_heads, task % op->kv_heads, worker); return;
    case GATHER:
      memcpy(ROW(op->dst, task), ROW(op->src, pass->gather[task]), sizeof(float) * (size_t)op->in);
      return;
    case ROUTE: route(op, pass, task); return;
    case PLAN: planned(op, pass->nodes, pass->plan); return;
    case DEAL: deal(op, pass, task); return;
    case COMBINE: combine(op, pass, task); return;
    case GATE: gate(op, pass, task); return;
    case PICK: pick(op, pass, task); return;
    case CONVOLVE: {
      const int64_t blocks = (op->in + CHANNELS - 1) / CHANNELS, c = task % blocks * CHANNELS, left = op->in - c;
      convolve(op, pass, task / blocks, c, left < CHANNELS ? left : CHANNELS);
      return;
    }
    case RATES: rates_row(op, pass, task); return;
    case UNIT: unit_row(op, pass, task); return;
    case RECUR: recur(op, pass, task / op->kv_heads, task % op->kv_heads, worker); return;
    case SCAN: {
      const int64_t slices = op->heads * slices_of_head(op);
      scan(op, pass, task / slices, task % slices, worker);
      return;
    }
    case GATED_NORM: gated_norm(op, pass, task); return;
    case GLU: clamped_glu(op, pass, task); return;
    case XIELU: xielu(op, ROW(op->src, task), ROW(op->dst, task)); return;
    case MIX: mix(op, pass, task); return;
    case MATCH: match(op, ROW(op->src, task), ROW(op->other, task), ROW(op->dst, task)); return;
    case EXCEED: exceed(op, ROW(op->src, task), ROW(op->dst, task)); return;
    case SPARE: spare(op, pass, task); return;
    case CHOOSE: choose(op, ROW(op->src, task), ROW(op->dst, task)); return;
    default: elementwise(op, pass, task);
  }
}

/* The places that nodes see are before this one. */
static int64_t reach_of(const Pass *pass) {
  int64_t reach = 1;
  for (int64_t i = 0; pass->base && i < pass->nodes; i++) {
    if (pass->base[i] > reach) reach = pass->base[i];
    if (pass->source_lengths && pass->source_lengths[i] > reach) reach = pass->source_lengths[i];
  }
  for (int64_t e = 0; e < pass->extras; e++)
    if (pass->extra[e] >= reach) reach = pass->extra[e] + 1;
  return (reach + PANEL - 1) / PANEL * PANEL;
}

/* The sizes of a worker's rooms, in numbers. */
typedef struct {
  size_t scores, queries, extras, keys, x, sums, chosen, vectors, states, holders, all;
} Rooms;

IN size_t whole_lines(int64_t numbers) { return (size_t)(numbers + 15) / 16 * 16; }

static Rooms rooms_of(const Op *ops, int64_t count, const Pass *pass, int64_t share) {
  const int64_t chunk = pass->nodes < CHUNK ? pass->nodes : CHUNK, queries = share * MANY;
  int64_t head = 0, wide = 0, sums = 0, chosen = 0;
  for (int64_t i = 0; i < count; i++) {
    const int attends = ops[i].kind == ATTEND || ops[i].kind == CROSS;
    if (attends && key_size(ops + i) > head) head = key_size(ops + i);
    if (attends && units && ops[i].narrow && queries * padded_to_32(key_size(ops + i)) > wide)
      wide = queries * padded_to_32(key_size(ops + i));
    if ((ops[i].kind == LINEAR || ops[i].kind == GATED || ops[i].kind == HEADS) && in_bf16(ops + i) && chunk * apart_in_bf16(ops[i].in) > wide)
      wide = chunk * apart_in_bf16(ops[i].in);
    if ((ops[i].kind == LINEAR || ops[i].kind == GATED) && in_fixed_point(ops + i)) {
      const Fixed fixed = fixed_of(ops + i);
      const int64_t bytes = chunk * (ops[i].in / fixed.columns) * bytes_of_block(fixed);
      if (bytes > 2 * wide) wide = bytes / 2;
    }
    if (ops[i].offsets && chunk * ops[i].groups > sums) sums = chunk * ops[i].groups;
    if (ops[i].kind == LINEAR && ops[i].heads && ops[i].in + SOONER_STEPS > chosen) chosen = ops[i].in + SOONER_STEPS;
  }
  Rooms r = {head ? whole_lines(queries * (pass->reach + 2 * PANEL)) : 0, whole_lines(queries * head),
             head ? whole_lines(pass->longest) : 0, whole_lines(KEYS * head), whole_lines((wide + 1) / 2), whole_lines(sums), whole_lines(chosen), 0, 0, 0, 0};
  int64_t nodes = 0, drafts = 0, size = 0;
  for (int64_t i = 0; i < pass->rows; i++) {
    const int64_t own = pass->row_from[i + 1] - pass->row_from[i], path = pass->path_from[i + 1] - pass->path_from[i];
    if (own + path > nodes) nodes = own + path;
    if (own - pass->settled[i] > drafts) drafts = own - pass->settled[i];
  }
  for (int64_t i = 0; i < count; i++)
    if ((ops[i].kind == RECUR || ops[i].kind == SCAN) && ops[i].head > size) size = ops[i].head;
  if (size) {
    r.vectors = whole_lines((2 * nodes + SLICE) * size);
    r.states = whole_lines((drafts + 1) * size * SLICE);
    r.holders = whole_lines(2 * (3 * drafts + 1)); /* of 64 bits */
  }
  r.all = r.scores + r.queries + r.extras + r.keys + r.x + r.sums + r.chosen + r.vectors + r.states + r.holders;
  return r;
}

typedef struct {
  const Op *ops;
  int64_t count;
  const Pass *pass;
  Rooms rooms;
  float *scratch;
  Counter *counters;
  Barrier barrier;
} Run;

static void run_thread(void *given, int self, int threads) {
  Run *const run = given;
  const Rooms *rooms = &run->rooms;
  float *own = run->scratch + (size_t)self * rooms->all;
  Worker worker = {.scores = own};
  worker.queries = own += rooms->scores;
  worker.extras = own += rooms->queries;
  worker.keys = (uint32_t *)(own += rooms->extras);
  worker.x = (bf16 *)(own += rooms->keys);
  worker.sums = own += rooms->x;
  worker.chosen = (int32_t *)(own += rooms->sums);
  worker.vectors = own += rooms->chosen;
  worker.states = own += rooms->vectors;
  worker.holders = (int64_t *)(own += rooms->states);
  for (int64_t i = 0; i < run->count; i++) {
    const int64_t total = tasks_of(run->ops + i, run->pass);
    int turn = 0;
    for (int64_t task; (task = claim(run->counters + i * threads, total, threads, self, &turn)) >= 0;)
      run_task(run->ops + i, run->pass, task, &worker);
    if (run->ops[i].wait) meet(&run->barrier, threads);
  }
}

/* Returns 0, or 1 where there was no memory: nothing was done then. */
static int run(const Op *ops, int64_t count, const Pass *given, int64_t share, int threads) {
  Pass pass = *given;
  pass.reach = reach_of(given);
  Run run = {.ops = ops, .count = count, .pass = &pass, .rooms = rooms_of(ops, count, &pass, share)};
  run.counters = aligned_alloc(64, sizeof(Counter) * (size_t)(count * threads));
  run.scratch = aligned_alloc(64, sizeof(float) * (run.rooms.all * (size_t)threads + 16));
  Plan plan = {0};
  pass.plan = &plan;
  const int enough = room(ops, count, pass.nodes, &plan) && run.counters && run.scratch;
  if (enough) {
    memset(run.counters, 0, sizeof(Counter) * (size_t)(count * threads));
    in_team(threads, run_thread, &run);
  }
  free(run.counters);
  free(run.scratch);
  free(plan.part);
  free(plan.row);
  free(plan.next);
  return !enough;
}

/* ---------------------------------------------------------------- checks of the caller's arguments */

enum { FITS, NO_MEMORY, BAD_TOKEN, BAD_PLACE, BAD_NODES, BAD_OP, BAD_THREADS };
enum { MOST = 1 << 28, MOST_THREADS = 1 << 12 }; /* of any size of an operation: no product of two of them overflows */

IN int within(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

/* Whether rows of `width` floats fit in a buffer; strides, multiples of 16, have room for the end of a vector. */
static int fits(const Pass *pass, int32_t buffer, int64_t width, int64_t rows) {
  return within(buffer, 0, pass->buffers - 1) && within(width, 1, MOST) && width <= pass->stride[buffer] &&
         rows <= pass->room[buffer] / pass->stride[buffer];
}

/* Whether columns of weights come in groups that their form allows. */
static int groups_fit(const Op *op) {
  if (op->form == PANEL_BLOCKS)
    return by_integers[op->form] && blocks_fit(op->shift, op->in) && !op->groups && !op->scales && !op->offsets && !op->half;
  if (op->form == GROUPED && (!within(op->shift, 4, 30) || op->groups << op->shift != op->in)) return 0;
  if (in_parts(op) && (op->form == PANEL_FLOAT || op->form == PANEL_BFLOAT))
    return op->kind != HEADS && !op->heads && !op->half && !op->offsets && within(op->shift, PANEL, MOST) &&
           op->shift % PANEL == 0 && op->groups == (op->in + op->shift - 1) / op->shift;
  if (op->form != PANEL_INT8 && op->form != PANEL_INT4)
    return !op->half && (op->form == GROUPED || (!op->groups && !op->offsets));
  const int64_t least = op->offsets ? L : columns_of[op->form];
  return within(op->groups, 1, op->in) && op->in % op->groups == 0 &&
         (op->in / op->groups % least == 0 || (op->groups == 1 && op->form == PANEL_INT8 && !op->offsets)) &&
         (op->kind != GATED || !op->offsets == !op->second_offsets);
}

static int weights_fit(const Op *op) {
  return op->weight && within(op->form, FLOAT, FORMS - 1) && within(op->out, 1, MOST) && within(op->in, 1, MOST) &&
         (op->form == FLOAT || op->form == BFLOAT || op->form == PANEL_FLOAT || op->form == PANEL_BFLOAT || op->form == PANEL_BLOCKS || op->scales) &&
         (op->form < PANELS || op->apart % PANEL == 0) && groups_fit(op);
}

/* Whether the parts of the inputs or outputs that nodes choose are those of the weights. */
static int chosen_fit(const Op *op, const Pass *pass, int64_t nodes) {
  if (!op->heads && !op->kv_heads) return 1;
  const int64_t parts = op->heads ? op->heads : op->kv_heads;
  return !op->experts && !op->offsets && !(op->heads && op->kv_heads) && within(parts, 1, MOST / PANEL) &&
         within(op->step, 1, PANEL) && parts * op->step == (op->heads ? op->in : op->out) &&
         !(op->heads && (op->kind == GATED || op->form == PANEL_BLOCKS || op->in % columns_of[op->form])) && fits(pass, op->other, parts, nodes) &&
         op->other != op->dst;
}

static int queries_fit(const Op *op) {
  return within(op->head, 1, MOST) && op->head % L == 0 && within(op->heads, 1, MOST / op->head) &&
         within(op->step, op->head, MOST / op->heads);
}

static int heads_fit(const Op *op, int64_t share) {
  return queries_fit(op) && within(op->kv_heads, 1, MOST) && op->heads % op->kv_heads == 0 &&
         op->heads / op->kv_heads <= share && op->keys && op->values;
}

/* Whether the operation of a layer with states stays within its buffers. */
static int states_fit(const Op *op, const Pass *pass) {
  if (!op->keys || !op->values || pass->rows < 1) return 0;
  if (op->kind == CONVOLVE)
    return op->weight && within(op->head, 1, TAPS) && within(op->mode, MEAN, SIGMOID) &&
           (op->mode != MEAN || op->head == 2) && op->in % L == 0 &&
           fits(pass, op->src, op->in, pass->nodes) && fits(pass, op->dst, op->in, pass->nodes) && op->src != op->dst;
  if (op->kind == SCAN)
    return (op->mode == LINEAR_UNIT || (op->bias && op->other_bias)) && (op->mode != SELECTIVE || op->weight) &&
           within(op->mode, SELECTIVE, WKV) && (op->mode != WKV || op->head == 3) &&
           within(op->in, 1, MOST) && within(op->heads, 1, op->in) &&
           op->in % op->heads == 0 && op->in / op->heads % L == 0 && within(op->head, 1, MOST / op->heads) &&
           within(op->k_at, 0, MOST) && within(op->q_at, 0, MOST) && fits(pass, op->src, op->in, pass->nodes) &&
           fits(pass, op->other, op->in, pass->nodes) &&
           fits(pass, op->other, op->k_at + op->heads * op->head, pass->nodes) &&
           fits(pass, op->other, op->q_at + op->heads * op->head, pass->nodes) &&
           fits(pass, op->dst, op->in, pass->nodes) && op->src != op->dst && op->other != op->dst;
  return within(op->head, 1, MOST) && op->head % L == 0 && within(op->step, 1, MOST) && op->step % L == 0 &&
         within(op->kv_heads, 1, MOST / op->head) && within(op->heads, 1, MOST / op->step) &&
         op->heads % op->kv_heads == 0 && within(op->q_at, 0, MOST) && within(op->k_at, 0, MOST) &&
         within(op->v_at, 0, MOST) && fits(pass, op->src, op->q_at + op->kv_heads * op->head, pass->nodes) &&
         fits(pass, op->src, op->k_at + op->kv_heads * op->head, pass->nodes) &&
         fits(pass, op->src, op->v_at + op->heads * op->step, pass->nodes) &&
         (op->other_bias || fits(pass, op->other, 2 * op->heads, pass->nodes)) &&
         fits(pass, op->dst, op->heads * op->step, pass->nodes);
}

/* Whether a table of embeddings in panels is one that EMBED reads. */
static int table_fits(const Op *op) {
  if (op->form == PANEL_BLOCKS) return within(op->groups, 0, 255) && blocks_fit((int)op->groups, op->in);
  return op->form == (op->narrow ? PANEL_BFLOAT : PANEL_FLOAT);
}

/* Whether an operation stays within the buffers, for as many nodes as the pass has. */
static int op_fits(const Op *op, const Pass *pass, int64_t share) {
  const int64_t nodes = op->tail ? pass->tail : pass->nodes, top = op->top;
  if ((op->spared || op->kind == SPARE) && (!pass->sparing || op->tail)) return 0;
  if (!within(top, 0, op->experts ? op->experts : 1) || !within(op->experts, 0, MOST)) return 0;
  const int64_t dealt = op->experts ? nodes * top : nodes;
  switch (op->kind) {
    case EMBED:
      return fits(pass, op->dst, op->in, nodes) && (op->weight || pass->embeds) &&
             (!op->second || (op->out > 0 && op->shift >= 0)) &&
             (op->form < PANELS || (!op->heads && table_fits(op)));
    case RMS_NORM:
    case LAYER_NORM: {
      const int64_t parts = op->kind == RMS_NORM && op->heads ? op->heads : 1;
      return op->weight && within(op->in, 1, MOST) && within(parts, 1, MOST / op->in) &&
             fits(pass, op->src, parts * op->in, nodes) && fits(pass, op->dst, parts * op->in, nodes);
    }
    case GATED:
      if (!op->second || (op->scales && !op->second_scales) || (op->mode == TABLED && !(op->values && op->narrow)))
        return 0; /* fall through */
    case LINEAR:
      return weights_fit(op) && fits(pass, op->src, op->in, dealt) && fits(pass, op->dst, op->out, dealt) &&
             (!op->experts || (top > 0 && op->apart > 0)) && chosen_fit(op, pass, nodes);
    case COLUMNS:
      return op->weight && within(op->form, FLOAT, BFLOAT) && within(op->in, 1, MOST) && within(op->out, 1, MOST) &&
             op->out % L == 0 && within(op->apart, op->out, MOST) && fits(pass, op->src, op->in, dealt) &&
             fits(pass, op->dst, op->out, dealt) && (!op->experts || top > 0);
    case PREPARE: {
      if (!queries_fit(op) || !fits(pass, op->src, (op->heads - 1) * op->step + op->head, nodes) ||
          !within(op->rotary, 0, op->head) || op->rotary % 2 || (op->rotary && !(op->cosine && op->sine)))
        return 0;
      if (!op->kv_heads) return within(op->other, 0, pass->buffers - 1) && within(op->dst, 0, pass->buffers - 1);
      if (!within(op->kv_step, op->head, MOST / op->heads)) return 0;
      const int64_t kv = (op->kv_heads - 1) * op->kv_step + op->head;
      return heads_fit(op, share) && op->k_at >= 0 && op->v_at >= 0 && fits(pass, op->other, kv + op->k_at, nodes) &&
             fits(pass, op->dst, kv + op->v_at, nodes);
    }
    case LATENT:
      return within(op->heads, 1, MOST / 2) && within(op->head, 1, MOST) && op->head % L == 0 && op->keys && op->values &&
             within(op->in, 2, MOST) && op->in % 2 == 0 && within(op->step, 1, MOST / op->heads) && op->k_at >= 0 &&
             within(op->kv_step, op->head + op->in, MOST / op->heads) && (!op->rotary || (op->cosine && op->sine)) &&
             (op->rotary == 0 || op->rotary == op->in) && within(op->interleaved, 0, 2) &&
             fits(pass, op->src, (op->heads - 1) * op->step + op->k_at + op->in, nodes) &&
             fits(pass, op->other, op->head + 2 * op->in, nodes) && fits(pass, op->dst, op->heads * op->kv_step, nodes);
    case HEADS:
      return !op->tail && within(op->form, FLOAT, BFLOAT) && weights_fit(op) && within(op->heads, 1, MOST / 2) &&
             within(op->step, 1, MOST / op->heads) && within(op->kv_step, op->out, MOST / op->heads) && op->k_at >= 0 &&
             within(op->v_at, 0, MOST) && within(op->apart, op->v_at + (op->mode ? op->in : op->out), MOST) &&
             (op->mode ? op->out % L == 0 : op->in % PANEL == 0) && op->src != op->dst &&
             fits(pass, op->src, (op->heads - 1) * op->step + op->k_at + op->in, nodes) &&
             fits(pass, op->dst, op->heads * op->kv_step, nodes);
    case CROSS:
    case ATTEND:
      if (op->kind == ATTEND && (!within(op->in, 0, MOST) || op->in % 2)) return 0;
      if (op->weight &&
          (op->kind != ATTEND || op->in || op->window || op->head > MOST_ROUNDED || !op->second || !op->scales ||
           !op->second_scales || !within(op->form, PANEL_INT8, PANEL_INT4) || op->apart % ROUNDED || !pass->rounded))
        return 0;
      if (op->mode & ALONE && (op->kind != ATTEND || !op->narrow || op->mode & ~of_alone || op->in || op->window ||
                               op->cap != 0.0f || op->sinks || op->bias || op->weight))
        return 0;
      return heads_fit(op, share) && within(key_size(op), 1, MOST) &&
             fits(pass, op->src, (op->heads - 1) * op->step + key_size(op), nodes) &&
             fits(pass, op->dst, op->heads * op->head, nodes) && op->window >= 0 &&
             (op->kind == ATTEND || (pass->source_lengths && pass->source_slot && pass->sources > 0));
    case CONVOLVE:
    case RECUR:
    case SCAN: return states_fit(op, pass);
    case RATES:
      return within(op->heads, 1, MOST / 2) && op->bias && op->other_bias && fits(pass, op->src, op->heads, nodes) &&
             fits(pass, op->other, op->heads, nodes) && fits(pass, op->dst, 2 * op->heads, nodes);
    case UNIT:
      return op->weight && op->bias && op->other_bias && within(op->in, 1, MOST) && op->in % L == 0 &&
             within(op->k_at, 0, MOST) && within(op->v_at, 0, MOST) && fits(pass, op->src, op->in, nodes) &&
             fits(pass, op->other, op->k_at + op->in, nodes) && fits(pass, op->dst, op->v_at + op->in, nodes);
    case GATED_NORM:
      return op->weight && within(op->head, 1, MOST) && op->head % L == 0 && within(op->heads, 1, MOST / op->head) &&
             fits(pass, op->src, op->heads * op->head, nodes) && fits(pass, op->other, op->heads * op->head, nodes) &&
             fits(pass, op->dst, op->heads * op->head, nodes);
    case GATE:
      if (!within(op->head, 1, MOST) || op->head % L || !within(op->heads, 1, MOST / op->head)) return 0;
      return (op->step == 1 || within(op->step, op->head, MOST / op->heads)) && within(op->k_at, 0, MOST) &&
             fits(pass, op->dst, op->heads * op->head, nodes) &&
             fits(pass, op->src, (op->heads - 1) * op->step + op->k_at + (op->step == 1 ? 1 : op->head), nodes);
    case PICK:
      return within(op->head, 1, MOST) && within(op->step, op->head, MOST) && within(op->heads, 1, MOST / op->step) &&
             within(op->k_at, 0, MOST) && within(op->v_at, 0, MOST) && op->src != op->dst &&
             fits(pass, op->src, (op->heads - 1) * op->step + op->k_at + op->head, nodes) &&
             fits(pass, op->dst, op->v_at + op->heads * op->head, nodes);
    case MULTIPLY:
      return fits(pass, op->src, op->in, dealt) && fits(pass, op->other, op->in, dealt) &&
             fits(pass, op->dst, op->in, dealt) && (!op->experts || top > 0);
    case MIX:
      return within(op->heads, 1, STREAMS) && within(op->kv_heads, 1, STREAMS) && within(op->head, 1, MOST) &&
             op->head % L == 0 && fits(pass, op->src, op->heads * op->head, nodes) &&
             fits(pass, op->dst, op->kv_heads * op->head, nodes) &&
             (op->bias ? within(op->other, 0, pass->buffers - 1) : fits(pass, op->other, op->heads * op->kv_heads, nodes));
    case CHOOSE:
      return within(op->heads, 1, MOST) && within(op->kv_heads, 1, op->heads) && fits(pass, op->src, op->heads, nodes) &&
             fits(pass, op->dst, op->heads, nodes) && op->src != op->dst;
    case SPARE:
    case EXCEED: return fits(pass, op->src, op->in, nodes) && fits(pass, op->dst, op->in, nodes);
    case MATCH:
    case ADD:
      return fits(pass, op->src, op->in, nodes) && fits(pass, op->other, op->in, nodes) &&
             fits(pass, op->dst, op->in, nodes);
    case ACTIVATE:
      return fits(pass, op->src, op->in, dealt) && fits(pass, op->dst, op->in, dealt) &&
             within(op->other, 0, pass->buffers - 1) && (!op->experts || top > 0);
    case SCALE:
    case CLAMP:
    case CAP:
      return fits(pass, op->src, op->in, nodes) && fits(pass, op->dst, op->in, nodes) &&
             within(op->other, 0, pass->buffers - 1);
    case GATHER: return op->tail && fits(pass, op->src, op->in, pass->nodes) && fits(pass, op->dst, op->in, nodes);
    case ROUTE:
      return top > 0 && fits(pass, op->src, op->experts, nodes) && within(op->heads, 0, op->experts) &&
             within(op->kv_heads, op->heads ? 1 : 0, op->heads) && within(op->window, 0, 2) &&
             (!op->heads || op->experts % op->heads == 0) &&
             fits(pass, op->dst, op->heads > top ? op->heads : top, nodes);
    case XIELU:
      return op->bias && op->other_bias && fits(pass, op->src, op->in, nodes) && fits(pass, op->dst, op->in, nodes);
    case GLU:
      return within(op->in, 1, MOST / 2) && fits(pass, op->src, 2 * op->in, dealt) && fits(pass, op->dst, op->in, dealt);
    case PLAN: return top > 0 && !op->tail;
    case DEAL:
      return top > 0 && fits(pass, op->src, op->in, nodes) && fits(pass, op->dst, op->in, dealt) &&
             (op->mode ? fits(pass, op->other, top, nodes) : within(op->other, 0, pass->buffers - 1));
    case COMBINE:
      return top > 0 && fits(pass, op->src, op->in, dealt) && fits(pass, op->other, top, nodes) &&
             fits(pass, op->dst, op->in, nodes);
    default: return 0;
  }
}

/* Whether the relative position biases cover all distances that a node sees. */
static int biases_fit(const Op *op, const Pass *pass, int64_t node) {
  const int keys = op->mode & 2;
  const int64_t at = pass->position[node] + op->shift;
  if (keys ? pass->base[node] > op->out : at >= op->out || at - (pass->base[node] - 1) < 0) return 0;
  for (int64_t e = pass->extra_from[node]; e < pass->extra_from[node + 1]; e++)
    if (!within(keys ? pass->extra_position[e] : at - pass->extra_position[e], 0, op->out - 1)) return 0;
  return 1;
}

/* Whether all nodes see the places of their slots that are read in fewer bits. */
static int rounded_fit(const Op *op, const Pass *pass) {
  for (int64_t i = 0; i < pass->nodes; i++) {
    const int64_t n = pass->rounded[pass->slot[i]];
    if (!within(n, 0, pass->base[i] < op->apart ? pass->base[i] : op->apart) || n % ROUNDED) return 0;
  }
  return 1;
}

/* Whether the tokens, slots, positions and nodes that a pass refers to are in range. */
static int nodes_fit(const Pass *pass) {
  const int64_t n = pass->nodes;
  if (!within(n, 0, MOST) || !within(pass->tail, 0, MOST) || pass->capacity < 1 || pass->positions < 1 || pass->slots < 1)
    return BAD_NODES;
  for (int64_t i = 0; i < n; i++) {
    if (!pass->embeds && !within(pass->token[i], 0, pass->vocabulary - 1)) return BAD_TOKEN;
    if (!within(pass->place[i], 0, pass->capacity - 1) || !within(pass->position[i], 0, pass->positions - 1))
      return BAD_PLACE;
    const int64_t from = pass->extra_from[i], to = pass->extra_from[i + 1];
    if (!within(pass->slot[i], 0, pass->slots - 1) || !within(pass->base[i], 0, pass->capacity) || from < 0 || from > to ||
        to > pass->extras || pass->base[i] + to - from > pass->longest || pass->base[i] + to - from < 1 ||
        (pass->source_lengths && (!within(pass->source_lengths[i], 0, pass->sources) || pass->source_lengths[i] > pass->longest)) ||
        (pass->source_slot && !within(pass->source_slot[i], 0, pass->source_slots - 1)))
      return BAD_NODES;
  }
  for (int64_t e = 0; e < pass->extras; e++)
    if (!within(pass->extra[e], 0, pass->capacity - 1) || !within(pass->extra_position[e], 0, pass->positions - 1))
      return BAD_NODES;
  for (int64_t i = 0; i < pass->tail; i++)
    if (!within(pass->gather[i], 0, n - 1)) return BAD_NODES;
  if (pass->groups < 0 || pass->group_from[0] != 0 || pass->group_from[pass->groups] != n) return BAD_NODES;
  for (int64_t g = 0; g < pass->groups; g++) {
    const int64_t from = pass->group_from[g], to = pass->group_from[g + 1];
    if (from >= to || to > n || to - from > MANY) return BAD_NODES;
    for (int64_t i = from + 1; i < to; i++)
      if (pass->slot[i] != pass->slot[from] || (pass->source_slot && pass->source_slot[i] != pass->source_slot[from]))
        return BAD_NODES;
  }
  return FITS;
}

/* Whether the rows of layers with states are made of the pass's nodes, and refer to drafts that there is room for. */
static int rows_fit(const Pass *pass) {
  if (pass->rows == 0) return 1;
  if (!within(pass->rows, 1, pass->nodes) || !within(pass->drafted, 0, MOST) || pass->row_from[0] != 0 ||
      pass->row_from[pass->rows] != pass->nodes || pass->path_from[0] != 0)
    return 0;
  for (int64_t r = 0; r < pass->rows; r++) {
    const int64_t first = pass->row_from[r], last = pass->row_from[r + 1], settled = pass->settled[r];
    if (first >= last || last > pass->nodes || !within(settled, 0, last - first) ||
        last - first - settled > pass->drafted || !within(pass->path_from[r + 1] - pass->path_from[r], 0, pass->drafted))
      return 0;
    for (int64_t i = first; i < last; i++)
      if (pass->slot[i] != pass->slot[first] || pass->parent[i] >= i ||
          (i == first ? pass->parent[i] != -1 : pass->parent[i] < first) ||
          (i <= first + settled && i > first && pass->parent[i] != i - 1))
        return 0;
    for (int64_t r2 = 0; r2 < r; r2++)
      if (pass->slot[pass->row_from[r2]] == pass->slot[first]) return 0;
  }
  for (int64_t i = 0; i < pass->path_from[pass->rows]; i++)
    if (!within(pass->path[i], 0, pass->drafted - 1)) return 0;
  return 1;
}

/* Returns 0; or an error, and nothing was done: NO_MEMORY, a token or a place out of range, inconsistent nodes or
   operations, a number of threads out of range. */
int truedraft_pass(const Op *ops, int64_t count, const Pass *pass, int64_t share, int threads) {
  if (!within(threads, 1, MOST_THREADS)) return BAD_THREADS;
  if (!within(count, 1, MOST) || !within(share, 1, MOST) || !within(pass->buffers, 1, MOST)) return BAD_OP;
  if (!within(pass->longest, 1, MOST)) return BAD_NODES;
  for (int64_t i = 0; i < pass->buffers; i++)
    if (pass->room[i] < 0 || pass->stride[i] < 0 || pass->stride[i] % 16 ||
        (pass->room[i] && (!pass->buffer[i] || !pass->stride[i])))
      return BAD_OP;
  const int wrong = nodes_fit(pass);
  if (wrong) return wrong;
  if (!rows_fit(pass)) return BAD_NODES;
  for (int64_t i = 0; i < count; i++) {
    if (!op_fits(ops + i, pass, share)) return BAD_OP;
    if (ops[i].kind == ATTEND && ops[i].weight && !rounded_fit(ops + i, pass)) return BAD_NODES;
    if (ops[i].kind != ATTEND || !ops[i].bias) continue;
    for (int64_t node = 0; node < pass->nodes; node++)
      if (!biases_fit(ops + i, pass, node)) return BAD_PLACE;
  }
  return run(ops, count, pass, share, threads);
}

#include "chains.inc"
#include "trees.inc"

/* One linear layer alone: (nodes, in) at x to (nodes, out) at y. Returns as truedraft_pass. */
int truedraft_linear(const Op *op, const float *x, int64_t nodes, float *y, int threads) {
  if (!within(threads, 1, MOST_THREADS)) return BAD_THREADS;
  if (!x || !y || !within(nodes, 1, MOST)) return BAD_NODES;
  if (op->kind != LINEAR || op->experts || op->heads || op->kv_heads || op->src != 0 || op->dst != 1 || op->tail || op->spared || !weights_fit(op) || op->in % 16) return BAD_OP;
  float *buffer[2] = {(float *)x, y};
  const int64_t stride[2] = {op->in, op->out};
  const Pass pass = {.nodes = nodes, .buffer = buffer, .stride = stride};
  return run(op, 1, &pass, 0, threads);
}

/* Sixteen rows of integers, of which n are there, to a panel of bytes, or of four bits where `nibbles`. */
static void integer_panel(const int8_t *rows, int64_t n, int64_t in, int nibbles, void *to) {
  if (!nibbles) {
    for (int64_t k = 0; k < in; k++)
      for (int64_t i = 0; i < PANEL; i++) ((int8_t *)to)[k * PANEL + i] = i < n ? rows[i * in + k] : 0;
    return;
  }
  for (int64_t k = 0; k < in; k += 8)
    for (int64_t i = 0; i < PANEL; i++) {
      uint32_t packed = 0;
      for (int64_t j = 0; j < 8 && i < n; j++) packed |= (uint32_t)(rows[i * in + k + j] & 15) << (4 * (j / 2) + 16 * (j % 2));
      ((uint32_t *)to)[k / 8 * PANEL + i] = packed;
    }
}

typedef struct {
  int form;
  int64_t out, in, row, panel; /* bytes of a row and of a panel */
  char *rows, *panels;
} Copied;

static void copy_panels(void *given, int self, int threads) {
  const Copied *c = given;
  const int64_t panels = (c->out + PANEL - 1) / PANEL;
  for (int64_t p = panels * self / threads; p < panels * (self + 1) / threads; p++) {
    const char *from = c->rows + p * PANEL * c->row;
    char *to = c->panels + p * c->panel;
    const int64_t n = c->out - p * PANEL < PANEL ? c->out - p * PANEL : PANEL;
    if (c->form >= PANEL_INT8) integer_panel((const int8_t *)from, n, c->in, c->form == PANEL_INT4, to);
    else to_panels((const uint32_t *)from, n, c->row / 4, c->row / 4, (uint32_t *)to);
  }
}

/* A panel to the first n of its rows, of `width` numbers of 32 bits each. */
AVX2 static void from_panel(const uint32_t *panel, int64_t n, int64_t width, uint32_t *to) {
  for (int64_t i = 0; i < n; i += L) {
    int64_t k = 0;
    if (i + L <= n)
      for (; k + L <= width; k += L) transpose8(panel + k * PANEL + i, PANEL, to + i * width + k, width);
    for (; k < width; k++)
      for (int64_t row = i; row < n && row < i + L; row++) to[row * width + k] = panel[k * PANEL + row];
  }
}

static void copy_rows(void *given, int self, int threads) {
  const Copied *c = given;
  const int64_t panels = (c->out + PANEL - 1) / PANEL;
  for (int64_t p = panels * self / threads; p < panels * (self + 1) / threads; p++) {
    const int64_t n = c->out - p * PANEL < PANEL ? c->out - p * PANEL : PANEL;
    from_panel((const uint32_t *)(c->panels + p * c->panel), n, c->row / 4, (uint32_t *)(c->rows + p * PANEL * c->row));
  }
}

/* Weights (out, in) in rows to panels of this form. `in` is even in bf16, a multiple of four in bytes, and of eight for four
   bits. Returns as truedraft_pass. */
int truedraft_panels(int form, const void *rows, int64_t out, int64_t in, void *panels, int threads) {
  if (!within(threads, 1, MOST_THREADS)) return BAD_THREADS;
  if (!within(form, PANELS, PANEL_INT4) || !within(out, 1, MOST) || !within(in, 1, MOST) || !rows || !panels) return BAD_OP;
  if (in % columns_of[form]) return BAD_OP;
  const int64_t row = form == PANEL_INT4 ? in : in * bits_of[form] / 8, panel = PANEL * in * bits_of[form] / 8;
  in_team(threads, copy_panels, &(Copied){form, out, in, row, panel, (char *)rows, panels});
  return FITS;
}

/* The reverse of it, for plain weights. */
int truedraft_rows(int form, const void *panels, int64_t out, int64_t in, void *rows, int threads) {
  if (!within(threads, 1, MOST_THREADS)) return BAD_THREADS;
  if (!within(form, PANELS, PANEL_BFLOAT) || !within(out, 1, MOST) || !within(in, 1, MOST) || !rows || !panels) return BAD_OP;
  if (in % columns_of[form]) return BAD_OP;
  const int64_t row = in * bits_of[form] / 8;
  in_team(threads, copy_rows, &(Copied){form, out, in, row, PANEL * row, rows, (char *)panels});
  return FITS;
}

#include "packing.inc"

typedef struct {
  int bfloat;
  int64_t steps, operations; /* of a thread */
} Multiplied;

static void multiply(void *given, int self, int threads) {
  Multiplied *m = given;
  float numbers[RUNNING * 16] = {0};
  (void)threads;
  const int64_t operations = multiply_of[m->bfloat](numbers, m->steps);
  if (!self) m->operations = operations;
}

/* Has all threads multiply numbers in registers, by the instruction for this form of weights; the operations done. */
int64_t truedraft_multiply(int form, int64_t steps, int threads) {
  Multiplied m = {form == BFLOAT, steps, 0};
  in_team(threads, multiply, &m);
  return m.operations * threads;
}

/* The bits of a mode that attention as torch computes it for single tokens takes; 0 where there is none. */
int truedraft_attends_alone(void) { return of_alone; }

/* Whether the processor multiplies panels that have their scales within them. */
int truedraft_takes_blocks(void) { return by_integers[PANEL_BLOCKS] != NULL; }

/* The layout of the structures in memory, to detect a stale build. */
int64_t truedraft_layout(void) {
  return (((int64_t)(offsetof(Op, weight) * 4096 + offsetof(Op, eps)) * 4096 + (int64_t)sizeof(Op)) * 4096 +
          (int64_t)sizeof(Pass)) * 4096 + (int64_t)(sizeof(Chains) + sizeof(Trees));
}

#define USE(set, lanes)                                                                                                 \
  (linears[FLOAT] = linear_float_##set, linears[BFLOAT] = linear_bf16_##set, linears[INT8] = linear_int8_##set,          \
   linears[GROUPED] = linear_grouped_##set, linears[PANEL_FLOAT] = panels_float_##set,                                   \
   linears[PANEL_BFLOAT] = panels_bf16_##set, linears[PANEL_INT8] = panels_int8_##set,                                   \
   linears[PANEL_INT4] = panels_int4_##set, values_of[0] = values_float_##set, values_of[1] = values_bf16_##set,         \
   multiply_of[0] = multiply_of[1] = multiply_##set, softmax = softmax##lanes, finish = finish##lanes)
#define USE_FOR_BF16(set)                                                                                               \
  (by_units[PANEL_BFLOAT] = panels_bf16_##set, by_units[PANEL_INT8] = panels_int8_##set,                                 \
   by_units[PANEL_INT4] = panels_int4_##set, multiply_of[1] = multiply_##set)

#define USE_INTEGERS(set)                                                                                                 \
  (by_integers[PANEL_INT8] = panels_int8_##set, by_integers[PANEL_INT4] = panels_int4_##set,                             \
   by_integers[PANEL_BLOCKS] = panels_blocks_##set, fix = to_blocks_##set)

#ifdef KNOWS_AVX_VNNI
static int has_avx_vnni(void) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#endif

/* Which instructions the linear layers use, at most `wanted`: 0 none; 2 AVX2, or NEON; 3 also AVX-VNNI; 4 the same in the
   encoding of AVX512-VNNI, only where just that is wanted; 5 AVX-512, without products of integers; 6 also the latter, with
   the rest of AVX-512; 7 also those for bf16, and for bytes where there is AVX512-VBMI; 8 also those for tiles of either, by
   which plain integers become bf16 where the model computes in it, and blocks with fine scales are taken by 256 columns. */
int truedraft_choose(int wanted) {
  if (wanted < 2) return 0;
  memset(by_integers, 0, sizeof by_integers);
  fix_supers = NULL;
  for_plain[0] = 0, for_plain[1] = 1;
#ifdef __x86_64__
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const int wide = wanted >= 5 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  units = wanted >= 7 && wide && __builtin_cpu_supports("avx512bf16");
  by_pairs = !wide;
  attend_as_alone = wide ? attend_alone : NULL;
  of_alone = units ? ALONE | BY_PAIRS : wide ? ALONE : 0;
  if (wide) USE(avx512, 16);
  else USE(avx2, 8), USE_INTEGERS(pairs);
  if (wanted == 4 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    USE_INTEGERS(evex);
    by_pairs = 0;
    for_plain[0] = 1;
    return 4;
  }
#ifdef KNOWS_AVX_VNNI
  if (wanted >= 3 && !wide && has_avx_vnni()) {
    USE_INTEGERS(vex);
    by_pairs = 0;
    for_plain[0] = 1;
    return 3;
  }
#endif
  const int tiles = units && wanted >= 8 && has_tiles();
  if (units) USE_FOR_BF16(units);
  if (tiles) USE_FOR_BF16(tiles);
  const int dots = wanted >= 6 && wide && __builtin_cpu_supports("avx512vnni");
  const int bytes = dots && wanted >= 7 && __builtin_cpu_supports("avx512vbmi");
  if (bytes && tiles) USE_INTEGERS(many), fix_supers = to_supers;
  else if (bytes) USE_INTEGERS(bytes);
  else if (dots) USE_INTEGERS(evex);
  for_plain[0] = dots, for_plain[1] = !tiles;
#else
  const int wide = 0, dots = 0, tiles = 0;
  units = wanted >= 7 && has(SECOND_WORD, 14, "hw.optional.arm.FEAT_BF16");
  USE(avx2, 8);
  if (has(FIRST_WORD, 20, "hw.optional.arm.FEAT_DotProd")) USE_INTEGERS(bytes);
  if (units) USE_FOR_BF16(units);
#endif
  return tiles ? 8 : units ? 7 : dots ? 6 : wide ? 5 : 2;
}
