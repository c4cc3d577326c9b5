/* A suffix automaton over token ids: it counts occurrences, can be extended, and can be read from a mapped file.

A state represents all strings that end at the same positions of the text. The text is read token by token (Blumer et al.
1985, the online construction); besides, every state stores its first and its latest end and how often its strings
occur, and a state with many continuations keeps a list of the most frequent eight. Counts, latest ends and those eight
are updated for strings of up to `cap` tokens, which bounds the cost of a token.

Memory belongs to this file while the text grows, and to the caller where it was mapped from a file (room 0).

Arguments are not assumed valid: every entry point clamps cursor and counts to their ranges first. Walks end because
links lead to shorter strings and lists of edges to earlier edges; `truedraft_sound` checks that in a mapped file. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TOP = 8, BLOCK = TOP + 1 };

typedef struct {
    int32_t link, len;       /* the longest suffix with other occurrences; the longest string */
    int32_t end, last;       /* index of the last token of the first and of the latest occurrence */
    int32_t count;           /* occurrences */
    int32_t token, target;   /* the first continuation; target 0 where there is none */
    int32_t more;            /* the others: 0 none, > 0 edge more - 1 and its list, < 0 block -more - 1 of `top` */
} State;

typedef struct {
    int32_t state, token, target, next; /* next: as `more` of a state, > 0 or 0 */
} Edge;

typedef struct {
    int64_t tokens, states, edges, tops, hashed, slots; /* in use; slots is a power of two */
    int64_t token_room, state_room, edge_room, top_room;
    int32_t *token;
    State *state;
    Edge *edge;
    int32_t *top;  /* blocks: head of the edge list, then the most frequent continuations (0 the first, e + 1 edge e) */
    int32_t *slot; /* edges of states with a block, by (state, token): e + 1, 0 free */
    int32_t cap, tail, active, depth; /* the state of the whole text; of its last `depth` <= cap tokens */
} Automaton;

typedef struct {
    int32_t state, length, pending, has_pending;
} Cursor;

typedef struct {
    int64_t at; /* index of the next token of an input, -1 for none */
    int32_t run, wrong;
} Place;

static int grow(void **memory, int64_t *room, int64_t need, size_t size) {
    if (need <= *room) return 1;
    if (need > INT32_MAX) return 0; /* places are counted in 32 bits */
    int64_t larger = *room * 2 > need ? *room * 2 : need;
    if (larger < 64) larger = 64;
    void *moved = realloc(*memory, (size_t)larger * size);
    if (!moved) return 0;
    *memory = moved;
    *room = larger;
    return 1;
}

static uint64_t hashed(int32_t state, int32_t token) {
    uint64_t x = (uint64_t)(uint32_t)state << 32 | (uint32_t)token;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    return x;
}

static void enter(Automaton *a, int32_t e) {
    uint64_t mask = (uint64_t)a->slots - 1, at = hashed(a->edge[e].state, a->edge[e].token) & mask;
    while (a->slot[at]) at = (at + 1) & mask;
    a->slot[at] = e + 1;
    a->hashed++;
}

static int room_in_table(Automaton *a, int64_t more) {
    if (2 * (a->hashed + more) <= a->slots) return 1;
    int64_t slots = a->slots ? a->slots : 256;
    while (slots < 4 * (a->hashed + more)) slots *= 2;
    int32_t *old = a->slot, *fresh = calloc((size_t)slots, sizeof(int32_t));
    if (!fresh) return 0;
    int64_t before = a->slots;
    a->slot = fresh, a->slots = slots, a->hashed = 0;
    for (int64_t i = 0; i < before; i++)
        if (old[i]) enter(a, old[i] - 1);
    free(old);
    return 1;
}

static int32_t head(const Automaton *a, int32_t s) {
    int32_t more = a->state[s].more;
    return more >= 0 ? more : a->top[(int64_t)(-more - 1) * BLOCK];
}

