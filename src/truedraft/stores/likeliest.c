/* The largest score of each row, or the few largest, in one reading. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Compiled for several sets of instructions, of which the loader chooses. Only for functions of this file: clang before 18
   exports them by other names. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef CLONED
#define CLONED
#endif

enum { BLOCK = 64, MOST = 16, SPAN = 512, SPANS = 1024 }; /* SPANS: of a row, at most */

/* Keeps the `count` largest of the values given, the largest first and of equal ones the first; returns how many. */
static int32_t kept(float *best, int32_t *at, int32_t n, int32_t count, float x, int32_t i) {
    if (x != x || x == -INFINITY) return n;
    if (n == count && (x < best[n - 1] || (x == best[n - 1] && i > at[n - 1]))) return n;
    int32_t place = n < count ? n++ : count - 1;
    for (; place && (best[place - 1] < x || (best[place - 1] == x && at[place - 1] > i)); place--)
        best[place] = best[place - 1], at[place] = at[place - 1];
    best[place] = x, at[place] = i;
    return n;
}

/* top: the largest of each `span` scores of a row, a multiple of BLOCK; NaN are left out. Returns whether there are any. */
CLONED static int largest_of_spans(const float *score, int64_t width, int64_t span, float *top) {
    int32_t odd[BLOCK] = {0}, any = 0;
    for (int64_t first = 0; first < width; first += span, top++) {
        const int64_t end = first + span < width ? first + span : width;
        float most[BLOCK], whole = -INFINITY;
        int64_t from = first;
        for (int j = 0; j < BLOCK; j++) most[j] = -INFINITY;
        for (; from + BLOCK <= end; from += BLOCK)
            for (int j = 0; j < BLOCK; j++) {
                const float x = score[from + j];
                most[j] = x > most[j] ? x : most[j];
                odd[j] |= x != x;
            }
        for (int half = BLOCK / 2; half; half /= 2)
            for (int j = 0; j < half; j++) most[j] = most[j + half] > most[j] ? most[j + half] : most[j];
        for (whole = most[0]; from < end; from++) whole = score[from] > whole ? score[from] : whole, any |= score[from] != score[from];
        *top = whole;
    }
    for (int j = 0; j < BLOCK; j++) any |= odd[j];
    return any;
}

/* Of `width` scores, no more than BLOCK, whether any is `least` or larger. */
static inline int any_from(const float *score, int64_t width, float least) {
    int32_t hit = 0;
    for (int64_t j = 0; j < width; j++) hit |= score[j] >= least;
    return hit;
}

/* The `count` <= 16 largest of a row and their indices, the largest first; returns how many there are (NaN and -inf are
   left out). A row is read once, for the largest of each span; only spans whose largest is among the `count` largest of
   these have to be searched, for scores that are no smaller. odd: whether there are NaN. */
CLONED static int32_t best_of_row(const float *score, int64_t width, int32_t count, float *best, int32_t *at, int *odd) {
    const int64_t span = SPAN * (1 + width / (SPAN * (int64_t)SPANS));
    const int32_t spans = (int32_t)((width + span - 1) / span);
    float top[SPANS];
    int32_t n = 0;
    *odd = largest_of_spans(score, width, span, top);
    for (int32_t i = 0; i < spans; i++) n = kept(best, at, n, count, top[i], i);
    const float least = n == count ? best[n - 1] : -INFINITY;
    n = 0;
    for (int32_t i = 0; i < spans; i++) {
        const int64_t end = (i + 1) * span < width ? (i + 1) * span : width;
        for (int64_t from = i * span; top[i] >= least && from < end; from += BLOCK) {
            const int64_t to = from + BLOCK < end ? from + BLOCK : end;
            const int hit = to - from == BLOCK ? any_from(score + from, BLOCK, least) : 1;
            for (int64_t j = from; hit && j < to; j++)
                if (score[j] >= least) n = kept(best, at, n, count, score[j], (int32_t)j);
        }
    }
    return n;
}

/* score: rows of `width` floats, `stride` apart; out: `count` <= 16 indices for each, the largest first, -1 where there are
   fewer (NaN and -inf are left out). */
void truedraft_likeliest(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t count, int32_t *out) {
    if (count < 1 || count > MOST || width > INT32_MAX) return;
    for (int64_t r = 0; r < rows; r++, score += stride, out += count) {
        float best[MOST];
        int32_t at[MOST];
        int odd;
        const int32_t n = best_of_row(score, width, count, best, at, &odd);
        for (int32_t i = 0; i < count; i++) out[i] = i < n ? at[i] : -1;
    }
}

enum { UNREAD, READ, ODD }; /* ODD: there are NaN */

/* Ranks the rows at `place` that are unread: their `count` largest as for truedraft_likeliest, with the values, -INFINITY
   where there are fewer. token, value, state: of all rows. */
void truedraft_rank(const float *score, int64_t width, int64_t stride, const int32_t *place, int64_t places, int32_t count,
                    int32_t *token, float *value, int8_t *state) {
    if (count < 1 || count > MOST || width > INT32_MAX) return;
    for (int64_t i = 0; i < places; i++) {
        const int64_t row = place[i];
        if (state[row] != UNREAD) continue;
        float best[MOST];
        int32_t at[MOST];
        int odd;
        const int32_t n = best_of_row(score + row * stride, width, count, best, at, &odd);
        for (int32_t k = 0; k < count; k++) {
            token[row * count + k] = k < n ? at[k] : -1;
            value[row * count + k] = k < n ? best[k] : -INFINITY;
        }
        state[row] = odd ? ODD : READ;
    }
}

