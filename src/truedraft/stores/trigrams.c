/* Trigram weights in a table of fixed size, and the tree search that drafts from them.

A key is a pair of tokens; its row holds the twelve successors of most weight. Rows are in sets of eight: where a set
is full, a new key replaces the least recently used one. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { WAYS = 8, KEPT = 12, TREE = 4096 };

typedef struct {
    int32_t first, second, used; /* used: when last, 0 where the row is free */
    int32_t count;
    int32_t token[KEPT];
    float weight[KEPT];
} Row;

typedef struct {
    Row *row;
    int64_t sets; /* a power of two */
    int32_t clock;
} Table;

enum { SETS = 1 << 24 }; /* at most: a table of some 15 GB */

static Row *set_of(const Table *t, int32_t first, int32_t second) {
    uint64_t x = (uint64_t)(uint32_t)first << 32 | (uint32_t)second;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    return t->row + (int64_t)(x & ((uint64_t)t->sets - 1)) * WAYS;
}

static const Row *row_of(const Table *t, int32_t first, int32_t second) {
    const Row *set = set_of(t, first, second);
    for (int i = 0; i < WAYS; i++)
        if (set[i].used && set[i].first == first && set[i].second == second) return &set[i];
    return 0;
}

int truedraft_table(Table *t, int64_t sets) {
    t->row = 0, t->sets = sets, t->clock = 0;
    if (sets < 1 || sets > SETS || sets & (sets - 1)) return 0;
    t->row = calloc((size_t)(sets * WAYS), sizeof(Row));
    return t->row != 0;
}

int truedraft_table_copy(Table *t, const Table *from) {
    if (!truedraft_table(t, from->sets)) return 0;
    for (int64_t i = 0; i < from->sets * WAYS; i++) /* free rows cost no memory until they are written */
        if (from->row[i].used) t->row[i] = from->row[i];
    t->clock = from->clock;
    return 1;
}

void truedraft_table_free(Table *t) {
    free(t->row);
    t->row = 0;
}

/* The time of a use; when 31 bits are full, all earlier uses are set to one time. */
static int32_t now(Table *t) {
    if (t->clock == INT32_MAX) {
        for (int64_t i = 0; i < t->sets * WAYS; i++) t->row[i].used = t->row[i].used != 0;
        t->clock = 1;
    }
    return ++t->clock;
}

/* Adds `weight` to every trigram of a run of tokens, up to `most` each. */
void truedraft_weigh(Table *t, const int32_t *token, int64_t count, float weight, float most) {
    for (int64_t i = 0; i + 2 < count; i++) {
        if (token[i] < 0 || token[i + 1] < 0 || token[i + 2] < 0) continue; /* across the end of a document */
        Row *set = set_of(t, token[i], token[i + 1]), *row = set;
        for (int k = 0; k < WAYS; k++) {
            if (set[k].used && set[k].first == token[i] && set[k].second == token[i + 1]) {
                row = &set[k];
                break;
            }
            if (set[k].used < row->used) row = &set[k];
        }
        if (!row->used || row->first != token[i] || row->second != token[i + 1]) {
            memset(row, 0, sizeof *row);
            row->first = token[i], row->second = token[i + 1];
        }
        row->used = now(t);
        int at = 0;
        while (at < row->count && row->token[at] != token[i + 2]) at++;
        if (at == row->count) {
            if (row->count == KEPT) at--;
            else row->count++;
            row->token[at] = token[i + 2], row->weight[at] = 0;
        }
        float raised = row->weight[at] + weight;
        raised = raised < most ? raised : most;
        for (; at && row->weight[at - 1] < raised; at--)
            row->weight[at] = row->weight[at - 1], row->token[at] = row->token[at - 1];
        row->weight[at] = raised, row->token[at] = token[i + 2];
    }
}

static double chance(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (double)(*state >> 11) / 9007199254740992.0;
}

typedef struct {
    int32_t token, before, parent, depth, first, children, visits, place;
    double value, weight, share; /* of the trigram: its weight, and its fraction of the row's */
} Node;

static int expand(const Table *t, Node *node, int *nodes, int at) {
    const Row *row = row_of(t, node[at].before, node[at].token);
    if (!row || *nodes + row->count > TREE) return 0;
    double sum = 0;
    for (int i = 0; i < row->count; i++) sum += row->weight[i];
    node[at].first = *nodes, node[at].children = row->count;
    for (int i = 0; i < row->count; i++)
        node[(*nodes)++] = (Node){.token = row->token[i], .before = node[at].token, .parent = at,
                                  .depth = node[at].depth + 1, .first = -1, .weight = row->weight[i],
                                  .share = sum > 0 ? row->weight[i] / sum : 0};
    return row->count;
}

static double rolled(const Table *t, const Node *node, int at, int depth, uint64_t *random) {
    double reward = 1;
    for (int i = at; i > 0; i = node[i].parent) reward += node[i].weight;
    int32_t before = node[at].before, token = node[at].token;
    for (int d = node[at].depth; d < depth; d++) {
        const Row *row = row_of(t, before, token);
        if (!row) break;
        double sum = 0;
        for (int i = 0; i < row->count; i++) sum += row->weight[i];
        double left = chance(random) * sum;
        int i = 0;
        while (i + 1 < row->count && left >= row->weight[i]) left -= row->weight[i++];
        reward += row->weight[i];
        before = token, token = row->token[i];
    }
    return reward;
}

/* Simulates from the last two tokens, and writes the most visited nodes, parents before children, at most `most`.
   parent: places in the output, -1 for the root; share: of the trigram. Returns how many. */
int64_t truedraft_search(const Table *t, int32_t before, int32_t last, int32_t simulations, int32_t depth, double c1,
                         double c2, int32_t most, int32_t *token, int32_t *parent, double *share) {
    static Node node[TREE]; /* calls hold the interpreter's lock */
    int nodes = 1;
    uint64_t random = ((uint64_t)(uint32_t)before << 32 | (uint32_t)last) * 0x9e3779b97f4a7c15u | 1;
    node[0] = (Node){.token = last, .before = before, .parent = -1, .first = -1};
    for (int s = 0; s < simulations; s++) {
        int at = 0;
        while (node[at].first >= 0 && node[at].children && node[at].depth < depth) {
            double wide = (c1 + log((node[at].visits + c2 + 1) / c2)) * sqrt(node[at].visits), best = -1;
            int chosen = node[at].first;
            for (int i = node[at].first; i < node[at].first + node[at].children; i++) {
                double mean = node[i].visits ? node[i].value / node[i].visits : 0;
                double score = mean + wide * node[i].share / (1 + node[i].visits);
                if (score > best) best = score, chosen = i;
            }
            at = chosen;
        }
        if (node[at].first < 0 && node[at].depth < depth && !expand(t, node, &nodes, at)) node[at].first = 0;
        double reward = rolled(t, node, at, depth, &random);
        for (int i = at; i >= 0; i = node[i].parent) node[i].visits++, node[i].value += reward;
    }
    int64_t n = 0;
    node[0].place = -1;
    for (int i = 1; i < nodes; i++) node[i].place = -2;
    while (n < most) { /* the most visited node whose parent has been written */
        int best = 0;
        for (int i = 1; i < nodes; i++)
            if (node[i].place == -2 && node[node[i].parent].place != -2 && node[i].visits &&
                (!best || node[i].visits > node[best].visits))
                best = i;
        if (!best) break;
        token[n] = node[best].token, parent[n] = node[node[best].parent].place, share[n] = node[best].share;
        node[best].place = (int32_t)n++;
    }
    return n;
}