/* Where a continuation is stored: 0 the first, e + 1 edge e, -1 nowhere. */
static int32_t place(const Automaton *a, int32_t s, int32_t token) {
    const State *state = &a->state[s];
    if (!state->target) return -1;
    if (state->token == token) return 0;
    if (state->more >= 0) {
        for (int32_t e = state->more; e; e = a->edge[e - 1].next)
            if (a->edge[e - 1].token == token) return e;
        return -1;
    }
    uint64_t mask = (uint64_t)a->slots - 1, at = hashed(s, token) & mask;
    for (; a->slot[at]; at = (at + 1) & mask) {
        const Edge *edge = &a->edge[a->slot[at] - 1];
        if (edge->state == s && edge->token == token) return a->slot[at];
    }
    return -1;
}

static int32_t target_at(const Automaton *a, int32_t s, int32_t at) {
    return at ? a->edge[at - 1].target : a->state[s].target;
}

static int32_t token_at(const Automaton *a, int32_t s, int32_t at) {
    return at ? a->edge[at - 1].token : a->state[s].token;
}

static int32_t count_at(const Automaton *a, int32_t s, int32_t at) { return a->state[target_at(a, s, at)].count; }

static int32_t next_of(const Automaton *a, int32_t s, int32_t token) {
    int32_t at = place(a, s, token);
    return at < 0 ? 0 : target_at(a, s, at);
}

/* A continuation has become more frequent, or is new: keep the block in order. */
static void bump(Automaton *a, int32_t s, int32_t at) {
    int32_t *best = a->top + (int64_t)(-a->state[s].more - 1) * BLOCK + 1, count = count_at(a, s, at);
    int i = 0;
    while (i < TOP && best[i] != at) i++;
    if (i == TOP) {
        if (count <= count_at(a, s, best[TOP - 1])) return;
        best[i = TOP - 1] = at;
    }
    for (; i && count_at(a, s, best[i - 1]) < count; i--) best[i] = best[i - 1], best[i - 1] = at;
}

static int raise_block(Automaton *a, int32_t s) {
    if (!grow((void **)&a->top, &a->top_room, (a->tops + 1) * BLOCK, sizeof(int32_t)) || !room_in_table(a, TOP)) return 0;
    int32_t *block = a->top + a->tops * BLOCK, e = a->state[s].more;
    int filled = 1;
    block[0] = e;
    for (int i = 1; i <= TOP; i++) block[i] = 0;
    for (; e; e = a->edge[e - 1].next, filled++) {
        enter(a, e - 1);
        if (filled < TOP) block[1 + filled] = e;
    }
    for (int i = 2; i <= TOP; i++) { /* insertion sort of the first eight */
        int32_t at = block[i], count = count_at(a, s, at);
        int j = i;
        for (; j > 1 && count_at(a, s, block[j - 1]) < count; j--) block[j] = block[j - 1];
        block[j] = at;
    }
    a->state[s].more = -(int32_t)++a->tops;
    for (e = block[0]; e; e = a->edge[e - 1].next) bump(a, s, e);
    return 1;
}

static int add(Automaton *a, int32_t s, int32_t token, int32_t target) {
    State *state = &a->state[s];
    if (!state->target) {
        state->token = token, state->target = target;
        return 1;
    }
    if (!grow((void **)&a->edge, &a->edge_room, a->edges + 1, sizeof(Edge))) return 0;
    int32_t e = (int32_t)a->edges;
    if (state->more < 0) {
        if (!room_in_table(a, 1)) return 0;
        int32_t *first = a->top + (int64_t)(-state->more - 1) * BLOCK;
        a->edge[a->edges++] = (Edge){s, token, target, *first};
        *first = e + 1;
        enter(a, e);
        bump(a, s, e + 1);
        return 1;
    }
    a->edge[a->edges++] = (Edge){s, token, target, state->more};
    state->more = e + 1;
    int n = 1;
    for (int32_t i = e + 1; i; i = a->edge[i - 1].next) n++;
    return n <= TOP || raise_block(a, s);
}

static int32_t fresh(Automaton *a, State state) {
    if (!grow((void **)&a->state, &a->state_room, a->states + 1, sizeof(State))) return -1;
    a->state[a->states] = state;
    return (int32_t)a->states++;
}

/* The shortest prefix of a state's strings' suffix chain that still holds `length` tokens. */
static int32_t holding(const Automaton *a, int32_t s, int32_t length) {
    while (s && a->state[a->state[s].link].len >= length) s = a->state[s].link;
    return s;
}