/* exp of x <= 0 (Cephes), within 3e-7 of it; below -87, and of NaN, that of -87. */
static inline float exp_below(float x) {
    const float y = x > -87.0f ? x : -87.0f, n = floorf(y * 1.44269504f + 0.5f);
    const float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float p = 1.9875691500e-4f, power;
    memcpy(&power, &bits, sizeof power);
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * power;
}

/* The sum of exp(score - most); NaN where a score is. */
CLONED static float sum_of_exps(const float *score, int64_t width, float most) {
    float sum[BLOCK] = {0}, whole = 0;
    int32_t wrong[BLOCK] = {0}, any = 0;
    int64_t from = 0;
    for (; from + BLOCK <= width; from += BLOCK)
        for (int j = 0; j < BLOCK; j++) sum[j] += exp_below(score[from + j] - most), wrong[j] |= score[from + j] != score[from + j];
    for (; from < width; from++) whole += exp_below(score[from] - most), any |= score[from] != score[from];
    for (int j = 0; j < BLOCK; j++) whole += sum[j], any |= wrong[j];
    return any ? NAN : whole;
}

/* As truedraft_likeliest, with the softmax probabilities of these; -1 where these are 0, and for all of a row with NaN. */
void truedraft_chances(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t count, int32_t *out,
                       float *chance) {
    truedraft_likeliest(score, rows, width, stride, count, out);
    for (int64_t r = 0; r < rows && count >= 1 && count <= MOST; r++, score += stride, out += count, chance += count) {
        const float most = out[0] < 0 ? 0.0f : score[out[0]], sum = out[0] < 0 ? NAN : sum_of_exps(score, width, most);
        for (int32_t i = 0; i < count; i++) {
            chance[i] = out[i] < 0 ? 0.0f : expf(score[out[i]] - most) / sum;
            if (!(chance[i] > 0)) out[i] = -1;
        }
    }
}

/* Keeps the likeliest successors of tokens: those of `token[r]`, one more than each, in line `token[r]` of a table whose
   lines have `count` places, 0 where there are fewer. A row of scores without a possible token changes nothing,
   nor does a token without a line. */
void truedraft_succeed(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t count, const int32_t *token,
                       int32_t *table, int64_t lines) {
    if (count < 1 || count > MOST || width > INT32_MAX) return;
    for (int64_t r = 0; r < rows; r++) {
        if (token[r] < 0 || token[r] >= lines) continue;
        int32_t best[MOST], *line = table + (int64_t)token[r] * count;
        truedraft_likeliest(score + r * stride, 1, width, stride, count, best);
        for (int32_t i = 0; best[0] >= 0 && i < count; i++) line[i] = best[i] + 1;
    }
}

static inline void two_of(float *first, float *second, float x) {
    const float less = x > *first ? *first : x;
    *first = x > *first ? x : *first;
    *second = less > *second ? less : *second;
}

CLONED static void two_largest(const float *score, int64_t width, int64_t stride, const int32_t *place, int64_t count,
                               float *out) {
    for (int64_t r = 0; r < count; r++, out += 2) {
        const float *row = score + place[r] * stride;
        float first[BLOCK], second[BLOCK];
        for (int j = 0; j < BLOCK; j++) first[j] = second[j] = -INFINITY;
        int64_t from = 0;
        for (; from + BLOCK <= width; from += BLOCK)
            for (int j = 0; j < BLOCK; j++) two_of(first + j, second + j, row[from + j]);
        for (int j = 0; from + j < width; j++) two_of(first + j, second + j, row[from + j]);
        out[0] = out[1] = -INFINITY;
        for (int j = 0; j < BLOCK; j++) two_of(out, out + 1, first[j]), two_of(out, out + 1, second[j]);
    }
}

/* out: the two largest of each of `count` rows, those at `place`, -INFINITY where there is none; NaN are left out. */
void truedraft_two_largest(const float *score, int64_t width, int64_t stride, const int32_t *place, int64_t count, float *out) {
    two_largest(score, width, stride, place, count, out);
}

CLONED static void largest(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t *out) {
    for (int64_t r = 0; r < rows; r++, score += stride) {
        float best = -INFINITY;
        out[r] = 0;
        for (int64_t from = 0; from < width && out[r] >= 0; from += BLOCK) {
            int64_t to = from + BLOCK < width ? from + BLOCK : width;
            if (to - from == BLOCK) { /* most blocks hold neither a larger one nor NaN */
                int32_t hit = 0;
                for (int i = 0; i < BLOCK; i++) hit |= !(score[from + i] <= best);
                if (!hit) continue;
            }
            for (int64_t i = from; i < to; i++) {
                if (score[i] > best) best = score[i], out[r] = (int32_t)i;
                if (score[i] != score[i]) {
                    out[r] = -1;
                    break;
                }
            }
        }
    }
}

/* out: the place of the first largest of each row, -1 where one is NaN. */
void truedraft_largest(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t *out) {
    largest(score, rows, width, stride, out);
}
