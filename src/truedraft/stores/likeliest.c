/* The largest score of each row, or the few largest, in one reading. */

#include <math.h>
#include <stdint.h>

enum { BLOCK = 64 };

/* score: rows of `width` floats, `stride` apart; out: `count` <= 16 places for each, the largest first, -1 where there is
   none (neither NaN nor the impossible, -inf, is one). */
void truedraft_likeliest(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t count, int32_t *out) {
    for (int64_t r = 0; r < rows; r++, score += stride, out += count) {
        float best[16];
        int32_t n = 0;
        for (int32_t i = 0; i < count; i++) out[i] = -1, best[i] = 0;
        for (int64_t from = 0; from < width; from += BLOCK) {
            int64_t to = from + BLOCK < width ? from + BLOCK : width;
            if (n == count && to - from == BLOCK) { /* most blocks hold nothing that is large enough */
                int32_t hit = 0;
                for (int i = 0; i < BLOCK; i++) hit |= score[from + i] > best[count - 1];
                if (!hit) continue;
            }
            for (int64_t i = from; i < to; i++) {
                float x = score[i];
                if (x != x || x == -INFINITY || (n == count && x <= best[count - 1])) continue;
                int32_t at = n < count ? n++ : count - 1;
                for (; at && best[at - 1] < x; at--) best[at] = best[at - 1], out[at] = out[at - 1];
                best[at] = x, out[at] = (int32_t)i;
            }
        }
    }
}

/* out: the place of the first largest of each row, -1 where one is NaN. */
void truedraft_largest(const float *score, int64_t rows, int64_t width, int64_t stride, int32_t *out) {
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