static int32_t split(Automaton *a, int32_t p, int32_t token, int32_t q) {
    State copy = a->state[q];
    copy.len = a->state[p].len + 1, copy.target = 0, copy.more = 0;
    int32_t clone = fresh(a, copy);
    if (clone < 0) return -1;
    if (!add(a, clone, a->state[q].token, a->state[q].target)) return -1;
    for (int32_t e = head(a, q); e; e = a->edge[e - 1].next)
        if (!add(a, clone, a->edge[e - 1].token, a->edge[e - 1].target)) return -1;
    for (;; p = a->state[p].link) {
        int32_t at = place(a, p, token);
        if (at < 0 || target_at(a, p, at) != q) break;
        if (at) a->edge[at - 1].target = clone;
        else a->state[p].target = clone;
        if (!p) break;
    }
    a->state[q].link = clone;
    return clone;
}

static int extend(Automaton *a, int32_t token) {
    if (!grow((void **)&a->token, &a->token_room, a->tokens + 1, sizeof(int32_t))) return 0;
    int32_t at = (int32_t)a->tokens, link = 0;
    a->token[a->tokens] = token;
    int32_t own = fresh(a, (State){.link = 0, .len = at + 1, .end = at, .last = at, .count = 1});
    if (own < 0) return 0;
    for (int32_t p = a->tail;; p = a->state[p].link) {
        int32_t found = place(a, p, token), q;
        if (found >= 0) {
            q = target_at(a, p, found);
            link = a->state[q].len == a->state[p].len + 1 ? q : split(a, p, token, q);
            if (link < 0) return 0;
            break;
        }
        if (!add(a, p, token, own)) return 0;
        if (!p) break;
    }
    a->state[own].link = link;
    a->tail = own;
    a->tokens++;
    a->state[0].count++;

    int32_t before = holding(a, a->active, a->depth), now = next_of(a, before, token);
    if (++a->depth > a->cap) a->depth = a->cap;
    a->active = holding(a, now, a->depth);
    for (int32_t s = a->active; s; s = a->state[s].link) {
        if (s == own) continue;
        a->state[s].count++;
        a->state[s].last = at;
    }
    for (int32_t s = before;; s = a->state[s].link) {
        if (a->state[s].more < 0) bump(a, s, place(a, s, token));
        if (!s) break;
    }
    return 1;
}

/* Resets a cursor that is invalid in this automaton to the beginning. */
static void placed(const Automaton *a, Cursor *c) {
    if (c->state < 0 || c->state >= a->states) c->state = 0;
    if (!c->state || c->length < 0) c->length = 0;
    c->state = holding(a, c->state, c->length);
}

static void step(const Automaton *a, Cursor *c, int32_t token) {
    int32_t s = holding(a, c->state, c->length), next;
    while (!(next = next_of(a, s, token)) && s) s = a->state[s].link, c->length = a->state[s].len;
    c->state = next;
    c->length = next ? c->length + 1 : 0;
}

/* Returns 1, or 0 where memory is out. */
int truedraft_begin(Automaton *a, int32_t cap) {
    memset(a, 0, sizeof *a);
    a->cap = cap > 0 ? cap : 1;
    return fresh(a, (State){0}) == 0;
}

void truedraft_free(Automaton *a) {
    if (a->state_room) free(a->token), free(a->state), free(a->edge), free(a->top), free(a->slot);
    memset(a, 0, sizeof *a);
}

int truedraft_extend(Automaton *a, const int32_t *tokens, int64_t count) {
    if (!a->state_room) return 0; /* of a file */
    for (int64_t i = 0; i < count; i++)
        if (!extend(a, tokens[i])) return 0;
    return 1;
}

/* The text's own cursor: each token is looked up first and added with the next one, so that the end of the text does
   not match itself. */
int truedraft_read(Automaton *a, Cursor *c, const int32_t *tokens, int64_t count) {
    if (!a->state_room) return 0;
    placed(a, c);
    for (int64_t i = 0; i < count; i++) {
        if (c->has_pending && !extend(a, c->pending)) return 0;
        step(a, c, tokens[i]);
        c->pending = tokens[i], c->has_pending = 1;
    }
    return 1;
}

void truedraft_follow(const Automaton *a, Cursor *c, const int32_t *tokens, int64_t count) {
    placed(a, c);
    for (int64_t i = 0; i < count; i++) step(a, c, tokens[i]);
}

/* The cursor at its last `length` tokens, or fewer. */
void truedraft_shorten(const Automaton *a, Cursor *c, int32_t length) {
    if (length < c->length) c->length = length;
    placed(a, c);
}

/* The place of the last token of the first occurrence of a cursor's string. */
int32_t truedraft_first(const Automaton *a, const Cursor *c) {
    Cursor here = *c;
    placed(a, &here);
    return a->state[here.state].end;
}

/* Copies what followed the first or the latest occurrence of the longest suffix of a cursor's string that has `shortest`
   tokens or more and is followed by `enough`. Returns how many tokens, 0 for none; c is left at the suffix found. */
int64_t truedraft_copy(const Automaton *a, Cursor *c, int32_t shortest, int64_t count, int64_t enough, int latest, int32_t *out) {
    int64_t text = a->tokens + (c->has_pending != 0);
    placed(a, c);
    for (; c->state && c->length >= shortest; c->state = a->state[c->state].link, c->length = a->state[c->state].len) {
        int64_t from = (latest ? a->state[c->state].last : a->state[c->state].end) + 1, n = 0;
        for (; n < count && from + n < text; n++) {
            int32_t token = from + n < a->tokens ? a->token[from + n] : c->pending;
            if (token < 0) break;
            out[n] = token;
        }
        if (n >= enough) return n;
    }
    return 0;
}

typedef struct {
    int32_t state, node, token, count;
} Leaf;

static void push(Leaf *heap, int *size, Leaf leaf) {
    int i = (*size)++;
    for (; i && heap[(i - 1) / 2].count < leaf.count; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = leaf;
}

static Leaf pop(Leaf *heap, int *size) {
    Leaf top = heap[0], last = heap[--*size];
    int i = 0;
    for (int child; (child = 2 * i + 1) < *size; i = child) {
        if (child + 1 < *size && heap[child + 1].count > heap[child].count) child++;
        if (heap[child].count <= last.count) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

/* Up to eight continuations of a state, separators left out. */
static int children(const Automaton *a, int32_t s, int32_t *at) {
    const State *state = &a->state[s];
    int n = 0;
    if (!state->target) return 0;
    if (state->more < 0) {
        const int32_t *best = a->top + (int64_t)(-state->more - 1) * BLOCK + 1;
        for (int i = 0; i < TOP; i++)
            if (token_at(a, s, best[i]) >= 0) at[n++] = best[i];
        return n;
    }
    if (state->token >= 0) at[n++] = 0;
    for (int32_t e = state->more; e && n < TOP; e = a->edge[e - 1].next)
        if (a->edge[e - 1].token >= 0) at[n++] = e;
    return n;
}

/* The tree of the most frequent continuations of a cursor's string, at most `nodes` <= 256 of them, most frequent first;
   none rarer than `rarest`, each node with at most `wide` children, none deeper than `deep`.
   parent: place of the parent in out, -1 for the root. Returns how many. */
int64_t truedraft_grow(const Automaton *a, const Cursor *c, int64_t nodes, int32_t rarest, int32_t wide, int32_t deep,
                       int32_t *token, int32_t *parent, int32_t *count) {
    Leaf heap[256 * TOP + TOP];
    int32_t depth[256], at[TOP];
    int size = 0;
    int64_t n = 0;
    Cursor here = *c;
    placed(a, &here);
    int32_t s = here.state, node = -1;
    if (nodes < 0) nodes = 0;
    if (nodes > 256) nodes = 256;
    for (;;) {
        if ((node < 0 ? 0 : depth[node]) < deep) {
            int found = children(a, s, at);
            for (int i = 1; i < found; i++) { /* most frequent first */
                int32_t x = at[i];
                int j = i;
                for (; j && count_at(a, s, at[j - 1]) < count_at(a, s, x); j--) at[j] = at[j - 1];
                at[j] = x;
            }
            for (int i = 0; i < found && i < wide; i++)
                if (count_at(a, s, at[i]) >= rarest)
                    push(heap, &size, (Leaf){target_at(a, s, at[i]), node, token_at(a, s, at[i]), count_at(a, s, at[i])});
        }
        if (!size || n == nodes) return n;
        Leaf leaf = pop(heap, &size);
        depth[n] = leaf.node < 0 ? 1 : depth[leaf.node] + 1;
        token[n] = leaf.token, parent[n] = leaf.node, count[n] = leaf.count;
        node = (int32_t)n++;
        s = leaf.state;
    }
}

/* Of the trees grown from a cursor's string and its suffixes, the first with the most expected tokens, if these are more
   than `*score`: the occurrences of its nodes over those of the suffix, `*of`. A suffix of n tokens grows at most
   alpha * n + offset nodes, none rarer than the share `rare` of its occurrences, none deeper than `deep` - n; suffixes
   that cannot have more expected tokens are not tried. Returns how many nodes, -1 for no such tree; c is left at the
   suffix. Expected tokens become `*score`; the rest as for `truedraft_grow`. */
int64_t truedraft_best(const Automaton *a, Cursor *c, int64_t nodes, double alpha, double offset, double rare, int32_t wide,
                       int32_t deep, double *score, int32_t *of, int32_t *token, int32_t *parent, int32_t *count) {
    int32_t tokens[256], parents[256], counts[256];
    int64_t best = -1;
    Cursor found = *c;
    if (nodes > 256) nodes = 256;
    placed(a, c);
    for (Cursor here = *c; here.state; here.state = a->state[here.state].link, here.length = a->state[here.state].len) {
        double most = alpha * here.length + offset, times = a->state[here.state].count, share = rare * times;
        if (!(most > 0 && most > *score)) break;
        int32_t rarest = share < 1 ? 1 : share < INT32_MAX ? (int32_t)share : INT32_MAX;
        if (rarest < share && rarest < INT32_MAX) rarest++; /* rounded up */
        int64_t all = 0, n = truedraft_grow(a, &here, most < (double)nodes ? (int64_t)most : nodes, rarest, wide,
                                            deep - here.length, tokens, parents, counts);
        for (int64_t i = 0; i < n; i++) all += counts[i];
        if (!((double)all / times > *score)) continue;
        *score = (double)all / times, *of = a->state[here.state].count, found = here, best = n;
        memcpy(token, tokens, sizeof(int32_t) * (size_t)n);
        memcpy(parent, parents, sizeof(int32_t) * (size_t)n);
        memcpy(count, counts, sizeof(int32_t) * (size_t)n);
    }
    if (best >= 0) *c = found;
    return best;
}

/* The suffixes of a cursor's string, longest first, one for each state: length and count. Returns how many. */
int64_t truedraft_suffixes(const Automaton *a, const Cursor *c, int64_t most, int32_t *length, int32_t *count) {
    Cursor here = *c;
    placed(a, &here);
    int64_t n = 0;
    int32_t m = here.length;
    for (int32_t s = here.state; s && n < most; s = a->state[s].link, m = a->state[s].len)
        length[n] = m, count[n] = a->state[s].count, n++;
    return n;
}

/* The token at an index of the text, which a text's own cursor continues by one; -1 beyond. */
static int32_t text_at(const Automaton *a, const Cursor *c, int64_t i) {
    if (i < a->tokens) return a->token[i];
    return i == a->tokens && c->has_pending ? c->pending : -1;
}

/* After a departure from the input, by the last of `count` tokens: the best match nearby, or one token was replaced. A match
   scores 2 for each token less log2(1 + distance). */
static void depart(const Automaton *a, const Cursor *c, Place *p, int64_t source, const int32_t *token, int64_t count, int64_t reach,
                   int64_t patience, double replaced) {
    double best = replaced;
    int64_t found = -1, matched = 0, from = p->at - reach, to = p->at + reach;
    if (from < 1) from = 1;
    if (to > source) to = source;
    for (int64_t place = from; place <= to; place++) {
        int64_t length = 0;
        while (length < count && length < place && text_at(a, c, place - 1 - length) == token[count - 1 - length]) length++;
        if (!length) continue;
        const int64_t distance = place < p->at ? p->at - place : place - p->at;
        const double score = 2.0 * (double)length - log2(1.0 + (double)distance);
        if (score > best) best = score, found = place, matched = length;
    }
    if (found >= 0) p->at = found, p->run = (int32_t)matched, p->wrong = 0;
    else if (p->run || p->wrong) {
        p->at++, p->run = 0, p->wrong++;
        if (p->wrong > patience) p->at = -1;
    } else
        p->at = -1;
}

/* Moves a place in the first `source` tokens of a text along the last `added` of `count` tokens, the latest of a row; `context`
   of them at most are compared with the text. Where the row has departed and none is found nearby, the first match of its last
   tokens, by the cursor, is taken: of `afar` tokens or more, or of `shortest` where there is no place. */
void truedraft_locate(const Automaton *a, const Cursor *c, Place *p, int64_t source, const int32_t *token, int64_t count, int64_t added,
                      int32_t shortest, int32_t afar, int32_t context, int64_t reach, int64_t patience, double replaced) {
    if (added > count) added = count;
    if (source > a->tokens + 1) source = a->tokens + 1;
    for (int64_t end = count - added + 1; end <= count; end++) {
        if (p->at < 0) break;
        if (p->at < source && text_at(a, c, p->at) == token[end - 1]) {
            p->run = p->wrong ? 1 : p->run + 1;
            p->at++, p->wrong = 0;
        } else {
            const int64_t compared = end < context ? end : context;
            depart(a, c, p, source, token + end - compared, compared, reach, patience, replaced);
        }
    }
    if (p->at >= 0 && !p->wrong) return;
    Cursor here = *c;
    if (here.length > context) here.length = context;
    placed(a, &here);
    for (int32_t s = here.state, length = here.length; s; s = a->state[s].link, length = a->state[s].len) {
        if (length < (p->at < 0 ? shortest : afar)) return;
        if (a->state[s].end + 1 < source) {
            p->at = a->state[s].end + 1, p->run = length, p->wrong = 0;
            return;
        }
    }
}

static int within(int64_t low, int64_t x, int64_t high) { return low <= x && x <= high; }

/* Whether an automaton from a file can be read within its arrays and without endless loops: every index is in range,
   links lead to shorter strings and lists of edges to earlier ones, continuations are tokens of the text and have
   counts, and the table has free slots. */
int truedraft_sound(const Automaton *a) {
    int64_t states = a->states - 1, filled = 0;
    int32_t largest = 0;
    if (states < 0 || a->slots & (a->slots - 1) || a->state[0].len || a->state[0].link) return 0;
    for (int64_t i = 0; i < a->tokens; i++)
        if (a->token[i] > largest) largest = a->token[i];
    for (int64_t i = 0; i <= states; i++) {
        const State *s = &a->state[i];
        if (!within(0, s->link, states) || !within(0, s->target, states) || s->token > largest) return 0;
        if (!within(0, s->end, a->tokens) || !within(0, s->last, a->tokens)) return 0;
        if (i && (s->count < 1 || s->len < 1 || a->state[s->link].len >= s->len)) return 0;
        if (!within(-a->tops, s->more, a->edges) || (s->more < 0 && !a->slots)) return 0;
    }
    for (int64_t i = 0; i < a->edges; i++) {
        const Edge *e = &a->edge[i];
        if (!within(0, e->target, states) || !within(0, e->next, i) || e->token > largest) return 0;
    }
    for (int64_t i = 0; i < a->tops * BLOCK; i++)
        if (!within(0, a->top[i], a->edges)) return 0;
    for (int64_t i = 0; i < a->slots; i++) {
        if (!within(0, a->slot[i], a->edges)) return 0;
        filled += a->slot[i] != 0;
    }
    return filled < a->slots || !a->slots;
}

enum { CALLS = 4 }; /* version of the signatures of this library's functions */

int64_t truedraft_store_layout(void) {
    return ((int64_t)CALLS * 4096 + (int64_t)sizeof(Automaton)) * 4096 + (int64_t)sizeof(Cursor);
}
